"""Data that brings its own signal: 8-byte words of 4 bytes of data and a flag of 4 bytes.

    word = flag << 32 | payload        flag: the upper half of the call's signal, which is the slot's epoch

A word is stored and loaded as a whole (PTX: relaxed accesses of 64 bits are not torn). So a word with the right flag has the
right data, whatever comes before or after it: nothing is released or acquired, and no signal follows the data.

Nothing else is ever stored where such words lie. What is there is zero or a word of an earlier call with another epoch, so old
data are never taken for new. An epoch comes again after 2^32 uses of a slot.
"""

import triton
import triton.language as tl

from .signal import EPOCH_SHIFT, clock, has_arrived, is_noted, note_wait, record_fault, signal_word

LOW_HALF = tl.constexpr(0xFFFFFFFF)
ONE_EPOCH = tl.constexpr(1 << 32)
INSTEAD_OF_ZERO = tl.constexpr(-(1 << 63))  # the epoch that is half a turn away
# What a wait has found; the highest that any thread sees counts.
COMPLETE, WAITING, LATE, ELSEWHERE, ABORTED = (tl.constexpr(state) for state in range(5))
# One store of 64 bits for each word. Triton's own would be weak, which PTX allows to be torn.
STORE_WORD = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.relaxed.sys.global.b64 [$1], $2; mov.b32 $0, 0; }"
)


@triton.jit
def flag_of(signal):
    """The flag of a call's words, in its place in the upper half. Never 0: memory starts with zeros."""
    flag = (signal >> EPOCH_SHIFT) << EPOCH_SHIFT
    return tl.where(flag == 0, INSTEAD_OF_ZERO, flag)


@triton.jit
def store_words(to_ptr, places, payload, flag, inside, COMPILED: tl.constexpr):
    """Store payload [B] int32 as words at to_ptr + places [B], where `inside`. The interpreter knows no assembly."""
    words = (payload.to(tl.int64) & LOW_HALF) | flag
    if COMPILED:
        addresses = (to_ptr + places).to(tl.int64)
        operands = [addresses, words, inside.to(tl.int32)]
        tl.inline_asm_elementwise(STORE_WORD, "=r,l,l,r", operands, dtype=tl.int32, is_pure=False, pack=1)
    else:
        tl.store(to_ptr + places, words, mask=inside)


@triton.jit
def receive_words(from_ptr, places, inside, flag, source, signals_ptr, expected, abort_ptr, record_ptr, limit,
                  TIMED: tl.constexpr):  # fmt: skip
    """Spin until all words [B] of rank `source` have come; payload [B] int32, -1 if they do not: NaN in every dtype.

    The signal of the source tells which call it is in, for which a flag has no room; it is no proof that data have come. Bounded
    and recorded as wait_signal is.

    Threads look at different times. They go on or leave together, as the reduction says that all of them take part in: where
    some left on their own, the others would wait for them in the next reduction.
    """
    spins = tl.cast(0, tl.int64)
    begin = clock(spins, TIMED)
    word = signal_word(source, 0)
    state = WAITING
    seen = expected
    words = tl.zeros_like(places).to(tl.int64)
    while state == WAITING:
        seen = tl.load(signals_ptr + word, volatile=True)
        words = tl.load(from_ptr + places, mask=inside, other=flag, volatile=True)
        aborted = tl.load(abort_ptr, volatile=True) != 0
        elapsed = clock(spins, TIMED) - begin
        spins += 1
        here = (((words >> EPOCH_SHIFT) << EPOCH_SHIFT) == flag) & (seen == expected)
        elsewhere = has_arrived(seen, expected) & (seen != expected)
        otherwise = tl.where(elsewhere, ELSEWHERE, tl.where(elapsed > limit, LATE, WAITING))
        state = tl.max(tl.where(aborted, ABORTED, tl.where(here, COMPLETE, otherwise)), 0)
        if (state == WAITING) & is_noted(elapsed, spins, limit, TIMED):
            note_wait(abort_ptr, record_ptr, word, expected, elapsed)
    if (state == LATE) | (state == ELSEWHERE):  # where the signal has come and data have not: as if neither had
        record_fault(abort_ptr, record_ptr, word, expected, tl.where(seen == expected, expected - ONE_EPOCH, seen))
    return tl.where(state == COMPLETE, words.to(tl.int32), -1)


@triton.jit
def load_payload(ptr, places, size, PER_WORD: tl.constexpr):
    """Words' worth of data: [B] int32 from units of 4 bytes (PER_WORD 1) or of 2 (PER_WORD 2); 0 beyond `size` units."""
    if PER_WORD == 1:
        return tl.load(ptr + places, mask=places < size, other=0)
    else:
        low = tl.load(ptr + 2 * places, mask=2 * places < size, other=0).to(tl.int32) & 0xFFFF
        high = tl.load(ptr + 2 * places + 1, mask=2 * places + 1 < size, other=0).to(tl.int32)
        return low | (high << 16)


@triton.jit
def store_payload(ptr, places, payload, size, PER_WORD: tl.constexpr):
    """The reverse of load_payload."""
    if PER_WORD == 1:
        tl.store(ptr + places, payload, mask=places < size)
    else:
        tl.store(ptr + 2 * places, payload.to(tl.int16), mask=2 * places < size)
        tl.store(ptr + 2 * places + 1, (payload >> 16).to(tl.int16), mask=2 * places + 1 < size)
