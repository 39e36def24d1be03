"""The low-latency kernels send and receive in the schedule's order, read from what the kernels access in Triton's interpreter.

One CTA a rank: what it claims next is what any CTA would. A block has four parts.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import groupby, product
from typing import Any

import pytest

pytest.importorskip("greenlet")

from overlap_train.schedule.kinds import Kind
from overlap_train.schedule.order import Topology, sources, targets, tile_order, transfers_of
from tests.protocol.actors import Actor
from tests.protocol.interleaving import Scheduler
from tests.protocol.interpreter_hooks import MemoryAccess
from tests.protocol.operator_problems import gathers, scatters
from tests.protocol.simulated_ranks import TILE, WORDS_AT_ONCE, SimulatedDomain, Simulation

PROBLEMS = {Kind.AG_GEMM: gathers, Kind.GEMM_RS: scatters}
WORDS = TILE * TILE  # of a block of fp32
PARTS = WORDS // WORDS_AT_ONCE
WORLDS = [2, 3, 5]

Piece = tuple[int, int]  # (rank, part of a block)


class Recording(Scheduler):
    """Keeps all accesses of kernels, by rank, in order."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.accesses: dict[int, list[MemoryAccess]] = defaultdict(list)

    def after_access(self, actor: Actor, access: MemoryAccess) -> None:
        super().after_access(actor, access)
        self.accesses[actor.rank].append(access)


@dataclass
class Order:
    """What one rank did: whom it told which call it is in, and the pieces that it sent, and waited for."""

    told: list[int] = field(default_factory=list)
    sent: list[Piece] = field(default_factory=list)
    received: list[Piece] = field(default_factory=list)


def orders(kind: str, world: int) -> list[Order]:
    """Of every rank, in one call."""
    domains: dict[int, SimulatedDomain] = {}
    scheduler, machine = Recording(seed=0), Simulation(world, ctas=1)
    build = PROBLEMS[kind]("low_latency", machine, 1, before=lambda domain: domains.update({domain.rank: domain}))
    check = build(scheduler)
    scheduler.run()
    check()
    return [_order(scheduler, domains[rank]) for rank in range(world)]


def _order(scheduler: Recording, domain: SimulatedDomain) -> Order:
    order = Order()
    for access in scheduler.accesses[domain.rank]:
        name = scheduler.name_of(access.address)
        if access.kind == "atomic" and name.startswith("signals"):  # signalsR[slot, source, chunk]
            order.told.append(int(name.removeprefix("signals").partition("[")[0]))
        for rank in range(domain.world_size):
            block, part = _place(domain, rank, access)
            if block is None:
                continue
            if access.kind == "store":
                assert block == domain.rank != rank, "a rank writes its own block, at its peers"
                order.sent.append((rank, part))
            else:
                assert rank == domain.rank
                order.received.append((block, part))
    # Words are stored, and looked for, in several accesses.
    order.sent, order.received = ([piece for piece, _ in groupby(found)] for found in (order.sent, order.received))
    return order


def _place(domain: SimulatedDomain, rank: int, access: MemoryAccess) -> tuple[Any, int]:
    """(block, part) of the flagged words of a rank's first slot; block None: the access is of something else."""
    start = domain.heap.view(rank).data_ptr() + domain.layout.flagged_offset(0)
    block, word = divmod((access.address - start) // 8, WORDS)
    return (block if 0 <= block < domain.world_size else None), word // WORDS_AT_ONCE


def in_turn(ranks: tuple[int, ...]) -> list[Piece]:
    """The first part of all ranks, then the second."""
    return [(rank, part) for part, rank in product(range(PARTS), ranks)]


def expected(kind: str, topology: Topology) -> Order:
    """By the schedule: transfers are of whole blocks, whose parts take turns, as tiles do that kernels store at the peers."""
    to = tuple(transfer.target for transfer in transfers_of(kind, topology, chunks=1))
    if kind == Kind.AG_GEMM:
        return Order(list(to), in_turn(to), in_turn(sources(topology)))
    interleaved = tile_order(Kind.GEMM_RS, topology, 1, PARTS, interleaved=True)
    sent = [(block, part) for block, _, part in interleaved if block != topology.rank]
    in_rank_order = tuple(rank for rank in range(topology.world) if rank != topology.rank)  # as all methods add
    return Order(list(to), sent, in_turn(in_rank_order))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("kind", PROBLEMS)
def test_kernels_send_and_receive_in_the_schedules_order(kind: str, world: int) -> None:
    assert orders(kind, world) == [expected(kind, Topology(1, world, rank)) for rank in range(world)]


def test_all_parts_go_to_every_peer_in_the_order_of_the_legs() -> None:
    """What both kernels have in common."""
    for rank in range(3):
        topology = Topology(1, 3, rank)
        assert (
            expected(Kind.GEMM_RS, topology).sent == expected(Kind.AG_GEMM, topology).sent == in_turn(targets(topology))
        )
