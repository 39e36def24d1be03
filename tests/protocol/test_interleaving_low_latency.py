"""Few rows, by words with flags or, all-reduced, by stores and signals: the real engines and kernels under seeded schedules.

Stores of words are torn on purpose: some of a part arrive before the others (interpreter_hooks.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import product
from unittest import mock

import pytest
import torch

pytest.importorskip("greenlet")

from tests.protocol import planted as hook
from tests.protocol.explore import Build, assert_caught, assert_passes
from tests.protocol.interleaving import Scheduler
from tests.protocol.operator_problems import all_reduces, gathers, integers, scatters, tag_of
from tests.protocol.planted import Plant
from tests.protocol.simulated_ranks import TILE, SimulatedDomain, Simulation, core
from tests.protocol.test_interleaving_linear import mlp
from tests.protocol.test_interleaving_shared_slot import gather_and_barrier

METHOD, CALLS, EPOCH = "low_latency", "ops.low_latency", 1 << 32
by_words: dict[str, Callable[..., Build]] = {
    "gather": partial(gathers, METHOD),
    "scatter": partial(scatters, METHOD),
    "all-reduce": partial(all_reduces, "words"),
}
few_rows = by_words | {shots: partial(all_reduces, shots) for shots in ("one shot", "two shots")}
operators = pytest.mark.parametrize("operator", few_rows)


@operators
def test_it_passes(operator: str) -> None:
    assert_passes(few_rows[operator](Simulation(2)), range(3))
    assert_passes(few_rows[operator](Simulation(3)), range(2))


@operators
@pytest.mark.parametrize(("world", "calls"), [(4, 2)])
def test_so_do_more_ranks(operator: str, world: int, calls: int) -> None:
    assert_passes(few_rows[operator](Simulation(world, ctas=1), calls), range(1))


@operators
def test_one_resident_cta_of_three_sends_everything_before_it_waits(operator: str) -> None:
    """Rule 4: the others start when it ends, because another kernel holds the SMs."""
    assert_passes(few_rows[operator](Simulation(2, ctas=3)), range(4), resident=1)


@pytest.mark.parametrize("gathered_input", ["regather", "keep"])
def test_both_linears_pass_forward_and_backward(gathered_input: str) -> None:
    assert_passes(mlp(METHOD, Simulation(2), gathered_input, steps=1), range(3))


@operators
@pytest.mark.parametrize("other", ["direct", "fused", "chunked"])
def test_methods_take_turns_on_one_slot(operator: str, other: str) -> None:
    assert_passes(few_rows[operator](Simulation(2), calls=2, before=gather_and_barrier(other)), range(2))
    problem = {"gather": gathers, "scatter": scatters}.get(operator)  # others all-reduce in two operators
    if problem is not None:
        assert_passes(problem(other, Simulation(2), calls=2, before=gather_and_barrier(METHOD)), range(2))


def test_ways_to_all_reduce_take_turns_on_the_slots() -> None:
    """Columns that pieces do not divide: shares are shorter at the end, and some chunks have no piece."""
    ways = ("two shots", "one shot", "words", "one shot", "two shots")
    assert_passes(all_reduces(ways, Simulation(2), columns=13), range(2))
    assert_passes(all_reduces(ways, Simulation(3)), range(2))


def lengths(rows: tuple[int, ...]) -> Build:
    """Gathers of that many rows of one rank, one call after the other: words of the long calls stay behind the short ones."""
    world, machine = 2, Simulation(2)
    x = integers(len(rows), world, max(rows), TILE, seed=11)

    def build(scheduler: Scheduler) -> Callable[[], None]:
        results: dict[tuple[int, int], torch.Tensor] = {}

        def host(domain: SimulatedDomain) -> None:
            for call, count in enumerate(rows):
                with domain.operator(tag_of("gather"), slots=1):
                    own = x[call, domain.rank, :count].contiguous()
                    results[call, domain.rank] = core(CALLS).gather(domain, tag_of("gather"), own, sm_margin=0).clone()

        machine.spawn_hosts(scheduler, host)

        def check() -> None:
            wrong = [
                (call, rank)
                for (call, rank), got in results.items()
                if not torch.equal(got, x[call, :, : rows[call]].flatten(0, 1))
            ]
            assert not wrong and len(results) == 2 * len(rows), wrong

        return check

    return build


def test_words_of_longer_calls_are_not_taken_for_new_ones() -> None:
    assert_passes(lengths((16, 4, 4, 16, 2, 16)), range(3))


@pytest.mark.parametrize("epoch", [-1, (1 << 31) - 1])
@operators
def test_epochs_wrap_around(operator: str, epoch: int) -> None:
    """To 0, as memory starts, and to the most negative, which stands for 0."""
    assert_passes(from_epoch(operator, epoch), range(3))


def from_epoch(operator: str, epoch: int) -> Build:
    """Calls in slots that have been used so often."""

    def before(domain: SimulatedDomain) -> None:
        for slot in domain.workspace.slots:
            if not slot.epoch.any():
                slot.epoch.fill_(epoch * EPOCH)
                slot.signals[slot.signals == 0] = epoch * EPOCH  # others have come from the first call already

    return few_rows[operator](Simulation(2), calls=3, before=before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("columns", [7, 6])
def test_a_scatter_adds_own_rows_first_then_in_rank_order(dtype: torch.dtype, columns: int) -> None:
    """In fp32, rounded once, to the bit. 3 x 7 numbers: blocks of 16 bits end, and begin, within a word. (The interpreter does
    not round to bf16 as GPUs do.)"""
    world, rows = 4, 3
    partials = random_partials(world, world * rows, columns, dtype)
    results = of_each_rank(partials, lambda *told: core(CALLS).scatter(*told, sm_margin=0))
    for rank, result in enumerate(results):
        mine = partials[:, rank * rows : (rank + 1) * rows]
        others = [mine[source] for source in range(world) if source != rank]
        assert torch.equal(result, added([mine[rank], *others])), f"rank {rank}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("world", "rows", "columns"), [(1, 3, 7), (2, 1, 1), (3, 3, 7), (4, 3, 6), (4, 5, 13)])
def test_an_all_reduce_adds_in_rank_order_at_every_rank(
    world: int, rows: int, columns: int, dtype: torch.dtype
) -> None:
    """Likewise; then the bias."""
    partials = random_partials(world, rows, columns, dtype)
    bias = random_partials(1, 1, columns, dtype)[0, 0]
    for added_too, shots in product((None, bias), ("words", "one shot", "two shots")):
        right = added([*partials], added_too)
        results = of_each_rank(partials, lambda *told, b=added_too, s=shots: core(CALLS).all_reduce(*told, s, 0, b))
        assert all(torch.equal(result, right) for result in results)


def random_partials(world: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(world, rows, columns, generator=torch.Generator().manual_seed(5)).to(dtype)


def added(blocks: list[torch.Tensor], bias: torch.Tensor | None = None) -> torch.Tensor:
    """In fp32 one after the other, then the bias; rounded once."""
    total = blocks[0].float()
    for block in blocks[1:] if bias is None else [*blocks[1:], bias]:
        total = total + block
    return total.to(blocks[0].dtype)


def of_each_rank(partials: torch.Tensor, call: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """What call(domain, tag, partial) returns at each rank, under one schedule."""
    results: dict[int, torch.Tensor] = {}

    def build(scheduler: Scheduler) -> Callable[[], None]:
        def host(domain: SimulatedDomain) -> None:
            with domain.operator(tag_of("sum"), slots=1):
                results[domain.rank] = call(domain, tag_of("sum"), partials[domain.rank])

        Simulation(len(partials), ctas=1).spawn_hosts(scheduler, host)
        return lambda: None

    assert_passes(build, range(1))
    return [results[rank] for rank in range(len(partials))]


def one_flag_for_all_calls() -> Plant:
    return lambda: mock.patch.object(core("kernels.low_latency"), "flag_of", lambda signal: (signal | -1) << 63)


WRONG, STOPS = "wrong result", "deadlock|TimeoutError"
FAULTS: dict[str, tuple[Plant, str]] = {
    "words of any call are taken": (one_flag_for_all_calls(), WRONG),
    "words are left out": (hook.words(hook.masked), STOPS),
    "words have the flag of the call before": (hook.words(hook.value(lambda word: word - EPOCH)), f"{WRONG}|{STOPS}"),
    "words have other data": (hook.words(hook.value(lambda word: word ^ (1 << 22))), WRONG),
    "words lie beside their place": (hook.words(hook.moved(1)), f"{WRONG}|{STOPS}"),
}


@pytest.mark.parametrize("operator", by_words)
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(operator: str, fault: str) -> None:
    plant, report = FAULTS[fault]
    with plant():
        assert re.search(report, str(assert_caught(by_words[operator](Simulation(2)), range(30))))
