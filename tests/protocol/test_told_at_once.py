"""A rank that cannot go on, or that is in another call: its peers hear of it, by name, long before the
time-out of 600 s: run_ranks waits for 40."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from overlap_train import (
    OverlapConfig,
    OverlapMismatchError,
    OverlapPeerError,
    all_gather_linear,
    linear_reduce_scatter,
    shutdown,
)
from overlap_train.group import domain
from overlap_train.group.registry import tell_peers
from overlap_train.ops.ag_gemm import ChunkedAllGatherGemm
from overlap_train.ops.wgrad import WeightGradient
from tests.processes import run_ranks


class Step:
    """Forward and backward of a column and a row linear."""

    def __init__(self, method: str) -> None:
        self.config = OverlapConfig(method=method, timeout_s=600.0)
        self.w = torch.ones(8, 8, requires_grad=True)

    def __call__(self, rows: int = 8, name: str = "fc1") -> None:
        group = dist.group.WORLD
        hidden = all_gather_linear(torch.ones(rows, 8), self.w, group=group, config=self.config, name=name)
        linear_reduce_scatter(hidden, self.w, group=group, config=self.config, name="fc2").sum().backward()


def _boom(*_: Any, **__: Any) -> None:
    raise MemoryError("none left, says a test")


def _in_forward(step: Step) -> None:
    with mock.patch.object(ChunkedAllGatherGemm, "matmul", _boom):
        step()


def _in_backward(step: Step) -> None:
    with mock.patch.object(WeightGradient, "add", _boom):
        step()


def _in_growth(step: Step) -> None:
    with mock.patch.object(domain, "heap_by", _boom):
        step(rows=800)


def _between_calls(step: Step) -> None:
    """As an error that nobody catches: the process ends by it (registry.tell_peers is its excepthook)."""
    try:
        _boom()
    except MemoryError as error:
        tell_peers(error)
        raise


def _ends(step: Step) -> None:
    os._exit(3)


def _leaves(step: Step) -> None:
    shutdown()


def _is_longer(step: Step) -> None:
    step(rows=80)


def _is_frozen(step: Step) -> None:
    step.w = step.w.detach()
    all_gather_linear(torch.ones(8, 8), step.w, group=dist.group.WORLD, config=step.config, name="fc1")


def _is_refused(step: Step) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        step()


def _asks_alone(step: Step) -> None:
    all_gather_linear(torch.ones(4, 8), torch.ones(24, 8), group=dist.group.WORLD, config=step.config, name="new")


RAISES = {
    "in_forward": _in_forward,
    "in_backward": _in_backward,
    "in_growth": _in_growth,
    "between_calls": _between_calls,
}
DIFFERS = {
    "ends": _ends,
    "leaves": _leaves,
    "is_refused": _is_refused,
    "is_longer": _is_longer,
    "is_frozen": _is_frozen,
    "asks_alone": _asks_alone,
}
ALL = RAISES | DIFFERS


def _mistake(rank: int, world: int, method: str, what: str, peers_agree: bool) -> tuple[str, str]:
    """The last rank makes a mistake, or fails, after two right steps. Returns what the others raise."""
    step = Step(method)
    step(), step()
    heard = ("", "no error")
    try:
        if rank == world - 1:
            ALL[what](step)
        else:
            for _ in range(3):
                step(rows=800 if what == "in_growth" else 40 if peers_agree else 8)
    except (OverlapPeerError, OverlapMismatchError, MemoryError, ValueError) as error:
        heard = type(error).__name__, str(error)
    # Its process goes on until all have heard: of the error, and not of its end.
    store = dist.PrefixStore("heard", dist.distributed_c10d._get_default_store())
    store.set(str(rank), "")
    with suppress(dist.DistStoreError):
        store.wait([str(peer) for peer in range(world - (what == "ends"))], timedelta(seconds=8))
    return heard


@pytest.mark.parametrize(
    ("method", "world", "what"),
    [
        *[("chunked", 2 if what == "between_calls" else 3, what) for what in RAISES],
        ("collective", 2, "in_backward"),
        ("collective", 2, "between_calls"),
    ],
)
def test_peers_hear_of_an_error(method: str, world: int, what: str) -> None:
    *peers, last = run_ranks(world, _mistake, method, what, False, limit_s=40)
    assert last.value is not None and last.value[0] == "MemoryError", last.error
    for peer in peers:
        kind, text = peer.value
        assert kind == "OverlapPeerError", text
        assert f"rank {world - 1} of the group raised MemoryError: none left, says a test" in text


def test_so_do_ranks_that_agree_meanwhile() -> None:
    first, _ = run_ranks(2, _mistake, "chunked", "between_calls", True, limit_s=40)
    assert "fc1: agree on its first call" in first.value[1] and "raised MemoryError: none left" in first.value[1]


MESSAGES = {
    "ends": r"rank 1 of the group has ended \(process",
    "leaves": r"rank 1 of the group has called shutdown\(\)",
    "is_refused": r"rank 1 of the group raised ValueError: fc1: autocast to torch\.bfloat16 is on",
    "is_longer": r"\[8, 8\].*\[80, 8\]",
    "is_frozen": r"rank 1 is in: fc1: agree on its first call",
    "asks_alone": r"rank 1 is in: new: agree on its first call with input \[4, 8\], weight \[24, 8\]",
}


@pytest.mark.parametrize("what", DIFFERS)
def test_peers_are_told_where_a_rank_is(what: str) -> None:
    first, second = run_ranks(2, _mistake, "chunked", what, False, limit_s=40)
    kind, text = first.value
    assert kind == ("OverlapPeerError" if what in ("ends", "leaves", "is_refused") else "OverlapMismatchError")
    assert re.search(MESSAGES[what], text, re.S), text
    if kind == "OverlapMismatchError":  # and it hears so, too
        assert second.value[0] == kind and re.search(MESSAGES[what], second.value[1], re.S), second.value


def _alike(rank: int, world: int) -> float:
    """All ranks raise in the same operator, one after the other, and go on."""
    step = Step("chunked")
    step()
    for _ in range(2):
        time.sleep(0.3 * rank)
        with pytest.raises(MemoryError):
            _in_backward(step)
        step()
    return 1.0


def test_ranks_that_raise_alike_go_on() -> None:
    assert [outcome.value for outcome in run_ranks(3, _alike, limit_s=40)] == [1.0] * 3
