"""Known calls that meet by mistake, on GPUs: every rank raises within its time-out, and somebody names both calls."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import overlap_train
from overlap_train import (
    OverlapMismatchError,
    OverlapTimeoutError,
    all_gather_linear,
    all_to_all_linear,
    check,
    linear_all_to_all,
    linear_reduce_scatter,
)
from tests.linear_cases import Case

TIMEOUT_S = 4.0
# What the names of both calls have in common.
MISTAKES = {"skips a layer": "layers.", "swaps": "fc", "swaps exchanges": "a2a.", "has another length": "fc1"}


def gather(case: Case, rows: int = 256, name: str = "fc1") -> None:
    x, w = (torch.ones(rows, 512, device=case.device, dtype=case.dtype) for rows in (rows, 256))
    all_gather_linear(x, w, group=case.group, config=case.config, name=name)


def scatter(case: Case, name: str = "fc2") -> None:
    x, w = (torch.ones(rows, 512, device=case.device, dtype=case.dtype) for rows in (256 * case.world, 256))
    linear_reduce_scatter(x, w, group=case.group, config=case.config, name=name)


def to_heads(case: Case) -> None:
    x, w = (torch.ones(rows, 512, device=case.device, dtype=case.dtype) for rows in (256, 256))
    linear_all_to_all(x, w, group=case.group, config=case.config, name="a2a.qkv")


def to_rows(case: Case) -> None:
    x = torch.ones(256 * case.world, 512 // case.world, device=case.device, dtype=case.dtype)
    w = torch.ones(256, 512, device=case.device, dtype=case.dtype)
    all_to_all_linear(x, w, group=case.group, config=case.config, name="a2a.proj")


def layers(case: Case, skipped: int | None = None) -> None:
    for layer in range(3):
        if layer != skipped:
            gather(case, name=f"layers.{layer}.fc1")


def run_mistake(case: Case, mistake: str) -> None:
    """The last rank of the group makes it; then all go on until they notice."""
    wrong = case.rank == case.world - 1
    if mistake == "skips a layer":
        layers(case, skipped=1 if wrong else None)
    elif mistake.startswith("swaps"):
        calls = (gather, scatter) if mistake == "swaps" else (to_heads, to_rows)
        for call in reversed(calls) if wrong else calls:
            call(case)
    else:
        gather(case, rows=512 if wrong else 256)
    for _ in range(3):
        layers(case)
        torch.cuda.synchronize()
        check()


@pytest.mark.parametrize("mistake", MISTAKES)
def test_every_rank_raises_and_one_names_both_calls(case: Case, mistake: str) -> None:
    if case.config.method == "collective":
        pytest.skip("of NCCL's collectives NCCL's own watchdog takes care")
    dist.barrier(case.group)
    overlap_train.shutdown()  # a domain with a time-out of its own
    case = replace(case, config=replace(case.config, timeout_s=TIMEOUT_S))
    layers(case)
    for rows in (256, 512):
        gather(case, rows)
    for call in (scatter, to_heads, to_rows):
        call(case)
    torch.cuda.synchronize()
    dist.barrier(case.group)
    begin = time.monotonic()
    with pytest.raises((OverlapMismatchError, OverlapTimeoutError)) as caught:
        run_mistake(case, mistake)
    seconds = time.monotonic() - begin
    torch.cuda.synchronize()
    found: list[tuple[str, str]] = [("", "")] * case.world
    dist.all_gather_object(found, (type(caught.value).__name__, str(caught.value)), group=case.group)
    overlap_train.shutdown()
    assert seconds <= TIMEOUT_S + 2, found
    named = [text for kind, text in found if kind == "OverlapMismatchError"]
    assert named and all(text.count(MISTAKES[mistake]) >= 2 for text in named), found
