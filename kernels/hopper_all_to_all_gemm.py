"""AllToAll + GEMM for Hopper: all_to_all_gemm.py's protocol around the warp-specialised GEMM of hopper_tiles.py.

The warps that multiply and store are those of hopper_all_gather_gemm.py, in a world of one: they see one [M/W, K] matrix. Only
the loading warp knows that its columns lie in W blocks, and waits at each block's edge.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .arrivals import units_to_take
from .hopper_all_gather_gemm import SENDERS, multiply_tiles, send_rows, store_tiles
from .hopper_scaled import UNSCALED, registers
from .hopper_stores import make_outbox
from .hopper_tiles import NO_TILE, PARTS, WARPS, claim_tile, fence_for_tma, load_tile_or_half, make_rings
from .order import received_block
from .signal import finalize_epoch, next_word, signal_word, wait_both
from .tiles import cut_of_gather, pieces_below, strip_in_run, tile_and_side, tile_in_run


@gluon.jit
def _load(panels, tiles, own_desc, received_desc, b_desc, b_half_desc, words, sizes,
          WORLD: gl.constexpr, LOCAL: gl.constexpr, CHUNKS: gl.constexpr, DIRECT: gl.constexpr, BLOCK_M: gl.constexpr,
          BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
          B_IS_NK: gl.constexpr):  # fmt: skip
    """The loading warp: claims tiles, and brings the panels of the own block, then those of each peer once its rows are here."""
    ROWS: gl.constexpr = BLOCK_M // PARTS
    rank, counter_ptr, signals_ptr, epoch_ptr, abort_ptr, record_ptr, tag, limit, leaves, here_ptr = words
    m_shard, n, k = sizes
    m_chunk = m_shard // CHUNKS
    strips, tiles_n, total, halved = cut_of_gather(m_chunk, n, gl.num_programs(0), ROWS, BLOCK_N, CHUNKS)
    k_steps = gl.cdiv(k, BLOCK_K)
    expected = next_word(gl.load(epoch_ptr), tag) if DIRECT else gl.load(epoch_ptr)
    units = units_to_take(leaves, here_ptr, 0, CHUNKS, LOCAL < WORLD)
    bound = pieces_below(units, strips, tiles_n, total, halved, CHUNKS)
    step = 0
    turn = 0
    index = claim_tile(tiles, turn, counter_ptr, bound, NO_TILE, LOCAL < WORLD)
    while index != NO_TILE:
        tile, side = tile_and_side(index, halved)
        pair, tile_n = tile_in_run(tile, strips, CHUNKS, tiles_n, GROUP_M)
        upper_chunk, upper_strip = strip_in_run(2 * pair, strips, CHUNKS)
        chunk, strip = strip_in_run(2 * pair + 1, strips, CHUNKS)
        upper, row = upper_chunk * m_chunk + upper_strip * ROWS, chunk * m_chunk + strip * ROWS
        col = tile_n * BLOCK_N
        step = load_tile_or_half(panels, step, own_desc, own_desc, b_desc, b_half_desc, upper, row, col, rank * k, side,
                                 k_steps, BLOCK_N, BLOCK_K, STAGES, B_IS_NK)  # fmt: skip
        for distance in range(1, WORLD):
            source = received_block(distance, rank, WORLD, LOCAL)
            word, upper_word = signal_word(source, chunk), signal_word(source, upper_chunk)
            wait_both(signals_ptr, upper_word, word, expected, abort_ptr, record_ptr, limit)
            fence_for_tma()
            above = source * m_shard
            step = load_tile_or_half(panels, step, received_desc, received_desc, b_desc, b_half_desc, above + upper, above + row,
                                     col, source * k, side, k_steps, BLOCK_N, BLOCK_K, STAGES, B_IS_NK)  # fmt: skip
        turn += 1
        index = claim_tile(tiles, turn, counter_ptr, bound, index, LOCAL < WORLD)


@gluon.jit(do_not_specialize=["m_shard", "rank", "tag", "limit", "leaves"])
def hopper_all_to_all_gemm_kernel(
    own_desc, own_ptr, received_desc, b_desc, b_half_desc, y_desc, m_shard, n, k,
    rank, counter_ptr, signals_ptr, epoch_ptr, abort_ptr, record_ptr, tag, limit, leaves, here_ptr,
    sent_ptr, complete_ptr, left_ptr, memory_at_ptr, outgoing_at_ptr,
    WORLD: gl.constexpr, LOCAL: gl.constexpr, CHUNKS: gl.constexpr, DIRECT: gl.constexpr, PIECE: gl.constexpr,
    STEP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
    STAGES: gl.constexpr, B_IS_NK: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """y [M/W, N], as [CHUNKS, M/W/CHUNKS, N] = the own block [M/W, K/W] and the peers', one below the other in received [M, K/W],
    each times its K/W rows of b, [N, K] or [K, N] by B_IS_NK; rows aligned. own_ptr: all blocks of the own rows [M, K/W], for the
    warps that send them (DIRECT).

    k: K/W. Its last panel reads zeros of A beyond it, so that what it reads of B there counts nothing. The rest as for
    hopper_all_gather_gemm_kernel.
    """
    gl.static_assert(num_warps == WARPS)
    panels, tiles = make_rings(own_desc, b_desc, STAGES, READERS=PARTS + 1)
    outbox = make_outbox(y_desc, BUFFERS=1)
    words = (rank, counter_ptr, signals_ptr, epoch_ptr, abort_ptr, record_ptr, tag, limit, leaves, here_ptr)
    places = (sent_ptr, complete_ptr, memory_at_ptr, outgoing_at_ptr)
    sizes = (m_shard, n, k)
    whole = (m_shard, n, WORLD * gl.cdiv(k, BLOCK_K) * BLOCK_K)  # as the multiplying warps see it: whole panels
    gl.warp_specialize([
        (multiply_tiles, (panels, tiles, outbox, b_desc, b_half_desc, None, abort_ptr, 0, whole, (), 0, 1, 1, CHUNKS, BLOCK_M,
                          BLOCK_N, BLOCK_K, GROUP_M, STAGES, B_IS_NK, UNSCALED)),
        (multiply_tiles, (panels, tiles, outbox, b_desc, b_half_desc, None, abort_ptr, 0, whole, (), 1, 1, 1, CHUNKS, BLOCK_M,
                          BLOCK_N, BLOCK_K, GROUP_M, STAGES, B_IS_NK, UNSCALED)),
        (_load, (panels, tiles, own_desc, received_desc, b_desc, b_half_desc, words, sizes, WORLD, LOCAL, CHUNKS, DIRECT,
                 BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES, B_IS_NK)),
        (store_tiles, (tiles, outbox, y_desc, 0, whole, 1, 1, CHUNKS, BLOCK_M, BLOCK_N, GROUP_M)),
        (send_rows, (own_ptr, words, places, sizes, WORLD, CHUNKS, DIRECT, PIECE, STEP, True)),
    ], [WARPS, 1, 1, SENDERS], registers(UNSCALED, 3))  # fmt: skip
    if DIRECT:
        finalize_epoch(left_ptr, epoch_ptr, next_word(gl.load(epoch_ptr), tag), WORLD)
