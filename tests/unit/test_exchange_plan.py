"""What is planned for all-to-alls: sizes of passes and slots, kernels, chunks, and the method where nothing was measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overlap_train.config import OverlapConfig
from overlap_train.ops.plan import make_plan, planner_of
from overlap_train.ops.spec import (
    ALL_TO_ALL,
    ALL_TO_ALL_LINEAR,
    LINEAR_ALL_TO_ALL,
    all_to_all_linear_error,
    linear_all_to_all_error,
)
from overlap_train.schedule.order import A2A_GEMM, GEMM_A2A, Topology
from overlap_train.select.choose import Choice, choose, may_choose
from overlap_train.select.method import NAMES, Method
from overlap_train.select.passes import Pass
from overlap_train.select.system import SYSTEMS
from overlap_train.select.table import UNTUNED
from overlap_train.select.tiling import HOPPER, PORTABLE
from tests.unit.test_plan import _hopper as _hopper

BF16, GPU = torch.bfloat16, SYSTEMS["h200"]  # stands where a device stands


def engine_plan(
    choice: Choice, pass_: Pass, topology: Topology, device: Any, w: torch.Tensor, sms: int = 4, sums: int = 9,
    gbs: float = 0.0,
) -> Any:  # fmt: skip
    """The plan of a pass where NCCL has `sms`, the sum of a node `sums`, and the network carries `gbs` GB/s."""
    config = OverlapConfig(network_sms=sms, reduce_sms=sums)
    return planner_of(topology, config, gbs).plan(choice, pass_, device, w)


def test_a_pass_multiplies_the_rows_of_one_rank() -> None:
    """M = 4096 rows of 4 ranks; K and N of the whole weight, of which one rank's blocks have a quarter."""
    out = Pass(GEMM_A2A, 4096, 3072, 1024, BF16, 4)
    back = out.dgrad
    assert (back.kind, back.m, back.n, back.k) == (A2A_GEMM, 4096, 1024, 3072) and back.dgrad == out
    for pass_ in (out, back):
        assert pass_.rows == 1024 and pass_.row_features == 3072 // 4, "of dy as of y"


