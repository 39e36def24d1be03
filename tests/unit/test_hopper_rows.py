"""Any number of rows: the tiles of the Hopper kernels store each element once, nothing beyond a chunk, from the right rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton")

from overlap_train.schedule.kinds import Kind
from overlap_train.schedule.order import Unit, sources, units_in_run
from overlap_train.select.tiles import HOPPER_TILE, count_waves
from tests.tile_orders import Strips, strip_order
from tests.unit.hopper_model import ORDER, SMS, Product, Scattered, Stored, run_gather, run_scatter, scales_of_tiles

pytestmark = pytest.mark.slow

# (rows of a rank, chunks): within a tile, around one, of many; chunks that end within tiles, too
FEW = [(1, 1), (65, 1), (1400, 2), (200, 8)]
# more tiles than there are SMs, and a last wave that is cut into halves, one of which may lack a strip
ROWS = [*FEW, (4100, 4), (4240, 1)]
ON_A_NODE, ON_NODES = [(1, 1, 0), (1, 2, 1), (1, 4, 2)], [(2, 4, 1), (2, 2, 0), (3, 6, 3)]  # nodes, ranks, this one
WIDE = 264  # two tiles of columns, the second of 8


def products_of(ranks: list[tuple[int, int, int]], rows: list[tuple[int, int]] = ROWS) -> pytest.MarkDecorator:
    """A test runs with each of the ranks and each number of rows."""
    products = [
        Product(world, rank, chunks, m_shard, WIDE, nodes=nodes) for nodes, world, rank in ranks for m_shard, chunks in rows
    ]  # fmt: skip
    return pytest.mark.parametrize("p", products, ids=str)


def check(stored: Stored, first_row: int, first_col: int = 0) -> None:
    """Each element once, row by row from row `first_row` of a on and column by column from column `first_col` of b on."""
    chunks, rows, cols = stored.times.shape
    assert (stored.times == 1).all(), "each element once"
    assert torch.equal(stored.rows.view(-1, cols)[:, 0], first_row + torch.arange(chunks * rows))
    assert (stored.rows == stored.rows[..., :1]).all()
    assert (stored.cols == first_col + torch.arange(cols)).all()


def part_of(stored: Stored, block: int, chunks: int) -> Stored:
    """One block of several."""
    part = Stored(0, 0, 0)
    for name in ("times", "rows", "cols"):
        setattr(part, name, getattr(stored, name)[block * chunks : (block + 1) * chunks])
    return part


def check_blocks(done: Scattered, p: Product, direct: bool, exchange: bool) -> None:
    """Each block is stored once, where it belongs, and those of peers are counted."""
    places = done.places if direct else [part_of(done.places[0], target, p.chunks) for target in p.peers]
    for target, block in zip((*p.peers, p.rank), (*places, done.own), strict=True):
        check(block, *((0, target * WIDE) if exchange else (target * p.m_shard, 0)))
    strips = HOPPER_TILE.counted(p.m_chunk, WIDE)  # what copies wait for (FusedGemmReduceScatter)
    assert done.counted == {target * 8 + chunk: strips for target in p.peers for chunk in range(p.chunks)}


@pytest.mark.parametrize("exchange", [False, True])
@pytest.mark.parametrize("direct", [False, True])
@products_of(ON_A_NODE)
def test_a_scatter_stores_every_row_of_every_block_once(p: Product, direct: bool, exchange: bool) -> None:
    done = run_scatter(p, direct, exchange)
    check_blocks(done, p, direct, exchange)
    if not direct:
        assert (part_of(done.places[0], p.rank, p.chunks).times == 0).all(), "the own block is not staged"
    strips = HOPPER_TILE.counted(p.m_chunk, WIDE)
    assert strips == -(-p.m_shard // p.chunks // 64) * 2, "of 64 rows, in two columns of tiles"
    assert done.goals == ({strips} if direct and p.peers else set())


@products_of(ON_A_NODE)
def test_own_strips_are_counted_by_halves_where_their_sums_are_sent_on(p: Product) -> None:
    """Each when it is stored, so that a chunk is counted whole, and no sooner, also where its tiles are cut."""
    done, strips = run_scatter(p, False, False, shares=True), HOPPER_TILE.counted(p.m_chunk, WIDE)
    assert done.counted == {
        target * 8 + chunk: strips * (1 + (target == p.rank)) for target in range(p.world) for chunk in range(p.chunks)
    }
    for steps in done.stored:
        assert len(steps[-1]) == 2, "no strip is stored behind the last count"


def pieces(p: Product, units: list[tuple[Unit, ...]]) -> list[tuple[tuple[Unit, ...], list[int]]]:
    """What a scatter's tiles are multiplied in: the units of each piece, and which halves of the columns it has.

    The tiles of the last wave are cut where at least half of the SMs had nothing to do, and where it has no more of them than
    there are pairs of own strips. Then it has own rows only. What the planner says of waves is the same.
    """
    programs = min(SMS, HOPPER_TILE.count(p.m_shard, p.n) * p.world)
    last = units[len(units) // programs * programs :]
    may_cut = HOPPER_TILE.pairs(p.m_chunk, p.n, p.chunks)
    cut = bool(last) and 2 * len(last) <= programs and len(last) <= may_cut
    assert count_waves(len(units), programs, may_cut) == len(units) // programs + (0.5 if cut else bool(last))
    whole = units[: -len(last)] if cut else units
    assert not cut or {block for tile in last for block, _ in tile} == {p.rank}
    return [(tile, [0, 1]) for tile in whole] + [(tile, [half]) for tile in units[len(whole) :] for half in (0, 1)]


@pytest.mark.parametrize(("total", "halves"), [(66, 132), (67, 0), (132, 0), (133, 2), (198, 132), (199, 0), (704, 88)])
def test_tiles_are_cut_where_half_of_the_last_wave_would_stand_idle(total: int, halves: int) -> None:
    assert 2 * (total - ORDER["first_cut"](total, SMS)) == halves <= SMS, "the last wave must not become two"


def units_of_tiles(p: Product, kind: str, direct: bool = False, adds: bool = True) -> list[tuple[Unit, ...]]:
    """Of which blocks and chunks the two strips of each tile are, as the schedule says."""
    run = units_in_run(kind, p.world, p.chunks, direct, adds and kind == Kind.GEMM_RS)
    strips = Strips(-(-p.m_shard // p.chunks // 64), 2, 2, run)
    return [units for _, units in strip_order(kind, p.topology, p.chunks, strips, direct)]


@pytest.mark.parametrize("direct", [False, True])
@products_of(ON_A_NODE)
def test_own_strips_add_the_same_rows_of_every_peer(p: Product, direct: bool) -> None:
    """Tiles come in the schedule's order. Own strips wait for their chunks, peers' for nothing."""
    done, expected = run_scatter(p, direct, exchange=False), pieces(p, units_of_tiles(p, Kind.GEMM_RS, direct))
    for tile, (units, halves) in zip(done.loads.tiles, expected, strict=True):
        own = [part for part, (block, _) in enumerate(units) if block == p.rank]
        adding = sorted(p.peers) if own else []
        assert not tile.waits
        assert (tile.halves, tile.b_col % 256) == (len(halves), halves[0] * 128)
        assert [added.waits for added in tile.adds] == [{s * 8 + units[part][1] for part in own} for s in adding]
        for added, source in zip(tile.adds, adding, strict=True):
            assert added.col == tile.b_col
            assert all(tile.a_rows[part] - added.rows[part] == (p.rank - source) * p.m_shard for part in own)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("direct", [False, True])
@products_of(ON_A_NODE)
def test_a_peers_strip_leaves_before_an_own_one_below_it(p: Product, direct: bool, adds: bool) -> None:
    """It is stored and counted before the own one is taken from the outbox. Each group takes as many panels as were loaded."""
    done = run_scatter(p, direct, exchange=False, adds=adds)
    for tile, (units, halves) in enumerate(pieces(p, units_of_tiles(p, Kind.GEMM_RS, direct, adds))):
        for part, (block, chunk) in enumerate(units):
            is_there = done.loads.tiles[tile].a_rows[part] < block * p.m_shard + (chunk + 1) * p.m_chunk
            sums = len(halves) if adds and block == p.rank else 0
            does = ["product" if is_there else "no product", *["add"] * sums * (p.world - 1), *["bias"] * sums]
            assert done.multiplied[part][tile] == [*does, *["put"] * len(halves)]
        assert done.stored[tile] == list(stores(units, len(halves), p.rank, done.stored[tile]))


@pytest.mark.parametrize("exchange", [False, True])
@products_of(ON_NODES)
def test_across_nodes_far_blocks_are_stored_first(p: Product, exchange: bool) -> None:
    """In the schedule's order, into staging; nothing is added."""
    done = run_scatter(p, direct=False, exchange=exchange, adds=False)
    units = [tile for tile, _ in pieces(p, units_of_tiles(p, Kind.GEMM_A2A if exchange else Kind.GEMM_RS, adds=False))]
    for tile, expected in zip(done.loads.tiles, units, strict=True):
        assert not tile.waits and not tile.adds
        of_rows = [chunk if exchange else block * p.chunks + chunk for block, chunk in expected]
        beyond = -(-p.m_chunk // 64) * 64 + 1  # a strip that a run lacks lies behind its last one
        assert all(row - of * p.m_chunk in range(beyond) for row, of in zip(tile.a_rows, of_rows, strict=True))
        assert not exchange or tile.b_col - expected[1][0] * WIDE in range(0, 512, 128), "two tiles of 256 columns"
    check_blocks(done, p, direct=False, exchange=exchange)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("direct", [False, True])
def test_what_a_wait_gave_up_on_is_nan(direct: bool, adds: bool) -> None:
    """In whole tiles and in halves, if the kernel itself adds; peers' rows are whole."""
    p = Product(4, 2, 4, 4100, WIDE)
    done = run_scatter(p, direct, exchange=False, adds=adds, gave_up=True)
    units = [tile for tile, _ in pieces(p, units_of_tiles(p, Kind.GEMM_RS, direct, adds))]
    for part in range(2):
        for tile, steps in zip(units, done.multiplied[part], strict=True):
            expected = "put NaN" if adds and tile[part][0] == p.rank else "put"
            assert {step for step in steps if step.startswith("put")} == {expected}


def stores(units: tuple[Unit, ...], halves: int, rank: int, did: list[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """A storing warp's quarters (part,) and counts (signal, strips) of a tile. At a run's end a strip may be missing."""
    words = [block * 8 + chunk for block, chunk in units]
    yield from [(0,)] * halves
    if units[0] != units[1] and units[0][0] != rank:
        yield words[0], 1
    yield from [(1,)] * halves
    if units[1][0] != rank:
        yield words[1], 1 if units[0] != units[1] or (words[1], 1) in did else 2


@pytest.mark.parametrize("exchange", [False, True])
@products_of(ON_A_NODE + ON_NODES)
def test_a_tile_waits_for_the_chunks_of_both_strips(p: Product, exchange: bool) -> None:
    loads, _ = run_gather(p, exchange)
    # a tile that is cut into halves is loaded twice, from the same rows
    seen = dict.fromkeys((t.descs, t.a_rows, t.b_col // 256, frozenset(t.waits)) for t in loads.tiles)
    expected = units_of_tiles(p, Kind.A2A_GEMM if exchange else Kind.AG_GEMM)
    if exchange:
        order = (p.rank, *sources(p.topology, Kind.A2A_GEMM))
        for turn, (descs, *_, waits) in enumerate(seen):
            source, units = order[turn % p.world], expected[turn // p.world]
            assert waits == (set() if source == p.rank else {source * 8 + chunk for _, chunk in units})
            assert descs == (("own",) if source == p.rank else ("arrived",)) * 2
        return
    for (descs, _, _, waits), units in zip(seen, expected, strict=True):
        assert waits == {block * 8 + chunk for block, chunk in units if block != p.rank}
        assert descs == tuple("own" if block == p.rank else "arrived" for block, _ in units)


def check_gathered(y: Stored, p: Product, exchange: bool) -> None:
    """Each element is stored once. Rows of `own` are 0 ... m_shard - 1."""
    if exchange:
        check(y, 0)  # of the own block, to which those of the peers are added
        return
    for source in range(p.world):
        check(part_of(y, source, p.chunks), 0 if source == p.rank else source * p.m_shard)


@pytest.mark.parametrize("exchange", [False, True])
@products_of(ON_A_NODE + ON_NODES)
def test_a_gather_stores_every_row_once(p: Product, exchange: bool) -> None:
    """Few tiles are cut into halves, of 144 the last 12, and of 72 none."""
    check_gathered(run_gather(p, exchange)[1], p, exchange)


@pytest.mark.parametrize("exchange", [False, True])
@products_of(ON_NODES, rows=[(1, 1), (1400, 2), (264, 4), (4240, 1)])
def test_a_kernel_that_leaves_takes_what_is_here_and_the_next_one_goes_on(p: Product, exchange: bool) -> None:
    """Chunks of other nodes come one by one, and a kernel is launched before each."""
    far = sources(p.topology, Kind.A2A_GEMM if exchange else Kind.AG_GEMM)[p.topology.local - 1 :]
    turns = [(source, chunk) for chunk in range(p.chunks) for source in far]
    if not exchange:
        turns.sort(key=lambda unit: far.index(unit[0]) // p.topology.local)
    loads, y = run_gather(p, exchange, [set(turns[:count]) for count in range(len(turns))])
    at_once = run_gather(p, exchange)[0].tiles
    order, expected = ([(t.a_rows, t.b_col, t.halves) for t in tiles] for tiles in (loads.tiles, at_once))
    assert order == expected, "no tile is left out, or multiplied twice"
    words = [source * 8 + chunk for source, chunk in turns]
    for count, (first, end) in enumerate(pairwise([0, *loads.ends])):
        absent = set(words[count:])
        assert not any(tile.waits & absent for tile in loads.tiles[first:end]), "nobody waits for another node"
        following = loads.tiles[end : end + (p.world if exchange else 1)]
        assert not following or any(tile.waits & absent for tile in following), "it leaves no sooner than it must"
    check_gathered(y, p, exchange)


@pytest.mark.parametrize("scatters", [False, True])
@products_of(ON_A_NODE)
def test_a_strips_scales_of_blocks_are_those_of_its_rows_and_columns(p: Product, scatters: bool) -> None:
    """Of rows that are loaded, none beyond the chunk, and of columns that b has: 384 are three squares in two tiles."""
    p, own, right, gathered, pitch = replace(p, n=384, k=640), 10**9, 2 * 10**9, 3 * 10**9, 172
    m, panels = p.world * p.m_shard, 8  # so many of 5 a row of b's scales has room for
    bases = (own, right) if scatters else (own, right, gathered, pitch)
    for tile, part, (a_ptr, last, a_row, a_step, b_ptr, to_right) in scales_of_tiles(p, scatters, bases):
        assert (a_row, a_step) == ((1, m) if scatters else (pitch, 1))
        assert a_ptr == (gathered if tile.descs[part] == "arrived" else own) + tile.a_rows[part] * a_row
        chunk_end = -(-(tile.a_rows[part] + min(last, 0) + 1) // p.m_chunk) * p.m_chunk
        assert tile.a_rows[part] + last == chunk_end - 1
        assert b_ptr == right + tile.b_col // 128 * panels
        assert to_right == (panels if tile.b_col + 128 < p.n else 0)
