"""AllToAll + GEMM in one persistent kernel: each tile multiplies one block of columns after the other, as they arrive.

    own       [W, M/W, K/W]   this rank's columns of all rows; block d goes to rank d
    received  [W, M/W, K/W]   the slot that the peers fill: block s are rank s's columns of the own rows; block `rank` is unused
    y         [M/W, N] = sum over s of block s @ the s-th K/W rows of b [K, N], in one fp32 accumulator

Blocks are walked in the order in which they arrive, the own one first (order.py): the same on every run, so the same bits. A tile
waits at each block's edge. With DIRECT there are no copies: the kernel stores the peers' blocks there before its first tile. A
kernel that `leaves` does not wait for other nodes (arrivals.py).
"""

import triton
import triton.language as tl

from .arrivals import claim_below, units_to_take
from .order import received_block
from .p2p_store import store_at_peers
from .signal import finalize_epoch, next_word, signal_word, wait_signal
from .tiles import tile_in_block, tile_offsets, tile_product


@triton.jit(do_not_specialize=["m_shard", "rank", "tag", "limit", "leaves"])
def all_to_all_gemm_kernel(
    own_ptr, received_ptr, b_ptr, y_ptr,
    m_shard, n, k, stride_bk, stride_bn,
    rank, counter_ptr, signals_ptr, epoch_ptr, abort_ptr, record_ptr, tag, limit, leaves, here_ptr,
    sent_ptr, complete_ptr, left_ptr, memory_at_ptr, outgoing_at_ptr,
    WORLD: tl.constexpr, LOCAL: tl.constexpr, CHUNKS: tl.constexpr, DIRECT: tl.constexpr, PIECE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, PRECISION: tl.constexpr,
    TIMED: tl.constexpr,
):  # fmt: skip
    """k: of one block, K/W."""
    m_chunk = m_shard // CHUNKS
    per_chunk = tl.cdiv(m_chunk, BLOCK_M) * tl.cdiv(n, BLOCK_N)
    expected = next_word(tl.load(epoch_ptr), tag) if DIRECT else tl.load(epoch_ptr)
    if DIRECT:  # before any wait: who waits for a peer must owe nothing
        STEP: tl.constexpr = PIECE // 4
        store_at_peers(own_ptr, m_chunk * k, tl.arange(0, STEP), rank, sent_ptr, complete_ptr, memory_at_ptr, outgoing_at_ptr,
                       expected, WORLD, CHUNKS, PIECE, STEP, EXCHANGE=True)  # fmt: skip
    bound = per_chunk * units_to_take(leaves, here_ptr, 0, CHUNKS, LOCAL < WORLD)
    index = claim_below(counter_ptr, 0, bound, LOCAL < WORLD)
    while index < bound:
        chunk = index // per_chunk
        first_row = chunk.to(tl.int64) * m_chunk
        tile_m, tile_n = tile_in_block(index % per_chunk, m_chunk, n, BLOCK_M, BLOCK_N, GROUP_M)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for step in range(WORLD):
            source = received_block(step, rank, WORLD, LOCAL)
            block_ptr = own_ptr
            if source != rank:
                word = signal_word(source, chunk)
                arrived = wait_signal(signals_ptr, word, expected, abort_ptr, record_ptr, limit, TIMED)
                # A barrier before this call may have failed.
                arrived = arrived & (tl.load(abort_ptr, volatile=True) == 0)
                acc = tl.where(arrived, acc, float("nan"))
                block_ptr = received_ptr
            rows_ptr = block_ptr + (source.to(tl.int64) * m_shard + first_row) * k
            acc = tile_product(acc, rows_ptr, b_ptr + source.to(tl.int64) * k * stride_bk, tile_m, tile_n, m_chunk, n, k,
                               k, 1, stride_bk, stride_bn, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)  # fmt: skip
        rows, cols, mask = tile_offsets(tile_m, tile_n, m_chunk, n, BLOCK_M, BLOCK_N)
        tl.store(y_ptr + (first_row + rows) * n + cols, acc.to(y_ptr.dtype.element_ty), mask=mask)
        index = claim_below(counter_ptr, index + 1, bound, LOCAL < WORLD)
    if DIRECT:
        finalize_epoch(left_ptr, epoch_ptr, expected, WORLD)
