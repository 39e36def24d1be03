"""The tiles of the persistent kernels, in the schedule's order, with what each takes and waits for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from . import cost
from .schedule import A2A_GEMM, GATHER, SCATTER, tile_order
from .tiling import HOPPER
from .timeline import Tile, arrived, stored
from .work import Work


def _tiles_a_chunk(work: Work) -> int:
    return work.plan.tile.count(work.m_shard // work.plan.chunks, work.block_columns)


def _tile_us(work: Work, waves: float, idle_us: float = 0.0) -> float:
    tile, pass_ = work.plan.tile, work.pass_
    speed = 1.0 if work.plan.kernels == HOPPER else work.system.portable
    flops = 2.0 * pass_.rows * pass_.n * pass_.k
    return cost.tile_us(work.system, tile.block_m, tile.block_n, pass_.k, waves, flops, idle_us) / speed


def gather_tiles(work: Work) -> tuple[Tile, ...]:
    """Of AG + GEMM: a peer's tiles wait for their chunk; those of the last wave may be halves."""
    return tuple(_cut(work, list(_gather_tiles(work))))


def _gather_tiles(work: Work) -> Iterator[Tile]:
    rank, tiles = work.topology.rank, _tiles_a_chunk(work)
    total = tiles * work.plan.chunks * work.world
    us = _tile_us(work, _waves(work, total))
    for block, chunk, tile in tile_order(GATHER, work.topology, work.plan.chunks, tiles):
        yield Tile((block, chunk, tile), us, () if block == rank else (arrived(work.call, block, chunk),))


def _waves(work: Work, tiles: int) -> float:
    """Of so many tiles, whose last wave may be one of halves."""
    rest = tiles % work.system.sms
    return tiles // work.system.sms + (0.0 if not rest else 0.5 if _is_cut(work, rest) else 1.0)


def _is_cut(work: Work, rest: int) -> bool:
    """Whether the kernel cuts the tiles of its last wave into halves (kernels/tiles.py: first_cut)."""
    return work.plan.kernels == HOPPER and 0 < 2 * rest <= work.system.sms


def _cut(work: Work, tiles: list[Tile]) -> Iterator[Tile]:
    rest = len(tiles) % work.system.sms
    first = len(tiles) - (rest if _is_cut(work, rest) else 0)
    yield from tiles[:first]
    for tile in tiles[first:]:
        yield from (replace(tile, us=tile.us / 2, adds_us=tile.adds_us / 2),) * 2


def receive_tiles(work: Work) -> tuple[Tile, ...]:
    """Of A2A + GEMM: a tile multiplies its own block, then waits for the peers' in its chunk and multiplies those."""
    tiles, chunks = _tiles_a_chunk(work), work.plan.chunks
    us = _tile_us(work, _waves(work, tiles * chunks))
    own = us / work.world
    order = tile_order(A2A_GEMM, work.topology, chunks, tiles)
    return tuple(_cut(work, [Tile(place, own, adds=work.arrivals(place[1]), adds_us=us - own) for place in order]))


def scatter_tiles(work: Work) -> tuple[Tile, ...]:
    """Of GEMM + RS: a peer's tiles fill its chunks, here or (direct) at the peer; own ones add what has arrived. Of GEMM + A2A:
    the same, with nothing to add."""
    return tuple(_scatter_tiles(work))


def _scatter_tiles(work: Work) -> Iterator[Tile]:
    plan, system, own, tiles = work.plan, work.system, work.topology.rank, _tiles_a_chunk(work)
    nbytes = plan.tile.block_m * plan.tile.block_n * work.pass_.dtype.itemsize
    direct, adds = plan.method == "direct", plan.kind == SCATTER and not plan.variant.split_reduction
    # All SMs read partials at the same time: a tile's share of the memory's bandwidth is one SM's.
    adds_us = (work.world - 1) * cost.sum_us(system, nbytes * system.sms) if adds else 0.0
    waves = math.ceil(tiles * plan.chunks * work.world / system.sms)
    idle_us = waves / work.world * (adds_us + (work.world - 1) * system.peer_tile_us * direct)
    us = _tile_us(work, waves, idle_us)
    legs = {(leg.target, leg.chunk): leg for leg in plan.legs}
    for block, chunk, tile in tile_order(plan.kind, work.topology, plan.chunks, tiles, interleaved=direct):
        place, fills = (block, chunk, tile), stored(work.call, block, chunk)
        if block == own:
            yield Tile(place, us, adds=work.arrivals(chunk) if adds else (), adds_us=adds_us)
        elif direct:
            yield Tile(place, us + system.peer_tile_us, fills=fills, leg=legs[block, chunk], nbytes=nbytes)
        else:
            yield Tile(place, us, fills=fills)
