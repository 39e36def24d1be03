"""Another number of rows of a known operator: no agreement, no wait, and the right result; what does not fit is agreed on."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_train import OverlapConfig, shutdown
from overlap_train.runtime.registry import domain_of
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


def _rows_that_differ(rank: int, world: int) -> str:
    case = _case(timeout_s=5.0)
    OPERATORS["column"](case, (8, 2), 24, 16)
    try:
        OPERATORS["column"](case, (4 + rank, 2), 24, 16)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_ranks_with_other_rows_are_named() -> None:
    """By their signals: nothing was agreed on."""
    for outcome in run_ranks(2, _rows_that_differ):
        said = outcome.value or outcome.error
        assert re.search(
            r"OverlapMismatchError: all_gather_linear/fprop: rank \d is in .*input \[[45], 2, 24\].*but rank", said
        )


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
