"""Operators inside a CUDA graph that is captured without `graphed`, or with shapes that are new: refused with the way out."""

from __future__ import annotations

import pytest
import torch

from overlap_train.group.domain import OverlapDomain
from overlap_train.group.memory import Request, prepare
from overlap_train.group.signals import Tag
from overlap_train.group.topology import Nodes
from overlap_train.schedule.order import Topology

FC1 = Tag("fc1", "")


def domain_on_gpu(monkeypatch: pytest.MonkeyPatch, capturing: bool, graphed: bool) -> OverlapDomain:
    """A domain as far as the guards look at it."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    domain = object.__new__(OverlapDomain)
    domain.on_gpu, domain.graphed, domain.closed = True, graphed, False
    domain.engine = domain.fault = None  # type: ignore[assignment]
    domain.heap = object()  # type: ignore[assignment]
    domain.nodes = Nodes(Topology(1, 2, 0))
    return domain


@pytest.mark.parametrize(("capturing", "graphed"), [(False, False), (True, True)])
def test_operators_run_eagerly_and_inside_graphed(
    monkeypatch: pytest.MonkeyPatch, capturing: bool, graphed: bool
) -> None:
    domain_on_gpu(monkeypatch, capturing, graphed).check_usable(FC1, slots=1)


def test_an_operator_in_a_foreign_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"not inside overlap_train.graphed\(group\)"):
        domain_on_gpu(monkeypatch, capturing=True, graphed=False).check_usable(FC1, slots=1)


@pytest.mark.parametrize("graphed", [False, True])
def test_across_nodes_collectives_alone_are_captured(monkeypatch: pytest.MonkeyPatch, graphed: bool) -> None:
    """The way out that the error names."""
    domain = domain_on_gpu(monkeypatch, capturing=True, graphed=graphed)
    domain.nodes = Nodes(Topology(2, 1, 0))
    with pytest.raises(RuntimeError, match=r"a group that spans nodes.* or use method='collective'"):
        domain.check_usable(FC1, slots=1)
    domain.check_usable(FC1, slots=0)


@pytest.mark.parametrize("graphed", [False, True])
def test_new_shapes_are_refused_in_a_capture(monkeypatch: pytest.MonkeyPatch, graphed: bool) -> None:
    """Ranks would have to talk to each other about them."""
    domain = domain_on_gpu(monkeypatch, capturing=True, graphed=graphed)
    with pytest.raises(RuntimeError, match=r"fc1 with x 4 x 8 is new to its group.* twice before capturing"):
        prepare(domain, Request("all_gather_linear", "x 4 x 8", 0), None, "fc1")


def test_on_the_cpu_nobody_asks_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    domain = domain_on_gpu(monkeypatch, capturing=True, graphed=False)
    domain.on_gpu = False
    domain.check_usable(FC1, slots=1)


def test_after_shutdown_an_operator_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    domain = domain_on_gpu(monkeypatch, capturing=False, graphed=False)
    domain.closed = True
    with pytest.raises(RuntimeError, match=r"fc1: the symmetric memory of its group is gone"):
        domain.check_usable(FC1, slots=1)
