"""Signals on the device: how a tile waits for a chunk, and how a kernel reports that a tile is stored.

A signal is one int64 word in symmetric memory with exactly one writer. Its upper half is the epoch of the slot, its lower half
the fingerprint of the call that sent the chunk. Epochs only grow, so nothing is ever reset. Rules: docs/design.md.
"""

import triton
import triton.language as tl

from . import signal_words as words

MAX_CHUNKS = tl.constexpr(words.MAX_CHUNKS)
EPOCH_SHIFT = tl.constexpr(words.EPOCH_SHIFT)
FIRST_COUNTERS = tl.constexpr(words.FIRST_COUNTERS)
FAULT_SET = tl.constexpr(words.FAULT_SET)
FAULT_WORD = tl.constexpr(words.FAULT_WORD)
FAULT_EXPECTED = tl.constexpr(words.FAULT_EXPECTED)
FAULT_SEEN = tl.constexpr(words.FAULT_SEEN)
LATE_WORD = tl.constexpr(words.LATE_WORD)
LATE_EXPECTED = tl.constexpr(words.LATE_EXPECTED)
LATE_ELAPSED = tl.constexpr(words.LATE_ELAPSED)
HOST_ABORT = tl.constexpr(words.HOST_ABORT)
NOTE_NS = tl.constexpr(words.NOTE_NS)


@triton.jit
def clock(spins, TIMED: tl.constexpr):
    """Nanoseconds on the GPU; the number of polls where the interpreter runs the kernel, which has no device clock."""
    if TIMED:
        return tl.extra.cuda.globaltimer().to(tl.int64)
    else:
        return spins


@triton.jit
def next_word(word, tag):
    """The signal of the slot's next call. tag: one epoch plus the call's fingerprint."""
    return ((word >> EPOCH_SHIFT) << EPOCH_SHIFT) + tag


@triton.jit
def has_arrived(seen, expected):
    """Whether a signal is of the expected epoch, or of a later one. The difference is right after the epoch wraps around, too."""
    return seen - ((expected >> EPOCH_SHIFT) << EPOCH_SHIFT) >= 0


@triton.jit
def wait_signal(signals_ptr, word, expected, abort_ptr, record_ptr, limit, TIMED: tl.constexpr):
    """Spin until signal `word` of a slot has the epoch of `expected`; returns whether it came, and from the same call.

    Acquires at system scope (rule 2). Bounded by `limit` (rule 5): nanoseconds if TIMED, else polls. The first wait that fails
    in a call raises the flag at `abort_ptr`, which ends every other wait of the rank at once, and fills the host-visible
    record. A long wait notes itself in the record, where the host looks whether the peer will come (note_wait).
    """
    spins = tl.cast(0, tl.int64)
    begin = clock(spins, TIMED)
    signal_ptr = signals_ptr + word
    seen = tl.atomic_add(signal_ptr, 0, sem="acquire", scope="sys")
    waiting = has_arrived(seen, expected) == 0
    while waiting:
        seen = tl.atomic_add(signal_ptr, 0, sem="acquire", scope="sys")
        spins += 1
        aborted = tl.load(abort_ptr, volatile=True) != 0
        elapsed = clock(spins, TIMED) - begin
        late = elapsed > limit
        waiting = (has_arrived(seen, expected) == 0) & (late == 0) & (aborted == 0)
        if waiting & is_noted(elapsed, spins, limit, TIMED):
            note_wait(abort_ptr, record_ptr, word, expected, elapsed)
    # A later epoch is right, too: a peer may be one barrier ahead.
    same_call = (seen == expected) | ((seen >> EPOCH_SHIFT) != (expected >> EPOCH_SHIFT))
    arrived = has_arrived(seen, expected) & same_call
    if arrived == 0:
        record_fault(abort_ptr, record_ptr, word, expected, seen)
    return arrived


