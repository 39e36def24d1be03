"""Signals on the device: how a tile waits for a chunk, and how a tile says that it is written.

A signal is one int64 word in symmetric memory with exactly one writer. It holds the epoch of the last chunk that arrived and
is compared with `>=`, so nothing is ever reset. Rule numbers refer to docs/design.md.
"""

import triton
import triton.language as tl

from . import signal_words as words

MAX_CHUNKS = tl.constexpr(words.MAX_CHUNKS)
FIRST_COUNTERS = tl.constexpr(words.FIRST_COUNTERS)
FAULT_SET = tl.constexpr(words.FAULT_SET)
FAULT_TAG = tl.constexpr(words.FAULT_TAG)
FAULT_WORD = tl.constexpr(words.FAULT_WORD)
FAULT_EXPECTED = tl.constexpr(words.FAULT_EXPECTED)
FAULT_SEEN = tl.constexpr(words.FAULT_SEEN)


@triton.jit
def clock(spins, TIMED: tl.constexpr):
    """Nanoseconds on the GPU; the number of polls where the interpreter runs the kernel, which has no device clock."""
    if TIMED:
        return tl.extra.cuda.globaltimer().to(tl.int64)
    else:
        return spins


@triton.jit
def wait_signal(signals_ptr, word, epoch, abort_ptr, record_ptr, tag, limit, TIMED: tl.constexpr):
    """Spin until word `word` of a slot's signals is at least `epoch`; returns whether it is.

    Acquires at system scope (rule 2). Bounded by `limit` (rule 5): nanoseconds if TIMED, else polls. The first wait that gives
    up in a call raises the flag at `abort_ptr`, which ends every other wait of the rank at once, and fills the host-visible
    record, so that the host can name what was waited for.
    """
    spins = tl.cast(0, tl.int64)
    begin = clock(spins, TIMED)
    signal_ptr = signals_ptr + word
    seen = tl.atomic_add(signal_ptr, 0, sem="acquire", scope="sys")
    waiting = seen < epoch
    while waiting:
        seen = tl.atomic_add(signal_ptr, 0, sem="acquire", scope="sys")
        spins += 1
        aborted = tl.load(abort_ptr, volatile=True) != 0
        late = clock(spins, TIMED) - begin > limit
        waiting = (seen < epoch) & (late == 0) & (aborted == 0)
    arrived = seen >= epoch
    if arrived == 0:
        report_fault(abort_ptr, record_ptr, tag, word, epoch, seen)
    return arrived


@triton.jit
def report_fault(abort_ptr, record_ptr, tag, word, expected, seen):
    """Fill the record once: the first wait that fails is the one worth naming. The set word is written last."""
    first = tl.atomic_cas(abort_ptr, tl.cast(0, tl.int64), tl.cast(1, tl.int64))
    if first == 0:
        tl.store(record_ptr + FAULT_TAG, tag)
        tl.store(record_ptr + FAULT_WORD, word)
        tl.store(record_ptr + FAULT_EXPECTED, expected)
        tl.store(record_ptr + FAULT_SEEN, seen)
        tl.atomic_xchg(record_ptr + FAULT_SET, tl.cast(1, tl.int64), sem="release", scope="sys")


@triton.jit
def announce(counter_ptr):
    """Count one finished tile. All threads' stores come before the barrier, the barrier before the release (rule 1)."""
    tl.debug_barrier()
    tl.atomic_add(counter_ptr, tl.cast(1, tl.int64), sem="release", scope="sys")


@triton.jit
def announce_at_peer(counter_ptr, count, signal_ptr, epoch):
    """Count one tile, or piece of rows, that was stored at a peer; whoever counts the last of a chunk's writes the peer's signal.

    The count acquires and releases, so that the signal is behind the stores of all CTAs that counted before (rule 1).
    """
    tl.debug_barrier()
    counted = tl.atomic_add(counter_ptr, tl.cast(1, tl.int64), sem="acq_rel", scope="sys") + 1
    if counted == count:
        tl.atomic_xchg(signal_ptr, epoch, sem="release", scope="sys")


