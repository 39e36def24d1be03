"""How tiles leave the Hopper kernels: from registers into an outbox in shared memory, a quarter tile at a time, and from there by
TMA.

A quarter is one multiplying group's strip of half a tile's columns. A storing warp takes quarters out of the outbox: of each tile
group 0's first, left before right. Each quarter has a `full` barrier (it is in its buffer) and a `free` one (TMA has read it).

Beside four stages there is room for two buffers. Both groups use both, one for each half of a tile, in turns. So no group waits
for TMA between its two quarters, as it did when each had one buffer. A product takes less time, the more the smaller K is: 4 to
5 % at K = 1024, 2 to 3 % at 2048, 1 to 2 % at 4096 (H100, `benchmarks/notes.md`).

What is stored has a descriptor of [chunks, rows of a chunk, columns]: TMA leaves out what lies beyond an edge.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language import debug_barrier

from .hopper_tiles import PARTS, reinterpret

# Triton 3.9 renamed it; the arguments are the same.
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global


@gluon.jit
def split_tile(acc, ROWS: gl.constexpr, COLS: gl.constexpr):
    """The left and right halves [ROWS, COLS / 2] of what one group has multiplied."""
    return acc.reshape((ROWS, 2, COLS // 2)).permute((0, 2, 1)).split()


@gluon.jit
def make_outbox(desc, BUFFERS: gl.constexpr):
    """make_outbox_of quarters that `desc` stores, whose blocks are [1, ROWS, COLS / 2]."""
    rows: gl.constexpr = desc.block_type.shape[1]
    cols: gl.constexpr = desc.block_type.shape[2]
    return make_outbox_of(desc.dtype, rows, cols, BUFFERS)


@gluon.jit
def make_outbox_of(dtype: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, BUFFERS: gl.constexpr):
    """Buffers of a quarter tile [ROWS, COLS] between the multiplying groups and a storing warp: (quarters, full barriers, free
    barriers).

    BUFFERS: for each half of a tile. One: both groups use it in turns, group 0 first. Two: each has its own.
    """
    HALVES: gl.constexpr = 2
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLS], dtype)
    quarters = gl.allocate_shared_memory(dtype, [HALVES * BUFFERS, ROWS, COLS], layout)
    full = gl.allocate_shared_memory(gl.int64, [PARTS * HALVES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [PARTS * HALVES, 1], mbarrier.MBarrierLayout())
    for quarter in gl.static_range(PARTS * HALVES):
        mbarrier.init(full.index(quarter), count=1)
        mbarrier.init(free.index(quarter), count=1)
    fence_async_shared()
    return quarters, full, free


@gluon.jit
def put_quarter(outbox, turn, values, PART: gl.constexpr, HALF: gl.constexpr, BUFFERS: gl.constexpr):
    """A multiplying group: put a quarter of its tile number `turn` into the outbox, once what its buffer held has left."""
    quarters, full, free = outbox
    if BUFFERS == 1:
        buffer = quarters.index(HALF)
        # Group 0's last quarter is of this tile, group 1's of the one before.
        mbarrier.wait(free.index((1 - PART) * 2 + HALF), (turn & 1) ^ (1 - PART))
    else:
        buffer = quarters.index(PART * 2 + HALF)
        mbarrier.wait(free.index(PART * 2 + HALF), (turn & 1) ^ 1)
    buffer.store(values.to(quarters.dtype))
    fence_async_shared()
    debug_barrier()
    mbarrier.arrive(full.index(PART * 2 + HALF), count=1)


@gluon.jit
def store_strip(out_desc, outbox, turn, chunk, row, col, halves, PART: gl.constexpr, BUFFERS: gl.constexpr):
    """Storing warp: store strip PART of tile number `turn`, a quarter for each of its `halves`, at (row, col) of a chunk; buffers
    are free once they have been read."""
    quarters, full, free = outbox
    cols: gl.constexpr = out_desc.block_type.shape[2]
    for half in range(halves):
        mbarrier.wait(full.index(PART * 2 + half), turn & 1)
        quarter = quarters.index((BUFFERS - 1) * PART * 2 + half)
        block = reinterpret(quarter, out_desc.dtype, out_desc.block_type.shape, out_desc.layout)
        tma_store(out_desc, [chunk, row, col + half * cols], block)  # as far as it lies inside
        tma.store_wait(0)
        mbarrier.arrive(free.index(PART * 2 + half), count=1)


@gluon.jit
def stores_are_written():
    """Wait until this thread's TMA stores are written, not only read out of shared memory, as tma.store_wait does."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
