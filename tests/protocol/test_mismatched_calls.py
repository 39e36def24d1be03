"""Calls whose shapes are all known, and that meet by mistake: every rank raises by name, and nobody returns a wrong result."""

from __future__ import annotations

import os
import re
import time

import pytest
import torch
import torch.distributed as dist

from overlap_train import (
    OverlapConfig,
    OverlapMismatchError,
    OverlapTimeoutError,
    all_gather_linear,
    all_to_all_linear,
    check,
    linear_all_to_all,
    linear_reduce_scatter,
)
from overlap_train.ulysses import parts
from tests.processes import run_ranks, values

TIMEOUT_S = 2.0


def _gather(config: OverlapConfig, rows: int = 4, name: str = "fc1") -> torch.Tensor:
    x, w = torch.ones(rows, 8), torch.ones(8, 8)
    return all_gather_linear(x, w, group=dist.group.WORLD, config=config, name=name)


def _scatter(config: OverlapConfig, rows: int = 16, name: str = "fc2") -> torch.Tensor:
    x, w = torch.ones(rows, 8), torch.ones(8, 8)
    return linear_reduce_scatter(x, w, group=dist.group.WORLD, config=config, name=name)


def _to_heads(config: OverlapConfig) -> torch.Tensor:
    x, w = torch.ones(16, 8), torch.ones(16, 8)
    return linear_all_to_all(x, w, group=dist.group.WORLD, config=config, name="qkv")


def _to_rows(config: OverlapConfig) -> torch.Tensor:
    x, w = torch.ones(16, 8), torch.ones(8, 8 * dist.get_world_size())
    return all_to_all_linear(x, w, group=dist.group.WORLD, config=config, name="proj")


def _layers(config: OverlapConfig, skipped: int | None = None) -> None:
    """Three layers of one shape; one of them is left out."""
    for layer in range(3):
        if layer != skipped:
            _gather(config, name=f"layers.{layer}.fc1")


def _mistake(rank: int, world: int, method: str, mistake: str) -> tuple[str, str, float]:
    """Every rank runs all calls once, rightly; then the last rank makes a mistake. Returns what it raised, and when."""
    config = OverlapConfig(method=method, timeout_s=TIMEOUT_S)
    wrong = rank == world - 1
    _layers(config)
    for rows in (4, 8):
        _gather(config, rows)
    _scatter(config)
    if method != "low_latency":  # it serves no all-to-all
        _to_heads(config), _to_rows(config)
    begin = time.monotonic()
    try:
        if mistake == "skips a layer":
            _layers(config, skipped=1 if wrong else None)
        elif mistake == "swaps":
            first, second = (_scatter, _gather) if wrong else (_gather, _scatter)
            first(config)
            second(config)
        elif mistake == "calls the other all-to-all":
            (_to_heads if wrong else _to_rows)(config)
        else:
            _gather(config, rows=8 if wrong else 4)
        for _ in range(3):  # a rank that was not wrong may find out in its next calls only
            _layers(config)
        check()
    except (OverlapMismatchError, OverlapTimeoutError) as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "no error", 0.0


MISTAKES = {
    "skips a layer": r"layers\.1\.fc1.*layers\.2\.fc1|layers\.2\.fc1.*layers\.1\.fc1",
    "swaps": r"fc1/fprop \[all_gather_linear.*fc2/fprop \[linear_reduce_scatter|fc2/fprop.*fc1/fprop",
    "calls the other all-to-all": r"qkv/fprop \[linear_all_to_all.*proj/fprop \[all_to_all_linear|proj/fprop.*qkv/fprop",
    "has another length": r"\[4, 8\].*\[8, 8\]|\[8, 8\].*\[4, 8\]",
}


def _check(method: str, mistake: str, world: int) -> None:
    outcomes = values(run_ranks(world, _mistake, method, mistake, limit_s=60))
    kinds = [kind for kind, _, _ in outcomes]
    assert all(kinds), outcomes
    named = [text for kind, text, _ in outcomes if kind == "OverlapMismatchError"]
    assert named and all(re.search(MISTAKES[mistake], text) for text in named), outcomes
    assert all(seconds <= TIMEOUT_S + 2.0 for _, _, seconds in outcomes), outcomes


def _in_parts(rank: int, world: int, method: str, mistake: str) -> tuple[str, str, float]:
    """A long sequence, all but whose last part is pulled, where the last rank has a short one, or is in another layer."""
    parts._MIB = 1 << 10  # of this process: as if 1 KiB were one
    config, group = OverlapConfig(method=method, timeout_s=TIMEOUT_S, exchange_mib=1), dist.group.WORLD

    def heads(rows: int) -> None:
        linear_all_to_all(torch.ones(rows, 8), torch.ones(8 * world, 8), group=group, config=config, name="qkv")

    for _ in range(3):
        heads(8), heads(2), _gather(config, rows=2)
    begin = time.monotonic()
    try:
        if rank < world - 1:
            heads(8)
        elif mistake == "is short":
            heads(2)
        for _ in range(4):
            _gather(config, rows=2)
        check()
    except (OverlapMismatchError, OverlapTimeoutError) as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return "", "no error", 0.0


PULLED = {"is short": r"qkv/fprop.*qkv/fprop", "is in another layer": r"qkv/fprop.*fc1/fprop|fc1/fprop.*qkv/fprop"}


@pytest.mark.parametrize("mistake", PULLED)
@pytest.mark.parametrize("method", ["chunked", "fused"])
def test_a_call_that_is_pulled_is_told_from_others(method: str, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if method == "fused":
        monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "1")
    outcomes = values(run_ranks(2, _in_parts, method, mistake, limit_s=60))
    assert [kind for kind, _, _ in outcomes] == ["OverlapMismatchError"] * 2, outcomes
    assert all(re.search(PULLED[mistake], text) for _, text, _ in outcomes), outcomes


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize(("method", "world"), [("chunked", 4), ("collective", 2)])
def test_every_rank_raises_by_name(method: str, mistake: str, world: int) -> None:
    _check(method, mistake, world)


KERNELS = [("fused", 2, mistake) for mistake in MISTAKES]
KERNELS += [(method, 2, mistake) for method in ("direct", "low_latency") for mistake in ("skips a layer", "swaps")]
KERNELS += [(method, 4, "has another length") for method in ("direct", "low_latency")]


@pytest.mark.parametrize(("method", "world", "mistake"), KERNELS)
def test_so_does_every_rank_from_inside_a_kernel(
    method: str, world: int, mistake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "1")
    outcomes = values(run_ranks(world, _mistake, method, mistake, limit_s=100))
    assert all(kind for kind, _, _ in outcomes), outcomes
    named = [text for kind, text, _ in outcomes if kind == "OverlapMismatchError"]
    assert named and all(re.search(MISTAKES[mistake], text) for text in named), outcomes
