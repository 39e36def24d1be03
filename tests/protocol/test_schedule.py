"""The schedule, and that every kernel takes tiles and pieces in its order."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from overlap_train.kernels.tiles import gather_tile, scatter_tile
from overlap_train.planning.schedule import GATHER, SCATTER, Topology, legs, sources, targets, tile_order

SIZES = [(1, 1, 1), (2, 1, 3), (2, 2, 2), (3, 2, 3), (4, 4, 1), (8, 8, 2)]


@triton.jit
def list_gather_kernel(out_ptr, rank, tiles, WORLD: tl.constexpr, CHUNKS: tl.constexpr):
    for index in range(tiles * WORLD * CHUNKS):
        block, chunk = gather_tile(index // tiles, rank, WORLD, CHUNKS)
        tl.store(out_ptr + 3 * index, block)
        tl.store(out_ptr + 3 * index + 1, chunk)
        tl.store(out_ptr + 3 * index + 2, index % tiles)


@triton.jit
def list_scatter_kernel(
    out_ptr, rank, tiles, count, WORLD: tl.constexpr, CHUNKS: tl.constexpr, INTERLEAVED: tl.constexpr
):
    for index in range(count):
        block, chunk, tile = scatter_tile(index, tiles, rank, WORLD, CHUNKS, INTERLEAVED)
        tl.store(out_ptr + 3 * index, block)
        tl.store(out_ptr + 3 * index + 1, chunk)
        tl.store(out_ptr + 3 * index + 2, tile)


def order_of(kernel: object, count: int, *arguments: int, **constants: object) -> list[tuple[int, int, int]]:
    out = torch.full((count, 3), -1, dtype=torch.int64)
    kernel[(1,)](out, *arguments, **constants)  # type: ignore[index]
    return [tuple(row) for row in out.tolist()]


@pytest.mark.parametrize(("world", "chunks", "tiles"), SIZES)
def test_kernels_take_tiles_in_the_schedules_order(world: int, chunks: int, tiles: int) -> None:
    count, constants = world * chunks * tiles, dict(WORLD=world, CHUNKS=chunks)
    for rank in range(world):
        topology = Topology(1, world, rank)
        assert order_of(list_gather_kernel, count, rank, tiles, **constants) == list(
            tile_order(GATHER, topology, chunks, tiles)
        )
        for interleaved in (False, True):
            taken = order_of(list_scatter_kernel, count, rank, tiles, count, INTERLEAVED=interleaved, **constants)
            assert taken == list(tile_order(SCATTER, topology, chunks, tiles, interleaved))


@pytest.mark.parametrize(("world", "chunks", "tiles"), SIZES)
def test_kernels_store_rows_at_peers_in_the_order_of_the_legs(world: int, chunks: int, tiles: int) -> None:
    """p2p_store.py counts pieces as a scatter counts tiles, without the own block."""
    count = (world - 1) * chunks * tiles
    for rank in range(world):
        taken = order_of(list_scatter_kernel, count, rank, tiles, count, INTERLEAVED=False, WORLD=world, CHUNKS=chunks)
        expected = [(leg.target, leg.chunk) for leg in legs(GATHER, Topology(1, world, rank), chunks)]
        assert [(target, chunk) for target, chunk, piece in taken if piece == 0] == expected


@pytest.mark.parametrize("kind", [GATHER, SCATTER])
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_every_rank_gets_every_block_once(kind: str, world: int) -> None:
    received: dict[tuple[int, int, int], int] = {}
    for rank in range(world):
        for leg in legs(kind, Topology(1, world, rank), chunks=2):
            assert leg.source == rank != leg.target
            assert leg.block == (leg.target if kind == SCATTER else 0)
            received[leg.target, leg.source, leg.chunk] = received.get((leg.target, leg.source, leg.chunk), 0) + 1
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
    for interleaved in (False, True):
        order = list(tile_order(SCATTER, topology, chunks, 2, interleaved))
        assert [block for block, _, _ in order[-2 * chunks :]] == [1] * 2 * chunks, "own rows last"
    sent = [(leg.target, leg.chunk) for leg in legs(SCATTER, topology, chunks)]
    computed = list(dict.fromkeys((block, chunk) for block, chunk, _ in tile_order(SCATTER, topology, chunks, 2)))
    assert computed[: len(sent)] == sent
