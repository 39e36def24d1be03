"""The sum between nodes: blocks of a slot that have arrived are added to the own partial."""

import triton
import triton.language as tl


@triton.jit
def add_blocks_kernel(
    own_ptr, received_ptr, order_ptr, y_ptr, size, pitch, abort_ptr, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """y [size] = own [size] + the blocks of received [W, pitch] that order [COUNT] names, in that order, summed in fp32.

    Between nodes; runs after the waits for these blocks. NaN if a wait gave up.
    """
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    total = tl.load(own_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    for place in tl.static_range(COUNT):
        part_ptr = received_ptr + tl.load(order_ptr + place) * pitch
        total += tl.load(part_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    total = tl.where(tl.load(abort_ptr, volatile=True) != 0, float("nan"), total)
    tl.store(y_ptr + offsets, total.to(y_ptr.dtype.element_ty), mask=mask)
