"""AllGather + GEMM: the real operator, kernel and pushes under seeded schedules, right and with planted faults."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("greenlet")

from tests.protocol.explore import Build, assert_caught, assert_passes
from tests.protocol.interleaving import Scheduler
from tests.protocol.mutation import planted
from tests.protocol.simulated_ranks import TILE, Simulation, core

CALLS = 4  # both slots are used twice


def integers(*shape: int, seed: int) -> torch.Tensor:
    """Small integers as fp32: products and sums are exact in any order."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def gathers(world: int, method: str = "fused", **machine: object) -> Build:
    """`CALLS` calls of [W, m, k] @ [k, n] with other numbers in each; every rank has to get all rows right."""
    x = integers(CALLS, world, TILE, TILE, seed=1)
    b = integers(world, TILE, 2 * TILE, seed=2)

    def build(scheduler: Scheduler):
        domains = Simulation(world, **machine).ranks(scheduler)
        y: dict[tuple[int, int], torch.Tensor] = {}

        def host(rank: int) -> None:
            domain = domains[rank]
            for call in range(CALLS):
                with domain.operator():
                    gather = core("operators.all_gather_gemm").start_all_gather(domain, x[call, rank], method, "test")
                    y[rank, call] = gather.matmul(b[rank])
            domain.close()

        def check() -> None:
            wrong = [at for at, got in y.items() if not torch.equal(got, x[at[1]].flatten(0, 1) @ b[at[0]])]
            assert not wrong, f"(rank, call) {wrong}"

        for rank in range(world):
            scheduler.spawn(f"host{rank}", lambda rank=rank: host(rank), rank=rank)
        return check

    return build


@pytest.mark.parametrize("world", [2, 3])
def test_fused_passes(world: int) -> None:
    assert_passes(gathers(world), range(30))
