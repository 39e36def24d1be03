"""GEMM + A2A of a long sequence in parts, whose blocks are pulled beside the next product: right under seeded schedules, and with
planted faults. The real pass of ulysses/exchange.py, twice in a row: the last part of each is pushed into a slot that was pulled
from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("greenlet")

from tests.protocol.explore import Build, assert_passes
from tests.protocol.interleaving import Scheduler
from tests.protocol.operator_problems import integers
from tests.protocol.simulated_ranks import TILE, SimulatedDomain, Simulation, core
from tests.protocol.simulated_streams import StreamSimulation

PASSES, PARTS = 2, 5  # more parts than there are slots


def to_heads(method: str, machine: Simulation, backward: bool = False) -> Build:
    """y [W, PARTS * TILE, TILE] of each rank: its columns of x @ w.T, block s of rank s. backward: as the input gradient of
    to_rows."""
    world = machine.world_size
    x, w = integers(PASSES, world, PARTS * TILE, TILE, seed=1), integers(world * TILE, TILE, seed=2)
    expected = (x @ w.t()).unflatten(-1, (world, TILE)).permute(0, 3, 1, 2, 4)  # [pass, to, from, rows, TILE]

    def run(domain: SimulatedDomain, number: int) -> torch.Tensor:
        return _one_pass(domain, method, x[number, domain.rank], w, backward)

    return _passes(machine, run, expected)


def _passes(machine: Simulation, run: Callable[[SimulatedDomain, int], torch.Tensor], expected: torch.Tensor) -> Build:
    """Passes after each other, each exactly as expected [PASSES, W, ...]."""

    def build(scheduler: Scheduler) -> Callable[[], None]:
        results: dict[tuple[int, int], torch.Tensor] = {}

        def host(domain: SimulatedDomain) -> None:
            for number in range(PASSES):
                results[number, domain.rank] = run(domain, number)

        machine.spawn_hosts(scheduler, host)

        def check() -> None:
            assert len(results) == PASSES * machine.world_size
            for (number, rank), y in results.items():
                assert torch.equal(y, expected[number, rank]), f"pass {number}, rank {rank}"

        return check

    return build


def _one_pass(
    domain: SimulatedDomain, method: str, x: torch.Tensor, w: torch.Tensor, backward: bool = False
) -> torch.Tensor:
    y = torch.full((domain.world_size * PARTS * TILE, TILE), torch.nan)
    into = core("ulysses.exchange").RankRows(y, domain.world_size, 1)
    if backward:
        linear_of(domain, method, "ALL_TO_ALL_LINEAR", y[: domain.world_size * TILE], w.t()).rows_backward(
            None, x, into
        )
    else:
        linear_of(domain, method, "LINEAR_ALL_TO_ALL", x[:TILE], w).to_heads(x, into)
    return y.view(domain.world_size, PARTS * TILE, TILE)


def linear_of(domain: SimulatedDomain, method: str, spec: str, of_part: torch.Tensor, w: torch.Tensor) -> Any:
    """The linear of PARTS parts of TILE positions each. of_part: what one multiplies, or receives."""
    exchange, plan_book, parts = core("ulysses.exchange"), core("ops.planned"), core("ulysses.parts")
    planned = plan_book.Planned(domain, domain.plan(method, of_part, w, spec, main_grad="off"))
    of_call = tuple(parts.Part(first, first + TILE, planned.linear("linear")) for first in range(0, PARTS * TILE, TILE))
    return exchange.Linear(of_call, w, w, None, 1)


def there_and_back(machine: Simulation) -> Build:
    """z = all_to_all(all_to_all(x @ w.T)) @ v.T of each rank, twice: its rows of x @ w.T @ v.T."""
    world = machine.world_size
    x, w = integers(PASSES, world, PARTS * TILE, TILE, seed=1), integers(world * TILE, TILE, seed=2)
    v = integers(TILE, world * TILE, seed=3)

    def run(domain: SimulatedDomain, number: int) -> torch.Tensor:
        y = _one_pass(domain, "chunked", x[number, domain.rank], w)
        back = linear_of(domain, "chunked", "ALL_TO_ALL_LINEAR", y.flatten(0, 1)[: world * TILE], v)
        rows = core("ulysses.exchange").RankRows(y.flatten(0, 1), world, 1)
        return back.to_rows(rows, False)[0]

    return _passes(machine, run, x @ w.t() @ v.t())


@pytest.mark.parametrize(("method", "ranks", "seeds"), [("chunked", 3, 6), ("fused", 2, 2), ("direct", 2, 1)])
def test_parts_pass(method: str, ranks: int, seeds: int) -> None:
    """`direct` stores each part at the peers."""
    assert_passes(to_heads(method, Simulation(ranks, device_waits=True)), range(seeds))


@pytest.mark.parametrize("method", ["chunked", "fused"])
def test_the_input_gradient_of_the_other_operator_is_pulled_too(method: str) -> None:
    """Where nothing else is sent in that pass: of a frozen weight."""
    assert_passes(to_heads(method, Simulation(2, device_waits=True), backward=True), range(2))


def test_parts_pass_between_parts_that_are_pushed() -> None:
    """To heads, to rows, and again: slots are left in, and pushed into, in turns."""
    assert_passes(there_and_back(Simulation(3, device_waits=True)), range(4))


@pytest.mark.parametrize("one_queue", [False, True])
def test_parts_pass_on_streams(one_queue: bool) -> None:
    assert_passes(to_heads("chunked", StreamSimulation(2, one_queue=one_queue)), range(8))


def _order(method: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What rank 0 does in its first pass: products that begin, of parts that are pulled or not, and operators that end."""
    order: list[str] = []
    step, bracket = core("ulysses.parts").Step, core("group.domain").OperatorScope

    def domain_of(noted: Any) -> Any:
        return noted.domain if isinstance(noted, step) else noted._domain

    def noted(what: Callable[[Any], str], plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any) -> Any:
            if domain_of(self).rank == 0:
                order.append(what(self))
            return plain(self, *args)

        return call

    with monkeypatch.context() as noting:
        noting.setattr(step, "start", noted(lambda self: "pulled" if self.is_pulled else "pushed", step.start))
        noting.setattr(bracket, "__exit__", noted(lambda self: "end", bracket.__exit__))
        assert_passes(to_heads(method, Simulation(2, device_waits=True)), range(1))
    return order[: 2 * PARTS]


def test_all_parts_but_the_last_are_pulled_and_the_next_product_begins_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """But of `direct`, whose product sends."""
    order = _order("chunked", monkeypatch)
    assert order == ["pulled", *["pulled", "end"] * (PARTS - 2), "pushed", "end", "end"]
    assert _order("direct", monkeypatch) == ["pushed", "end"] * PARTS
