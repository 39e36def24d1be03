"""How the projections of Ulysses are planned under tensor parallelism, where their exchanges cross nodes of GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_train.config import OverlapConfig
from overlap_train.group.span import products_beside
from overlap_train.ops.plan import make_plan
from overlap_train.ops.plan_cache import Planned
from overlap_train.ops.spec import ALL_GATHER_LINEAR
from overlap_train.schedule.order import Topology
from overlap_train.select.system import SYSTEMS
from overlap_train.select.table import UNTUNED
from overlap_train.ulysses import two_groups as two_group_calls
from overlap_train.ulysses.calls import Terms
from overlap_train.ulysses.layout import AttentionHeads

TERMS = Terms(OverlapConfig(method="fused", network_sms=4), "linear_qkv")


@dataclass(frozen=True)
class Group:
    """A process group of GPUs as plans see it."""

    topology: Topology

    def size(self) -> int:
        return self.topology.world

    def rank(self) -> int:
        return self.topology.rank


class OnGpu(torch.Tensor):
    """A tensor without memory that passes for one of a GPU."""

    is_cuda = True  # type: ignore[assignment]


def planned(ulysses_nodes: int, monkeypatch: pytest.MonkeyPatch, of: type[torch.Tensor] = torch.Tensor) -> Any:
    """linear_qkv of 8 tensor-parallel ranks in a node and 2 of Ulysses. of: the class of its input."""

    def plan_of(spec: Any, x: torch.Tensor, w: torch.Tensor, bias: None, group: Any, config: Any, name: str) -> Planned:
        domain: Any = SimpleNamespace(world_size=group.size(), operator=lambda *args, **how: None)
        return Planned(domain, make_plan(spec, config, UNTUNED, group.topology, x, w, SYSTEMS["h200"]))  # type: ignore[arg-type]

    monkeypatch.setattr(two_group_calls, "plan_of", plan_of)
    x, w = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((1024, 1, 512), (768, 512)))
    groups: Any = two_group_calls.Groups(
        Group(Topology(ulysses_nodes, 2 // ulysses_nodes, 0)), Group(Topology(1, 8, 0))
    )  # type: ignore[arg-type]
    linear, _ = two_group_calls.sharded_heads_linear(
        x.as_subclass(of), w, None, AttentionHeads(4, 2, 96), groups, TERMS
    )
    return linear.parts[0]


@pytest.mark.parametrize(("nodes", "sms"), [(1, 0), (2, 5)])
def test_kernels_leave_the_sms_of_an_exchange(nodes: int, sms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    part = planned(nodes, monkeypatch)
    assert part.exchange.plan.fprop.spared_sms == sms
    plan = part.product.plan
    assert plan.fprop.spared_sms == plan.dgrad.spared_sms == plan.wgrad.spared_sms == sms


def test_two_groups_that_cannot_overlap_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a rank whose TP group is inside one node: that of a peer is not."""
    monkeypatch.setattr(two_group_calls, "nodes_of_groups", lambda groups, config, device, name: (2, 4))
    with pytest.raises(ValueError, match="linear_qkv: group and tp_group span 2 and 4 nodes"):
        planned(2, monkeypatch, OnGpu)
    planned(2, monkeypatch)  # CPU processes do


def test_two_groups_that_can_overlap_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_group_calls, "nodes_of_groups", lambda groups, config, device, name: (2, 1))
    assert planned(2, monkeypatch, OnGpu).exchange.plan.fprop.nodes == 2


def test_collectives_across_nodes_need_no_engine() -> None:
    """Of a product that leaves SMs to another group: nothing of ours is under way beside its weight gradient."""
    x, w = (torch.empty(*shape, dtype=torch.bfloat16, device="meta") for shape in ((1024, 512), (512, 512)))
    config, target = OverlapConfig(method="collective"), SYSTEMS["h200"]
    plan = make_plan(ALL_GATHER_LINEAR, config, UNTUNED, Topology(2, 1, 0), x, w, target)  # type: ignore[arg-type]
    no_engine: Any = SimpleNamespace(engine=None)
    with products_beside(no_engine, plan.dgrad.beside(5)):
        pass
