"""tune_steps between real CPU ranks: methods take turns in training, all ranks find the same winner, and the next run has it."""

from __future__ import annotations

import contextlib
import io
import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import overlap_train.nodes  # noqa: F401  registers its engines
from overlap_train import OverlapConfig, all_gather_linear, shutdown
from overlap_train.ops.gemm_a2a import PULLED
from overlap_train.ops.table import TABLE
from overlap_train.select.method import Pass, rounded_up
from overlap_train.select.table import key_of, read
from tests.linear_cases import OPERATORS, SHAPES, Case
from tests.processes import run_ranks, values

CPU = torch.device("cpu")
STEPS = 10
ROWS, K, N = SHAPES["even"]  # of a rank; one row less is in the same bucket
FEWER_ROWS = (ROWS[0] - 1, *ROWS[1:])
# The first call is untuned and each round of two begins with the next method; then the winner, which PACE decides.
FORWARD = ["chunked", *["chunked", "collective", "collective", "chunked"] * 2, "chunked", "collective", "collective"]
BACKWARD = [*FORWARD[:STEPS], "chunked", "chunked"]
PACE = {("fprop", "chunked"): 0.03, ("dgrad", "collective"): 0.03}  # seconds that a pass by a method takes longer
NAMES = {
    "column": "all_gather_linear",
    "row": "linear_reduce_scatter",
    "to_heads": "linear_all_to_all",
    "to_rows": "all_to_all_linear",
}
Ran = dict[str, tuple[str, str]]  # "all_gather_linear/fprop" -> method and reason of its last call


@pytest.fixture(autouse=True)
def _two_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the interpreter of kernels, `chunked` and `collective` are what CPU processes have."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@dataclass
class Said:
    """What one rank has seen. turns: by pass, the method of each call. printed: by operator. next: calls of the next run."""

    turns: dict[str, list[str]]
    printed: dict[str, str]
    next: Ran


def watch(slow_rank: int) -> Ran:
    """Which method runs each pass, filled in as engines start. Passes of PACE take longer on slow_rank."""
    ran: Ran = {}

    def watching(start: Callable[..., Any]) -> Callable[..., Any]:
        def started(domain: Any, plan: Any, tag: Any, *operands: Any) -> Any:
            ran[tag.op] = (plan.method, plan.reason)
            if dist.get_rank() == slow_rank:
                time.sleep(PACE.get((tag.op.rpartition("/")[2], plan.method), 0.0))
            return start(domain, plan, tag, *operands)

        return started

    for methods in (PULLED, *(methods for engines in TABLE.values() for methods in engines.values())):
        methods.update({method: watching(start) for method, start in methods.items()})
    return ran


def _train(rank: int, world: int, folder: str, node_ranks: int) -> Said:
    """A run that tunes all operators, exact in each call; then a second run."""
    ran, seen = watch(slow_rank=1), Said({}, {}, {})
    config = OverlapConfig(tune_steps=STEPS, tuning_dir=folder, node_ranks=node_ranks, timeout_s=30.0)
    case = Case(dist.group.WORLD, CPU, config)
    for operator, name in NAMES.items():
        with contextlib.redirect_stderr(io.StringIO()) as said:
            for call in range(len(FORWARD)):
                OPERATORS[operator](case, FEWER_ROWS if call == 4 else ROWS, K, N, seed=call)
                for pass_ in ("fprop", "dgrad"):
                    seen.turns.setdefault(f"{name}/{pass_}", []).append(ran[f"{name}/{pass_}"][0])
        seen.printed[operator] = said.getvalue()
    shutdown()
    ran.clear()
    for operator in OPERATORS:
        OPERATORS[operator](case, ROWS, K, N)
    shutdown()
    return replace(seen, next=ran)


