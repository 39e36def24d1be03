"""The schedule of groups that span nodes: everything arrives once, crosses the network once, and in the order that hides it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from overlap_train.schedule.inter_node import send_recvs
from overlap_train.schedule.kinds import Kind
from overlap_train.schedule.order import (
    ARRIVED,
    LANDED,
    NETWORK,
    NODE_SUM,
    NVLINK,
    OPERAND,
    Topology,
    sources,
    targets,
    transfers_of,
)
from tests.tile_orders import tile_order

SIZES = [(2, 1), (2, 2), (3, 2), (2, 3), (4, 2), (3, 4)]
CHUNKS = 2
EXCHANGES = (Kind.A2A_GEMM, Kind.GEMM_A2A)
KINDS = (Kind.AG_GEMM, Kind.GEMM_RS, *EXCHANGES)


def topologies(nodes: int, local: int) -> list[Topology]:
    return [Topology(nodes, local, rank) for rank in range(nodes * local)]


def every_block_arrives_once_from_its_one_writer(nodes: int, local: int) -> None:
    """And, of one rank, all kinds of calls have the same writers: slots are reused between them."""
    world = topologies(nodes, local)
    for kind in KINDS:
        arrived = Counter()
        for topology in world:
            for transfer in transfers_of(kind, topology, CHUNKS):
                assert transfer.source == topology.rank != transfer.target
                assert world[transfer.target].sender(transfer.fills) == writer(topology, transfer)
                assert (transfer.link == NVLINK) == (transfer.source // local == transfer.target // local)
                arrived[transfer.target, transfer.fills, transfer.chunk] += 1
        ranks = range(nodes * local)
        assert arrived == {(t, b, c): 1 for t, b, c in product(ranks, ranks, range(CHUNKS)) if t != b}


def writer(topology: Any, transfer: Any) -> int:
    """Who writes at the target: the sender, or the rank of the target's node that takes it from the network for the target."""
    takes = topology.receiver(transfer.target) if transfer.link == NETWORK else transfer.target
    return transfer.source if takes == transfer.target else takes


def an_all_to_all_gives_every_rank_its_own_blocks(nodes: int, local: int) -> None:
    """As they are: nobody adds or passes on anything."""
    for kind, topology in product(EXCHANGES, topologies(nodes, local)):
        for transfer in transfers_of(kind, topology, CHUNKS):
            assert (transfer.block, transfer.fills, transfer.carries) == (
                transfer.target,
                topology.rank,
                OPERAND,
            )


def a_gather_gives_every_rank_every_shard(nodes: int, local: int) -> None:
    """Transfers carry what is there when all before them are done; what is passed on must have arrived."""
    world = topologies(nodes, local)
    held = {rank: {(rank, chunk): rank for chunk in range(CHUNKS)} for rank in range(nodes * local)}
    transfers = [transfer for topology in world for transfer in transfers_of(Kind.AG_GEMM, topology, CHUNKS)]
    for transfer in sorted(transfers, key=lambda transfer: transfer.carries == ARRIVED):
        block = transfer.block if transfer.carries == ARRIVED else transfer.source
        held[transfer.target][transfer.fills, transfer.chunk] = held[transfer.source][block, transfer.chunk]
    everything = {(rank, chunk): rank for rank in held for chunk in range(CHUNKS)}
    assert all(blocks == everything for blocks in held.values())