@triton.jit
def leave(left_ptr, epoch_ptr, epoch, WORLD: tl.constexpr):
    """The last CTA to leave zeroes the kernel's counters and counts the epoch, for the next call of the slot.

    For kernels whose epoch no copy sends: that saves a launch, 8 to 15 microseconds of host time and 4 on the GPU. Every CTA of
    the grid has claimed and counted what it will when it comes here, late ones too, so nobody misses what is zeroed.

    left_ptr: how many CTAs have left, the first of the kernel's counters.
    """
    tl.debug_barrier()
    left = tl.atomic_add(left_ptr, tl.cast(1, tl.int64), sem="acq_rel", scope="gpu") + 1
    if left == tl.num_programs(0):
        for word in range(FIRST_COUNTERS + WORLD * MAX_CHUNKS):
            tl.store(left_ptr + word, tl.cast(0, tl.int64))
        tl.store(epoch_ptr, epoch)


@triton.jit
def claim(counter_ptr):
    """The next tile in arrival order. Dynamic, so that any one resident CTA finishes the whole grid's work (rule 4)."""
    return tl.atomic_add(counter_ptr, tl.cast(1, tl.int64), sem="relaxed", scope="gpu")


@triton.jit
def signal_word(source, chunk):
    """Which signal of a slot guards `chunk` of the block that rank `source` writes."""
    return source * MAX_CHUNKS + chunk


@triton.jit(do_not_specialize=["rank", "tag", "limit"])
def meet_kernel(epoch_ptr, outgoing_at_ptr, signals_ptr, abort_ptr, record_ptr, tag, limit, rank, WORLD: tl.constexpr,
                TIMED: tl.constexpr):  # fmt: skip
    """One CTA that tells every peer that this rank's stream has come here, and holds it until all peers' streams have.

    What the stream did before is done when the kernel starts, and the release puts it before the signal. One launch instead of
    the ten driver calls (40 microseconds of host time) of pushes with a waiting kernel behind them.
    """
    epoch = 1 + tl.load(epoch_ptr)
    for peer in range(WORLD):
        if peer != rank:
            theirs_ptr = tl.load(outgoing_at_ptr + peer).to(epoch_ptr.dtype)
            tl.atomic_xchg(theirs_ptr, epoch, sem="release", scope="sys")
    for source in range(WORLD):
        if source != rank:
            wait_signal(signals_ptr, signal_word(source, 0), epoch, abort_ptr, record_ptr, tag, limit, TIMED)
    tl.store(epoch_ptr, epoch)  # counted here and not by the host, so that a replayed graph counts on


@triton.jit(do_not_specialize=["rank", "first", "count", "tag", "limit"])
def wait_kernel(signals_ptr, epoch_ptr, abort_ptr, record_ptr, tag, limit, rank, first, count, row_ptr, row_size,
                CHUNKS: tl.constexpr, TIMED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """One CTA that holds its stream until the blocks of `count` ranks from rank `first` on are there, but for the own one.

    The bounded wait of library GEMMs, which replays in a graph. Where it, or any wait of the rank before, gave up, it writes NaN
    over the row at `row_ptr` (`row_size` elements), so that the loss shows it even before the host raises.
    """
    epoch = tl.load(epoch_ptr)
    missing = 0
    for source in range(first, first + count):
        if source != rank:
            for chunk in tl.static_range(CHUNKS):
                word = signal_word(source, chunk)
                arrived = wait_signal(signals_ptr, word, epoch, abort_ptr, record_ptr, tag, limit, TIMED)
                missing += (arrived == 0).to(tl.int32)
    # A barrier that gave up has no output of its own: what comes after it may be wrong, and shows it here.
    missing += (tl.load(abort_ptr, volatile=True) != 0).to(tl.int32)
    if missing > 0:
        for start in range(0, row_size, BLOCK):
            offsets = start + tl.arange(0, BLOCK)
            nan = tl.full((BLOCK,), float("nan"), tl.float32)
            tl.store(row_ptr + offsets, nan.to(row_ptr.dtype.element_ty), mask=offsets < row_size)
