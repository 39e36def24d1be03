"""The schedule, and that every kernel takes tiles and pieces in its order."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from overlap_train.kernels.order import exchange_piece, gather_tile, received_block, scatter_tile
from overlap_train.schedule.kinds import Kind
from overlap_train.schedule.order import Topology, sources, targets, transfers_of
from tests.tile_orders import tile_order

SIZES = [(1, 1, 1), (2, 1, 3), (2, 2, 2), (3, 2, 3), (4, 4, 1), (6, 8, 2)]
NODES = [(2, 1, 2, 1), (2, 2, 1, 3), (2, 3, 2, 2), (3, 2, 2, 1)]  # nodes, ranks of each, chunks, tiles


@triton.jit
def list_gather_kernel(out_ptr, rank, tiles, WORLD: tl.constexpr, LOCAL: tl.constexpr, CHUNKS: tl.constexpr):
    for index in range(tiles * WORLD * CHUNKS):
        block, chunk = gather_tile(index // tiles, rank, WORLD, LOCAL, CHUNKS)
        tl.store(out_ptr + 3 * index, block)
        tl.store(out_ptr + 3 * index + 1, chunk)
        tl.store(out_ptr + 3 * index + 2, index % tiles)


@triton.jit
def list_scatter_kernel(
    out_ptr, rank, tiles, count, WORLD: tl.constexpr, LOCAL: tl.constexpr, CHUNKS: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    for index in range(count):
        block, chunk, tile = scatter_tile(index, tiles, rank, WORLD, LOCAL, CHUNKS, INTERLEAVED)
        tl.store(out_ptr + 3 * index, block)
        tl.store(out_ptr + 3 * index + 1, chunk)
        tl.store(out_ptr + 3 * index + 2, tile)


@triton.jit
def list_blocks_kernel(out_ptr, rank, WORLD: tl.constexpr, LOCAL: tl.constexpr):
    for step in range(WORLD):
        tl.store(out_ptr + 3 * step, received_block(step, rank, WORLD, LOCAL))


@triton.jit
def list_pieces_kernel(out_ptr, rank, pieces, count, WORLD: tl.constexpr):
    for index in range(count):
        target, chunk, piece = exchange_piece(index, pieces, rank, WORLD)
        tl.store(out_ptr + 3 * index, target)
        tl.store(out_ptr + 3 * index + 1, chunk)
        tl.store(out_ptr + 3 * index + 2, piece)


def order_of(kernel: object, count: int, *arguments: int, **constants: object) -> list[tuple[int, int, int]]:
    out = torch.full((count, 3), -1, dtype=torch.int64)
    kernel[(1,)](out, *arguments, **constants)  # type: ignore[index]
    return [tuple(row) for row in out.tolist()]


@pytest.mark.parametrize(("nodes", "local", "chunks", "tiles"), [*((1, *size) for size in SIZES), *NODES])
def test_kernels_take_tiles_in_the_schedules_order(nodes: int, local: int, chunks: int, tiles: int) -> None:
    world = nodes * local
    count, constants = world * chunks * tiles, dict(WORLD=world, LOCAL=local, CHUNKS=chunks)
    for rank in range(world):
        topology = Topology(nodes, local, rank)
        assert order_of(list_gather_kernel, count, rank, tiles, **constants) == list(
            tile_order(Kind.AG_GEMM, topology, chunks, tiles)
        )
        received = order_of(list_blocks_kernel, world, rank, WORLD=world, LOCAL=local)
        assert [block for block, *_ in received] == [rank, *sources(topology, Kind.A2A_GEMM)]
        for interleaved in (False, True) if nodes == 1 else (False,):
            taken = order_of(list_scatter_kernel, count, rank, tiles, count, INTERLEAVED=interleaved, **constants)
            assert taken == list(tile_order(Kind.GEMM_RS, topology, chunks, tiles, interleaved))
            assert taken == list(tile_order(Kind.GEMM_A2A, topology, chunks, tiles, interleaved)), "the same kernel"


@pytest.mark.parametrize("chunks", [1, 2])
def test_what_arrives_by_an_all_to_all_is_multiplied_in_one_block_of_tiles(chunks: int) -> None:
    """all_to_all_gemm.py counts them through: chunk by chunk of the own rows, whatever the number of ranks."""
    for world in (1, 3):
        order = list(tile_order(Kind.A2A_GEMM, Topology(1, world, world - 1), chunks, 2))
        assert order == [(world - 1, chunk, tile) for chunk in range(chunks) for tile in range(2)]


@pytest.mark.parametrize(("world", "chunks", "tiles"), SIZES)
def test_kernels_store_rows_at_peers_in_the_order_of_the_legs(world: int, chunks: int, tiles: int) -> None:
    """p2p_store.py counts pieces as a scatter counts tiles, without the own block."""
    count = (world - 1) * chunks * tiles
    for rank in range(world):
        told = dict(INTERLEAVED=False, WORLD=world, LOCAL=world, CHUNKS=chunks)
        taken = order_of(list_scatter_kernel, count, rank, tiles, count, **told)
        expected = [
            (transfer.target, transfer.chunk)
            for transfer in transfers_of(Kind.AG_GEMM, Topology(1, world, rank), chunks)
        ]
        assert [(target, chunk) for target, chunk, piece in taken if piece == 0] == expected


@pytest.mark.parametrize(("world", "chunks", "pieces"), SIZES)
def test_kernels_exchange_pieces_in_the_order_of_the_legs(world: int, chunks: int, pieces: int) -> None:
    """The first chunk of every peer's rows, then the second: a tile needs its chunk from every rank."""
    count = (world - 1) * chunks * pieces
    for rank in range(world):
        sent = [
            (transfer.target, transfer.chunk)
            for transfer in transfers_of(Kind.A2A_GEMM, Topology(1, world, rank), chunks)
        ]
        assert sent == [(target, chunk) for chunk in range(chunks) for target in targets(Topology(1, world, rank))]
        taken = order_of(list_pieces_kernel, count, rank, pieces, count, WORLD=world)
        assert taken == [(target, chunk, piece) for target, chunk in sent for piece in range(pieces)]


