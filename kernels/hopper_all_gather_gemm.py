"""AllGather + GEMM for Hopper: all_gather_gemm.py's protocol around the warp-specialised GEMM of hopper_tiles.py."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from .hopper_tiles import (
    NO_TILE,
    claim_and_hand_over,
    fence_for_tma,
    load_tile,
    make_rings,
    multiply_tile,
    split_tile,
    store_tile,
    take_over,
)
from .signal import signal_word, wait_signal
from .tiles import arrival, tile_in_block


@gluon.jit
def _load(panels, tiles, own_desc, gathered_desc, b_desc, words, sizes,
          WORLD: gl.constexpr, CHUNKS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
          GROUP_M: gl.constexpr, STAGES: gl.constexpr, B_IS_NK: gl.constexpr):  # fmt: skip
    rank, counter_ptr, signals_ptr, epoch_ptr, abort_ptr, record_ptr, tag, limit = words
    m_shard, n, k = sizes
    m_chunk = m_shard // CHUNKS
    per_chunk = gl.cdiv(m_chunk, BLOCK_M) * gl.cdiv(n, BLOCK_N)
    k_steps = gl.cdiv(k, BLOCK_K)
    epoch = gl.load(epoch_ptr)
    step = 0
    turn = 0
    index = claim_and_hand_over(tiles, turn, counter_ptr, per_chunk * WORLD * CHUNKS)
    while index != NO_TILE:
        source, chunk = arrival(index // per_chunk, rank, WORLD, CHUNKS)
        tile_m, tile_n = tile_in_block(index % per_chunk, m_chunk, n, BLOCK_M, BLOCK_N, GROUP_M)
        row = chunk * m_chunk + tile_m * BLOCK_M
        if source == rank:
            step = load_tile(panels, step, own_desc, b_desc, row, tile_n * BLOCK_N, k_steps, BLOCK_K, STAGES, B_IS_NK)
        else:
            wait_signal(signals_ptr, signal_word(source, chunk), epoch, abort_ptr, record_ptr, tag, limit, True)
            fence_for_tma()
            row += source * m_shard
            step = load_tile(
                panels, step, gathered_desc, b_desc, row, tile_n * BLOCK_N, k_steps, BLOCK_K, STAGES, B_IS_NK
            )
        turn += 1
        index = claim_and_hand_over(tiles, turn, counter_ptr, per_chunk * WORLD * CHUNKS)


@gluon.jit
def _multiply(panels, tiles, y_desc, y_ptr, half, rank, abort_ptr, sizes,
              WORLD: gl.constexpr, CHUNKS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
              GROUP_M: gl.constexpr, STAGES: gl.constexpr, B_IS_NK: gl.constexpr, WARPS: gl.constexpr,
              WHOLE_TILES: gl.constexpr):  # fmt: skip
    m_shard, n, k = sizes
    m_chunk = m_shard // CHUNKS
    per_chunk = gl.cdiv(m_chunk, BLOCK_M) * gl.cdiv(n, BLOCK_N)
    k_steps = gl.cdiv(k, BLOCK_K)
    step = 0
    turn = 0
    index = take_over(tiles, turn, WARPS)
    while index != NO_TILE:
        source, chunk = arrival(index // per_chunk, rank, WORLD, CHUNKS)
        tile_m, tile_n = tile_in_block(index % per_chunk, m_chunk, n, BLOCK_M, BLOCK_N, GROUP_M)
        acc, step = multiply_tile(panels, step, k_steps, BLOCK_M, BLOCK_N, STAGES, B_IS_NK, WARPS)
        if gl.load(abort_ptr, volatile=True) != 0:  # a wait gave up: whatever was loaded must not look like a result
            acc = acc + float("nan")
        if WHOLE_TILES:
            row = source * m_shard + chunk * m_chunk + tile_m * BLOCK_M
            left, right = split_tile(acc, BLOCK_M, BLOCK_N)
            store_tile(y_desc, half, left, right, row, tile_n * BLOCK_N, BLOCK_N)
        else:
            tile = acc.to(y_desc.dtype)
            rows = tile_m * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, tile.type.layout))
            cols = tile_n * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, tile.type.layout))
            first = (source.to(gl.int64) * m_shard + chunk * m_chunk) * n
            mask = (rows < m_chunk)[:, None] & (cols < n)[None, :]
            gl.store(y_ptr + first + rows.to(gl.int64)[:, None] * n + cols[None, :], tile, mask=mask)
        turn += 1
        index = take_over(tiles, turn, WARPS)
    if WHOLE_TILES:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["rank", "tag", "limit"])
def hopper_all_gather_gemm_kernel(
    own_desc, gathered_desc, b_desc, y_desc, y_ptr, m_shard, n, k,
    rank, counter_ptr, signals_ptr, epoch_ptr, abort_ptr, record_ptr, tag, limit,
    WORLD: gl.constexpr, CHUNKS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr, B_IS_NK: gl.constexpr, WHOLE_TILES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """own [M/W, K] and gathered [M, K] times b, [N, K] or [K, N] by B_IS_NK, into y [M, N]; all 16-byte aligned rows.

    WHOLE_TILES: no tile crosses a chunk's edge, so that tiles may be stored by TMA.
    """
    panels, tiles = make_rings(own_desc, b_desc, STAGES, READERS=1)
    half = gl.allocate_shared_memory(y_desc.dtype, y_desc.block_type.shape, y_desc.layout)
    words = (rank, counter_ptr, signals_ptr, epoch_ptr, abort_ptr, record_ptr, tag, limit)
    sizes = (m_shard, n, k)
    gl.warp_specialize([
        (_multiply, (panels, tiles, y_desc, y_ptr, half, rank, abort_ptr, sizes, WORLD, CHUNKS, BLOCK_M, BLOCK_N, BLOCK_K,
                     GROUP_M, STAGES, B_IS_NK, num_warps, WHOLE_TILES)),
        (_load, (panels, tiles, own_desc, gathered_desc, b_desc, words, sizes, WORLD, CHUNKS, BLOCK_M, BLOCK_N, BLOCK_K,
                 GROUP_M, STAGES, B_IS_NK)),
    ], [1], [40])  # fmt: skip