def a_scatter_adds_every_partial_once(nodes: int, local: int) -> None:
    """What each rank has at the end is the sum of W partials of its own rows, for each chunk."""
    world = topologies(nodes, local)
    for chunk in range(CHUNKS):
        slots: dict[int, dict[int, Counter]] = {topology.rank: {} for topology in world}
        transfers = [
            transfer for t in world for transfer in transfers_of(Kind.GEMM_RS, t, CHUNKS) if transfer.chunk == chunk
        ]
        for transfer in sorted(transfers, key=lambda transfer: transfer.carries == NODE_SUM):
            sent = Counter([(transfer.source, transfer.block)])
            if transfer.carries == NODE_SUM:
                sent += _received(slots[transfer.source], world[transfer.source], transfer.target // local)
            slots[transfer.target][transfer.fills] = sent
        for topology in world:
            total = Counter([(topology.rank, topology.rank)])
            total += _received(slots[topology.rank], topology, topology.node)
            for node in range(nodes):
                total += slots[topology.rank][topology.rail_peer(node)] if node != topology.node else Counter()
            assert total == {(source, topology.rank): 1 for source in range(nodes * local)}


def _received(slots: dict[int, Counter], topology: Any, node: int) -> Counter:
    """The partials of the other ranks of this node for this rank's rail peer in `node`."""
    blocks = [block for block in topology.ranks_of(node) if block != topology.rail_peer(node)]
    return sum((slots[block] for block in blocks), Counter())


def each_byte_crosses_the_network_once(nodes: int, local: int) -> None:
    """Between rail peers: a rank sends each far node its shard, or one sum, or the blocks of its ranks, and nothing else."""
    for kind, topology in product(KINDS, topologies(nodes, local)):
        crossing = [transfer for transfer in transfers_of(kind, topology, CHUNKS) if transfer.link == NETWORK]
        rail_peers = {topology.rail_peer(node) for node in range(nodes)} - {topology.rank}
        far = set(range(topology.world)) - set(topology.ranks_of(topology.node))
        targets = far if kind in EXCHANGES else rail_peers
        assert Counter((transfer.target, transfer.chunk) for transfer in crossing) == {
            (t, c): 1 for t in targets for c in range(CHUNKS)
        }
        assert {topology.receiver(transfer.target) for transfer in crossing} == rail_peers
        assert all(topology.receiver(transfer.target) // local == transfer.target // local for transfer in crossing)


def the_network_comes_first(nodes: int, local: int) -> None:
    """Far is sent before near, and own before what is passed on; a scatter and GEMM + A2A work for the own node last."""
    for topology in topologies(nodes, local):
        for kind in (Kind.AG_GEMM, *EXCHANGES):
            sent = list(transfers_of(kind, topology, CHUNKS))
            stages = [0 if transfer.link == NETWORK else 1 if transfer.carries == OPERAND else 2 for transfer in sent]
            assert stages == sorted(stages)
        for kind in (Kind.GEMM_RS, Kind.GEMM_A2A):
            far = [block // local != topology.node for block, *_ in tile_order(kind, topology, CHUNKS, 1)]
            assert far == sorted(far, reverse=True)
            assert [block for block, *_ in tile_order(kind, topology, CHUNKS, 1)][-1] == topology.rank


def blocks_of_an_all_to_all_arrive_in_the_order_of_its_product(nodes: int, local: int) -> None:
    """One after the other, each from another rank; whole, since the library multiplies whole blocks; the own node's first."""
    world = topologies(nodes, local)
    for kind in EXCHANGES:
        crossing = [[t for t, _ in transfers_of(kind, topology, CHUNKS).network.by_target] for topology in world]
        assert all(sorted(turn) == list(range(nodes * local)) for turn in zip(*crossing, strict=True))
        assert all(len(turns) == (nodes - 1) * local for turns in crossing), "all chunks of one, then those of the next"
        for topology in world:
            near, far = (sources(topology, kind)[some] for some in (slice(local - 1), slice(local - 1, None)))
            assert {source // local for source in near} <= {topology.node}
            turns = [crossing[source].index(topology.rank) for source in far]
            assert turns == list(range((nodes - 1) * local))


def nodes_do_not_all_send_to_the_same_one(nodes: int, local: int) -> None:
    """In each turn every node has one sender, and what came in that turn is what is multiplied next."""
    world = topologies(nodes, local)
    for turn in range(nodes - 1):
        for place in range(local):
            ranks = [topology for topology in world if topology.rank % local == place]
            for kind in (Kind.AG_GEMM, Kind.GEMM_RS):
                crossing = [list(transfers_of(kind, t, 1).network)[turn].target for t in ranks]
                assert len(set(crossing)) == nodes
            arrives = {list(transfers_of(Kind.AG_GEMM, t, 1).network)[turn].target: t.node for t in ranks}
            for topology in ranks:
                blocks = sources(topology)[local - 1 + turn * local :][:local]
                assert {block // local for block in blocks} == {arrives[topology.rank]}
                assert blocks[0] == topology.rail_peer(arrives[topology.rank]), "passed on blocks come after"


def tiles_are_taken_in_the_order_of_the_legs(nodes: int, local: int) -> None:
    for topology in topologies(nodes, local):
        for kind in (Kind.GEMM_RS, Kind.GEMM_A2A):
            tiles = list(tile_order(kind, topology, CHUNKS, 1))
            left = [(transfer.block, transfer.chunk) for transfer in transfers_of(kind, topology, CHUNKS)]
            assert left == [(block, chunk) for block, chunk, _ in tiles[: len(left)]]
        assert {block for block, *_ in tile_order(Kind.AG_GEMM, topology, CHUNKS, 1)} == set(range(topology.world))
        first = [block for block, chunk, _ in tile_order(Kind.AG_GEMM, topology, CHUNKS, 1) if chunk == 0]
        assert first == [topology.rank, *sources(topology)]
        assert {block // local for block in first[:local]} == {topology.node}, "the own node needs no network"


def what_is_received_is_what_a_twin_sends(nodes: int, local: int) -> None:
    """By the plain definition: every rail peer is asked for its transfers, and every transfer whether it passes on what came."""
    for kind, topology in product(KINDS, topologies(nodes, local)):
        mine, found = transfers_of(kind, topology, CHUNKS), send_recvs(kind, topology, CHUNKS)
        assert tuple(crossing.sent for crossing in found) == mine.network.all
        for turn, crossing in enumerate(found):
            distance = crossing.sent.target // local - topology.node
            rail_peer = Topology(nodes, local, topology.rail_peer((topology.node - distance) % nodes))
            assert crossing.received == transfers_of(kind, rail_peer, CHUNKS).network.all[turn]
            unit = (crossing.received.fills, crossing.received.chunk)
            if not crossing.for_another:
                onward = tuple(transfer for transfer in mine.passed_on if (transfer.block, transfer.chunk) == unit)
                assert crossing.passed_on.all == onward


def far_blocks_of_an_all_to_all_are_received_or_passed_on_once(nodes: int, local: int) -> None:
    """Whoever takes a block from the network keeps it, or copies it once to the rank that it is for, as its one writer."""
    world = topologies(nodes, local)
    for kind in EXCHANGES:
        came = Counter()
        for topology in world:
            for crossing in send_recvs(kind, topology, CHUNKS):
                copies = list(crossing.passed_on)
                assert crossing.for_another == bool(copies)
                assert {(transfer.source, transfer.link, transfer.carries) for transfer in copies} <= {
                    (topology.rank, NVLINK, LANDED)
                }
                for transfer in copies or [crossing.received]:
                    assert (
                        transfer.target == topology.rank
                        or world[transfer.target].sender(transfer.fills) == topology.rank
                    )
                    came[transfer.target, transfer.fills, transfer.chunk] += 1
        far = [
            (t.rank, b, c) for t, b, c in product(world, range(nodes * local), range(CHUNKS)) if b // local != t.node
        ]
        assert came == dict.fromkeys(far, 1)


def a_kernel_gets_all_blocks_of_an_all_to_all_chunk_by_chunk(nodes: int, local: int) -> None:
    """Far before near, as for the library. Each tile needs its chunk from every rank, so first chunks come before second ones."""
    for topology in topologies(nodes, local):
        tiled = transfers_of(Kind.A2A_GEMM, topology, CHUNKS, True)
        assert Counter(tiled) == Counter(transfers_of(Kind.A2A_GEMM, topology, CHUNKS)), "the same, in another order"
        order = [(transfer.link == NVLINK, transfer.chunk) for transfer in tiled]
        assert order == sorted(order)
        assert [crossing.sent for crossing in send_recvs(Kind.A2A_GEMM, topology, CHUNKS, True)] == list(tiled.network)


def a_kernel_multiplies_what_arrives_first(nodes: int, local: int) -> None:
    """Of a far node the first chunk of each rank, then the second: rail peers send theirs at the same time."""
    for topology in topologies(nodes, local):
        order = [(block, chunk) for block, chunk, _ in tile_order(Kind.AG_GEMM, topology, CHUNKS, 1)]
        assert len(set(order)) == len(order) == topology.world * CHUNKS
        far = order[local * CHUNKS :]
        for crossing, first in zip(send_recvs(Kind.AG_GEMM, topology, CHUNKS), range(0, len(far), local), strict=True):
            node = crossing.received.source // local
            expected = [(block, crossing.received.chunk) for block in topology.ranks_of(node)]
            assert sorted(far[first : first + local]) == expected


def what_a_kernel_sends_leaves_after_its_tiles(nodes: int, local: int) -> None:
    for kind, topology in product(KINDS, topologies(nodes, local)):
        assert not any(transfer.after_tiles for transfer in transfers_of(kind, topology, CHUNKS))
        own = [transfer for transfer in transfers_of(kind, topology, CHUNKS, True) if transfer.carries != ARRIVED]
        assert {transfer.after_tiles for transfer in own} == {kind in (Kind.GEMM_RS, Kind.GEMM_A2A)}


def what_a_rank_receives_last_of_an_all_to_all_is_its_own(nodes: int, local: int) -> None:
    """So it has received all that it passes on when its own blocks are there. What it multiplies then may hold its SMs, and wait
    for ranks of another group that wait for what it passes on (TP x Ulysses)."""
    for kind, topology in product(EXCHANGES, topologies(nodes, local)):
        assert not send_recvs(kind, topology, CHUNKS)[-1].for_another


RULES: list[Callable[[int, int], None]] = [
    every_block_arrives_once_from_its_one_writer,
    an_all_to_all_gives_every_rank_its_own_blocks,
    blocks_of_an_all_to_all_arrive_in_the_order_of_its_product,
    a_gather_gives_every_rank_every_shard,
    a_scatter_adds_every_partial_once,
    each_byte_crosses_the_network_once,
    the_network_comes_first,
    nodes_do_not_all_send_to_the_same_one,
    tiles_are_taken_in_the_order_of_the_legs,
    what_is_received_is_what_a_twin_sends,
    far_blocks_of_an_all_to_all_are_received_or_passed_on_once,
    a_kernel_gets_all_blocks_of_an_all_to_all_chunk_by_chunk,
    a_kernel_multiplies_what_arrives_first,
    what_a_kernel_sends_leaves_after_its_tiles,
    what_a_rank_receives_last_of_an_all_to_all_is_its_own,
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("nodes", "local"), SIZES)
def test_rule(rule: Callable[[int, int], None], nodes: int, local: int) -> None:
    rule(nodes, local)


def test_one_node_is_as_it_was() -> None:
    """Nearest following first, nearest preceding first, and every transfer inside the node."""
    for world, rank in ((1, 0), (3, 1), (4, 3)):
        topology = Topology(1, world, rank)
        assert targets(topology) == tuple((rank + step) % world for step in range(1, world))
        assert sources(topology) == tuple((rank - step) % world for step in range(1, world))
        for kind in KINDS:
            assert sources(topology, kind) == sources(topology)
            mine = transfers_of(kind, topology, 2)
            assert {(transfer.link, transfer.fills, transfer.carries) for transfer in mine} <= {(NVLINK, rank, OPERAND)}
            assert mine.inside.all == mine.all and not mine.network.all and not mine.passed_on.all
