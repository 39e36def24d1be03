"""Spans of a timeline: what they are, which communication nothing hides, and what a kernel sends itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_train.group.registry import domain_of
from overlap_train.tools.bench import timeline
from overlap_train.tools.bench.timeline import last_call, record
from overlap_train.tools.measure.models import TINY
from overlap_train.tools.measure.world import World
from overlap_train.tools.pictures.held_up import GAPS, LONG_WAITS, remarks
from overlap_train.tools.pictures.lanes import (
    STAGES,
    Span,
    common,
    exposed,
    kind_of,
    perfect,
    stages_of,
    stored_inside,
    union,
)
from tests.processes import run_ranks, values


def _span(kind: str, start: float, end: float, name: str = "") -> Span:
    return {"kind": kind, "name": name or kind, "start": start, "end": end, "stream": 7}


@pytest.mark.parametrize(
    ("name", "stream", "kind"),
    [
        ("Memcpy PtoP (Device -> Device)", 7, "communication"),
        ("ncclDevKernel_AllGather_RING_LL", 8, "communication"),
        ("Memcpy DtoD (Device -> Device)", 7, "compute"),  # a local copy of the model's own
        ("Memcpy DtoD (Device -> Device)", 9, "communication"),
        ("nvjet_tst_128x256", 7, "gemm"),
        ("hopper_all_gather_gemm_kernel", 7, "gemm"),
        ("reduce_partials_kernel", 7, "compute"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, cutlass::bfloat16_t>>", 7, "compute"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", 7, "compute"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", 7, "compute"),
        ("unpack_kernel", 7, "compute"),
        ("hopper_all_to_all_gemm_kernel", 7, "gemm"),
        ("wait_kernel", 7, "waiting"),
        ("meet_kernel", 7, "waiting"),
        ("vectorized_elementwise_kernel<4, FillFunctor<float>>", 7, ""),
    ],
)
def test_kinds(name: str, stream: int, kind: str) -> None:
    assert kind_of({"name": name, "stream": stream}, 7, "fillfunctor") == kind


def test_exposed_is_what_computation_does_not_cover() -> None:
    spans = [_span("communication", 0, 10), _span("gemm", 2, 4), _span("compute", 6, 7), _span("waiting", 20, 25)]
    assert exposed(spans) == [(0, 2), (4, 6), (7, 10), (20, 25)]
    assert exposed([_span("communication", 1, 2), _span("gemm", 0, 3)]) == []


def test_a_call_across_nodes_has_a_lane_for_each_stage() -> None:
    product, total = (
        _span("gemm", 0, 4, "hopper_gemm_reduce_scatter_kernel"),
        _span("compute", 2, 3, "add_blocks_kernel"),
    )
    scatter = _span("communication", 1, 2, "Memcpy PtoP (Device -> Device)")
    send, wait = _span("communication", 3, 9, "ncclDevKernel_SendRecv"), _span("waiting", 4, 9, "wait_kernel")
    lanes = {
        lane.label: [span["name"] for span in (product, total, scatter, send, wait) if lane.holds(span)]
        for lane in STAGES
    }
    assert lanes == {
        "network": [send["name"]], "sums": [total["name"]], "inside nodes": [scatter["name"]], "products": [product["name"]]
    }  # fmt: skip
    assert [lane.label for lane in stages_of([[product, send], [wait]])] == ["network", "products"]


def test_what_lies_in_both() -> None:
    assert common([(0, 4), (6, 9)], [(1, 2), (3, 7), (9, 10)]) == [(1, 2), (3, 4), (6, 7)]


def test_what_is_exposed_twice_counts_once() -> None:
    spans = [_span("communication", 0, 10), _span("waiting", 5, 12), _span("gemm", 3, 6)]
    assert union(spans, ("communication", "waiting")) == [(0, 12)]
    assert exposed(spans) == [(0, 3), (6, 12)]


def test_with_perfect_overlap_only_the_longer_kind_of_work_takes_time() -> None:
    assert perfect([_span("communication", 0, 5), _span("gemm", 5, 9), _span("gemm", 10, 14)]) == 8
    assert perfect([_span("communication", 0, 5), _span("gemm", 5, 9)]) == 5


def test_kernels_of_direct_store_at_the_peers_and_of_auto_those_beside_which_nothing_is_sent() -> None:
    """A slow host lets copies of `fused` end before its kernel starts: nothing beside it, and still it stores nothing."""
    kernel, other = _span("gemm", 0, 8, "all_gather_gemm_kernel"), _span("gemm", 20, 30, "gemm_reduce_scatter_kernel")
    spans = [
        kernel,
        _span("communication", 2, 6),
        other,
        _span("communication", 30, 31),
        _span("gemm", 40, 50, "nvjet"),
    ]
    for method in ("auto", "overlap", "te_overlap", "overlap again"):
        assert stored_inside(spans, method) == [(20, 30)]
    assert stored_inside(spans, "direct") == [(0, 8), (20, 30)]
    for method in ("fused", "chunked", "collective", "megatron"):
        assert stored_inside(spans, method) == []


def test_gaps_are_told_where_the_gpu_is_empty_for_more_than_a_tenth() -> None:
    """Whatever runs or waits on it; and also before the first kernel."""
    full = [_span("gemm", 5, 50), _span("communication", 48, 70), _span("waiting", 70, 80), _span("compute", 84, 100)]
    assert remarks([full]) == ()
    assert remarks([full, full[1:]]) == (GAPS,), "the first 48"
    assert remarks([[_span("gemm", 0, 40), _span("gemm", 60, 100)]]) == (GAPS,)


def test_long_waits_are_told_where_a_peer_was_late() -> None:
    """Not where this GPU waits for what the wire takes."""
    late = [_span("gemm", 0, 50), _span("communication", 40, 50), _span("waiting", 50, 90), _span("gemm", 90, 100)]
    slow_wire = [late[0], _span("communication", 40, 88), *late[2:]]
    assert remarks([late]) == (LONG_WAITS,) and remarks([slow_wire]) == ()
    assert remarks([[_span("gemm", 0, 91), _span("waiting", 91, 100)]]) == ()
    assert remarks([late, [_span("gemm", 50, 100)]]) == (f"{GAPS} {LONG_WAITS}",)
    assert remarks([late, [_span("gemm", 50, 100)]], draws_waits=False) == (GAPS,), "no bar to speak of"


def test_last_call_is_what_lies_between_the_last_two_markers() -> None:
    marks = [_span("", t, t + 1, "FillFunctor") for t in (0, 10, 30)]
    work = [("gemm", 2, 9), ("memcpy ptop", 12, 16), ("gemm", 15, 29), ("gemm", 33, 34)]
    last = last_call([*marks, *(_span("", start, end, name) for name, start, end in work)])
    assert [(s["kind"], s["start"], s["end"]) for s in last] == [("communication", 1, 5), ("gemm", 4, 18)]


def test_a_call_that_fills_something_itself_is_not_cut_there() -> None:
    marks = [_span("", t, t + 1, "FillFunctor<short>") for t in (0, 10, 30)]
    spans = [*marks, _span("", 20, 21, "FillFunctor<float>"), _span("", 12, 15, "gemm"), _span("", 25, 28, "gemm")]
    assert [(s["start"], s["end"]) for s in last_call(spans)] == [(1, 4), (14, 17)]


def _attention(rank: int, world: int) -> Any:
    """The shapes that the block's calls give, on CPU processes."""
    timeline.MODEL, timeline.M, timeline.METHODS = TINY, 16, ("chunked", "collective")  # this process ends after it
    calls, shape = timeline._ulysses(World(dist.group.WORLD, torch.device("cpu"), rank, world))
    with torch.no_grad():
        return {name: tuple(call().shape) for name, call in calls.items()}, shape


