"""Problems for `explore`: consecutive operator calls on simulated ranks, with exact results.

Inputs are small integers as fp32, so that products and sums are exact in any order, and differ in each call, so that a
stale block is a wrong result. Inputs live in one buffer per rank that is overwritten with NaN after each call: a push that is
still under way by then sends NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.protocol.explore import Build
from tests.protocol.interleaving import Scheduler
from tests.protocol.simulated_ranks import TILE, SimulatedDomain, Simulation, core

CALLS = 4  # both slots are used twice
COLUMNS = 2 * TILE  # two tiles a block, so that a tile counter counts

Run = Callable[[SimulatedDomain, torch.Tensor, torch.Tensor], torch.Tensor]


def gathers(method: str, machine: Simulation) -> Build:
    """`CALLS` calls of all_gather(x [TILE, TILE] of each rank) @ b [TILE, COLUMNS] of this rank."""
    x = _integers(CALLS, machine.world_size, TILE, TILE, seed=1)
    b = _integers(machine.world_size, TILE, COLUMNS, seed=2)

    def run(domain: SimulatedDomain, own: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
        return core("operators.all_gather_gemm").start_all_gather(domain, own, method, "gather").matmul(mine)

    expected = x.flatten(1, 2)[:, None] @ b
    return _calls(machine, run, x, b, expected)


def scatters(method: str, machine: Simulation) -> Build:
    """`CALLS` calls of reduce_scatter(a [W * TILE, TILE] @ b [TILE, COLUMNS]) with other a and b on each rank."""
    world = machine.world_size
    a, b = _integers(CALLS, world, world * TILE, TILE, seed=3), _integers(world, TILE, COLUMNS, seed=4)

    def run(domain: SimulatedDomain, own: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
        return core("operators.gemm_reduce_scatter").start_gemm_reduce_scatter(domain, own, mine, method, "scatter").finish()

    return _calls(machine, run, a, b, (a @ b).sum(1).unflatten(1, (world, TILE)))


def backwards(method: str, machine: Simulation) -> Build:
    """As the backward of all_gather_linear: x is gathered while a GEMM + RS of it runs; the result is [RS rows; all of x].

    y [TILE + W * TILE, TILE] of rank r: rows of sum over ranks of (c [W * TILE, TILE] @ x of that rank), then the gathered x.
    """
    world = machine.world_size
    x, c = _integers(CALLS, world, TILE, TILE, seed=5), _integers(world, world * TILE, TILE, seed=6)

    def run(domain: SimulatedDomain, own: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
        gather = core("operators.all_gather_gemm").start_all_gather(domain, own, method, "wgrad")
        scatter = core("operators.gemm_reduce_scatter").start_gemm_reduce_scatter(domain, mine, own, method, "dgrad")
        full = gather.full().clone()
        return torch.cat([scatter.finish(), full])

    rows = (c @ x).sum(1).unflatten(1, (world, TILE))
    everything = x.flatten(1, 2)[:, None].expand(-1, world, -1, -1)
    return _calls(machine, run, x, c, torch.cat([rows, everything], dim=2))


def _calls(machine: Simulation, run: Run, inputs: torch.Tensor, weights: torch.Tensor, expected: torch.Tensor) -> Build:
    """Run on inputs [CALLS, W, ...] and weights [W, ...]; compare with expected [CALLS, W, ...]."""

    def build(scheduler: Scheduler) -> Callable[[], None]:
        outputs = torch.full_like(expected, torch.nan)

        def host(domain: SimulatedDomain) -> None:
            own = torch.empty_like(inputs[0, 0])
            for call in range(CALLS):
                own.copy_(inputs[call, domain.rank])
                with domain.operator():
                    y = run(domain, own, weights[domain.rank])
                own.fill_(torch.nan)
                outputs[call, domain.rank] = y
            domain.close()

        for domain in machine.ranks(scheduler):
            scheduler.spawn(f"host{domain.rank}", lambda domain=domain: host(domain), rank=domain.rank)

        def check() -> None:
            right = (outputs == expected).flatten(2).all(2)
            assert right.all(), f"(call, rank) {torch.nonzero(~right).tolist()}"

        return check

    return build


def _integers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()