@pytest.mark.parametrize("kind", [Kind.AG_GEMM, Kind.GEMM_RS, Kind.A2A_GEMM, Kind.GEMM_A2A])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_every_rank_gets_every_block_once(kind: str, world: int) -> None:
    received: dict[tuple[int, int, int], int] = {}
    for rank in range(world):
        for transfer in transfers_of(kind, Topology(1, world, rank), chunks=2):
            assert transfer.source == rank != transfer.target
            assert transfer.block == (0 if kind == Kind.AG_GEMM else transfer.target)
            received[transfer.target, transfer.source, transfer.chunk] = (
                received.get((transfer.target, transfer.source, transfer.chunk), 0) + 1
            )
    assert received == {(t, s, c): 1 for t in range(world) for s in range(world) if s != t for c in range(2)}


@pytest.mark.parametrize("world", [2, 3, 8])
def test_blocks_arrive_in_the_order_in_which_they_were_sent(world: int) -> None:
    """In the n-th round each rank receives from one peer only, which is the n-th in its order of arrival."""
    for turn in range(world - 1):
        arrivals = {targets(Topology(1, world, rank))[turn]: rank for rank in range(world)}
        assert len(arrivals) == world
        assert all(sources(Topology(1, world, rank))[turn] == source for rank, source in arrivals.items())


@pytest.mark.parametrize(("world", "chunks"), [(3, 2), (4, 1)])
def test_tiles_are_computed_in_the_order_in_which_their_rows_leave(world: int, chunks: int) -> None:
    topology = Topology(1, world, 1)
    for kind in (Kind.GEMM_RS, Kind.GEMM_A2A):
        for interleaved in (False, True):
            order = list(tile_order(kind, topology, chunks, 2, interleaved))
            assert [block for block, _, _ in order[-2 * chunks :]] == [1] * 2 * chunks, "own rows, or columns, last"
        sent = [(transfer.target, transfer.chunk) for transfer in transfers_of(kind, topology, chunks)]
        computed = list(dict.fromkeys((block, chunk) for block, chunk, _ in tile_order(kind, topology, chunks, 2)))
        assert computed[: len(sent)] == sent
        assert [target for target, _ in transfers_of(kind, topology, chunks).by_target] == list(targets(topology))
