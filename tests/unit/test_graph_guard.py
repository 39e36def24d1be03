"""Operators inside a CUDA graph that is captured without `graphed`, or with shapes that are new: refused with the way out."""

from __future__ import annotations

import pytest
import torch

from overlap_train.domain import Demand, OverlapDomain


def domain_on_gpu(monkeypatch: pytest.MonkeyPatch, capturing: bool, graphed: bool) -> OverlapDomain:
    """A domain as far as the guards look at it."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    domain = object.__new__(OverlapDomain)
    domain._on_gpu, domain.graphed, domain._agreed = True, graphed, set()
    domain.engine = domain.fault = None  # type: ignore[assignment]
    domain.heap = object()  # type: ignore[assignment]
    return domain


@pytest.mark.parametrize(("capturing", "graphed"), [(False, False), (True, True)])
def test_operators_run_eagerly_and_inside_graphed(
    monkeypatch: pytest.MonkeyPatch, capturing: bool, graphed: bool
) -> None:
    assert domain_on_gpu(monkeypatch, capturing, graphed).operator("fc1", calls=1) is not None


def test_an_operator_in_a_foreign_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"not inside overlap_train.graphed\(group\)"):
        domain_on_gpu(monkeypatch, capturing=True, graphed=False).operator("fc1", calls=1)


@pytest.mark.parametrize("graphed", [False, True])
def test_new_shapes_are_refused_in_a_capture(monkeypatch: pytest.MonkeyPatch, graphed: bool) -> None:
    """Ranks would have to talk to each other about them."""
    domain = domain_on_gpu(monkeypatch, capturing=True, graphed=graphed)
    with pytest.raises(RuntimeError, match=r"fc1 with x 4 x 8 is new to its group.* twice before capturing"):
        domain.prepare(Demand("fc1", "x 4 x 8", 0), None)


def test_on_the_cpu_nobody_asks_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    domain = domain_on_gpu(monkeypatch, capturing=True, graphed=False)
    domain._on_gpu = False
    assert domain.operator("fc1", calls=1) is not None
