"""GEMM + ReduceScatter for Hopper: gemm_reduce_scatter.py's protocol around the warp-specialised GEMM of hopper_tiles.py.

A partial tile leaves by TMA. Its count for the copy engine is raised one tile later, when the store has long been written:
waiting for it at once would stop the tensor cores for a microsecond a tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hopper_tiles import (
    NO_TILE,
    claim_and_hand_over,
    load_tile,
    make_rings,
    multiply_tile,
    store_tile,
    stores_are_written,
    take_over,
)
from .signal import announce, signal_word, wait_signal
from .tiles import departure, tile_in_block


@gluon.jit
def _load(panels, tiles, a_desc, b_desc, counter_ptr, rank, sizes,
          WORLD: gl.constexpr, CHUNKS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
          GROUP_M: gl.constexpr, STAGES: gl.constexpr, B_IS_NK: gl.constexpr):  # fmt: skip
    m_shard, n, k = sizes
    m_chunk = m_shard // CHUNKS
    per_chunk = gl.cdiv(m_chunk, BLOCK_M) * gl.cdiv(n, BLOCK_N)
    k_steps = gl.cdiv(k, BLOCK_K)
    step = 0
    turn = 0
    index = claim_and_hand_over(tiles, turn, counter_ptr, per_chunk * WORLD * CHUNKS)
    while index != NO_TILE:
        target, chunk = departure(index // per_chunk, rank, WORLD, CHUNKS)
        tile_m, tile_n = tile_in_block(index % per_chunk, m_chunk, n, BLOCK_M, BLOCK_N, GROUP_M)
        row = target * m_shard + chunk * m_chunk + tile_m * BLOCK_M
        step = load_tile(panels, step, a_desc, b_desc, row, tile_n * BLOCK_N, k_steps, BLOCK_K, STAGES, B_IS_NK)
        turn += 1
        index = claim_and_hand_over(tiles, turn, counter_ptr, per_chunk * WORLD * CHUNKS)


@gluon.jit
def _multiply(panels, tiles, staging_desc, half, received_ptr, y_ptr, complete_ptr, words, sizes,
              WORLD: gl.constexpr, CHUNKS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
              GROUP_M: gl.constexpr, STAGES: gl.constexpr, B_IS_NK: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    rank, signals_ptr, epoch_ptr, abort_ptr, record_ptr, tag, limit = words
    m_shard, n, k = sizes
    m_chunk = m_shard // CHUNKS
    per_chunk = gl.cdiv(m_chunk, BLOCK_M) * gl.cdiv(n, BLOCK_N)
    k_steps = gl.cdiv(k, BLOCK_K)
    block = gl.cast(m_shard, gl.int64) * n
    epoch = gl.load(epoch_ptr)
    step = 0
    turn = 0
    unannounced = -1  # the counter of a tile that is stored and not yet counted
    index = take_over(tiles, turn, WARPS)
    while index != NO_TILE:
        target, chunk = departure(index // per_chunk, rank, WORLD, CHUNKS)
        tile_m, tile_n = tile_in_block(index % per_chunk, m_chunk, n, BLOCK_M, BLOCK_N, GROUP_M)
        acc, step = multiply_tile(panels, step, k_steps, BLOCK_M, BLOCK_N, STAGES, B_IS_NK, WARPS)
        if unannounced >= 0:
            stores_are_written()
            announce(complete_ptr + unannounced)
            unannounced = -1
        if target != rank:
            row = target * m_shard + chunk * m_chunk + tile_m * BLOCK_M
            store_tile(staging_desc, half, acc.to(staging_desc.dtype), row, tile_n * BLOCK_N, BLOCK_M, BLOCK_N)
            unannounced = signal_word(target, chunk)
        else:
            rows = tile_m * BLOCK_M + gl.arange(0, BLOCK_M, gl.SliceLayout(1, acc.type.layout))
            cols = tile_n * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, acc.type.layout))
            offsets = (chunk * m_chunk + rows).to(gl.int64)[:, None] * n + cols[None, :]
            mask = (rows < m_chunk)[:, None] & (cols < n)[None, :]
            for source in gl.static_range(WORLD):
                if source != rank:
                    word = signal_word(source, chunk)
                    arrived = wait_signal(signals_ptr, word, epoch, abort_ptr, record_ptr, tag, limit, True)
                    if arrived == 0:
                        acc = acc + float("nan")
                    acc += gl.load(received_ptr + source * block + offsets, mask=mask, other=0.0).to(gl.float32)
            gl.store(y_ptr + offsets, acc.to(y_ptr.dtype.element_ty), mask=mask)
        turn += 1
        index = take_over(tiles, turn, WARPS)
    if unannounced >= 0:
        stores_are_written()
        announce(complete_ptr + unannounced)


@gluon.jit(do_not_specialize=["rank", "tag", "limit"])
def hopper_gemm_reduce_scatter_kernel(
    a_desc, b_desc, staging_desc, received_ptr, y_ptr, m_shard, n, k,
    rank, counter_ptr, complete_ptr, signals_ptr, epoch_ptr, abort_ptr, record_ptr, tag, limit,
    WORLD: gl.constexpr, CHUNKS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, STAGES: gl.constexpr, B_IS_NK: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """a [M, K] times b, [N, K] or [K, N] by B_IS_NK; M/W divisible by CHUNKS x BLOCK_M, rows 16-byte aligned."""
    panels, tiles = make_rings(a_desc, b_desc, STAGES)
    half = gl.allocate_shared_memory(staging_desc.dtype, staging_desc.block_type.shape, staging_desc.layout)
    words = (rank, signals_ptr, epoch_ptr, abort_ptr, record_ptr, tag, limit)
    sizes = (m_shard, n, k)
    gl.warp_specialize([
        (_multiply, (panels, tiles, staging_desc, half, received_ptr, y_ptr, complete_ptr, words, sizes, WORLD, CHUNKS,
                     BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES, B_IS_NK, num_warps)),
        (_load, (panels, tiles, a_desc, b_desc, counter_ptr, rank, sizes, WORLD, CHUNKS, BLOCK_M, BLOCK_N, BLOCK_K,
                 GROUP_M, STAGES, B_IS_NK)),
    ], [1], [40])  # fmt: skip
