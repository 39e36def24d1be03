"""A rank that raises on a GPU: with a limit of 600 s its peers, whose kernels wait for it, hear of it by name within seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import overlap_train
from overlap_train import OverlapPeerError, all_gather_linear, check, graphed, linear_reduce_scatter
from overlap_train.group.registry import tell_peers
from overlap_train.ops.wgrad import WeightGradient
from tests.linear_cases import Case


def step(case: Case) -> None:
    x, w = (torch.ones(rows, 512, device=case.device, dtype=case.dtype, requires_grad=True) for rows in (256, 512))
    hidden = all_gather_linear(x, w, group=case.group, config=case.config, name="fc1")
    linear_reduce_scatter(hidden, w, group=case.group, config=case.config, name="fc2").sum().backward()


def steps(case: Case) -> None:
    for _ in range(3):
        step(case)
        torch.cuda.synchronize()
        check()


def replays(case: Case) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), graphed(case.group):
        step(case)
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        check()


def fail(*_: object) -> None:
    raise MemoryError("none left, says a test")


def end(case: Case) -> None:
    """As by an error that nobody catches, whose hook this is."""
    try:
        fail()
    except MemoryError as error:
        tell_peers(error)
        raise


@pytest.mark.parametrize(
    ("method", "wrong", "right"),
    [
        *[(method, step, steps) for method in ("fused", "direct", "chunked", "low_latency")],
        ("fused", end, steps),
        ("fused", replays, replays),
    ],
)
def test_peers_of_a_rank_that_raises_hear_of_it(
    case: Case, wrong: Callable[[Case], None], right: Callable[[Case], None]
) -> None:
    dist.barrier(case.group)
    overlap_train.shutdown()  # a domain with a time-out of its own
    case = replace(case, config=replace(case.config, timeout_s=600.0))
    for _ in range(2):
        step(case)
    torch.cuda.synchronize()
    dist.barrier(case.group)
    begin, said = time.monotonic(), ""
    if case.rank == case.world - 1:
        # The end of a capture may have an error of its own.
        with mock.patch.object(WeightGradient, "add", fail), pytest.raises((MemoryError, RuntimeError)):
            wrong(case)
    else:
        with pytest.raises(OverlapPeerError) as caught:
            right(case)
        said = str(caught.value)
    found: list[tuple[str, float]] = [("", 0.0)] * case.world
    dist.all_gather_object(found, (said, time.monotonic() - begin), group=case.group)
    overlap_train.shutdown()
    for text, seconds in found[:-1]:
        assert f"rank {case.world - 1} of the group raised MemoryError: none left, says a test" in text, found
        assert seconds < 4.0, found
