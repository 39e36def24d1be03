"""GEMM + ReduceScatter, or GEMM + AllToAll: the GEMM computes what the peers get first.

GEMM + ReduceScatter: its last tiles add what the peers have sent.

    a         [M, K]         K is sharded over ranks, so a @ b is a partial sum
    staging   [W, M/W, N]    partials on their way out; block `rank` stays unused
    received  [W, M/W, N]    partials that the peers' copy engines pushed here
    y         [M/W, N] = own partial + the peers' partials in rank order + bias [N], if there is one, summed in fp32

Destinations are computed in the order rank+1, rank+2, ..., rank. A counter per destination and chunk tells the copy engine when
its rows are complete. Or (DIRECT) tiles are stored at the peer, and whoever counts the last tile of a chunk sends the signal. The
own rows come last: their epilogue is the reduction. The own partial is the first term because it is in the accumulator already: a
second [BLOCK_M, BLOCK_N] accumulator spilled 1,064 bytes a thread. Without REDUCE nobody waits here: y is the own partial, to
which reduce_partials_kernel adds the others. With SHARES own tiles are counted as well, each as OWN_TILE: the copy engine sends
sums to all peers, chunk by chunk.

With EXCHANGE (GEMM + AllToAll) a destination picks columns of b, not rows of a, and there is nothing to add:

    a         [M/W, K]
    b         [K, N]         block d of its columns belongs to rank d
    staging   [W, M/W, N/W]  blocks on their way out
    y         [M/W, N/W]     the own block; `n` is N/W here
"""

import triton
import triton.language as tl

from . import signal_words as words
from .order import scatter_tile
from .signal import claim, finalize_epoch, next_word, notify_copy_engine, notify_peer, signal_word, wait_signal
from .tiles import plus_bias, tile_in_block, tile_offsets, tile_product

OWN_TILE = tl.constexpr(words.OWN_TILE)


@triton.jit(do_not_specialize=["m_shard", "rank", "tag", "limit"])
def gemm_reduce_scatter_kernel(
    a_ptr, b_ptr, staging_ptr, received_ptr, bias_ptr, y_ptr,
    m_shard, n, k, stride_am, stride_ak, stride_bk, stride_bn,
    rank, counter_ptr, complete_ptr, signals_ptr, epoch_ptr, abort_ptr, record_ptr, tag, limit, left_ptr,
    memory_at_ptr, outgoing_at_ptr,
    WORLD: tl.constexpr, LOCAL: tl.constexpr, CHUNKS: tl.constexpr, DIRECT: tl.constexpr, REDUCE: tl.constexpr,
    EXCHANGE: tl.constexpr, SHARES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, PRECISION: tl.constexpr,
    TIMED: tl.constexpr,
):  # fmt: skip
    m_chunk = m_shard // CHUNKS
    per_chunk = tl.cdiv(m_chunk, BLOCK_M) * tl.cdiv(n, BLOCK_N)
    block = tl.cast(m_shard, tl.int64) * n
    expected = next_word(tl.load(epoch_ptr), tag) if DIRECT else tl.load(epoch_ptr)
    index = claim(counter_ptr).to(tl.int32)
    while index < per_chunk * WORLD * CHUNKS:
        target, chunk, tile = scatter_tile(index, per_chunk, rank, WORLD, LOCAL, CHUNKS, DIRECT)
        tile_m, tile_n = tile_in_block(tile, m_chunk, n, BLOCK_M, BLOCK_N, GROUP_M)
        rows, cols, mask = tile_offsets(tile_m, tile_n, m_chunk, n, BLOCK_M, BLOCK_N)
        first_row = chunk.to(tl.int64) * m_chunk
        offsets = (first_row + rows) * n + cols
        a_row = first_row if EXCHANGE else target.to(tl.int64) * m_shard + first_row
        b_col = target.to(tl.int64) * n if EXCHANGE else 0
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        acc = tile_product(acc, a_ptr + a_row * stride_am, b_ptr + b_col * stride_bn, tile_m, tile_n, m_chunk, n, k,
                           stride_am, stride_ak, stride_bk, stride_bn, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION)  # fmt: skip
        if target != rank:
            part = acc.to(y_ptr.dtype.element_ty)
            if DIRECT:
                remote_block_ptr = tl.load(memory_at_ptr + target).to(y_ptr.dtype) + rank * block
                signal_ptr = tl.load(outgoing_at_ptr + target).to(epoch_ptr.dtype) + chunk
                tl.store(remote_block_ptr + offsets, part, mask=mask)
                notify_peer(complete_ptr + signal_word(target, chunk), per_chunk, signal_ptr, expected)
            else:
                tl.store(staging_ptr + target * block + offsets, part, mask=mask)
                notify_copy_engine(complete_ptr + signal_word(target, chunk))
        else:
            for source in tl.static_range(WORLD):
                if REDUCE and source != rank:
                    word = signal_word(source, chunk)
                    arrived = wait_signal(signals_ptr, word, expected, abort_ptr, record_ptr, limit, TIMED)
                    arrived = arrived & (tl.load(abort_ptr, volatile=True) == 0)  # or a barrier before has failed
                    part = tl.load(received_ptr + source * block + offsets, mask=mask, other=0.0)
                    acc += tl.where(arrived, part.to(tl.float32), float("nan"))
            acc = plus_bias(acc, bias_ptr, cols, n)
            tl.store(y_ptr + offsets, acc.to(y_ptr.dtype.element_ty), mask=mask)
            if SHARES:
                notify_copy_engine(complete_ptr + signal_word(rank, chunk), OWN_TILE)
        index = claim(counter_ptr).to(tl.int32)
    if DIRECT:
        finalize_epoch(left_ptr, epoch_ptr, expected, WORLD)


@triton.jit(do_not_specialize=["rank"])
def reduce_partials_kernel(
    own_ptr, received_ptr, bias_ptr, y_ptr, size, n, rank, abort_ptr, WORLD: tl.constexpr, BLOCK: tl.constexpr
):
    """y [size] = own [size] + received [W, size] in rank order, block `rank` left out, summed in fp32; runs after a wait.

    bias [n], or None: of each row. NaN if a wait gave up: it poisons received, but what comes late may lie over that.
    """
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    total = tl.load(own_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    for source in tl.static_range(WORLD):
        if source != rank:
            part_ptr = received_ptr + source * tl.cast(size, tl.int64)
            total += tl.load(part_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + offsets % n).to(tl.float32)
    total = tl.where(tl.load(abort_ptr, volatile=True) != 0, float("nan"), total)
    tl.store(y_ptr + offsets, total.to(y_ptr.dtype.element_ty), mask=mask)
