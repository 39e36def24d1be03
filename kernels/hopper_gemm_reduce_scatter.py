"""GEMM + ReduceScatter, or GEMM + AllToAll, for Hopper: gemm_reduce_scatter.py's protocol around hopper_tiles.py's GEMM.

A second single warp stores finished tiles by TMA, partial ones into staging or (DIRECT) straight to the peer, waits until they
are written and counts them at once. While the multiplying warps counted them, one tile later, the last chunk left up to 40
microseconds late.

The loading warp waits for the peers' partials of an own tile and brings them through the same ring as the panels, in halves
[BLOCK_M, BLOCK_N / 2] where B's panels lie otherwise. When the multiplying warps loaded them themselves, 4 bytes a thread at a
time with nothing in flight, the reduction cost 0.1 ms of 0.34 ms (8192 x 4096 x 11008, 4 x H200).

The last wave's tiles are cut into halves as in hopper_all_gather_gemm.py, if only own rows are in them.

A tile may have a peer's strip above and an own one below, but not where own tiles add: all CTAs might hold such tiles, and wait
for what their peers' CTAs owe in those that come after (units_in_run).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hopper_scaled import (
    BLOCKS,
    PRECISE,
    UNSCALED,
    half_product,
    no_whole_product,
    registers,
    scale_of_product,
    scales_of_strip,
    whole_product,
)
from .hopper_stores import make_outbox, put_quarter, store_strip, stores_are_written
from .hopper_tiles import (
    NO_TILE,
    PARTS,
    WARPS,
    add_half,
    claim_tile,
    fence_for_tma,
    load_halves,
    load_tile_or_half,
    make_rings,
    next_tile,
    pass_tile,
    plus_bias,
)
from .signal import finalize_epoch, next_word, notify_copy_engine, notify_peer, signal_word, wait_both
from .tiles import WHOLE, columns_of, cut_of_scatter, scatter_pair, scatter_strip, tile_and_side


@gluon.jit
def _load(panels, tiles, a_desc, b_desc, b_half_desc, received_desc, counter_ptr, words, sizes,
          WORLD: gl.constexpr, LOCAL: gl.constexpr, CHUNKS: gl.constexpr, RUN: gl.constexpr, DIRECT: gl.constexpr,
          REDUCE: gl.constexpr, EXCHANGE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
          GROUP_M: gl.constexpr, STAGES: gl.constexpr, B_IS_NK: gl.constexpr):  # fmt: skip
    """The loading warp: claims tiles, brings A and B through the ring and, for own tiles (REDUCE), what each peer has sent."""
    ROWS: gl.constexpr = BLOCK_M // PARTS
    rank, signals_ptr, epoch_ptr, abort_ptr, record_ptr, tag, limit = words
    m_shard, n, k = sizes
    m_chunk = m_shard // CHUNKS
    strips, tiles_n, total, halved = cut_of_scatter(m_chunk, n, gl.num_programs(0), ROWS, BLOCK_N, WORLD, CHUNKS, RUN)
    k_steps = gl.cdiv(k, BLOCK_K)
    expected = next_word(gl.load(epoch_ptr), tag) if DIRECT else gl.load(epoch_ptr)
    step = 0
    turn = 0
    index = claim_tile(tiles, turn, counter_ptr, 2 * total - halved)
    while index != NO_TILE:
        tile, side = tile_and_side(index, halved)
        run, pair, tile_n = scatter_pair(tile, strips, tiles_n, rank, WORLD, CHUNKS, RUN, DIRECT, GROUP_M)
        upper_target, upper_chunk, upper_strip = scatter_strip(run, 2 * pair, strips, rank, WORLD, LOCAL, CHUNKS, RUN)
        target, chunk, strip = scatter_strip(run, 2 * pair + 1, strips, rank, WORLD, LOCAL, CHUNKS, RUN)
        upper, row = upper_chunk * m_chunk + upper_strip * ROWS, chunk * m_chunk + strip * ROWS
        upper_a = upper if EXCHANGE else upper_target * m_shard + upper
        lower_a = row if EXCHANGE else target * m_shard + row
        b_col = target * n + tile_n * BLOCK_N if EXCHANGE else tile_n * BLOCK_N
        step = load_tile_or_half(panels, step, a_desc, a_desc, b_desc, b_half_desc, upper_a, lower_a, b_col, 0, side, k_steps,
                                 BLOCK_N, BLOCK_K, STAGES, B_IS_NK)  # fmt: skip
        if target == rank:  # and where it adds, so is the upper strip's
            first_col, halves = columns_of(tile_n, side, BLOCK_N)
            for source in gl.static_range(WORLD):
                if REDUCE and source != rank:
                    word, upper_word = signal_word(source, chunk), signal_word(source, upper_chunk)
                    wait_both(signals_ptr, upper_word, word, expected, abort_ptr, record_ptr, limit)
                    fence_for_tma()
                    above = source * m_shard
                    step = load_halves(
                        panels, step, received_desc, above + upper, above + row, first_col, halves, STAGES
                    )
        turn += 1
        index = claim_tile(tiles, turn, counter_ptr, 2 * total - halved)


@gluon.jit
def _multiply(panels, tiles, outbox, b_desc, b_half_desc, received_desc, bias_ptr, abort_ptr, rank, sizes, scales,
              PART: gl.constexpr, WORLD: gl.constexpr, LOCAL: gl.constexpr, CHUNKS: gl.constexpr, RUN: gl.constexpr,
              DIRECT: gl.constexpr, REDUCE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
              GROUP_M: gl.constexpr, STAGES: gl.constexpr, B_IS_NK: gl.constexpr, BUFFERS: gl.constexpr,
              SCALING: gl.constexpr):  # fmt: skip
    """A multiplying group: multiplies strip PART of each tile, adds what the peers have sent and the bias to own rows (REDUCE),
    and puts it into the outbox, a quarter of a whole tile at a time."""
    ROWS: gl.constexpr = BLOCK_M // PARTS
    HALF: gl.constexpr = BLOCK_N // 2
    m_shard, n, k = sizes
    m_chunk = m_shard // CHUNKS
    strips, tiles_n, _, halved = cut_of_scatter(m_chunk, n, gl.num_programs(0), ROWS, BLOCK_N, WORLD, CHUNKS, RUN)
    k_steps = gl.cdiv(k, BLOCK_K)
    scale = scale_of_product(scales, SCALING)
    step = 0
    turn = 0
    index = next_tile(tiles, turn, WARPS)
    while index != NO_TILE:
        tile, side = tile_and_side(index, halved)
        run, pair, tile_n = scatter_pair(tile, strips, tiles_n, rank, WORLD, CHUNKS, RUN, DIRECT, GROUP_M)
        target, chunk, strip = scatter_strip(run, 2 * pair + PART, strips, rank, WORLD, LOCAL, CHUNKS, RUN)
        col, _ = columns_of(tile_n, side, BLOCK_N)
        by = scale
        if SCALING == BLOCKS:
            row = strip * ROWS
            first = target * m_shard + chunk * m_chunk + row
            by = scales_of_strip(scales[0], 1, WORLD * m_shard, scales[1], first, m_chunk - row, col, n, k)
        if side == WHOLE:
            # A strip beyond the run has no rows, and the other group has the tensor cores for itself. Not with sums in fp32: a
            # second way to them spills 330 bytes, and products take 1.4 times as long.
            if SCALING >= PRECISE or strip < strips:
                left, right, step = whole_product(panels, step, b_desc, b_half_desc, k_steps, by, PART, ROWS, BLOCK_N,
                                                  STAGES, B_IS_NK, SCALING)  # fmt: skip
            else:
                left, right, step = no_whole_product(panels, step, k_steps, ROWS, BLOCK_N, STAGES)
            if REDUCE and target == rank:
                # In the order of ranks. Unrolled, the additions came last and 550 bytes spilled.
                for _ in range(WORLD - 1):
                    left, step = add_half(panels, step, left, received_desc, PART, STAGES)
                    right, step = add_half(panels, step, right, received_desc, PART, STAGES)
                left = plus_bias(left, bias_ptr, col, n)
                right = plus_bias(right, bias_ptr, col + HALF, n)
                if gl.load(abort_ptr, volatile=True) != 0:  # a wait gave up: what was added must not look like a result
                    left, right = left + float("nan"), right + float("nan")
            put_quarter(outbox, turn, left, PART, 0, BUFFERS)
            put_quarter(outbox, turn, right, PART, 1, BUFFERS)
        else:  # of own rows
            if SCALING >= PRECISE or strip < strips:
                half, step = half_product(panels, step, b_half_desc, k_steps, by, PART, ROWS, HALF, STAGES,
                                          B_IS_NK, SCALING)  # fmt: skip
            else:
                half, step = pass_tile(panels, step, k_steps, ROWS, HALF, STAGES)
            if REDUCE:
                for _ in range(WORLD - 1):
                    half, step = add_half(panels, step, half, received_desc, PART, STAGES)
                half = plus_bias(half, bias_ptr, col, n)
                if gl.load(abort_ptr, volatile=True) != 0:
                    half = half + float("nan")
            put_quarter(outbox, turn, half, PART, 0, BUFFERS)
        turn += 1
        index = next_tile(tiles, turn, WARPS)


@gluon.jit
def _store(tiles, outbox, places, y_desc, complete_ptr, outgoing_at_ptr, epoch_ptr, tag, rank, sizes,
           WORLD: gl.constexpr, LOCAL: gl.constexpr, CHUNKS: gl.constexpr, RUN: gl.constexpr, DIRECT: gl.constexpr,
           BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr, BUFFERS: gl.constexpr,
           SHARES: gl.constexpr):  # fmt: skip
    """The storing warp: takes quarters out of the outbox, stores them where they belong, and counts a peer's strips. SHARES: and
    the halves of own strips, which may be cut."""
    ROWS: gl.constexpr = BLOCK_M // PARTS
    m_shard, n, _ = sizes
    strips, tiles_n, _, halved = cut_of_scatter(
        m_shard // CHUNKS, n, gl.num_programs(0), ROWS, BLOCK_N, WORLD, CHUNKS, RUN
    )
    expected = next_word(gl.load(epoch_ptr), tag) if DIRECT else gl.load(epoch_ptr)
    turn = 0
    index = next_tile(tiles, turn, 1)
    while index != NO_TILE:
        tile, side = tile_and_side(index, halved)
        run, pair, tile_n = scatter_pair(tile, strips, tiles_n, rank, WORLD, CHUNKS, RUN, DIRECT, GROUP_M)
        upper_target, upper_chunk, upper_strip = scatter_strip(run, 2 * pair, strips, rank, WORLD, LOCAL, CHUNKS, RUN)
        target, chunk, strip = scatter_strip(run, 2 * pair + 1, strips, rank, WORLD, LOCAL, CHUNKS, RUN)
        crosses = strip == 0  # from the chunk before
        col, halves = columns_of(tile_n, side, BLOCK_N)
        _store_strip(outbox, turn, places, y_desc, rank, upper_target, upper_chunk, upper_strip * ROWS, col, halves,
                     0, WORLD, CHUNKS, DIRECT, BUFFERS)  # fmt: skip
        weight = 1
        if SHARES:
            weight = gl.where(target == rank, halves, 1)  # the upper strip is own, too, since own tiles add
        if crosses and (SHARES or upper_target != rank):
            _count(complete_ptr, outgoing_at_ptr, upper_target, upper_chunk, weight, strips * tiles_n, expected, DIRECT)
        _store_strip(outbox, turn, places, y_desc, rank, target, chunk, strip * ROWS, col, halves,
                     1, WORLD, CHUNKS, DIRECT, BUFFERS)  # fmt: skip
        if SHARES or target != rank:
            stored = gl.where(crosses | (strip == strips), 1, 2)  # number `strips` lies beyond the run
            _count(complete_ptr, outgoing_at_ptr, target, chunk, stored * weight, strips * tiles_n, expected, DIRECT)
        turn += 1
        index = next_tile(tiles, turn, 1)


@gluon.jit
def _store_strip(outbox, turn, places, y_desc, rank, target, chunk, row, col, halves, PART: gl.constexpr,
                 WORLD: gl.constexpr, CHUNKS: gl.constexpr, DIRECT: gl.constexpr, BUFFERS: gl.constexpr):  # fmt: skip
    """Strip PART of a tile, from `row` of its chunk on, where it belongs: here, in staging or (DIRECT) at the peer."""
    if target == rank:
        store_strip(y_desc, outbox, turn, chunk, row, col, halves, PART, BUFFERS)
    else:
        if DIRECT:
            for distance in gl.static_range(1, WORLD):
                if target == (rank + distance) % WORLD:
                    store_strip(places[distance - 1], outbox, turn, chunk, row, col, halves, PART, BUFFERS)
        else:
            store_strip(places[0], outbox, turn, target * CHUNKS + chunk, row, col, halves, PART, BUFFERS)


@gluon.jit
def _count(complete_ptr, outgoing_at_ptr, target, chunk, stored, of_chunk, expected, DIRECT: gl.constexpr):
    """Count `stored` strips of the `of_chunk` that a chunk has, once they are written."""
    stores_are_written()
    counter_ptr = complete_ptr + signal_word(target, chunk)
    if DIRECT:
        signals_ptr = gl.load(outgoing_at_ptr + target).to(complete_ptr.dtype)
        notify_peer(counter_ptr, of_chunk, signals_ptr + chunk, expected, stored)
    else:
        notify_copy_engine(counter_ptr, stored)


@gluon.jit(do_not_specialize=["m_shard", "rank", "tag", "limit"])
def hopper_gemm_reduce_scatter_kernel(
    a_desc, b_desc, b_half_desc, received_desc, bias_ptr, y_desc, to1_desc, to2_desc, to3_desc, to4_desc, to5_desc, to6_desc,
    to7_desc, m_shard, n, k,
    rank, counter_ptr, complete_ptr, left_ptr, outgoing_at_ptr, signals_ptr, epoch_ptr, abort_ptr, record_ptr, tag, limit,
    WORLD: gl.constexpr, LOCAL: gl.constexpr, CHUNKS: gl.constexpr, RUN: gl.constexpr, DIRECT: gl.constexpr,
    REDUCE: gl.constexpr, EXCHANGE: gl.constexpr, SHARES: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr, B_IS_NK: gl.constexpr,
    num_warps: gl.constexpr, a_scale_ptr=None, b_scale_ptr=None, SCALING: gl.constexpr = UNSCALED,
):  # fmt: skip
    """a [M, K] times b, [N, K] or [K, N] by B_IS_NK; M/W divisible by CHUNKS, rows 16-byte aligned.

    b_half_desc: b again, in panels half as wide. received_desc: [M, N], block s from rank s. y_desc: [M/W, N] as
    [CHUNKS, M/W/CHUNKS, N], as all that is stored.
    RUN: how many chunks, in their order, the strips of tiles run through before they begin anew (units_in_run).
    EXCHANGE: a is [M/W, K], a destination picks columns of b, and where N stands it is N/W (gemm_reduce_scatter.py).
    REDUCE: the own tiles wait for the peers' partials and add them, and bias [N], or None; else y is the own partial.
    SHARES: with REDUCE, own strips are counted as well: the copy engine sends sums on.
    BUFFERS: of the outbox for each half of a tile (make_outbox); two and three stages, or one and four, fit into shared memory.
    to1_desc: staging [M, N], in W x CHUNKS chunks; with DIRECT to1_desc ... to7_desc are this rank's blocks [M/W, N] at ranks
    rank+1, rank+2, ...
    SCALING: hopper_scaled.py. With BLOCKS a_scale_ptr is [K/128, M].
    """
    gl.static_assert(num_warps == WARPS)  # of the first multiplying group
    panels, tiles = make_rings(a_desc, b_desc, STAGES, READERS=PARTS + 1)
    outbox = make_outbox(y_desc, BUFFERS)
    places = (to1_desc, to2_desc, to3_desc, to4_desc, to5_desc, to6_desc, to7_desc)
    words = (rank, signals_ptr, epoch_ptr, abort_ptr, record_ptr, tag, limit)
    sizes = (m_shard, n, k)
    scales = (a_scale_ptr, b_scale_ptr)
    gl.warp_specialize([
        (_multiply, (panels, tiles, outbox, b_desc, b_half_desc, received_desc, bias_ptr, abort_ptr, rank, sizes, scales, 0,
                     WORLD, LOCAL, CHUNKS, RUN, DIRECT, REDUCE, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES, B_IS_NK, BUFFERS,
                     SCALING)),
        (_multiply, (panels, tiles, outbox, b_desc, b_half_desc, received_desc, bias_ptr, abort_ptr, rank, sizes, scales, 1,
                     WORLD, LOCAL, CHUNKS, RUN, DIRECT, REDUCE, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES, B_IS_NK, BUFFERS,
                     SCALING)),
        (_load, (panels, tiles, a_desc, b_desc, b_half_desc, received_desc, counter_ptr, words, sizes, WORLD, LOCAL, CHUNKS,
                 RUN, DIRECT, REDUCE, EXCHANGE, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES, B_IS_NK)),
        (_store, (tiles, outbox, places, y_desc, complete_ptr, outgoing_at_ptr, epoch_ptr, tag, rank, sizes, WORLD, LOCAL,
                  CHUNKS, RUN, DIRECT, BLOCK_M, BLOCK_N, GROUP_M, BUFFERS, SHARES)),
    ], [WARPS, 1, 1], registers(SCALING, 2))  # fmt: skip
    if DIRECT:
        finalize_epoch(left_ptr, epoch_ptr, next_word(gl.load(epoch_ptr), tag), WORLD)
