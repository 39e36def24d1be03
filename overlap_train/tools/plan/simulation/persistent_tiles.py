"""The tiles of the persistent kernels, in the schedule's order, with what each takes and waits for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from ....planning import cost
from ....schedule.order import SCATTER, Strips, Unit, strip_order, units_in_run
from ....select.tiling import HOPPER, count_waves
from .timeline import Tile, Token, arrived, stored
from .work import Work


def _in_order(work: Work, interleaved: bool = False) -> list[tuple[tuple[int, int, int], dict[Unit, None]]]:
    """(Place, the chunks that its rows are of) of each tile."""
    plan, tile = work.plan, work.plan.tile
    run = units_in_run(plan.kind, work.world, plan.chunks, interleaved, _adds(work))
    strips = Strips(tile.strips(work.m_shard // plan.chunks), tile.columns(work.block_columns), tile.parts, run)
    order = strip_order(plan.kind, work.topology, plan.chunks, strips, interleaved)
    return [(place, dict.fromkeys(units)) for place, units in order]


def _adds(work: Work) -> bool:
    """Whether own tiles wait for the peers' partials."""
    return work.plan.kind == SCATTER and not work.plan.reduces_later


def _tile_us(work: Work, waves: float, idle_us: float = 0.0) -> float:
    tile, pass_ = work.plan.tile, work.pass_
    speed = 1.0 if work.plan.kernels == HOPPER else work.system.portable
    allowed_us = cost.power_us(work.system, 2.0 * pass_.rows * pass_.n * pass_.k * work.parts) / work.parts
    return cost.tile_us(work.system, tile.block_m, tile.block_n, pass_.k, waves, allowed_us, idle_us) / speed


def gather_tiles(work: Work) -> tuple[Tile, ...]:
    """The tiles of AG + GEMM in their order. A peer's tiles wait for their chunk; those of the last wave may be halves."""
    order = _in_order(work)
    us = _tile_us(work, _waves(work, len(order), len(order)))
    tiles = []
    for place, units in order:
        needs = tuple(arrived(work.call, *unit) for unit in units if unit[0] != work.topology.rank)
        tiles.append(Tile(place, us, needs, _far(work, needs)))
    return tuple(_cut(work, tiles, len(tiles)))


def _far(work: Work, arrivals: tuple[Token, ...]) -> tuple[Token, ...]:
    """Those of other nodes."""
    near = work.topology.ranks_of(work.topology.node)
    return tuple(token for token in arrivals if token[2] not in near) if work.topology.nodes > 1 else ()


def _waves(work: Work, tiles: int, may_cut: int) -> float:
    """The waves that so many tiles take. may_cut: tiles, of the last ones, that the kernels for Hopper may cut into halves."""
    return count_waves(tiles, work.kernel_sms, may_cut if work.plan.kernels == HOPPER else 0)


def _cut(work: Work, tiles: list[Tile], may_cut: int) -> Iterator[Tile]:
    is_cut = _waves(work, len(tiles), may_cut) % 1 > 0
    first = len(tiles) - (len(tiles) % work.kernel_sms if is_cut else 0)
    yield from tiles[:first]
    for tile in tiles[first:]:
        yield from (replace(tile, us=tile.us / 2, adds_us=tile.adds_us / 2),) * 2


def receive_tiles(work: Work) -> tuple[Tile, ...]:
    """The tiles of A2A + GEMM in their order. A tile multiplies its own block, then waits for the peers' in its chunk and
    multiplies those."""
    order = _in_order(work)
    us = _tile_us(work, _waves(work, len(order), len(order)))
    own = us / work.world
    tiles = []
    for place, units in order:
        adds = _arrivals(work, units)
        tiles.append(Tile(place, own, far=_far(work, adds), adds=adds, adds_us=us - own))
    return tuple(_cut(work, tiles, len(tiles)))


def _arrivals(work: Work, units: Iterable[Unit]) -> tuple[Token, ...]:
    """The arrivals, from every peer, of those of the chunks that are of own rows."""
    chunks = [chunk for block, chunk in units if block == work.topology.rank]
    return tuple(token for chunk in chunks for token in work.arrivals(chunk))


def scatter_tiles(work: Work) -> tuple[Tile, ...]:
    """The tiles of GEMM + RS, or GEMM + A2A, in their order. A peer's tiles fill its chunks, here or (direct) at the peer. In
    GEMM + RS own tiles add what has arrived; one with rows of both fills before it waits. GEMM + A2A has nothing to add."""
    tile, chunks = work.plan.tile, work.plan.chunks
    may_cut = tile.pairs(work.m_shard // chunks, work.block_columns, chunks)
    return tuple(_cut(work, list(_scatter_tiles(work, may_cut)), may_cut))


def _scatter_tiles(work: Work, may_cut: int) -> Iterator[Tile]:
    plan, system, own, direct = work.plan, work.system, work.topology.rank, work.plan.method == "direct"
    tiles = _in_order(work, interleaved=direct)
    nbytes = plan.tile.block_m * plan.tile.block_n * work.pass_.dtype.itemsize
    adds = _adds(work)
    # All SMs read partials at the same time: a tile's share of the memory's bandwidth is one SM's.
    adds_us = (work.world - 1) * cost.sum_us(system, nbytes * system.sms) if adds else 0.0
    waves = _waves(work, len(tiles), may_cut)
    idle_us = waves / work.world * (adds_us + (work.world - 1) * system.peer_tile_us * direct)
    us = _tile_us(work, waves, idle_us)
    legs = {(leg.target, leg.chunk): leg for leg in plan.legs}
    for place, units in tiles:
        tile = Tile(place, us, fills=tuple(stored(work.call, *unit) for unit in units if unit[0] != own))
        if direct and tile.fills:
            sent = tuple(legs[unit] for unit in units if unit[0] != own)
            tile = replace(tile, us=us + system.peer_tile_us, legs=sent, nbytes=nbytes * len(sent) / len(units))
        if place[0] == own:
            tile = replace(tile, adds=_arrivals(work, units) if adds else (), adds_us=adds_us)
        yield tile
