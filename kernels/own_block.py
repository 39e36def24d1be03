"""Received blocks for the weight gradient: the wait for the peers' and the copy of the own one are one launch.

torch's copy, with the view that it writes to, takes 10 to 20 microseconds of host time, as much as the wait. Nothing in the slot
depends on the order of the two: the own block has no signal, and no peer reads it here.
"""

import triton
import triton.language as tl

from .signal import hold


@triton.jit(do_not_specialize=["rank", "count", "limit"])
def wait_and_keep_kernel(signals_ptr, epoch_ptr, abort_ptr, record_ptr, limit, rank, count, row_ptr, row_size,
                         own_ptr, kept_ptr, size, CHUNKS: tl.constexpr, TIMED: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """The first CTA waits for the blocks of all `count` ranks, as wait_kernel does. The others write the own one, `size` elements
    at own_ptr, to its place among them, kept_ptr."""
    program = tl.program_id(0)
    if program == 0:
        hold(signals_ptr, epoch_ptr, abort_ptr, record_ptr, limit, rank, 0, count, 0, row_ptr, row_size,
             CHUNKS, TIMED, BLOCK)  # fmt: skip
    else:
        step = tl.cast(tl.num_programs(0) - 1, tl.int64) * BLOCK
        for start in range(tl.cast(program - 1, tl.int64) * BLOCK, size, step):
            place = start + tl.arange(0, BLOCK)
            tl.store(kept_ptr + place, tl.load(own_ptr + place, mask=place < size), mask=place < size)
