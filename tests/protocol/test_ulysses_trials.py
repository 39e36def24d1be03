"""tune_steps in Ulysses' linears: all parts of a call run by one method, which is timed as a whole, and the fastest is kept."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from overlap_train import AttentionHeads, OverlapConfig, all_to_all_linear, linear_all_to_all
from overlap_train.group.registry import made_domain
from overlap_train.ops import plan_cache as trial_book
from overlap_train.schedule.order import A2A_GEMM, GEMM_A2A
from overlap_train.select import autotune
from overlap_train.select.method import NAMES
from overlap_train.ulysses import calls, parts
from tests.linear_cases import OPERATORS, Case
from tests.processes import run_ranks, values
from tests.protocol.test_trials import STEPS, _slow, _two_methods

KINDS = {"to_heads": (GEMM_A2A, A2A_GEMM), "to_rows": (A2A_GEMM, GEMM_A2A)}
WORK = 2 * 9 * 2 * 16 * 6  # multiplications of a call of `_call`


@dataclass
class Seen:
    """What calls did: the methods of each one's parts, and what was timed, pass by pass."""

    methods: list[list[str]] = field(default_factory=list)
    timed: list[autotune.Timed] = field(default_factory=list)


@contextlib.contextmanager
def _seen() -> Iterator[Seen]:
    """Also lets a KiB stand for a MiB of exchange_mib."""
    seen, linear, add = Seen(), calls.Call.linear, autotune.Autotune.add

    def note_parts(call: calls.Call, planned: Any, *rest: Any) -> Any:
        seen.methods.append([part.exchange.plan.fprop.method for part in planned])
        return linear(call, planned, *rest)

    def note_time(trial: autotune.Autotune, timed: autotune.Timed, begin: Any) -> None:
        seen.timed.append(timed)
        add(trial, timed, begin)

    with (
        mock.patch.object(parts, "_MIB", 1 << 10),
        mock.patch.object(calls.Call, "linear", note_parts),
        mock.patch.object(autotune.Autotune, "add", note_time),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        yield seen


def _case(folder: str) -> Case:
    return Case(
        dist.group.WORLD,
        torch.device("cpu"),
        OverlapConfig(tune_steps=STEPS, tuning_dir=folder, exchange_mib=2, timeout_s=20.0),
    )


def _call(case: Case, operator: str, seed: int) -> None:
    """9 positions of 2 rows a rank, in parts of 5 and 4; compared exactly."""
    OPERATORS[operator](case, (9, 2), *((6, 8) if operator == "to_heads" else (8, 6)), seed=seed)


def _trial(rank: int, world: int, operator: str, folder: str) -> dict[str, Any]:
    forward, backward = KINDS[operator]
    case = _case(folder)
    with _two_methods(), _slow((0,), (forward, "chunked")), _slow((1,), (backward, "collective")), _seen() as seen:
        for call in range(STEPS):
            _call(case, operator, call)
        tried = list(seen.methods)
        _call(case, operator, STEPS)
    domain = made_domain(dist.group.WORLD)
    assert domain is not None
    return {
        "tried": tried,
        "after": seen.methods[STEPS:],
        "timed": [tuple(timed)[1:] for timed in seen.timed],
        "winners": {winner.measured.kind: winner.how.name for winner in domain.book.table.winners.values()},
    }


@pytest.mark.parametrize("operator", KINDS)
def test_all_parts_of_a_call_have_one_turn_and_one_time(operator: str, tmp_path: Path) -> None:
    forward, backward = KINDS[operator]
    methods = ["chunked", "collective", "collective", "chunked"] * (STEPS // 4)
    for facts in values(run_ranks(2, _trial, operator, str(tmp_path))):
        assert facts["tried"] == [[method] * 2 for method in ("chunked", *methods[:-1])], "the first is untuned"
        assert facts["timed"] == [(kind, method, WORK) for method in methods[:-1] for kind in (forward, backward)]
        assert facts["winners"] == {forward: "collective", backward: "chunked"}
        assert facts["after"] == [["collective", "chunked"]], "a shorter last part has sizes that nobody measured"


def _every_method(rank: int, world: int, folder: str) -> tuple[int, list[str]]:
    with _seen() as seen:
        for operator in KINDS:
            for call in range(1 + 3 * (len(NAMES) - 1) + 1):
                _call(_case(folder), operator, call)
    domain = made_domain(dist.group.WORLD)
    assert domain is not None
    return len(domain.book.table.winners), sorted({timed.method for timed in seen.timed})


def test_every_method_takes_its_turn_and_is_exact(tmp_path: Path) -> None:
    expected = (2, sorted(set(NAMES) - {"low_latency"}))
    assert values(run_ranks(2, _every_method, str(tmp_path))) == [expected] * 2


def _untimed(rank: int, world: int, folder: str) -> tuple[int, list[str]]:
    """Calls in evaluation and of a frozen weight; then kinds that were timed of an input without a gradient, whose KV head two
    ranks have."""
    case, heads = _case(folder), AttentionHeads(query=2, kv=1, dim=2)
    x, w = torch.ones(4, 1, 6), torch.ones(heads.features, 6)
    with _two_methods(), _seen() as seen:
        with torch.no_grad():
            linear_all_to_all(x, w, group=case.group, heads=heads, config=case.config)
        linear_all_to_all(x.requires_grad_(), w, group=case.group, heads=heads, config=case.config).sum().backward()
        none = len(seen.timed)
        w.requires_grad_()
        for _ in range(2):  # the first is untuned
            linear_all_to_all(x.detach(), w, group=case.group, heads=heads, config=case.config).sum().backward()
    return none, [timed.kind for timed in seen.timed]


def test_what_is_not_timed(tmp_path: Path) -> None:
    assert values(run_ranks(2, _untimed, str(tmp_path))) == [(0, [GEMM_A2A])] * 2


def _stands_in(rank: int, world: int, folder: str) -> tuple[list[list[str]], list[str]]:
    """Methods of three calls, of which the last would have the turn of one that does not serve it; and what was timed of them."""
    case = _case(folder)
    with _two_methods(), _seen() as seen:
        _call(case, "to_rows", 0)
        seen.methods.clear(), seen.timed.clear()
        with mock.patch.object(
            trial_book, "why_not_here", lambda plan, *_: "no" * (plan.fprop.method == "collective") or None
        ):
            for _ in range(3):
                x, w = (
                    torch.ones(18, 8, requires_grad=True),
                    torch.ones(6, 16, requires_grad=True),
                )  # of the same bucket
                y = all_to_all_linear(
                    x, w, group=case.group, config=replace(case.config, exchange_mib=64), name="other"
                )
                y.sum().backward()
    return seen.methods, [timed.method for timed in seen.timed]


def test_what_stands_in_is_not_timed(tmp_path: Path) -> None:
    assert values(run_ranks(2, _stands_in, str(tmp_path))) == [([["chunked"]] * 3, ["chunked"] * 2)] * 2


def _captured(rank: int, world: int, folder: str) -> list[str]:
    """The trial of one linear ends while that of another goes on, which a CUDA graph then captures. Its methods."""
    case = _case(folder)
    with _two_methods(), _seen() as seen, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the graph keeps the untuned plan
        for operator, count in (("to_rows", 6), ("to_heads", STEPS + 1), ("to_rows", 2)):
            for number in range(count):
                _call(case, operator, number)
        domain = made_domain(dist.group.WORLD)
        captures = mock.patch.object(type(domain), "is_capturing", return_value=True)
        with captures, mock.patch.object(domain, "graphed", True):
            _call(case, "to_rows", 9)
    return seen.methods[-1]


def test_a_linear_that_a_graph_captures_in_its_trial_keeps_its_plan_when_another_trial_has_ended(
    tmp_path: Path,
) -> None:
    for methods in values(run_ranks(2, _captured, str(tmp_path), limit_s=60)):
        assert set(methods) == {"chunked"}
