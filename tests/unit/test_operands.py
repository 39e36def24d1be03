"""What persistent kernels are given, and which launches count as the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_train.ops import launch as persistent
from overlap_train.ops.launch import GatherOperands, ScatterOperands
from overlap_train.select.tiling import HOPPER, PORTABLE

BF16 = torch.bfloat16


def plan(kernels: str, reduces_later: bool = False, spared_sms: int = 0) -> Any:
    return SimpleNamespace(kind="gather", kernels=kernels, reduces_later=reduces_later, spared_sms=spared_sms)


def test_what_tma_cannot_read_is_copied() -> None:
    whole = torch.zeros(64, 64, dtype=BF16)
    for readable in (whole, whole[8:, 8:], whole[::2]):
        assert persistent.operand(plan(HOPPER), readable) is readable
    odd = torch.zeros(8, 9, dtype=BF16)[:, :8]
    for wrong in (whole[:, 1:], whole[:, ::8], odd, whole.t(), torch.zeros(1, 64, dtype=BF16).expand(64, 64)):
        copy = persistent.operand(plan(HOPPER), wrong)
        assert copy is not wrong and copy.is_contiguous() and torch.equal(copy, wrong)
        assert persistent.operand(plan(PORTABLE), wrong) is wrong


def test_pointers_on_16_bytes_are_told_from_others() -> None:
    assert persistent.aligned(0, 16, 8, 33) == (True, True, False, False)


class Launches:
    """Remembers the keys of launches, and launches nothing."""

    def __init__(self) -> None:
        self.keys: list[Any] = []

    def run(self, key: Any, values: Any, describe: Any) -> None:
        self.keys.append(key)


@pytest.fixture
def call() -> Any:
    return SimpleNamespace(launches=Launches(), tag=SimpleNamespace(word=1))


def test_gathers_that_differ_have_launches_of_their_own(call: Any) -> None:
    domain: Any = SimpleNamespace(world_size=2)
    own, b = torch.zeros(4, 8), torch.zeros(8, 8)
    y = torch.empty(8, 8)
    for how, operands in (
        (plan(PORTABLE), GatherOperands(own, b, y, sends=False)),
        (plan(HOPPER), GatherOperands(own, b, y, sends=False)),
        (plan(PORTABLE, spared_sms=4), GatherOperands(own, b, y, sends=False)),
        (plan(PORTABLE), GatherOperands(own, b, y, sends=True)),
        (plan(PORTABLE), GatherOperands(own, b, y, sends=False, leaves=True)),
        (plan(PORTABLE), GatherOperands(own, b.t(), y, sends=False)),
        (plan(PORTABLE), GatherOperands(own, torch.zeros(8, 16), torch.empty(8, 16), sends=False)),
    ):
        persistent.receive_and_multiply(domain, call, how, operands)
    assert len(set(call.launches.keys)) == 7
    operands = GatherOperands(own.clone(), b.clone(), torch.empty(8, 8), sends=False)
    persistent.receive_and_multiply(domain, call, plan(PORTABLE), operands)
    assert len(set(call.launches.keys)) == 7


def test_so_have_scatters(call: Any) -> None:
    a, b, y = torch.zeros(8, 8), torch.zeros(8, 8), torch.zeros(4, 8)
    staging = torch.zeros(2, 4, 8)
    for how, operands in (
        (plan(PORTABLE), ScatterOperands(a, b, staging, y)),
        (plan(HOPPER), ScatterOperands(a, b, staging, y)),
        (plan(PORTABLE, reduces_later=True), ScatterOperands(a, b, staging, y)),
        (plan(PORTABLE, spared_sms=4), ScatterOperands(a, b, staging, y)),
        (plan(PORTABLE), ScatterOperands(a, b, None, y)),
        (plan(PORTABLE), ScatterOperands(a.t(), b, staging, y)),
        (plan(PORTABLE), ScatterOperands(a, b.t(), staging, y)),
    ):
        persistent.multiply_and_send(None, call, how, operands)  # type: ignore[arg-type]
    assert len(set(call.launches.keys)) == 7
