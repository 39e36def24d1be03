"""How tiles leave the Hopper kernels: from registers into shared memory, a quarter tile at a time, and from there by TMA.

A quarter is one multiplying group's strip of half a tile's columns. AG + GEMM stores from the multiplying warps, through one
buffer of each group. GEMM + RS has a storing warp, which takes quarters from an outbox. Each buffer there has a `full` barrier
(the quarter is in it) and a `free` one (TMA has read it).

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
def make_quarters(desc, COUNT: gl.constexpr):
    """Shared memory for COUNT quarter tiles [ROWS, COLS / 2] that `desc` stores, whose blocks are [1, ROWS, COLS / 2]."""
    rows: gl.constexpr = desc.block_type.shape[1]
    cols: gl.constexpr = desc.block_type.shape[2]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, cols], desc.dtype)
    return gl.allocate_shared_memory(desc.dtype, [COUNT, rows, cols], layout)


@gluon.jit
def store_inside(out_desc, quarter, chunk, row, col):
    """Store a quarter tile by TMA at (row, col) of a chunk, as far as it lies inside."""
    block = reinterpret(quarter, out_desc.dtype, out_desc.block_type.shape, out_desc.layout)
    tma_store(out_desc, [chunk, row, col], block)


@gluon.jit
def store_quarter(out_desc, buffer, values, chunk, row, col):
    """A multiplying group: store [ROWS, COLS / 2] by TMA through its only buffer, beside which four stages fit."""
    tma.store_wait(0)
    debug_barrier()
    buffer.store(values.to(out_desc.dtype))
    fence_async_shared()
    debug_barrier()
    store_inside(out_desc, buffer, chunk, row, col)


@gluon.jit
def make_outbox(desc, BUFFERS: gl.constexpr):
    """Buffers of a quarter tile between the multiplying groups, BUFFERS each, and a storing warp: (quarters, full barriers, free
    barriers)."""
    quarters = make_quarters(desc, PARTS * BUFFERS)
    full = gl.allocate_shared_memory(gl.int64, [PARTS * BUFFERS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [PARTS * BUFFERS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(PARTS * BUFFERS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    fence_async_shared()
    return quarters, full, free


@gluon.jit
def put_quarter(outbox, sent, values, PART: gl.constexpr, BUFFERS: gl.constexpr):
    """A multiplying group: put a quarter tile into the outbox; `sent` counts those of this group since the kernel began."""
    quarters, full, free = outbox
    slot = PART * BUFFERS + sent % BUFFERS
    mbarrier.wait(free.index(slot), (sent // BUFFERS & 1) ^ 1)
    quarters.index(slot).store(values.to(quarters.dtype))
    fence_async_shared()
    debug_barrier()
    mbarrier.arrive(full.index(slot), count=1)
    return sent + 1


@gluon.jit
def store_strip(out_desc, outbox, sent, chunk, row, col, halves, PART: gl.constexpr, BUFFERS: gl.constexpr):
    """Storing warp: store strip PART of a tile, a quarter for each of its `halves`, at (row, col) of a chunk; buffers are free
    once they have been read. `sent` counts quarters that this group has put into the outbox before."""
    quarters, full, free = outbox
    cols: gl.constexpr = out_desc.block_type.shape[2]
    for half in range(halves):
        slot = PART * BUFFERS + (sent + half) % BUFFERS
        mbarrier.wait(full.index(slot), (sent + half) // BUFFERS & 1)
        store_inside(out_desc, quarters.index(slot), chunk, row, col + half * cols)
        tma.store_wait(0)
        mbarrier.arrive(free.index(slot), count=1)


@gluon.jit
def stores_are_written():
    """Wait until this thread's TMA stores are written, not only read out of shared memory, as tma.store_wait does."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