def test_the_recorded_attention_block_runs_by_each_method() -> None:
    shapes = {"attention chunked": (8, 1, 32), "attention collective": (8, 1, 32)}
    assert values(run_ranks(2, _attention)) == [(shapes, {"model": TINY, "tokens": 16})] * 2


def _across_nodes(rank: int, world: int) -> Any:
    """The shapes that the calls of both linears give on two nodes of two CPU processes, and what the picture says."""
    timeline.M, timeline.HIDDEN, timeline.WIDE = 16, 8, 8  # this process ends after it
    timeline.METHODS = ("collective", "chunked", "direct")  # without a GPU fused needs Triton's interpreter
    here = World(dist.group.WORLD, torch.device("cpu"), rank, world)
    calls, shape = timeline._nodes(here, 2)
    with torch.no_grad():
        shapes = {name: tuple(call().shape) for name, call in calls.items()}
    topology = domain_of(here.group, None, here.device).topology
    return shapes, shape["nodes"], (topology.nodes, topology.local)


def test_the_recorded_linears_run_on_nodes_of_several_ranks() -> None:
    shapes = {
        f"{op} {method}": shape
        for method in ("collective", "chunked")
        for op, shape in (("all_gather_linear", (16, 8)), ("linear_reduce_scatter", (4, 8)))
    }
    assert values(run_ranks(4, _across_nodes)) == [(shapes, 2, (2, 2))] * 4


def test_without_gpus_there_is_nothing_to_record(tmp_path: Path) -> None:
    here = World(None, torch.device("cpu"), 0, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="records GPUs"):
        record(tmp_path, "linears", 1, here)
