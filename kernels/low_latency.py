"""Gather, reduce-scatter and all-reduce of few rows, each in one kernel, by words that carry their own flag (flagged_words.py).

    low_latency_gather_kernel     own [M/W, K] -> every peer; gathered [M, K] = own and the peers' rows, for a library GEMM
    low_latency_scatter_kernel    partial [W, M/W, N] of a library GEMM -> y [M/W, N] = own rows + the peers' in rank order
                                  + bias [N], if there is one
    low_latency_all_reduce_kernel partial [M, N] of a library GEMM -> every peer; y [M, N] = all ranks' in rank order + bias [N]

    words [W, block] at each rank     block s is written by rank s; a block has a word for every 4 bytes

Every CTA first sends until nothing is left to be sent, then receives its part. What is sent is claimed: one resident CTA sends
all of it before it waits for anybody (rule 4). What is received need not be claimed.

Tensors come as units of 4 bytes (PER_WORD 1), or of 2 where blocks end or start between (PER_WORD 2).
"""

import triton
import triton.language as tl

from .flagged_words import flag_of, load_payload, receive_words, store_payload, store_words
from .signal import claim, finalize_epoch, next_word

NOT_SPECIALIZED = ["rank", "size", "n", "tag", "limit"]
# Alignment would let one thread load 16 bytes. Its words would then be stored 32 bytes apart from the next thread's.
UNALIGNED = ["own_ptr", "gathered_ptr", "partial_ptr", "bias_ptr", "y_ptr"]


@triton.jit
def tell_call(outgoing_at_ptr, expected, rank, WORLD: tl.constexpr):
    """Tell the peers which call this is, for a wait that finds another one."""
    for step in tl.static_range(1, WORLD):
        signal_ptr = tl.load(outgoing_at_ptr + (rank + step) % WORLD).to(tl.pointer_type(tl.int64))
        tl.atomic_xchg(signal_ptr, expected, sem="release", scope="sys")


@triton.jit
def peer_block(words_at_ptr, peer, rank, block_words):
    """Where this rank's block lies at a peer."""
    return tl.load(words_at_ptr + peer).to(tl.pointer_type(tl.int64)) + tl.cast(rank, tl.int64) * block_words


