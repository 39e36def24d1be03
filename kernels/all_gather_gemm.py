"""AllGather + GEMM in one persistent kernel: each tile waits for the shard that it multiplies.

    own       [M/W, K]   this rank's rows, read where the caller has them
    gathered  [W, M/W, K]   the slot that the peers' copy engines fill; row block `rank` stays unused
    y         [M, N] = concat(shards) @ b [K, N] + bias [N], if there is one

Shards are walked in the order in which they arrive, the own one first (order.py). With DIRECT there are no copies: the kernel
stores the own rows at the peers, before its first tile (p2p_store.py). A kernel that `leaves` does not wait for other nodes
(arrivals.py).
"""

import triton
import triton.language as tl

from .arrivals import claim_below, units_to_take
from .order import gather_tile
from .p2p_store import store_at_peers
from .signal import finalize_epoch, next_word, signal_word, wait_signal
from .tiles import plus_bias, tile_in_block, tile_offsets, tile_product


@triton.jit(do_not_specialize=["m_shard", "rank", "tag", "limit", "leaves"])
def all_gather_gemm_kernel(
    own_ptr, gathered_ptr, b_ptr, bias_ptr, y_ptr,
    m_shard, n, k, stride_bk, stride_bn,
    rank, counter_ptr, signals_ptr, epoch_ptr, abort_ptr, record_ptr, tag, limit, leaves, here_ptr,
    sent_ptr, complete_ptr, left_ptr, memory_at_ptr, outgoing_at_ptr,
    WORLD: tl.constexpr, LOCAL: tl.constexpr, CHUNKS: tl.constexpr, DIRECT: tl.constexpr, PIECE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, PRECISION: tl.constexpr,
    TIMED: tl.constexpr,
):  # fmt: skip
    m_chunk = m_shard // CHUNKS
    per_chunk = tl.cdiv(m_chunk, BLOCK_M) * tl.cdiv(n, BLOCK_N)
    expected = next_word(tl.load(epoch_ptr), tag) if DIRECT else tl.load(epoch_ptr)
    if DIRECT:  # before any wait: who waits for a peer must owe nothing
        STEP: tl.constexpr = PIECE // 4  # 32 or 16 elements of each of 128 or 256 threads
        store_at_peers(own_ptr, m_chunk * k, tl.arange(0, STEP), rank, sent_ptr, complete_ptr, memory_at_ptr, outgoing_at_ptr,
                       expected, WORLD, CHUNKS, PIECE, STEP, EXCHANGE=False)  # fmt: skip
    bound = per_chunk * units_to_take(leaves, here_ptr, LOCAL * CHUNKS, WORLD * CHUNKS, LOCAL < WORLD)
    index = claim_below(counter_ptr, 0, bound, LOCAL < WORLD)
    while index < bound:
        source, chunk = gather_tile(index // per_chunk, rank, WORLD, LOCAL, CHUNKS)
        arrived = source == rank
        shard_ptr = own_ptr
        if source != rank:
            word = signal_word(source, chunk)
            arrived = wait_signal(signals_ptr, word, expected, abort_ptr, record_ptr, limit, TIMED)
            arrived = arrived & (tl.load(abort_ptr, volatile=True) == 0)  # a barrier before this call may have failed
            shard_ptr = gathered_ptr + source.to(tl.int64) * m_shard * k
        first_row = chunk.to(tl.int64) * m_chunk
        tile_m, tile_n = tile_in_block(index % per_chunk, m_chunk, n, BLOCK_M, BLOCK_N, GROUP_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        acc = tile_product(acc, shard_ptr + first_row * k, b_ptr, tile_m, tile_n, m_chunk, n, k, k, 1, stride_bk, stride_bn,
                           BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)  # fmt: skip
        acc = tl.where(arrived, acc, float("nan"))
        rows, cols, mask = tile_offsets(tile_m, tile_n, m_chunk, n, BLOCK_M, BLOCK_N)
        acc = plus_bias(acc, bias_ptr, cols, n)
        y_ptrs = y_ptr + (source.to(tl.int64) * m_shard + first_row + rows) * n + cols
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=mask)
        index = claim_below(counter_ptr, index + 1, bound, LOCAL < WORLD)
    if DIRECT:
        finalize_epoch(left_ptr, epoch_ptr, expected, WORLD)
