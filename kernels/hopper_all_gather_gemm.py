"""AllGather + GEMM for Hopper: all_gather_gemm.py's protocol around the warp-specialised GEMM of hopper_tiles.py.

Tiles are computed in waves, one for each SM. Where the last wave would leave at least half of the SMs without one, its tiles are
cut into left and right halves: 5.5 waves instead of 6 for 704 tiles on 132 SMs (8192 x 2752).

A storing warp takes finished tiles out of the outbox (hopper_stores.py). With DIRECT two more warps of each CTA store the own
rows at the peers (p2p_store.py), through registers: beside four stages there is no shared memory left for that.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .arrivals import units_to_take
from .hopper_scaled import BLOCKS, UNSCALED, half_product, registers, scale_of_product, scales_of_strip, whole_product
from .hopper_stores import make_outbox, put_quarter, store_strip
from .hopper_tiles import (
    NO_TILE,
    PARTS,
    WARPS,
    claim_tile,
    fence_for_tma,
    load_tile_or_half,
    make_rings,
    next_tile,
    plus_bias,
    wait_for_panel,
)
from .p2p_store import store_at_peers
from .signal import finalize_epoch, next_word, signal_word, wait_both
from .tiles import WHOLE, columns_of, cut_of_gather, gather_strip, pieces_below, tile_and_side, tile_in_run

# Warps of a CTA that send rows; with the loading and the storing one they are the four that there is room for.
SENDERS = gl.constexpr(2)


@gluon.jit
def _load(panels, tiles, own_desc, gathered_desc, b_desc, b_half_desc, words, sizes,
          WORLD: gl.constexpr, LOCAL: gl.constexpr, CHUNKS: gl.constexpr, DIRECT: gl.constexpr, BLOCK_M: gl.constexpr,
          BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
          B_IS_NK: gl.constexpr):  # fmt: skip
    """The loading warp: claims tiles, waits until the rows of both strips are here, and brings A and B through the ring."""
    ROWS: gl.constexpr = BLOCK_M // PARTS
    rank, counter_ptr, signals_ptr, epoch_ptr, abort_ptr, record_ptr, tag, limit, leaves, here_ptr = words
    m_shard, n, k = sizes
    m_chunk = m_shard // CHUNKS
    strips, tiles_n, total, halved = cut_of_gather(m_chunk, n, gl.num_programs(0), ROWS, BLOCK_N, WORLD * CHUNKS)
    k_steps = gl.cdiv(k, BLOCK_K)
    expected = next_word(gl.load(epoch_ptr), tag) if DIRECT else gl.load(epoch_ptr)
    units = units_to_take(leaves, here_ptr, LOCAL * CHUNKS, WORLD * CHUNKS, LOCAL < WORLD)
    bound = pieces_below(units, strips, tiles_n, total, halved, WORLD * CHUNKS)
    step = 0
    turn = 0
    index = claim_tile(tiles, turn, counter_ptr, bound, NO_TILE, LOCAL < WORLD)
    while index != NO_TILE:
        tile, side = tile_and_side(index, halved)
        pair, tile_n = tile_in_run(tile, strips, WORLD * CHUNKS, tiles_n, GROUP_M)
        upper_source, upper_chunk, upper_strip = gather_strip(2 * pair, strips, rank, WORLD, LOCAL, CHUNKS)
        source, chunk, strip = gather_strip(2 * pair + 1, strips, rank, WORLD, LOCAL, CHUNKS)
        upper, row = upper_chunk * m_chunk + upper_strip * ROWS, chunk * m_chunk + strip * ROWS
        col = tile_n * BLOCK_N
        # A call for each pair of descriptors. Choosing them at run time compiles, too (Triton 3.6), but was not measured.
        if source == rank:  # and so is the upper strip's: own rows come first
            step = load_tile_or_half(panels, step, own_desc, own_desc, b_desc, b_half_desc, upper, row, col, 0, side, k_steps,
                                     BLOCK_N, BLOCK_K, STAGES, B_IS_NK)  # fmt: skip
        else:
            word, upper_word = signal_word(source, chunk), signal_word(upper_source, upper_chunk)
            upper_word = gl.where(upper_source == rank, word, upper_word)
            wait_both(signals_ptr, upper_word, word, expected, abort_ptr, record_ptr, limit)
            fence_for_tma()
            row += source * m_shard
            if upper_source == rank:
                step = load_tile_or_half(panels, step, own_desc, gathered_desc, b_desc, b_half_desc, upper, row, col, 0, side,
                                         k_steps, BLOCK_N, BLOCK_K, STAGES, B_IS_NK)  # fmt: skip
            else:
                upper += upper_source * m_shard
                step = load_tile_or_half(panels, step, gathered_desc, gathered_desc, b_desc, b_half_desc, upper, row, col, 0,
                                         side, k_steps, BLOCK_N, BLOCK_K, STAGES, B_IS_NK)  # fmt: skip
        turn += 1
        index = claim_tile(tiles, turn, counter_ptr, bound, index, LOCAL < WORLD)


@gluon.jit
def multiply_tiles(panels, tiles, outbox, b_desc, b_half_desc, bias_ptr, abort_ptr, rank, sizes, scales, PART: gl.constexpr,
                   WORLD: gl.constexpr, LOCAL: gl.constexpr, CHUNKS: gl.constexpr, BLOCK_M: gl.constexpr,
                   BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
                   B_IS_NK: gl.constexpr, SCALING: gl.constexpr):  # fmt: skip
    """A multiplying group: multiplies strip PART of each tile that the loading warp hands over, adds the bias, if there is one,
    and puts it into the outbox."""
    ROWS: gl.constexpr = BLOCK_M // PARTS
    m_shard, n, k = sizes
    m_chunk = m_shard // CHUNKS
    strips, tiles_n, _, halved = cut_of_gather(m_chunk, n, gl.num_programs(0), ROWS, BLOCK_N, WORLD * CHUNKS)
    k_steps = gl.cdiv(k, BLOCK_K)
    scale = scale_of_product(scales, SCALING)
    step = 0
    turn = 0
    index = next_tile(tiles, turn, WARPS)
    while index != NO_TILE:
        tile, side = tile_and_side(index, halved)
        pair, tile_n = tile_in_run(tile, strips, WORLD * CHUNKS, tiles_n, GROUP_M)
        col, _ = columns_of(tile_n, side, BLOCK_N)
        by = scale
        if SCALING == BLOCKS:
            own_ptr, b_ptr, gathered_ptr, pitch = scales
            source, chunk, strip = gather_strip(2 * pair + PART, strips, rank, WORLD, LOCAL, CHUNKS)
            a_ptr = gathered_ptr + gl.cast(source * m_shard, gl.int64) * pitch
            a_ptr = gl.where(source == rank, own_ptr, a_ptr)
            row = strip * ROWS
            wait_for_panel(panels, step, STAGES)
            by = scales_of_strip(a_ptr, pitch, 1, b_ptr, chunk * m_chunk + row, m_chunk - row, col, n, k)
        if side == WHOLE:
            left, right, step = whole_product(panels, step, b_desc, b_half_desc, k_steps, by, PART, ROWS, BLOCK_N,
                                              STAGES, B_IS_NK, SCALING)  # fmt: skip
            if gl.load(abort_ptr, volatile=True) != 0:
                left, right = left + float("nan"), right + float("nan")
            put_quarter(outbox, turn, plus_bias(left, bias_ptr, col, n), PART, 0, BUFFERS=1)
            put_quarter(outbox, turn, plus_bias(right, bias_ptr, col + BLOCK_N // 2, n), PART, 1, BUFFERS=1)
        else:
            half, step = half_product(panels, step, b_half_desc, k_steps, by, PART, ROWS, BLOCK_N // 2, STAGES,
                                      B_IS_NK, SCALING)  # fmt: skip
            if gl.load(abort_ptr, volatile=True) != 0:
                half = half + float("nan")
            put_quarter(outbox, turn, plus_bias(half, bias_ptr, col, n), PART, 0, BUFFERS=1)
        turn += 1
        index = next_tile(tiles, turn, WARPS)


@gluon.jit
def store_tiles(tiles, outbox, y_desc, rank, sizes, WORLD: gl.constexpr, LOCAL: gl.constexpr, CHUNKS: gl.constexpr,
                BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr):  # fmt: skip
    """The storing warp: stores each tile's quarters in y as they come into the outbox."""
    ROWS: gl.constexpr = BLOCK_M // PARTS
    m_shard, n, _ = sizes
    strips, tiles_n, _, halved = cut_of_gather(m_shard // CHUNKS, n, gl.num_programs(0), ROWS, BLOCK_N, WORLD * CHUNKS)
    turn = 0
    index = next_tile(tiles, turn, 1)
    while index != NO_TILE:
        tile, side = tile_and_side(index, halved)
        pair, tile_n = tile_in_run(tile, strips, WORLD * CHUNKS, tiles_n, GROUP_M)
        col, halves = columns_of(tile_n, side, BLOCK_N)
        for part in gl.static_range(PARTS):
            source, chunk, strip = gather_strip(2 * pair + part, strips, rank, WORLD, LOCAL, CHUNKS)
            store_strip(y_desc, outbox, turn, source * CHUNKS + chunk, strip * ROWS, col, halves, part, BUFFERS=1)
        turn += 1
        index = next_tile(tiles, turn, 1)


@gluon.jit
def send_rows(own_ptr, words, places, sizes, WORLD: gl.constexpr, CHUNKS: gl.constexpr, DIRECT: gl.constexpr,
              PIECE: gl.constexpr, STEP: gl.constexpr, EXCHANGE: gl.constexpr):  # fmt: skip
    """SENDERS warps: store the own rows at the peers (DIRECT), else nothing."""
    if DIRECT:
        sent_ptr, complete_ptr, memory_at_ptr, outgoing_at_ptr = places
        m_shard, _, pitch = sizes
        # What a thread stores at once: 16 bytes.
        VECTOR: gl.constexpr = 128 // own_ptr.dtype.element_ty.primitive_bitwidth
        layout: gl.constexpr = gl.BlockedLayout([VECTOR], [32], [SENDERS], [0])
        lane = gl.arange(0, STEP, layout)
        store_at_peers(own_ptr, m_shard // CHUNKS * pitch, lane, words[0], sent_ptr, complete_ptr, memory_at_ptr, outgoing_at_ptr,
                       next_word(gl.load(words[3]), words[6]), WORLD, CHUNKS, PIECE, STEP, EXCHANGE)  # fmt: skip


@gluon.jit(do_not_specialize=["m_shard", "rank", "tag", "limit", "leaves"])
def hopper_all_gather_gemm_kernel(
    own_desc, own_ptr, gathered_desc, b_desc, b_half_desc, bias_ptr, y_desc, m_shard, n, k, pitch,
    rank, counter_ptr, signals_ptr, epoch_ptr, abort_ptr, record_ptr, tag, limit, leaves, here_ptr,
    sent_ptr, complete_ptr, left_ptr, memory_at_ptr, outgoing_at_ptr,
    WORLD: gl.constexpr, LOCAL: gl.constexpr, CHUNKS: gl.constexpr, DIRECT: gl.constexpr, PIECE: gl.constexpr,
    STEP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
    STAGES: gl.constexpr, B_IS_NK: gl.constexpr, num_warps: gl.constexpr, a_scale_ptr=None, b_scale_ptr=None,
    gathered_scale_ptr=None, SCALING: gl.constexpr = UNSCALED,
):  # fmt: skip
    """own [M/W, K] and gathered [M, K] times b, [N, K] or [K, N] by B_IS_NK, into y [M, N], as
    [W x CHUNKS, M/W/CHUNKS, N]; all 16-byte aligned rows. bias [N], or None, is added in fp32.

    own_ptr: own again, for the warps that send it (DIRECT): PIECE elements are claimed and counted at once, STEP are in flight.
    pitch: from row to row of own and gathered, at least K: all of a row is sent.
    b_half_desc: b again, in panels half as wide.
    SCALING: hopper_scaled.py. With BLOCKS a_scale_ptr and gathered_scale_ptr are behind the K numbers of row 0.
    """
    gl.static_assert(num_warps == WARPS)  # of the first multiplying group
    panels, tiles = make_rings(own_desc, b_desc, STAGES, READERS=PARTS + 1)
    outbox = make_outbox(y_desc, BUFFERS=1)
    words = (rank, counter_ptr, signals_ptr, epoch_ptr, abort_ptr, record_ptr, tag, limit, leaves, here_ptr)
    places = (sent_ptr, complete_ptr, memory_at_ptr, outgoing_at_ptr)
    sizes = (m_shard, n, k)
    scales = (a_scale_ptr, b_scale_ptr)
    if SCALING == BLOCKS:
        scales = (a_scale_ptr, b_scale_ptr, gathered_scale_ptr, pitch // 4)  # fp32, behind numbers of one byte
    gl.warp_specialize([
        (multiply_tiles, (panels, tiles, outbox, b_desc, b_half_desc, bias_ptr, abort_ptr, rank, sizes, scales, 0, WORLD, LOCAL,
                          CHUNKS, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES, B_IS_NK, SCALING)),
        (multiply_tiles, (panels, tiles, outbox, b_desc, b_half_desc, bias_ptr, abort_ptr, rank, sizes, scales, 1, WORLD, LOCAL,
                          CHUNKS, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES, B_IS_NK, SCALING)),
        (_load, (panels, tiles, own_desc, gathered_desc, b_desc, b_half_desc, words, sizes, WORLD, LOCAL, CHUNKS, DIRECT,
                 BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES, B_IS_NK)),
        (store_tiles, (tiles, outbox, y_desc, rank, sizes, WORLD, LOCAL, CHUNKS, BLOCK_M, BLOCK_N, GROUP_M)),
        (send_rows, (own_ptr, words, places, (m_shard, n, pitch), WORLD, CHUNKS, DIRECT, PIECE, STEP, False)),
    ], [WARPS, 1, 1, SENDERS], registers(SCALING, 3))  # fmt: skip
    if DIRECT:
        finalize_epoch(left_ptr, epoch_ptr, next_word(gl.load(epoch_ptr), tag), WORLD)
