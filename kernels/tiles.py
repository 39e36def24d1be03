"""One output tile: where it lies, and its matrix product with fp32 accumulation."""

import triton
import triton.language as tl

from .order import gather_tile, scatter_tile, scatter_unit

WHOLE = tl.constexpr(-1)  # a tile that is not cut, instead of 0 for its left half or 1 for its right


@triton.jit
def tile_in_block(index, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Tile `index` of a [m, n] block -> (tile row, tile column), in groups of GROUP_M rows that share columns in L2."""
    return tile_in_groups(index, tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), GROUP_M)


@triton.jit
def tile_in_groups(index, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """Tile `index` of tiles_m x tiles_n -> (tile row, tile column), in groups of GROUP_M rows."""
    group = index // (GROUP_M * tiles_n)
    first_m = group * GROUP_M
    group_m = tl.minimum(tiles_m - first_m, GROUP_M)
    within = index % (GROUP_M * tiles_n)
    return first_m + within % group_m, within // group_m


# The Hopper kernels cut each unit (one chunk of a block) into strips of rows, number the strips through a run of units, and
# multiply two strips a tile. So a tile may cross from one unit into the next. Only the last tile row of a run may lack a strip.


@triton.jit
def tiles_in_run(strips, units, tiles_n):
    """Tiles of a run of `units` units with `strips` strips each: two strips a tile, in the last one perhaps one."""
    return tl.cdiv(strips * units, 2) * tiles_n


@triton.jit
def tile_in_run(index, strips, units, tiles_n, GROUP_M: tl.constexpr):
    """The index-th tile of a run -> (pair, tile column). Pair p has the run's strips 2p and 2p + 1.

    A pair belongs to the unit of its last strip. One that crosses from the unit before comes first, with all its columns, so that
    the chunk that ends in it is complete soon. The others follow in groups of GROUP_M.
    """
    unit = tl.minimum((2 * (index // tiles_n) + 1) // strips, units - 1)
    crosses = unit * strips % 2
    first = unit * strips // 2
    end = tl.where(unit == units - 1, tl.cdiv(strips * units, 2), (unit + 1) * strips // 2)
    within = index - (first + crosses) * tiles_n
    if within < 0:
        pair, col = first, within + tiles_n
    else:
        row, col = tile_in_groups(within, end - first - crosses, tiles_n, GROUP_M)
        pair = first + crosses + row
    return pair, col


@triton.jit
def strip_in_run(strip, strips, units):
    """Strip of a run -> (its unit, number in it). One beyond the run is number `strips` of the last unit: behind its rows."""
    unit = tl.minimum(strip // strips, units - 1)
    return unit, strip - unit * strips


@triton.jit
def gather_strip(strip, strips, rank, WORLD: tl.constexpr, LOCAL: tl.constexpr, CHUNKS: tl.constexpr):
    """Strip of a gather's only run -> (source rank, its chunk, number in the chunk)."""
    unit, number = strip_in_run(strip, strips, WORLD * CHUNKS)
    source, chunk = gather_tile(unit, rank, WORLD, LOCAL, CHUNKS)
    return source, chunk, number


@triton.jit
def tiles_in_scatter(strips, tiles_n, WORLD: tl.constexpr, CHUNKS: tl.constexpr, RUN: tl.constexpr):
    """Tiles of all runs. RUN: units of a run, in the order of scatter_tile; the last run may have fewer."""
    whole = WORLD * CHUNKS // RUN * tiles_in_run(strips, RUN, tiles_n)
    return whole + tiles_in_run(strips, WORLD * CHUNKS % RUN, tiles_n)


@triton.jit
def scatter_pair(index, strips, tiles_n, rank, WORLD: tl.constexpr, CHUNKS: tl.constexpr, RUN: tl.constexpr,
                 INTERLEAVED: tl.constexpr, GROUP_M: tl.constexpr):  # fmt: skip
    """The index-th tile to be multiplied -> (run, pair in the run, tile column)."""
    per_run = tiles_in_run(strips, RUN, tiles_n)
    run = index // per_run
    within = index % per_run
    if INTERLEAVED and WORLD > 2:  # a run is one target's
        target, _, within = scatter_tile(index, per_run, rank, WORLD, WORLD, 1, INTERLEAVED)
        run = (target + WORLD - rank - 1) % WORLD
    pair, col = tile_in_run(within, strips, tl.minimum(RUN, WORLD * CHUNKS - run * RUN), tiles_n, GROUP_M)
    return run, pair, col


@triton.jit
def scatter_strip(run, strip, strips, rank, WORLD: tl.constexpr, LOCAL: tl.constexpr, CHUNKS: tl.constexpr,
                  RUN: tl.constexpr):  # fmt: skip
    """Strip of a scatter's run -> (target rank, its chunk, number in the chunk)."""
    unit, number = strip_in_run(strip, strips, tl.minimum(RUN, WORLD * CHUNKS - run * RUN))
    target, chunk = scatter_unit(run * RUN + unit, rank, WORLD, LOCAL, CHUNKS)
    return target, chunk, number


@triton.jit
def first_cut(total, programs):
    """Of `total` tiles the first that is cut into halves: those of the last wave, if at least half of the programs would have
    nothing to do in it; `total` if none is."""
    rest = total % programs
    return total - tl.where(2 * rest <= programs, rest, 0)


@triton.jit
def first_cut_of_scatter(strips, tiles_n, programs, WORLD: tl.constexpr, CHUNKS: tl.constexpr, RUN: tl.constexpr):
    """As first_cut, of the tiles of all runs, if the last wave has no more of them than there are pairs of own strips: then none
    has a peer's strip, of which two halves would be counted as two."""
    total = tiles_in_scatter(strips, tiles_n, WORLD, CHUNKS, RUN)
    halved = first_cut(total, programs)
    own = strips * CHUNKS // 2 * tiles_n
    return tl.where(total - halved <= own, halved, total)


@triton.jit
def cut_of_gather(m_chunk, n, programs, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, UNITS: tl.constexpr):
    """How a gather's product is cut -> (strips of a chunk, columns of tiles, tiles, the first of them that is cut into halves).

    Every group of warps works it out for itself, because all that they share is the number of a piece of work (tile_and_side).
    UNITS: chunks of all rows.
    """
    strips, tiles_n = tl.cdiv(m_chunk, ROWS), tl.cdiv(n, BLOCK_N)
    total = tiles_in_run(strips, UNITS, tiles_n)
    return strips, tiles_n, total, first_cut(total, programs)


@triton.jit
def pieces_below(units, strips, tiles_n, total, halved, UNITS: tl.constexpr):
    """Pieces of work (tile_and_side) that need none but the first `units` of UNITS chunks of a gather's run."""
    tiles = tl.where(units == UNITS, total, units * strips // 2 * tiles_n)
    return tl.where(tiles <= halved, tiles, 2 * tiles - halved)


@triton.jit
def cut_of_scatter(m_chunk, n, programs, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, WORLD: tl.constexpr, CHUNKS: tl.constexpr,
                   RUN: tl.constexpr):  # fmt: skip
    """As cut_of_gather, of a scatter's product."""
    strips, tiles_n = tl.cdiv(m_chunk, ROWS), tl.cdiv(n, BLOCK_N)
    halved = first_cut_of_scatter(strips, tiles_n, programs, WORLD, CHUNKS, RUN)
    return strips, tiles_n, tiles_in_scatter(strips, tiles_n, WORLD, CHUNKS, RUN), halved


@triton.jit
def tile_and_side(index, halved):
    """The index-th piece of work -> (tile, side): whole tiles, then from tile `halved` on both halves of each."""
    beyond = index - halved
    return tl.where(beyond < 0, index, halved + beyond // 2), tl.where(beyond < 0, WHOLE, beyond % 2)


@triton.jit
def columns_of(tile_n, side, BLOCK_N: tl.constexpr):
    """(First column, how many halves) of a whole tile, or of the half that `side` says."""
    is_whole = side == WHOLE
    return tile_n * BLOCK_N + tl.where(is_whole, 0, side * (BLOCK_N // 2)), tl.where(is_whole, 2, 1)


@triton.jit
def tile_offsets(tile_m, tile_n, m_shard, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Row and column indices of a tile as int64 [BLOCK_M, 1], [1, BLOCK_N], and the mask of those inside [m_shard, n]."""
    rows = tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (rows < m_shard)[:, None] & (cols < n)[None, :]
    return rows[:, None], cols[None, :], mask


@triton.jit
def plus_bias(acc, bias_ptr, cols, n):
    """acc [BLOCK_M, BLOCK_N] fp32 + bias [n] of the columns `cols` [1, BLOCK_N]; acc where there is no bias (None)."""
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + cols, mask=cols < n, other=0.0).to(tl.float32)
    return acc


@triton.jit
def tile_product(
    acc, a_ptr, b_ptr, tile_m, tile_n, m_shard, n, k, stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc [BLOCK_M, BLOCK_N] fp32 += a[rows of the tile, :] [m_shard, k] @ b[:, columns of the tile] [k, n].

    Rows and columns past the edge wrap around instead of being masked: their products are never stored, and the inner loop
    keeps full vector loads. Only the last step along k is masked.
    """
    rows = (tile_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)) % m_shard
    cols = (tile_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)) % n
    depth = tl.arange(0, BLOCK_K).to(tl.int64)
    a_ptrs = a_ptr + rows[:, None] * stride_am + depth[None, :] * stride_ak
    b_ptrs = b_ptr + depth[:, None] * stride_bk + cols[None, :] * stride_bn
    for start in range(0, k, BLOCK_K):
        left = k - start
        a = tl.load(a_ptrs, mask=depth[None, :] < left, other=0.0)
        b = tl.load(b_ptrs, mask=depth[:, None] < left, other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    return acc
