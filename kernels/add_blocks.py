"""The sum between nodes: blocks of a slot that have arrived are added to the own partial."""

import triton
import triton.language as tl

# Bytes of each block that a CTA adds at a time, and its warps. Beside products a CTA has an SM for itself, and few may have one:
# the more it reads at a time, the more it gets. 2, 4 and 8 blocks in bf16 by one CTA of an H100: 117, 67 and 61 GB/s with 64 KiB
# and 16 warps; 62, 36 and 60 with 32 KiB; 12, 17 and 10 with 2 KiB and 4 warps. On all SMs 32 KiB are best: 2503, 1882 and
# 2226 GB/s, beside 2489, 1274 and 1426 with 64 KiB and 1689, 1541 and 2093 with 2 KiB.
ON_FEW_SMS, ON_ALL_SMS, WARPS = 64 << 10, 32 << 10, 16
# Blocks beside the own one whose 64 KiB find room in registers, with Triton 3.8, too; of more 32 KiB are added at a time.
MOST_OF_64_KIB = 4


@triton.jit
def add_blocks_kernel(
    own_ptr, received_ptr, order_ptr, y_ptr, size, pitch, abort_ptr, COUNT: tl.constexpr, BLOCK: tl.constexpr
):
    """y [size] = own [size] + the blocks of received [W, pitch] that order [COUNT] names, in that order, summed in fp32.

    Between nodes; runs after the waits for these blocks. NaN if a wait gave up. Each program takes BLOCK elements after BLOCK
    elements: any number of programs gives the same bits.
    """
    failed = tl.load(abort_ptr, volatile=True) != 0
    for tile in range(tl.program_id(0), tl.cdiv(size, BLOCK), tl.num_programs(0)):
        offsets = tl.cast(tile, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = offsets < size
        total = tl.load(own_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        for place in tl.static_range(COUNT):
            part_ptr = received_ptr + tl.load(order_ptr + place) * pitch
            total += tl.load(part_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
        total = tl.where(failed, float("nan"), total)
        tl.store(y_ptr + offsets, total.to(y_ptr.dtype.element_ty), mask=mask)
