"""What is enqueued across nodes, in which order, and how many exchanges are under way."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_train.nodes.exchanges import Exchanges
from overlap_train.schedule.inter_node import EXCHANGE, FAR, NEAR, exchanges_ahead, leaving, send_recvs
from overlap_train.schedule.kinds import Kind
from overlap_train.schedule.order import Topology, chunks_after_own

CHUNKS = (1, 2, 4, 8)
SIZES = [(2, 1), (2, 2), (3, 1), (3, 2), (8, 1), (4, 8)]


@pytest.mark.parametrize(("nodes", "local"), SIZES)
def test_everything_that_leaves_is_enqueued_once_and_products_before_their_exchange(nodes: int, local: int) -> None:
    for kind, chunks, rank in product((Kind.GEMM_RS, Kind.GEMM_A2A), CHUNKS, (0, nodes * local - 1)):
        topology = Topology(nodes, local, rank)
        exchanges = send_recvs(kind, topology, chunks)
        steps = leaving(kind, topology, chunks, len(exchanges))
        units = [unit for _, some in steps for unit in some]
        assert sorted(units) == list(product(range(topology.world), range(chunks)))
        far = [some[-1] for what, some in steps if what == FAR]
        assert far == [(turn.sent.block, turn.sent.chunk) for turn in exchanges]
        near = [some[0] for what, some in steps if what == NEAR]
        assert near[-chunks:] == [(rank, chunk) for chunk in range(chunks)], "own rows last"
        waiting = 0
        for what, some in steps:
            waiting += {FAR: 1, EXCHANGE: -1, NEAR: 0}[what]
            assert waiting >= 0, "an exchange before its product"
            assert all((block // local != topology.node) == (what == FAR) for block, _ in some)
        assert waiting == 0


@pytest.mark.parametrize("chunks", CHUNKS)
def test_products_of_several_chunks_take_each_once_in_order(chunks: int) -> None:
    taken = chunks_after_own(Topology(2, 2, 0), chunks)
    assert [chunk for some in taken for chunk in some] == list(range(chunks))
    assert all(len(some) == 1 for some in chunks_after_own(Topology(3, 2, 0), chunks))
    assert [len(some) for some in chunks_after_own(Topology(2, 1, 0), 8)] == [4, 2, 1, 1]


class Engine:
    """What was enqueued: exchanges that start, +0, and that arrive, -0; raises in `fails`."""

    needs_buffers = has_started = False

    def __init__(self, fails: int | None = None) -> None:
        self.enqueued: list[str] = []
        self._fails = fails

    def told_of(self, step: Callable[[], None]) -> str:
        before = len(self.enqueued)
        step()
        return " ".join(self.enqueued[before:])

    def finish_started(self) -> bool:
        return False

    def at_end(self, exchanges: Any) -> None:
        pass

    def start_exchange(self, exchange: Any) -> None:
        if exchange.exchanged.number == self._fails:
            raise RuntimeError("out of memory")
        self.enqueued.append(f"+{exchange.exchanged.number}")

    def arrive(self, exchange: Any) -> None:
        self.enqueued.append(f"-{exchange.exchanged.number}")


def exchanges_of(engine: Engine, kind: Kind, count: int = 4) -> Exchanges:
    call: Any = SimpleNamespace(rank=0, chunks=2, chunk_of=lambda rank, chunk: torch.zeros(1))
    numbered = tuple(SimpleNamespace(number=number, for_another=False) for number in range(count))
    plan: Any = SimpleNamespace(send_recvs=numbered, kind=kind, beside_wgrad=False)
    operand = iter([torch.zeros(1)] * count) if kind.receives else None
    return Exchanges(engine, call, plan, operand)  # type: ignore[arg-type]


def test_the_oldest_arrives_before_a_third_starts_but_of_a_scatter() -> None:
    engine = Engine()
    exchanges = exchanges_of(engine, Kind.GEMM_A2A)
    assert [engine.told_of(lambda: exchanges.send(torch.zeros(1))) for _ in range(4)] == ["+0", "+1", "-0 +2", "-1 +3"]
    assert engine.told_of(exchanges.finish) == "-2 -3"
    scatter = exchanges_of(engine, Kind.GEMM_RS)
    assert [engine.told_of(lambda: scatter.send(torch.zeros(1))) for _ in range(3)] == ["+0", "+1", "+2"]
    assert engine.told_of(scatter.finish) == "-0 -1 -2"


def test_one_more_is_started_before_one_is_waited_for() -> None:
    engine = Engine()
    exchanges = exchanges_of(engine, Kind.AG_GEMM)
    brought = [engine.told_of(lambda: exchanges.bring(count)) for count in (1, 1, 3, 4)]  # noqa: B023
    assert brought == ["+0 +1 -0", "", "+2 -1 +3 -2", "-3"]
    three_ranks = exchanges_of(engine, Kind.A2A_GEMM, count=6)
    assert engine.told_of(lambda: three_ranks.bring_chunk(0)) == "+0 +1 -0 +2 -1 +3 -2"
    assert engine.told_of(lambda: three_ranks.bring_chunk(1)) == "+4 -3 +5 -4 -5"


def test_exchanges_of_an_operand_go_ahead_as_far_as_its_product() -> None:
    assert [exchanges_ahead(4, done, 8) for done in range(9)] == [1, 1, 2, 2, 3, 3, 4, 4, 4]


def test_after_an_error_what_was_sent_is_let_arrive_and_nothing_else_starts() -> None:
    engine = Engine(fails=1)
    exchanges = exchanges_of(engine, Kind.GEMM_RS)
    exchanges.send(torch.zeros(1))
    with pytest.raises(RuntimeError, match="out of memory"):
        exchanges.send(torch.zeros(1))
    exchanges.finish()  # as the scope of an operator does, whatever was raised in it
    assert engine.enqueued == ["+0", "-0"]