def test_slots_have_room_for_what_one_rank_receives() -> None:
    """linear_all_to_all: y, and as much of dy. all_to_all_linear: x, and as much of dx."""
    w = torch.empty(96, 40, dtype=BF16)
    assert LINEAR_ALL_TO_ALL.slot_bytes(torch.empty(8, 40, dtype=BF16), w, 4) == (4 * 8) * (96 // 4) * 2
    assert ALL_TO_ALL_LINEAR.slot_bytes(torch.empty(4 * 8, 10, dtype=BF16), w, 4) == (4 * 8) * 10 * 2


def engine(method: str, kind: str, m: int = 8192, n: int = 4096, k: int = 4096, world: int = 4) -> Any:
    w = torch.empty(8, 8, dtype=BF16)
    return engine_plan(
        Choice(Method(method), "asked for"),
        Pass(kind, m, n, k, BF16, world),
        Topology(1, world, 0),
        GPU,
        w,
    )


@pytest.mark.usefixtures("_hopper")
def test_whose_kernels_multiply_and_in_which_chunks() -> None:
    assert engine("fused", A2A_GEMM).kernels == engine("fused", GEMM_A2A).kernels == HOPPER
    assert engine("fused", GEMM_A2A, m=8192 + 4).kernels == HOPPER, "rows may end within a tile"
    assert engine("fused", A2A_GEMM, m=8192 + 4).kernels == HOPPER
    assert engine("fused", A2A_GEMM, k=4096 + 16).kernels == PORTABLE, "K/W does not start on 16 bytes"
    assert engine("fused", GEMM_A2A, n=4096 + 16).kernels == PORTABLE
    assert engine("fused", A2A_GEMM, m=16384, k=16384).chunks == 4, "of 4096 rows, 8 MiB each"
    assert engine("fused", A2A_GEMM, m=65536, k=16384).chunks == 8, "the first is waited for"
    assert engine("fused", GEMM_A2A, m=65536, n=16384).chunks == 4, "nobody waits for the first"
    assert [leg.after_tiles for leg in engine("fused", GEMM_A2A).legs] == [True] * 3
    assert [leg.after_tiles for leg in engine("direct", GEMM_A2A).legs if leg.chunk == 0] == [False] * 3
    assert [leg.after_tiles for leg in engine("fused", A2A_GEMM).legs] == [False] * 3


@pytest.mark.usefixtures("_hopper")
def test_shallow_blocks_are_multiplied_together() -> None:
    """At least 1024 features at once, where a node has so many; of GPUs, across nodes."""

    def together(k: int, nodes: int = 2, device: torch.device = GPU, kind: str = A2A_GEMM) -> int:
        return a2a_plan(8, k, nodes, device, kind).together

    assert [together(8 * depth) for depth in (1024, 1000, 512, 300, 8)] == [1, 2, 2, 4, 4]
    assert together(4096, device=torch.device("cpu")) == together(4096, kind=GEMM_A2A) == 1


def a2a_plan(
    world: int, k: int, nodes: int, device: torch.device = GPU, kind: str = A2A_GEMM, chunks: int = 0,
    method: str = "chunked",
) -> Any:  # fmt: skip
    choice, weight = Choice(Method(method, chunks=chunks), "asked for"), torch.empty(8, 8, dtype=BF16)
    topology = Topology(nodes, world // nodes, 0)
    return engine_plan(choice, Pass(kind, 16384, 4096, k, BF16, world), topology, device, weight)


@pytest.mark.usefixtures("_hopper")
def test_many_chunks_of_two_ranks_are_multiplied_by_rows() -> None:
    """A2A + GEMM of GPUs that are a node each, by the library."""
    assert a2a_plan(2, 4096, 2, chunks=8).by_rows and not a2a_plan(2, 4096, 2, chunks=4).by_rows
    others = [(4, 4096, 2), (4, 4096, 4), (2, 4096, 2, torch.device("cpu")), (2, 4096, 2, GPU, GEMM_A2A)]
    assert not any(a2a_plan(*case, chunks=8).by_rows for case in others)
    assert not a2a_plan(2, 4096, 2, chunks=8, method="fused").by_rows


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize(("gbs", "chunks"), [(0.0, 4), (2.4, 8), (9.0, 8), (25.0, 4), (50.0, 4)])
def test_auto_multiplies_by_rows_over_slow_networks(gbs: float, chunks: int) -> None:
    """Only there blocks have eight chunks. By a faster one, or one that nobody has measured, `chunked` goes rank by rank."""
    pass_, weight = Pass(A2A_GEMM, 32768, 8192, 8192, BF16, 2), torch.empty(8, 8, dtype=BF16)
    choice = choose("auto", pass_, GPU, UNTUNED, nodes=2)
    plan = engine_plan(choice, pass_, Topology(2, 1, 0), GPU, weight, 2, 0, gbs)
    assert (plan.method, plan.chunks, plan.by_rows) == ("chunked", chunks, chunks == 8)


@pytest.mark.usefixtures("_hopper")
def test_chunks_that_cross_nodes_of_gpus_are_products_that_fill_a_gpu() -> None:
    """Of 16384 rows A2A + GEMM multiplies 8192 for all 4096 columns, GEMM + A2A for half of them."""

    def chunks(kind: str, n: int) -> int:
        pass_ = Pass(kind, 16384, n, 4096, BF16, 2)
        choice = Choice(Method("chunked"), "asked for")
        return engine_plan(choice, pass_, Topology(2, 1, 0), GPU, torch.empty(8, 8, dtype=BF16)).chunks

    assert (chunks(A2A_GEMM, 4096), chunks(A2A_GEMM, 1024)) == (4, 1)
    assert (chunks(GEMM_A2A, 4096), chunks(GEMM_A2A, 1024)) == (2, 1)


def test_sizes_that_cannot_be_divided_say_why() -> None:
    x, w = torch.empty(8, 16), torch.empty(10, 16)
    assert linear_all_to_all_error(x, w, None, 2, "qkv") is None
    assert "its 10 output features must be divisible by the group's 4 ranks" in str(
        linear_all_to_all_error(x, w, None, 4, "qkv")
    )
    assert all_to_all_linear_error(x, torch.empty(10, 32), None, 2, "proj") is None
    assert "expects 16 from 2 ranks together" in str(all_to_all_linear_error(x, w, None, 2, "proj"))
    assert "must be divisible by the group's 3 ranks" in str(
        all_to_all_linear_error(x, torch.empty(10, 48), None, 3, "proj")
    )


@pytest.mark.parametrize(
    ("method", "nodes", "expected"),
    [("auto", 1, "chunked"), ("fused", 1, "chunked"), ("direct", 1, "chunked"), ("collective", 1, "collective"),
     ("auto", 2, "collective")],
)  # fmt: skip
def test_an_exchange_beside_a_product_is_by_copies_in_whole_blocks(method: str, nodes: int, expected: str) -> None:
    """Whatever multiplies beside it: its SMs are left alone."""
    x, w = torch.empty(64, 2, 96, dtype=BF16), torch.empty(48, 40, dtype=BF16)
    for gathered_input in ("regather", "keep"):
        config = OverlapConfig(method=method, gathered_input=gathered_input)
        plan = make_plan(ALL_TO_ALL, config, UNTUNED, Topology(nodes, 4 // nodes, 1), x, w)
        assert plan.fprop == plan.dgrad and plan.fprop.method == expected and plan.fprop.chunks == 1
        assert (plan.wgrad is None) == (gathered_input == "keep")
        assert plan.request.slot_bytes == (64 * 2 * 96 * 2 if expected == "chunked" else 0)
        assert plan.fprop.sends_ahead == (expected == "chunked")


def test_across_nodes_methods_that_store_at_peers_are_not_chosen() -> None:
    assert {method for method in NAMES if may_choose(method, nodes=2)} == {"fused", "chunked", "collective"}
    assert all(may_choose(method, nodes=1) for method in NAMES)


def test_an_exchange_beside_a_product_across_nodes_has_whole_blocks_and_sms() -> None:
    """Those of NCCL, and one for waits: a kernel of the other group may hold all others to its end. `auto` does not."""
    x, w = (torch.empty(*shape, dtype=BF16, device="meta") for shape in ((1 << 17, 4096), (6144, 4096)))

    def plan(method: str, nodes: int) -> Any:
        config, topology = OverlapConfig(method=method, network_sms=4), Topology(nodes, 4 // nodes, 0)
        return make_plan(ALL_TO_ALL, config, UNTUNED, topology, x, w, GPU).fprop

    across, inside, by_nccl = plan("fused", 2), plan("fused", 1), plan("auto", 2)
    assert (across.method, across.chunks, across.spared_sms) == ("chunked", 1, 5)
    assert (inside.method, inside.chunks, inside.spared_sms) == ("chunked", 1, 0)
    assert (by_nccl.method, by_nccl.spared_sms) == ("collective", 0) and "not measured" in by_nccl.reason
