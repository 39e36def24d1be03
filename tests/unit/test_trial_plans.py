"""The plans that take turns, on GPUs that a test pretends to have: which ones, and what a CUDA graph gets of them."""

from __future__ import annotations

import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_train import OverlapConfig
from overlap_train.group.memory import may_hold
from overlap_train.methods import TRAITS
from overlap_train.ops import plan_cache as settled
from overlap_train.ops.plan import make_plan
from overlap_train.ops.plan_cache import InRun, PlanBook, Planned
from overlap_train.ops.spec import ALL_GATHER_LINEAR
from overlap_train.planning.table import Table, Winner
from overlap_train.schedule.order import GATHER, Topology
from overlap_train.select.passes import Pass

GPU = torch.device("cuda", 0)
CONFIG = OverlapConfig(tune_steps=20)


@pytest.fixture(autouse=True)
def _plans_for_a_gpu(hopper_gpu: pytest.MonkeyPatch) -> None:
    def for_a_gpu(*args: Any, **kwargs: Any) -> Any:
        return make_plan(*args, **kwargs, device=GPU)

    hopper_gpu.setattr(settled, "make_plan", for_a_gpu)


def domain_of(topology: Topology, **facts: Any) -> Any:
    """A domain as far as plans ask it."""
    known = dict(device=GPU, topology=topology, world_size=topology.world, rank=0, network_gbs=0.0)
    known |= dict(nodes=SimpleNamespace(problem=None), is_connected=True)
    known |= dict(config=OverlapConfig(), heap=None, captured=False, across_nodes=SimpleNamespace(staged_blocks=0))
    answers = dict(operator=lambda *args: args, is_capturing=lambda: False)
    return SimpleNamespace(**known | answers | facts)


def planned_by(
    domain: Any, rows: int, features: int, dtype: torch.dtype = torch.bfloat16, measured: tuple[Winner, ...] = ()
) -> Planned:
    """A column linear [features, 4096] of so many global rows, at its first call."""
    x, w = (
        torch.empty(count, 4096, dtype=dtype, device="meta", requires_grad=True)
        for count in (rows // domain.world_size, features)
    )
    table = Table({winner.measured.bucket: winner for winner in measured}, domain.topology.nodes)
    return PlanBook(domain, table)._planned(ALL_GATHER_LINEAR, CONFIG, x, w, "fc1", tries=True)


def in_trial(domain: Any, rows: int, features: int, dtype: torch.dtype = torch.bfloat16) -> InRun:
    """The same, in a trial."""
    planned = planned_by(domain, rows, features, dtype)
    assert isinstance(planned, InRun)
    return planned


QKV = Topology(1, 2, 0), 4096, 3072  # Llama-3 8B on two GPUs: direct forward, fused backward


def _methods(linear: Any) -> tuple[str, str]:
    return linear.plan.fprop.method, linear.plan.dgrad.method


def _captured(rank: int = 0, calls: int = 12) -> tuple[InRun, list[tuple[str, str]], list[str]]:
    """A trial, the methods of what a graph captures of two linears after so many calls of one, and what was said."""
    topology, *sizes = QKV
    domain = domain_of(topology, rank=rank)
    planned = in_trial(domain, *sizes)
    for _ in range(calls):
        planned.next_call("layers.0.qkv")
    domain.is_capturing = lambda: True
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        captured = [_methods(planned.next_call(f"layers.{layer}.qkv")) for layer in (0, 0, 1)]
    return planned, captured, [str(warning.message) for warning in said]


def test_a_graph_captures_the_untuned_plan_and_its_first_call_has_run_that() -> None:
    planned, captured, _ = _captured()
    assert captured == [("direct", "fused")] * 3
    eager = in_trial(domain_of(QKV[0]), *QKV[1:])
    calls = [_methods(eager.next_call("layers.0.qkv")) for _ in range(6)]
    assert calls == [("direct", "fused"), *((method, method) for method in eager.run.methods)]
    assert planned.run.calls("layers.0.qkv") == 12, "captures are no calls"


def test_a_capture_during_a_trial_is_said_once() -> None:
    planned, _, said = _captured()
    (warning,) = said
    assert warning.startswith("tune_steps=20: a CUDA graph captures layers.0.qkv after 12 calls")
    assert "--cuda-graph-warmup-steps" in warning and "--overlap-train-tune-steps" in warning
    assert planned.run.captured == {"layers.0.qkv", "layers.1.qkv"}
    assert _captured(rank=1)[2] == [], "by rank 0 of the group"


@pytest.mark.parametrize(("mib", "missing"), [(50, {"low_latency"}), (80, set())])
def test_methods_share_the_memory_that_there_may_be(mib: int, missing: set[str]) -> None:
    """The untuned plan is collective, which needs none. Three blocks take 24 MiB, their flagged words 48."""
    domain = domain_of(Topology(1, 2, 0), config=OverlapConfig(symmetric_mib=mib))
    planned = in_trial(domain, 512, 2048, torch.float32)
    assert set(planned.run.methods) == set(TRAITS) - missing
    assert may_hold(domain, planned.request)


TWO_NODES = Topology(2, 2, 0)
SHORT = 512, 3584  # whose blocks are too short to cross nodes one by one: untuned it is collective


def _connecting(connected: list[OverlapConfig]) -> Any:
    """A domain on two nodes, whose network wants 8 SMs, and sums of a node 4."""

    def connect(config: OverlapConfig) -> OverlapConfig:
        connected.append(config)
        return replace(config, network_sms=8, reduce_sms=4)

    return domain_of(TWO_NODES, settled=connect)


@pytest.mark.parametrize(("rows", "untuned"), [(512, "collective"), (8192, "fused")])
def test_across_nodes_all_that_is_tried_leaves_sms_to_the_network(rows: int, untuned: str) -> None:
    planned = in_trial(_connecting([]), rows, 3584)
    assert planned.plan.fprop.method == untuned
    left = {candidate.plan.fprop.method: candidate.plan.fprop.send_sms for candidate in planned.candidates}
    assert left == {"fused": 8, "chunked": 8, "collective": 0}
    assert {c.plan.dgrad.reduce_sms for c in planned.candidates if c.plan.dgrad.slots} == {4}


def test_nodes_are_not_connected_for_what_was_measured() -> None:
    connected: list[OverlapConfig] = []
    fprop = Pass(GATHER, *SHORT, 4096, torch.bfloat16, 4)
    measured = Winner(fprop, "collective", {}), Winner(fprop.dgrad, "collective", {})
    assert not isinstance(planned_by(_connecting(connected), *SHORT, measured=measured), InRun)
    assert connected == []


def test_a_group_that_cannot_share_memory_tries_nothing_that_does() -> None:
    domain = domain_of(Topology(1, 4, 0), nodes=SimpleNamespace(problem="nodes of 1 and 3 ranks"))
    planned = planned_by(domain, 512, 4096, torch.float32)
    assert planned.plan.fprop.method == planned.plan.dgrad.method == "collective"
    assert not isinstance(planned, InRun)
