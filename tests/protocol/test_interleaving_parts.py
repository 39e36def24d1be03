"""Long sequences in parts, the next sent before one is multiplied: right under seeded schedules.

The real passes of ulysses/exchange.py and ahead.py. What is sent of a part is packed into memory that is overwritten when it is
done, as a caching allocator would give it to the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("greenlet")

from tests.protocol.explore import Build, assert_passes
from tests.protocol.interleaving import Scheduler
from tests.protocol.operator_problems import integers
from tests.protocol.simulated_ranks import TILE, SimulatedDomain, Simulation
from tests.protocol.simulated_streams import StreamSimulation
from tests.protocol.test_interleaving_pulls import PARTS, linear_of


class Packed:
    """Rows [W, PARTS * TILE, C] that are packed for each part. What was packed is overwritten two parts later, when its part has
    ended; it stays allocated, since simulated copies go by address."""

    def __init__(self, x: torch.Tensor, given: list[torch.Tensor]) -> None:
        self._x, self._given, self._before = x, given, len(given)

    def give(self, part: Any) -> torch.Tensor:
        if len(self._given) - self._before > 1:
            self._given[-2].fill_(torch.nan)
        self._given.append(self._x[:, part.first : part.last].clone())
        return self._given[-1]


def passes(method: str, machine: Simulation, backward: bool = False) -> Build:
    """Two passes after each other. y [PARTS * TILE, TILE] = all_to_all(x) @ w.T of each rank; backward: of a QKV projection, dx
    and dw of what was received."""
    world = machine.world_size
    x, rows = integers(world, world, PARTS * TILE, TILE, seed=1), integers(world, PARTS * TILE, TILE, seed=2)
    w = integers(world, world * TILE, TILE, seed=3)  # of a rank: [W * TILE, TILE]
    received = x.transpose(0, 1).transpose(1, 2).flatten(2)  # [to, rows, W * TILE]
    expected = [received @ w, received.transpose(1, 2) @ rows]

    def build(scheduler: Scheduler) -> Callable[[], None]:
        results: dict[tuple[int, int], list[torch.Tensor]] = {}
        given: list[list[torch.Tensor]] = [[] for _ in range(world)]

        def host(domain: SimulatedDomain) -> None:
            rank = domain.rank
            for number in range(2):
                results[number, rank] = _one_pass(
                    domain, method, Packed(x[rank], given[rank]), rows[rank], w[rank], backward
                )

        machine.spawn_hosts(scheduler, host)

        def check() -> None:
            for (number, rank), found in results.items():
                right = [torch.equal(y, of_all[rank]) for y, of_all in zip(found, expected, strict=False)]
                assert all(right) and len(results) == 2 * world, f"pass {number}, rank {rank}: {right}"

        return check

    return build


def _one_pass(
    domain: SimulatedDomain, method: str, x: Packed, rows: torch.Tensor, w: torch.Tensor, backward: bool
) -> list[torch.Tensor]:
    if backward:
        return list(linear_of(domain, method, "LINEAR_ALL_TO_ALL", rows[:TILE], w).heads_backward(rows, x, True))
    received = rows.new_empty(domain.world_size * TILE, TILE)
    return [linear_of(domain, method, "ALL_TO_ALL_LINEAR", received, w.t()).to_rows(x, False)[0]]


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(("method", "ranks", "seeds"), [("chunked", 3, 6), ("fused", 2, 2), ("direct", 2, 1)])
def test_parts_pass(method: str, ranks: int, seeds: int, backward: bool) -> None:
    assert_passes(passes(method, Simulation(ranks, device_waits=backward), backward), range(seeds))


@pytest.mark.parametrize("one_queue", [False, True])
def test_parts_pass_on_streams(one_queue: bool) -> None:
    assert_passes(passes("chunked", StreamSimulation(2, one_queue=one_queue)), range(8))
    assert_passes(passes("chunked", StreamSimulation(2, one_queue=one_queue), backward=True), range(3))