@triton.jit
def is_noted(elapsed, spins, limit, TIMED: tl.constexpr):
    """Whether a wait notes itself: from a quarter of a second, or a tenth of its limit, on, every 16384 polls."""
    takes_long = elapsed > tl.minimum(limit // 10, NOTE_NS)
    if TIMED:
        return takes_long & ((spins & 16383) == 0)
    else:
        return takes_long


@triton.jit
def note_wait(abort_ptr, record_ptr, word, expected, elapsed):
    """Tell the host of a wait that goes on, and end all waits of the rank if the host says that the peer will not come."""
    tl.store(record_ptr + LATE_WORD, word)
    tl.store(record_ptr + LATE_EXPECTED, expected)
    tl.store(record_ptr + LATE_ELAPSED, elapsed)
    if tl.load(record_ptr + HOST_ABORT, volatile=True) != 0:
        tl.store(abort_ptr, tl.cast(1, tl.int64))


@triton.jit
def wait_both(signals_ptr, first, last, expected, abort_ptr, record_ptr, limit):
    """wait_signal on a GPU for two signals, which may be the same one. In a loop, so that the code of a wait is there once."""
    word = last
    waiting = True
    while waiting:
        wait_signal(signals_ptr, word, expected, abort_ptr, record_ptr, limit, True)
        waiting = word != first
        word = first


@triton.jit
def record_fault(abort_ptr, record_ptr, word, expected, seen):
    """Fill the record once: the first wait that fails is the one worth naming. The set word is written last."""
    first = tl.atomic_cas(abort_ptr, tl.cast(0, tl.int64), tl.cast(1, tl.int64))
    if first == 0:
        tl.store(record_ptr + FAULT_WORD, word)
        tl.store(record_ptr + FAULT_EXPECTED, expected)
        tl.store(record_ptr + FAULT_SEEN, seen)
        tl.atomic_xchg(record_ptr + FAULT_SET, tl.cast(1, tl.int64), sem="release", scope="sys")


@triton.jit
def notify_copy_engine(counter_ptr, amount=1):
    """Count a stored tile, or the strips of one. The barrier puts the stores of all threads before the release (rule 1)."""
    tl.debug_barrier()
    tl.atomic_add(counter_ptr, tl.cast(amount, tl.int64), sem="release", scope="sys")


@triton.jit
def notify_peer(counter_ptr, count, signal_ptr, word, amount=1):
    """Count a tile, strips of one, or a piece of rows that was stored at a peer; the last of a chunk writes the peer's signal.

    The count acquires and releases: the signal follows the stores of all CTAs that counted before (rule 1).
    """
    tl.debug_barrier()
    counted = tl.atomic_add(counter_ptr, tl.cast(amount, tl.int64), sem="acq_rel", scope="sys") + amount
    if counted == count:
        tl.atomic_xchg(signal_ptr, word, sem="release", scope="sys")


@triton.jit
def finalize_epoch(left_ptr, epoch_ptr, word, WORLD: tl.constexpr):
    """The last CTA to exit resets the tile counters and advances the slot's epoch.

    For kernels that send everything themselves: no copy sends the epoch, and a launch is saved (8 to 15 microseconds of host
    time, 4 on the GPU). All CTAs are past their last claim here, so resetting is safe.

    left_ptr: how many CTAs have exited, the first of the kernel's counters.
    """
    tl.debug_barrier()
    left = tl.atomic_add(left_ptr, tl.cast(1, tl.int64), sem="acq_rel", scope="gpu") + 1
    if left == tl.num_programs(0):
        for counter in range(FIRST_COUNTERS + WORLD * MAX_CHUNKS):
            tl.store(left_ptr + counter, tl.cast(0, tl.int64))
        tl.store(epoch_ptr, word)


@triton.jit(do_not_specialize=["tag", "count"])
def next_epoch_kernel(epoch_ptr, tag, count, BLOCK: tl.constexpr):
    """Advance a slot's epoch and reset the `count` counters after it, before a call whose blocks are sent by copies."""
    word = next_word(tl.load(epoch_ptr), tag)
    counters = tl.arange(0, BLOCK)
    tl.store(epoch_ptr + 1 + counters, tl.zeros((BLOCK,), tl.int64), mask=counters < count)
    tl.store(epoch_ptr, word)


@triton.jit
def claim(counter_ptr):
    """The next tile of the schedule. Dynamic: any one resident CTA finishes the whole grid's work (rule 4)."""
    return tl.atomic_add(counter_ptr, tl.cast(1, tl.int64), sem="relaxed", scope="gpu")


@triton.jit
def signal_word(source, chunk):
    """Which signal of a slot guards `chunk` of the block that rank `source` writes."""
    # A cast, since Triton 3.8's interpreter takes a Python number times a constant plus a tensor for a constant.
    return tl.cast(source, tl.int32) * MAX_CHUNKS + chunk


@triton.jit(do_not_specialize=["rank", "tag", "limit"])
def barrier_kernel(epoch_ptr, outgoing_at_ptr, signals_ptr, abort_ptr, record_ptr, tag, limit, rank, WORLD: tl.constexpr,
                   TIMED: tl.constexpr):  # fmt: skip
    """One CTA that signals every peer and holds its stream until every peer has signalled.

    All earlier work of the stream is done when the kernel starts, and the release puts it before the signal. One launch replaces
    ten driver calls (40 microseconds of host time) of pushes with a waiting kernel after them.
    """
    word = next_word(tl.load(epoch_ptr), tag)
    for peer in range(WORLD):
        if peer != rank:
            theirs_ptr = tl.load(outgoing_at_ptr + peer).to(epoch_ptr.dtype)
            tl.atomic_xchg(theirs_ptr, word, sem="release", scope="sys")
    for source in range(WORLD):
        if source != rank:
            wait_signal(signals_ptr, signal_word(source, 0), word, abort_ptr, record_ptr, limit, TIMED)
    tl.store(epoch_ptr, word)  # advanced here and not by the host: a replayed graph goes on counting


@triton.jit(
    do_not_specialize=["rank", "first", "count", "first_chunk", "limit", "row_size"],
    do_not_specialize_on_alignment=["row_ptr"],
)
def wait_kernel(signals_ptr, epoch_ptr, abort_ptr, record_ptr, limit, rank, first, count, first_chunk, row_ptr, row_size,
                CHUNKS: tl.constexpr, TIMED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One CTA that holds its stream until CHUNKS chunks, from `first_chunk` on, of the blocks of `count` ranks, from rank `first`
    on, have arrived (its own excepted).

    Library GEMMs wait by it; it is bounded and replays in a graph. If this wait, or an earlier one of the rank, has failed, it
    writes NaN over the row at `row_ptr` (`row_size` elements): the loss shows it even before the host raises.

    One binary for all rows of a dtype, so that no later one is loaded beside a running kernel.
    """
    hold(signals_ptr, epoch_ptr, abort_ptr, record_ptr, limit, rank, first, count, first_chunk, row_ptr, row_size,
         CHUNKS, TIMED, BLOCK)  # fmt: skip


@triton.jit(do_not_specialize=["rank", "count", "limit"])
def wait_and_keep_kernel(signals_ptr, epoch_ptr, abort_ptr, record_ptr, limit, rank, count, row_ptr, row_size,
                         own_ptr, kept_ptr, size, CHUNKS: tl.constexpr, TIMED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The first CTA waits for the blocks of all `count` ranks, as wait_kernel does. The others write the own one, `size` elements
    at own_ptr, to its place among them, kept_ptr: torch's copy would take 10 to 20 microseconds of host time more. Nothing
    depends on the order of the two: the own block has no signal, and no peer reads it here."""
    program = tl.program_id(0)
    if program == 0:
        hold(signals_ptr, epoch_ptr, abort_ptr, record_ptr, limit, rank, 0, count, 0, row_ptr, row_size,
             CHUNKS, TIMED, BLOCK)  # fmt: skip
    else:
        step = tl.cast(tl.num_programs(0) - 1, tl.int64) * BLOCK
        for start in range(tl.cast(program - 1, tl.int64) * BLOCK, size, step):
            place = start + tl.arange(0, BLOCK)
            tl.store(kept_ptr + place, tl.load(own_ptr + place, mask=place < size), mask=place < size)


@triton.jit(do_not_specialize=["rank", "limit"])
def take_blocks_kernel(signals_ptr, epoch_ptr, abort_ptr, record_ptr, limit, rank, blocks_ptr, y_ptr, chunk_size,
                       WORLD: tl.constexpr, CHUNKS: tl.constexpr, TIMED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Copy the blocks of all other ranks out of the slot into y [W, CHUNKS, chunk_size], the first chunks of all first: each
    piece of BLOCK elements when its chunk is here. NaN where this wait, or an earlier one of the rank, has failed."""
    expected = tl.load(epoch_ptr)
    per_chunk = tl.cdiv(chunk_size, BLOCK)
    for number in range(tl.program_id(0), per_chunk * (WORLD - 1) * CHUNKS, tl.num_programs(0)):
        unit = number // per_chunk
        chunk = unit // (WORLD - 1)
        source = (rank + 1 + unit % (WORLD - 1)) % WORLD
        word = signal_word(source, chunk)
        arrived = wait_signal(signals_ptr, word, expected, abort_ptr, record_ptr, limit, TIMED)
        arrived = arrived & (tl.load(abort_ptr, volatile=True) == 0)
        place = number % per_chunk * BLOCK + tl.arange(0, BLOCK)
        first = (tl.cast(source, tl.int64) * CHUNKS + chunk) * chunk_size
        values = tl.load(blocks_ptr + first + place, mask=place < chunk_size, other=0.0)
        values = tl.where(arrived, values, float("nan"))
        tl.store(y_ptr + first + place, values.to(y_ptr.dtype.element_ty), mask=place < chunk_size)


@triton.jit
def hold(signals_ptr, epoch_ptr, abort_ptr, record_ptr, limit, rank, first, count, first_chunk, row_ptr, row_size,
         CHUNKS: tl.constexpr, TIMED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """What wait_kernel does."""
    expected = tl.load(epoch_ptr)
    missing = 0
    for source in range(first, first + count):
        if source != rank:
            for chunk in tl.static_range(CHUNKS):
                word = signal_word(source, first_chunk + chunk)
                arrived = wait_signal(signals_ptr, word, expected, abort_ptr, record_ptr, limit, TIMED)
                missing += (arrived == 0).to(tl.int32)
    # A barrier that failed has no output of its own: what follows it may be wrong, and shows it here.
    missing += (tl.load(abort_ptr, volatile=True) != 0).to(tl.int32)
    if missing > 0:
        for start in range(0, row_size, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            nan = tl.full((BLOCK,), float("nan"), tl.float32)
            tl.store(row_ptr + offsets, nan.to(row_ptr.dtype.element_ty), mask=offsets < row_size)
