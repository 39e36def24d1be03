"""Any number of rows: the tiles of the Hopper kernels store each element once, nothing beyond a chunk, from the right rows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

pytest.importorskip("triton")

from overlap_train.schedule.kinds import Kind
from overlap_train.schedule.order import Unit, sources, units_in_run
from overlap_train.select.tiles import HOPPER_TILE, count_waves
from tests.tile_orders import Strips, strip_order
from tests.unit.hopper_model import ORDER, SMS, Product, Stored, run_gather, run_scatter, scales_of_tiles

pytestmark = pytest.mark.slow

# (rows of a rank, chunks): within a tile, around one, of many; chunks that end within tiles, too
FEW = [(1, 1), (65, 1), (1400, 2), (200, 8)]
# more tiles than there are SMs, and a last wave that is cut into halves, one of which may lack a strip
ROWS = [*FEW, (4100, 4), (4240, 1)]
RANKS = [(1, 0), (2, 1), (4, 2)]
NODES = [(1, *of_world) for of_world in RANKS] + [(2, 4, 1), (2, 2, 0), (3, 6, 3)]  # nodes, ranks, this one
WIDE = 264  # two tiles of columns, the second of 8


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


@pytest.mark.parametrize("exchange", [False, True])
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(("world", "rank"), RANKS)
@pytest.mark.parametrize(("m_shard", "chunks"), ROWS)
def test_a_scatter_stores_every_row_of_every_block_once(
    m_shard: int, chunks: int, world: int, rank: int, direct: bool, exchange: bool
) -> None:
    p = Product(world, rank, chunks, m_shard, WIDE)
    done = run_scatter(p, direct, exchange)

    def begins(target: int) -> tuple[int, int]:
        return (0, target * WIDE) if exchange else (target * m_shard, 0)

    check(done.own, *begins(rank))
    peers = [(rank + distance) % world for distance in range(1, world)]
    for distance, target in enumerate(peers):
        block = done.places[distance] if direct else part_of(done.places[0], target, chunks)
        check(block, *begins(target))
    if not direct:
        assert (part_of(done.places[0], rank, chunks).times == 0).all(), "the own block is not staged"
    strips = HOPPER_TILE.counted(m_shard // chunks, WIDE)  # what copies wait for (FusedGemmReduceScatter)
    assert strips == -(-m_shard // chunks // 64) * 2, "of 64 rows, in two columns of tiles"
    assert done.counted == {target * 8 + chunk: strips for target in peers for chunk in range(chunks)}
    assert done.goals == ({strips} if direct and peers else set())


@pytest.mark.parametrize(("world", "rank"), RANKS)
@pytest.mark.parametrize(("m_shard", "chunks"), ROWS)
def test_own_strips_are_counted_by_halves_where_their_sums_are_sent_on(
    m_shard: int, chunks: int, world: int, rank: int
) -> None:
    """Each when it is stored, so that a chunk is counted whole, and no sooner, also where its tiles are cut."""
    p = Product(world, rank, chunks, m_shard, WIDE)
    done, strips = run_scatter(p, False, False, shares=True), HOPPER_TILE.counted(m_shard // chunks, WIDE)
    assert done.counted == {
        target * 8 + chunk: strips * (1 + (target == rank)) for target in range(world) for chunk in range(chunks)
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
    may_cut = HOPPER_TILE.pairs(p.m_shard // p.chunks, p.n, p.chunks)
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
@pytest.mark.parametrize(("world", "rank"), RANKS)
@pytest.mark.parametrize(("m_shard", "chunks"), ROWS)
def test_own_strips_add_the_same_rows_of_every_peer(
    m_shard: int, chunks: int, world: int, rank: int, direct: bool
) -> None:
    """Tiles come in the schedule's order. Own strips wait for their chunks, peers' for nothing."""
    p = Product(world, rank, chunks, m_shard, WIDE)
    done, peers = run_scatter(p, direct, exchange=False), [source for source in range(world) if source != rank]
    expected = pieces(p, units_of_tiles(p, Kind.GEMM_RS, direct))
    for tile, (units, halves) in zip(done.loads.tiles, expected, strict=True):
        own = [part for part, (block, _) in enumerate(units) if block == rank]
        adding = peers if own else []
        assert not tile.waits
        assert (tile.halves, tile.b_col % 256) == (len(halves), halves[0] * 128)
        assert [added.waits for added in tile.adds] == [{s * 8 + units[part][1] for part in own} for s in adding]
        for added, source in zip(tile.adds, adding, strict=True):
            assert added.col == tile.b_col
            assert all(tile.a_rows[part] - added.rows[part] == (rank - source) * m_shard for part in own)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(("world", "rank"), RANKS)
@pytest.mark.parametrize(("m_shard", "chunks"), ROWS)
def test_a_peers_strip_leaves_before_an_own_one_below_it(
    m_shard: int, chunks: int, world: int, rank: int, direct: bool, adds: bool
) -> None:
    """It is stored and counted before the own one is taken from the outbox. Each group takes as many panels as were loaded."""
    p = Product(world, rank, chunks, m_shard, WIDE)
    done = run_scatter(p, direct, exchange=False, adds=adds)
    for tile, (units, halves) in enumerate(pieces(p, units_of_tiles(p, Kind.GEMM_RS, direct, adds))):
        for part, (block, chunk) in enumerate(units):
            m_chunk = m_shard // chunks
            is_there = done.loads.tiles[tile].a_rows[part] < block * m_shard + (chunk + 1) * m_chunk
            added = len(halves) * (world - 1) if adds and block == rank else 0
            biased = len(halves) if adds and block == rank else 0
            does = [
                "product" if is_there else "no product",
                *["add"] * added,
                *["bias"] * biased,
                *["put"] * len(halves),
            ]
            assert done.multiplied[part][tile] == does
        assert done.stored[tile] == list(stores(units, len(halves), rank, done.stored[tile]))


@pytest.mark.parametrize("exchange", [False, True])
@pytest.mark.parametrize(("nodes", "world", "rank"), [case for case in NODES if case[0] > 1])
@pytest.mark.parametrize(("m_shard", "chunks"), ROWS)
def test_across_nodes_far_blocks_are_stored_first(
    m_shard: int, chunks: int, nodes: int, world: int, rank: int, exchange: bool
) -> None:
    """In the schedule's order, into staging; nothing is added."""
    p = Product(world, rank, chunks, m_shard, WIDE, nodes=nodes)
    done = run_scatter(p, direct=False, exchange=exchange, adds=False)
    units = [tile for tile, _ in pieces(p, units_of_tiles(p, Kind.GEMM_A2A if exchange else Kind.GEMM_RS, adds=False))]
    m_chunk = m_shard // chunks
    for tile, expected in zip(done.loads.tiles, units, strict=True):
        assert not tile.waits and not tile.adds
        of_rows = [chunk if exchange else block * chunks + chunk for block, chunk in expected]
        beyond = -(-m_chunk // 64) * 64 + 1  # a strip that a run lacks lies behind its last one
        assert all(row - of * m_chunk in range(beyond) for row, of in zip(tile.a_rows, of_rows, strict=True))
        assert not exchange or tile.b_col - expected[1][0] * WIDE in range(0, 512, 128), "two tiles of 256 columns"
    strips = HOPPER_TILE.counted(m_chunk, WIDE)
    peers = [target for target in range(world) if target != rank]
    assert done.counted == {target * 8 + chunk: strips for target in peers for chunk in range(chunks)}
    for target in peers:
        check(part_of(done.places[0], target, chunks), *((0, target * WIDE) if exchange else (target * m_shard, 0)))
    check(done.own, *((0, rank * WIDE) if exchange else (rank * m_shard, 0)))


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
@pytest.mark.parametrize(("nodes", "world", "rank"), NODES)
@pytest.mark.parametrize(("m_shard", "chunks"), ROWS)
def test_a_tile_waits_for_the_chunks_of_both_strips(
    m_shard: int, chunks: int, nodes: int, world: int, rank: int, exchange: bool
) -> None:
    p = Product(world, rank, chunks, m_shard, WIDE, nodes=nodes)
    loads, _ = run_gather(p, exchange)
    # a tile that is cut into halves is loaded twice, from the same rows
    seen = dict.fromkeys((t.descs, t.a_rows, t.b_col // 256, frozenset(t.waits)) for t in loads.tiles)
    expected = units_of_tiles(p, Kind.A2A_GEMM if exchange else Kind.AG_GEMM)
    if exchange:
        order = (rank, *sources(p.topology, Kind.A2A_GEMM))
        for turn, (descs, *_, waits) in enumerate(seen):
            source, units = order[turn % world], expected[turn // world]
            assert waits == (set() if source == rank else {source * 8 + chunk for _, chunk in units})
            assert descs == (("own",) if source == rank else ("arrived",)) * 2
        return
    for (descs, _, _, waits), units in zip(seen, expected, strict=True):
        assert waits == {block * 8 + chunk for block, chunk in units if block != rank}
        assert descs == tuple("own" if block == rank else "arrived" for block, _ in units)


@pytest.mark.parametrize("exchange", [False, True])
@pytest.mark.parametrize(("nodes", "world", "rank"), NODES)
@pytest.mark.parametrize(("m_shard", "chunks"), ROWS)
def test_a_gather_stores_every_row_once(
    m_shard: int, chunks: int, nodes: int, world: int, rank: int, exchange: bool
) -> None:
    """Few tiles are cut into halves, of 144 the last 12, and of 72 none. Rows of `own` are 0 ... m_shard - 1."""
    _, y = run_gather(Product(world, rank, chunks, m_shard, WIDE, nodes=nodes), exchange)
    if exchange:
        check(y, 0)  # of the own block, to which those of the peers are added
        return
    for source in range(world):
        check(part_of(y, source, chunks), 0 if source == rank else source * m_shard)


@pytest.mark.parametrize("exchange", [False, True])
@pytest.mark.parametrize(("nodes", "world", "rank"), [case for case in NODES if case[0] > 1])
@pytest.mark.parametrize(("m_shard", "chunks"), [(1, 1), (1400, 2), (264, 4), (4240, 1)])
def test_a_kernel_that_leaves_takes_what_is_here_and_the_next_one_goes_on(
    m_shard: int, chunks: int, nodes: int, world: int, rank: int, exchange: bool
) -> None:
    """Chunks of other nodes come one by one, and a kernel is launched before each."""
    p = Product(world, rank, chunks, m_shard, WIDE, nodes=nodes)
    far = sources(p.topology, Kind.A2A_GEMM if exchange else Kind.AG_GEMM)[p.topology.local - 1 :]
    turns = [(source, chunk) for chunk in range(chunks) for source in far]
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
        following = loads.tiles[end : end + (world if exchange else 1)]
        assert not following or any(tile.waits & absent for tile in following), "it leaves no sooner than it must"
    blocks = [0] if exchange else range(world)
    for block in blocks:
        check(y if exchange else part_of(y, block, chunks), 0 if exchange or block == rank else block * m_shard)


@pytest.mark.parametrize("scatters", [False, True])
@pytest.mark.parametrize(("world", "rank"), RANKS)
@pytest.mark.parametrize(("m_shard", "chunks"), ROWS)
def test_a_strips_scales_of_blocks_are_those_of_its_rows_and_columns(
    m_shard: int, chunks: int, world: int, rank: int, scatters: bool
) -> None:
    """Of rows that are loaded, none beyond the chunk, and of columns that b has: 384 are three squares in two tiles."""
    p, own, right, gathered, pitch = Product(world, rank, chunks, m_shard, 384, k=640), 10**9, 2 * 10**9, 3 * 10**9, 172
    m, panels = world * m_shard, 8  # so many of 5 a row of b's scales has room for
    bases = (own, right) if scatters else (own, right, gathered, pitch)
    for tile, part, (a_ptr, last, a_row, a_step, b_ptr, to_right) in scales_of_tiles(p, scatters, bases):
        assert (a_row, a_step) == ((1, m) if scatters else (pitch, 1))
        assert a_ptr == (gathered if tile.descs[part] == "arrived" else own) + tile.a_rows[part] * a_row
        chunk_end = -(-(tile.a_rows[part] + min(last, 0) + 1) // (m_shard // chunks)) * (m_shard // chunks)
        assert tile.a_rows[part] + last == chunk_end - 1
        assert b_ptr == right + tile.b_col // 128 * panels
        assert to_right == (panels if tile.b_col + 128 < p.n else 0)