@triton.jit
def send_to_all(
    own_ptr, kept_ptr, size, words_at_ptr, flag, expected, rank, outgoing_at_ptr, sent_ptr,
    WORLD: tl.constexpr, PER_WORD: tl.constexpr, BLOCK: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    """Store the own block, of `size` units, at every peer, and at kept_ptr, if that is not None."""
    block_words = tl.cdiv(size, PER_WORD)
    parts = tl.cdiv(block_words, BLOCK)
    part = claim(sent_ptr).to(tl.int32)
    while part < parts:
        if part == 0:
            tell_call(outgoing_at_ptr, expected, rank, WORLD)
        places = part * BLOCK + tl.arange(0, BLOCK)
        payload = load_payload(own_ptr, places, size, PER_WORD)
        for step in tl.static_range(1, WORLD):
            block_ptr = peer_block(words_at_ptr, (rank + step) % WORLD, rank, block_words)
            store_words(block_ptr, places, payload, flag, places < block_words, TIMED)
        if kept_ptr is not None:
            store_payload(kept_ptr, places, payload, size, PER_WORD)
        part = claim(sent_ptr).to(tl.int32)


@triton.jit(do_not_specialize=NOT_SPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def low_latency_gather_kernel(
    own_ptr, gathered_ptr, words_ptr, words_at_ptr, size,
    rank, signals_ptr, epoch_ptr, outgoing_at_ptr, sent_ptr, left_ptr, abort_ptr, record_ptr, tag, limit,
    WORLD: tl.constexpr, PER_WORD: tl.constexpr, BLOCK: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    """size: units of one block."""
    expected = next_word(tl.load(epoch_ptr), tag)
    flag = flag_of(expected)
    block_words = tl.cdiv(size, PER_WORD)
    parts = tl.cdiv(block_words, BLOCK)
    send_to_all(own_ptr, gathered_ptr + tl.cast(rank, tl.int64) * size, size, words_at_ptr, flag, expected, rank,
                outgoing_at_ptr, sent_ptr, WORLD, PER_WORD, BLOCK, TIMED)  # fmt: skip
    for index in range(tl.program_id(0), parts * (WORLD - 1), tl.num_programs(0)):
        source = (rank + WORLD - 1 - index % (WORLD - 1)) % WORLD
        places = index // (WORLD - 1) * BLOCK + tl.arange(0, BLOCK)
        payload = receive_words(words_ptr + tl.cast(source, tl.int64) * block_words, places, places < block_words, flag,
                                source, signals_ptr, expected, abort_ptr, record_ptr, limit, TIMED)  # fmt: skip
        store_payload(gathered_ptr + tl.cast(source, tl.int64) * size, places, payload, size, PER_WORD)
    finalize_epoch(left_ptr, epoch_ptr, expected, WORLD)


@triton.jit
def widened(payload, DTYPE: tl.constexpr):
    """(first, second) element of each payload in fp32; of fp32 there is one, and it is both."""
    if DTYPE == tl.float32:
        value = payload.to(tl.float32, bitcast=True)
        return value, value
    else:
        first = payload.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)
        return first, (payload >> 16).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def narrowed(first, second, DTYPE: tl.constexpr):
    """The reverse, rounded once."""
    if DTYPE == tl.float32:
        return first.to(tl.int32, bitcast=True)
    else:
        low = first.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return low | (second.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def store_sum(y_ptr, bias_ptr, places, first, second, size, n, PER_WORD: tl.constexpr, DTYPE: tl.constexpr):
    """y = sums + bias [n], if that is not None, rounded once. first, second: elements of the words at `places`, in fp32."""
    if bias_ptr is not None:
        EACH: tl.constexpr = 1 if DTYPE == tl.float32 else 2  # elements of a word
        first += tl.load(bias_ptr + EACH * places % n).to(tl.float32)
        second += tl.load(bias_ptr + (EACH * places + EACH - 1) % n).to(tl.float32)
    store_payload(y_ptr, places, narrowed(first, second, DTYPE), size, PER_WORD)


@triton.jit(do_not_specialize=NOT_SPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def low_latency_scatter_kernel(
    partial_ptr, bias_ptr, y_ptr, words_ptr, words_at_ptr, size, n,
    rank, signals_ptr, epoch_ptr, outgoing_at_ptr, sent_ptr, left_ptr, abort_ptr, record_ptr, tag, limit,
    WORLD: tl.constexpr, PER_WORD: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    """size: units of one block. bias [n]: of DTYPE, or None. The sum is that of reduce_partials_kernel, to the bit."""
    expected = next_word(tl.load(epoch_ptr), tag)
    flag = flag_of(expected)
    block_words = tl.cdiv(size, PER_WORD)
    parts = tl.cdiv(block_words, BLOCK)
    lane = tl.arange(0, BLOCK)
    index = claim(sent_ptr).to(tl.int32)
    while index < parts * (WORLD - 1):
        if index == 0:
            tell_call(outgoing_at_ptr, expected, rank, WORLD)
        target = (rank + 1 + index % (WORLD - 1)) % WORLD  # in turn: ranks out of step do not meet at one peer
        places = index // (WORLD - 1) * BLOCK + lane
        payload = load_payload(partial_ptr + tl.cast(target, tl.int64) * size, places, size, PER_WORD)
        block_ptr = peer_block(words_at_ptr, target, rank, block_words)
        store_words(block_ptr, places, payload, flag, places < block_words, TIMED)
        index = claim(sent_ptr).to(tl.int32)
    for part in range(tl.program_id(0), parts, tl.num_programs(0)):
        places = part * BLOCK + lane
        own = load_payload(partial_ptr + tl.cast(rank, tl.int64) * size, places, size, PER_WORD)
        first, second = widened(own, DTYPE)
        for source in range(WORLD):
            if source != rank:
                from_ptr = words_ptr + tl.cast(source, tl.int64) * block_words
                payload = receive_words(from_ptr, places, places < block_words, flag, source, signals_ptr, expected,
                                        abort_ptr, record_ptr, limit, TIMED)  # fmt: skip
                more, more_too = widened(payload, DTYPE)
                first, second = first + more, second + more_too
        store_sum(y_ptr, bias_ptr, places, first, second, size, n, PER_WORD, DTYPE)
    finalize_epoch(left_ptr, epoch_ptr, expected, WORLD)


@triton.jit(do_not_specialize=NOT_SPECIALIZED, do_not_specialize_on_alignment=UNALIGNED)
def low_latency_all_reduce_kernel(
    partial_ptr, bias_ptr, y_ptr, words_ptr, words_at_ptr, size, n,
    rank, signals_ptr, epoch_ptr, outgoing_at_ptr, sent_ptr, left_ptr, abort_ptr, record_ptr, tag, limit,
    WORLD: tl.constexpr, PER_WORD: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    """size: units of the whole partial. bias [n]: as above. Rank 0's comes first at every rank, so all have the same bits."""
    expected = next_word(tl.load(epoch_ptr), tag)
    flag = flag_of(expected)
    block_words = tl.cdiv(size, PER_WORD)
    send_to_all(partial_ptr, None, size, words_at_ptr, flag, expected, rank,
                outgoing_at_ptr, sent_ptr, WORLD, PER_WORD, BLOCK, TIMED)  # fmt: skip
    for part in range(tl.program_id(0), tl.cdiv(block_words, BLOCK), tl.num_programs(0)):
        places = part * BLOCK + tl.arange(0, BLOCK)
        first = tl.zeros((BLOCK,), tl.float32)
        second = first
        from_ptr = words_ptr
        for source in range(WORLD):
            if source == rank:
                payload = load_payload(partial_ptr, places, size, PER_WORD)
            else:
                payload = receive_words(from_ptr, places, places < block_words, flag, source, signals_ptr, expected,
                                        abort_ptr, record_ptr, limit, TIMED)  # fmt: skip
            from_ptr += block_words
            more, more_too = widened(payload, DTYPE)
            first, second = first + more, second + more_too
        store_sum(y_ptr, bias_ptr, places, first, second, size, n, PER_WORD, DTYPE)
    finalize_epoch(left_ptr, epoch_ptr, expected, WORLD)
