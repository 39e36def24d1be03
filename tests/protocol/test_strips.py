"""Tiles of two strips of rows, in the schedule's order, and of two chunks only at a chunk's border. (Each strip once, and of its
rows and columns: tests/unit/test_hopper_rows.py.)"""

from __future__ import annotations

from itertools import product

import pytest
import torch
import triton
import triton.language as tl

from overlap_train.kernels.tiles import (
    gather_strip,
    scatter_pair,
    scatter_strip,
    tile_in_run,
    tiles_in_run,
    tiles_in_scatter,
)
from overlap_train.schedule.kinds import Kind
from overlap_train.schedule.order import Topology, Unit, units_in_run
from tests.tile_orders import Strips, strip_order


@triton.jit
def list_gather_kernel(out_ptr, rank, strips, tiles_n, WORLD: tl.constexpr, LOCAL: tl.constexpr, CHUNKS: tl.constexpr):
    for index in range(tiles_in_run(strips, WORLD * CHUNKS, tiles_n)):
        pair, _ = tile_in_run(index, strips, WORLD * CHUNKS, tiles_n, 2)
        for part in tl.static_range(2):
            block, chunk, _ = gather_strip(2 * pair + part, strips, rank, WORLD, LOCAL, CHUNKS)
            tl.store(out_ptr + 4 * index + 2 * part, block)
            tl.store(out_ptr + 4 * index + 2 * part + 1, chunk)


@triton.jit
def list_scatter_kernel(
    out_ptr, rank, strips, tiles_n, WORLD: tl.constexpr, LOCAL: tl.constexpr, CHUNKS: tl.constexpr, RUN: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    for index in range(tiles_in_scatter(strips, tiles_n, WORLD, CHUNKS, RUN)):
        run, pair, _ = scatter_pair(index, strips, tiles_n, rank, WORLD, CHUNKS, RUN, INTERLEAVED, 2)
        for part in tl.static_range(2):
            block, chunk, _ = scatter_strip(run, 2 * pair + part, strips, rank, WORLD, LOCAL, CHUNKS, RUN)
            tl.store(out_ptr + 4 * index + 2 * part, block)
            tl.store(out_ptr + 4 * index + 2 * part + 1, chunk)


def order_of(kernel: object, count: int, *arguments: int, **constants: object) -> list[tuple[Unit, ...]]:
    out = torch.full((count, 2, 2), -1, dtype=torch.int64)
    kernel[(1,)](out, *arguments, **constants)  # type: ignore[index]
    return [tuple((block, chunk) for block, chunk in tile) for tile in out.tolist()]


SIZES = [
    (1, 1, 1, 1, 1),
    (1, 2, 1, 3, 2),
    (1, 2, 2, 1, 1),
    (1, 2, 2, 2, 2),
    (1, 3, 2, 3, 1),
    (1, 4, 1, 5, 1),
    (2, 4, 2, 3, 1),
    (3, 6, 1, 1, 2),
]  # nodes, world, chunks, strips, columns


@pytest.mark.parametrize(("nodes", "world", "chunks", "strips", "columns"), SIZES)
def test_kernels_take_tiles_of_strips_in_the_schedules_order(
    nodes: int, world: int, chunks: int, strips: int, columns: int
) -> None:
    """In Triton's own arithmetic."""
    rank, local = world - 2 if nodes > 1 else world - 1, world // nodes
    constants = dict(WORLD=world, LOCAL=local, CHUNKS=chunks)

    def expected(kind: str, run: int, interleaved: bool = False) -> list[tuple[Unit, ...]]:
        cut = Strips(strips, columns, 2, run)
        return [units for _, units in strip_order(kind, Topology(nodes, local, rank), chunks, cut, interleaved)]

    gathered = expected(Kind.AG_GEMM, world * chunks)
    assert order_of(list_gather_kernel, len(gathered), rank, strips, columns, **constants) == gathered
    inside = (False, True) if nodes == 1 else (False,)  # what only kernels in one node do
    for kind, interleaved, adds in product((Kind.GEMM_RS, Kind.GEMM_A2A), inside, inside):
        run = units_in_run(kind, world, chunks, interleaved, adds)
        scattered = expected(kind, run, interleaved)
        told = constants | dict(RUN=run, INTERLEAVED=interleaved)
        assert order_of(list_scatter_kernel, len(scattered), rank, strips, columns, **told) == scattered


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_strips_of_two_blocks_share_a_tile_where_that_is_right(world: int, chunks: int) -> None:
    """They must share columns of b and follow each other. Where own tiles add, a peer's strip must not wait with an own one."""
    for kind, interleaved, adds in product(
        (Kind.AG_GEMM, Kind.GEMM_RS, Kind.A2A_GEMM, Kind.GEMM_A2A), (False, True), (False, True)
    ):
        cut = Strips(3, 1, 2, units_in_run(kind, world, chunks, interleaved, adds and kind == Kind.GEMM_RS))
        tiles = [units for _, units in strip_order(kind, Topology(1, world, 0), chunks, cut, interleaved)]
        crossing = [(upper, lower) for upper, lower in tiles if upper[0] != lower[0]]
        if kind in (Kind.A2A_GEMM, Kind.GEMM_A2A) or (kind == Kind.GEMM_RS and interleaved and world > 2):
            assert not crossing, "another block of columns, or a block that takes turns"
        elif kind == Kind.GEMM_RS and adds:
            assert not [upper for upper, (block, _) in crossing if block == 0]
        elif chunks % 2 and world > 1:
            assert crossing
        if chunks > 1:
            assert [units for units in tiles if units[0] != units[1]], "from one chunk into the next"


def test_places_are_numbered_in_the_chunk_of_the_last_strip() -> None:
    order = list(strip_order(Kind.AG_GEMM, Topology(1, 2, 0), 1, Strips(3, 2, 2, 2)))
    own, peer = (0, 0), (1, 0)
    assert [units for _, units in order] == [(own, own)] * 2 + [(own, peer)] * 2 + [(peer, peer)] * 2
    assert [place for place, _ in order] == [(*own, 0), (*own, 1), *((*peer, number) for number in range(4))]
