"""All-reduce in one kernel, by stores and a signal for each chunk of them: of more bytes than pay as words with flags, which are
twice as many (low_latency.py).

    partial [M, N] of a library GEMM -> y [M, N] = all ranks' in rank order + bias [N], if there is one

    one shot    each rank stores its partial at all others; each adds all of them. Blocks [W, size] in a slot
    two shots   rank r stores its part of share s at rank s, which adds that share, and stores the sum at all others. Blocks
                [W, share] of partials in a slot, then [W, share] of sums; rank r writes block r of both

Elements go in pieces, of which each chunk has as many. Whoever counts the last one of a chunk signals it. What is stored at peers
is claimed: one resident CTA stores all of it before it waits for what peers store after that (rule 4).
"""

import triton
import triton.language as tl

from . import signal_words as words
from .signal import claim, finalize_epoch, next_word, notify_peer, signal_word, wait_signal

MAX_CHUNKS = tl.constexpr(words.MAX_CHUNKS)
OF_SUMS = tl.constexpr(words.MAX_CHUNKS // 2)  # chunks of partials in two shots, and the first signal of sums
NOT_SPECIALIZED = ["rank", "tag", "limit"]


@triton.jit
def _store_at(peer, memory_at_ptr, first, place, values, inside):
    slot_ptr = tl.load(memory_at_ptr + peer).to(tl.pointer_type(values.dtype))
    tl.store(tl.multiple_of(slot_ptr, 16) + first + place, values, mask=inside)


@triton.jit
def _store_at_all(memory_at_ptr, first, place, values, inside, signal, of_chunk, word, rank, outgoing_at_ptr, complete_ptr,
                  WORLD: tl.constexpr):  # fmt: skip
    """Store a piece at every peer, and count it once for all of them, as notify_peer does for one; the last of `of_chunk` pieces
    writes the signal at every peer."""
    for step in tl.static_range(1, WORLD):
        _store_at((rank + step) % WORLD, memory_at_ptr, first, place, values, inside)
    tl.debug_barrier()
    counted = (
        tl.atomic_add(complete_ptr + signal_word(rank, signal), tl.cast(1, tl.int64), sem="acq_rel", scope="sys") + 1
    )
    if counted == of_chunk:
        for step in tl.static_range(1, WORLD):
            row_ptr = tl.load(outgoing_at_ptr + (rank + step) % WORLD).to(complete_ptr.dtype)
            tl.atomic_xchg(row_ptr + signal, word, sem="release", scope="sys")


@triton.jit
def _sum_of_all(partial_ptr, blocks_ptr, pitch, bias_ptr, first, n, place, inside, chunk, word, rank, signals_ptr, abort_ptr,
                record_ptr, limit, WORLD: tl.constexpr, BLOCK: tl.constexpr, TIMED: tl.constexpr):  # fmt: skip
    """Elements of partial_ptr, and of the others' blocks when they have come, added in fp32, in rank order, then the bias. NaN
    where a wait of the rank has failed. first: which element of y place 0 is."""
    total = tl.zeros((BLOCK,), tl.float32)
    for source in range(WORLD):
        from_ptr = partial_ptr
        if source != rank:
            wait_signal(signals_ptr, signal_word(source, chunk), word, abort_ptr, record_ptr, limit, TIMED)
            from_ptr = blocks_ptr + tl.cast(source, tl.int64) * pitch
        total += tl.load(from_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + (first + place) % n).to(tl.float32)
    return tl.where(tl.load(abort_ptr, volatile=True) != 0, float("nan"), total).to(partial_ptr.dtype.element_ty)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def all_reduce_kernel(
    partial_ptr, bias_ptr, y_ptr, blocks_ptr, memory_at_ptr, size, n, rank, signals_ptr, epoch_ptr, outgoing_at_ptr, sent_ptr,
    complete_ptr, left_ptr, abort_ptr, record_ptr, tag, limit, WORLD: tl.constexpr, BLOCK: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    """In one shot. size: elements of y, fewer than 2^31."""
    word = next_word(tl.load(epoch_ptr), tag)
    pieces = tl.cdiv(size, BLOCK)
    per_chunk = tl.cdiv(pieces, MAX_CHUNKS)
    piece = claim(sent_ptr).to(tl.int32)
    while piece < pieces:
        place = piece * BLOCK + tl.arange(0, BLOCK)
        inside = place < size
        values = tl.load(partial_ptr + place, mask=inside)
        chunk = piece // per_chunk
        of_chunk = tl.minimum(per_chunk, pieces - chunk * per_chunk)
        _store_at_all(memory_at_ptr, tl.cast(rank, tl.int64) * size, place, values, inside, chunk, of_chunk, word, rank,
                      outgoing_at_ptr, complete_ptr, WORLD)  # fmt: skip
        piece = claim(sent_ptr).to(tl.int32)
    for piece in range(tl.program_id(0), pieces, tl.num_programs(0)):
        place = piece * BLOCK + tl.arange(0, BLOCK)
        inside = place < size
        total = _sum_of_all(partial_ptr, blocks_ptr, size, bias_ptr, 0, n, place, inside, piece // per_chunk, word, rank,
                            signals_ptr, abort_ptr, record_ptr, limit, WORLD, BLOCK, TIMED)  # fmt: skip
        tl.store(y_ptr + place, total, mask=inside)
    finalize_epoch(left_ptr, epoch_ptr, word, WORLD)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def two_shot_all_reduce_kernel(
    partial_ptr, bias_ptr, y_ptr, blocks_ptr, memory_at_ptr, size, share, n, rank, signals_ptr, epoch_ptr, outgoing_at_ptr,
    sent_ptr, counter_ptr, complete_ptr, left_ptr, abort_ptr, record_ptr, tag, limit, WORLD: tl.constexpr, BLOCK: tl.constexpr,
    TIMED: tl.constexpr,
):  # fmt: skip
    """size: elements of y, fewer than 2^31. share: of each rank, but the last ones, which may have fewer."""
    word = next_word(tl.load(epoch_ptr), tag)
    pieces = tl.cdiv(share, BLOCK)
    per_chunk = tl.cdiv(pieces, OF_SUMS)
    others = WORLD - 1
    first = tl.cast(rank, tl.int64) * share
    sums = tl.cast(WORLD, tl.int64) * share  # where blocks of sums begin
    index = claim(sent_ptr).to(tl.int32)
    while index < pieces * others:
        peer = (rank + 1 + index % others) % WORLD  # in turn: ranks out of step do not meet at one peer
        piece = index // others
        place = piece * BLOCK + tl.arange(0, BLOCK)
        theirs = tl.cast(peer, tl.int64) * share
        inside = (place < share) & (theirs + place < size)
        values = tl.load(partial_ptr + theirs + place, mask=inside)
        _store_at(peer, memory_at_ptr, first, place, values, inside)
        chunk = piece // per_chunk
        of_chunk = tl.minimum(per_chunk, pieces - chunk * per_chunk)
        row_ptr = tl.load(outgoing_at_ptr + peer).to(complete_ptr.dtype)
        notify_peer(complete_ptr + signal_word(peer, chunk), of_chunk, row_ptr + chunk, word)
        index = claim(sent_ptr).to(tl.int32)
    piece = claim(counter_ptr).to(tl.int32)
    while piece < pieces:
        place = piece * BLOCK + tl.arange(0, BLOCK)
        inside = (place < share) & (first + place < size)
        chunk = piece // per_chunk
        of_chunk = tl.minimum(per_chunk, pieces - chunk * per_chunk)
        total = _sum_of_all(partial_ptr + first, blocks_ptr, share, bias_ptr, first, n, place, inside, chunk, word, rank,
                            signals_ptr, abort_ptr, record_ptr, limit, WORLD, BLOCK, TIMED)  # fmt: skip
        tl.store(y_ptr + first + place, total, mask=inside)
        _store_at_all(memory_at_ptr, sums + first, place, total, inside, OF_SUMS + chunk, of_chunk, word, rank, outgoing_at_ptr,
                      complete_ptr, WORLD)  # fmt: skip
        piece = claim(counter_ptr).to(tl.int32)
    for index in range(tl.program_id(0), pieces * others, tl.num_programs(0)):
        source = (rank + others - index % others) % WORLD
        piece = index // others
        signal = signal_word(source, OF_SUMS + piece // per_chunk)
        wait_signal(signals_ptr, signal, word, abort_ptr, record_ptr, limit, TIMED)
        place = piece * BLOCK + tl.arange(0, BLOCK)
        theirs = tl.cast(source, tl.int64) * share
        inside = (place < share) & (theirs + place < size)
        values = tl.load(blocks_ptr + sums + theirs + place, mask=inside)
        values = tl.where(tl.load(abort_ptr, volatile=True) != 0, float("nan"), values.to(tl.float32))
        tl.store(y_ptr + theirs + place, values.to(y_ptr.dtype.element_ty), mask=inside)
    finalize_epoch(left_ptr, epoch_ptr, word, WORLD)
