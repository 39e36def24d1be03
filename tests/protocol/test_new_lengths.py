"""Another number of rows of a known operator: no agreement, no wait, and the right result; what does not fit is agreed on."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_train import OverlapConfig, OverlapMismatchError, OverlapTimeoutError, all_gather_linear, shutdown
from overlap_train.group.registry import domain_of
from tests.linear_cases import OPERATORS, Case
from tests.processes import run_ranks, values


def _case(method: str = "chunked", timeout_s: float = 20.0) -> Case:
    return Case(dist.group.WORLD, torch.device("cpu"), OverlapConfig(method=method, timeout_s=timeout_s))


def _exchanges(case: Case) -> list[str]:
    """What the domain agrees on from here on, but for `collective`'s comparisons before each call on CPUs."""
    agreement, said = domain_of(case.group, case.config, case.device).agreement, []
    exchange = agreement.exchange

    def listening(mine: Any, what: str, **rest: Any) -> list[Any]:
        if "agree on" in what:
            said.append(what)
        return exchange(mine, what, **rest)

    agreement.exchange = listening  # type: ignore[method-assign]
    return said


def _other_rows(rank: int, world: int, method: str) -> list[str]:
    case = _case(method)
    for operator in OPERATORS.values():
        operator(case, (8, 2), 24, 16)
    said = _exchanges(case)
    for rows in (1, 3, 7, 8):
        for operator in OPERATORS.values():
            operator(case, (rows, 2), 24, 16, seed=rows)
    none = list(said)
    OPERATORS["column"](case, (20, 2), 24, 16)
    assert (len(said) > len(none)) == (method == "chunked"), "more symmetric memory is agreed on"
    shutdown()
    return none


@pytest.mark.parametrize("method", ["chunked", "collective"])
def test_fewer_rows_need_no_agreement(method: str) -> None:
    assert values(run_ranks(2, _other_rows, method)) == [[], []]


def _many_rows(rank: int, world: int, step: int) -> tuple[int, int]:
    """200 lengths, each new: how often ranks agreed, and how many heaps there were."""
    case, heaps = _case(), set()
    x, w = torch.ones(2000, 3), torch.ones(4, 3)
    all_gather_linear(x[:1000], w, group=case.group, config=case.config)
    said = _exchanges(case)
    for rows in range(1005, 2001, 5)[::step]:
        y = all_gather_linear(x[:rows], w, group=case.group, config=case.config)
        assert y.shape == (2 * rows, 4) and bool((y == 3).all())
        heaps.add(domain_of(case.group, case.config, case.device).layout.slot_bytes)
    return len(said), len(heaps)


@pytest.mark.parametrize(("step", "agreements"), [(1, 8), (-1, 1)], ids=["ever longer", "ever shorter"])
def test_many_lengths_agree_once_a_bucket(step: int, agreements: int) -> None:
    """48 KB a rank, then up to twice as much: there are eight buckets between them, and no longest row needs more than one."""
    assert values(run_ranks(2, _many_rows, step)) == [(agreements, agreements + (step > 0))] * 2


def _up_to_the_limit(rank: int, world: int) -> int:
    """Three slots of 340 KiB fill one MiB: there is no room for rows that are an eighth longer."""
    config = OverlapConfig(method="chunked", symmetric_mib=1)
    all_gather_linear(torch.ones(10880, 4), torch.ones(4, 4), group=dist.group.WORLD, config=config)
    return domain_of(dist.group.WORLD, config, torch.device("cpu")).layout.slot_bytes


def test_room_for_longer_rows_is_not_taken_beyond_the_limit() -> None:
    assert values(run_ranks(2, _up_to_the_limit)) == [340 << 10] * 2


def _differs(rank: int, world: int, wrong: int) -> str:
    """All ranks know [8, 2, 24]; then the last one comes with `wrong` rows."""
    case = _case(timeout_s=10.0)
    OPERATORS["column"](case, (8, 2), 24, 16)
    try:
        OPERATORS["column"](case, (wrong if rank == world - 1 else 8, 2), 24, 16)
    except (OverlapMismatchError, OverlapTimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_with_other_rows_are_named(world: int) -> None:
    """By their signals: nothing was agreed on."""
    said = values(run_ranks(world, _differs, 5))
    named = r"OverlapMismatchError: all_gather_linear/fprop: rank \d is in .*input \[[58], 2, 24\].*but rank"
    assert re.search(named, said[world - 1]) and sum(bool(re.search(named, one)) for one in said) >= 2
    assert all("Overlap" in one for one in said), said


@pytest.mark.parametrize("world", [2, 4])
def test_a_rank_that_must_agree_first_and_one_that_need_not_name_each_other(world: int) -> None:
    """They wait in different places, the one for more memory, the others for its rows."""
    for said in values(run_ranks(world, _differs, 80)):
        assert re.search(r"^OverlapMismatchError: all_gather_linear", said), said
        assert "[8, 2, 24]" in said and "agree on its first call with input [80, 2, 24]" in said, said


def _wrong_rows(rank: int, world: int) -> str:
    case = _case()
    OPERATORS["row"](case, (8, 2), 24, 16)
    try:
        from overlap_train import linear_reduce_scatter

        x, w = torch.ones(5, 2, 24, requires_grad=True), torch.ones(16, 24, requires_grad=True)
        linear_reduce_scatter(x, w, group=case.group, config=case.config)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_rows_that_cannot_be_divided_are_refused_at_once() -> None:
    assert all("must be divisible by the group's 2 ranks" in said for said in values(run_ranks(2, _wrong_rows)))