@pytest.mark.parametrize(("world", "node_ranks"), [(2, 0), (4, 2)], ids=["one node", "two nodes"])
def test_all_ranks_find_the_same_winner_and_the_next_run_has_it(world: int, node_ranks: int, tmp_path: Path) -> None:
    ranks = values(run_ranks(world, _train, str(tmp_path), node_ranks, limit_s=90))
    for seen in ranks:
        for name in NAMES.values():
            assert seen.turns[f"{name}/fprop"] == FORWARD, name
            assert seen.turns[f"{name}/dgrad"] == BACKWARD, name
            for pass_, winner in (("fprop", "collective"), ("dgrad", "chunked")):
                method, reason = seen.next[f"{name}/{pass_}"]
                assert method == winner and reason.startswith("auto: tuned for M="), (name, pass_)
    (file,) = tmp_path.iterdir()
    for operator, printed in ranks[0].printed.items():
        assert f"overlap_train: {NAMES[operator]} and linears of about its sizes (M=" in printed
        assert f"in {STEPS} calls, kept in {file}:" in printed
        assert re.search(r"^  forward collective \(collective \d+\.\d+ ms, chunked \d+\.\d+ ms\)$", printed, re.M)
        assert re.search(r"^  backward chunked \(chunked \d+\.\d+ ms, collective \d+\.\d+ ms\)$", printed, re.M)
    assert not any(printed for seen in ranks[1:] for printed in seen.printed.values()), "rank 0 of the job prints"
    table = read(str(tmp_path), key_of(CPU, world, world // node_ranks if node_ranks else 1))
    assert len(table) == 2 * len(OPERATORS)
    for winner in table.values():
        assert winner.how.name == min(winner.ms, key=winner.ms.__getitem__).name
        assert winner.measured.bucket == _bucket(winner.measured, world)


def _bucket(measured: Pass, world: int) -> tuple[str, str, int, int, int, int]:
    """That of the measured sizes, from the global rows of a call."""
    rows = rounded_up(ROWS[0] * ROWS[1] * world)
    return measured.kind, "float32", world, rows, rounded_up(measured.n), rounded_up(measured.k)


def _in_parts(rank: int, world: int, folder: str) -> list[set[tuple[str, str]]]:
    """Of each timed call of a linear in two parts, the methods of its parts, by pass; and of the first call after those."""
    ran, calls = watch(slow_rank=0), []
    config = OverlapConfig(tune_steps=STEPS, tuning_dir=folder, exchange_mib=1, timeout_s=30.0)
    with contextlib.redirect_stderr(io.StringIO()):
        for call in range(STEPS + 1):
            ran.clear()
            OPERATORS["to_heads"](Case(dist.group.WORLD, CPU, config), (512, 1), 8, 512, seed=call)
            calls.append({(op.rpartition("/")[2], method) for op, (method, _) in ran.items()})
    shutdown()
    return calls[1:]


def test_all_parts_of_a_call_have_the_same_turn(tmp_path: Path) -> None:
    first, second = values(run_ranks(2, _in_parts, str(tmp_path), limit_s=90))
    turns = zip(FORWARD[1 : STEPS + 1], BACKWARD[1 : STEPS + 1], strict=True)
    assert first == second == [{("fprop", fprop), ("dgrad", dgrad)} for fprop, dgrad in turns]


def _differ(rank: int, world: int, folder: str) -> tuple[str, str]:
    """Ranks with another number of calls; then a folder that is a file."""
    x, w = torch.ones(4, 8), torch.ones(8, 8, requires_grad=True)
    config = OverlapConfig(tune_steps=STEPS + rank, tuning_dir=folder)
    with pytest.raises(ValueError) as raised:
        all_gather_linear(x, w, group=dist.group.WORLD, config=config, name="fc1")
    shutdown()
    config = OverlapConfig(tune_steps=STEPS, tuning_dir=f"{folder}/file")
    with contextlib.redirect_stderr(io.StringIO()) as said, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(4 * STEPS + 1):  # x wants no gradient, so that no backward is timed
            y = all_gather_linear(x, w, group=dist.group.WORLD, config=config, name="fc1")
            y.sum().backward()
    shutdown()
    return str(raised.value), "\n".join([said.getvalue(), *(str(one.message) for one in warned)])


def test_ranks_that_differ_are_refused_and_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (error, said), (other, _) = values(run_ranks(2, _differ, str(tmp_path), limit_s=60))
    assert all(f"in {STEPS} calls" in text and f"in {STEPS + 1} calls" in text for text in (error, other))
    assert "cannot be written" in said and "for this run only" in said
    assert "\n  forward " in said and "\n  backward " not in said
