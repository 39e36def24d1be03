"""GEMM + A2A of a long sequence in parts, whose blocks are pulled beside the next product: right under seeded schedules, and with
planted faults. The real pass of ulysses/exchange.py, twice in a row: the last part of each is pushed into a slot that was pulled
from."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
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


class Taken:
    """Rows that have no place of their own: each part is made of what it has received."""

    def __init__(self, x: torch.Tensor, world_size: int, batch: int) -> None:
        self.x = x.view(world_size, -1, x.shape[-1])

    def place(self, part: Any) -> None:
        return None

    def take(self, part: Any, received: torch.Tensor) -> None:
        self.x[:, part.first : part.last] = received


def to_heads(method: str, machine: Simulation, rows: Any = None, backward: bool = False) -> Build:
    """y [W, PARTS * TILE, TILE] of each rank: its columns of x @ w.T, block s of rank s. rows: default RankRows. backward: as the
    input gradient of to_rows."""
    world = machine.world_size
    x, w = integers(PASSES, world, PARTS * TILE, TILE, seed=1), integers(world * TILE, TILE, seed=2)
    expected = (x @ w.t()).unflatten(-1, (world, TILE)).permute(0, 3, 1, 2, 4)  # [pass, to, from, rows, TILE]

    def run(domain: SimulatedDomain, number: int) -> torch.Tensor:
        return _one_pass(domain, method, x[number, domain.rank], w, rows, backward)

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
    domain: SimulatedDomain, method: str, x: torch.Tensor, w: torch.Tensor, rows: Any = None, backward: bool = False
) -> torch.Tensor:
    y = torch.full((domain.world_size * PARTS * TILE, TILE), torch.nan)
    into = (rows or core("ulysses.exchange").RankRows)(y, domain.world_size, 1)
    if backward:
        _linear(domain, method, "ALL_TO_ALL_LINEAR", y[: domain.world_size * TILE], w.t()).rows_backward(None, x, into)
    else:
        _linear(domain, method, "LINEAR_ALL_TO_ALL", x[:TILE], w).to_heads(x, into)
    return y.view(domain.world_size, PARTS * TILE, TILE)


def _linear(domain: SimulatedDomain, method: str, spec: str, of_part: torch.Tensor, w: torch.Tensor) -> Any:
    exchange, plan_book, parts = core("ulysses.exchange"), core("ops.plan_cache"), core("ulysses.parts")
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
        back = _linear(domain, "chunked", "ALL_TO_ALL_LINEAR", y.flatten(0, 1)[: world * TILE], v)
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


def _order(method: str, monkeypatch: pytest.MonkeyPatch, rows: Any = None) -> list[str]:
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
        assert_passes(to_heads(method, Simulation(2, device_waits=True), rows), range(1))
    return order[: 2 * PARTS]


def test_which_parts_are_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the last, where copies send and what arrives has its place."""
    assert [part for part in _order("chunked", monkeypatch) if part != "end"] == ["pulled"] * (PARTS - 1) + ["pushed"]
    assert _order("direct", monkeypatch) == _order("chunked", monkeypatch, Taken) == ["pushed", "end"] * PARTS
    plan_of: Any = SimulatedDomain.plan
    for nodes in (1, 2):
        group = SimpleNamespace(world_size=2, rank=0, topology=core("schedule.order").Topology(nodes, 2 // nodes, 0))
        plan = plan_of(group, "fused", torch.empty(TILE, TILE), torch.empty(2 * TILE, TILE), "LINEAR_ALL_TO_ALL")
        assert plan.fprop.may_pull == (nodes == 1)


def test_the_next_product_begins_before_one_is_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    order = _order("chunked", monkeypatch)
    assert order == ["pulled", *["pulled", "end"] * (PARTS - 2), "pushed", "end", "end"]
