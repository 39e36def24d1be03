"""A warp-specialised tile GEMM for Hopper, in Gluon: one warp claims tiles, waits and loads; two warp groups multiply.

The plain Triton kernels (all_gather_gemm.py, gemm_reduce_scatter.py) run anywhere and reach 74 to 91 % of cuBLAS on H200,
because their loads, waits and stores stop the tensor cores. Here they do not: this form reached 90 to 102 % of cuBLAS on the
shapes of benchmarks/. Only the loading warp waits for signals, while the tiles before are still being multiplied.

Shared memory: a ring of STAGES panels of A [BLOCK_M, BLOCK_K] and B, and a ring of two tile indices that the loading warp hands
over. Each ring slot has a `full` barrier (its content is there) and a `free` one (it has been read). GEMM + RS has a storing
warp, which takes half tiles from an outbox with the same two barriers; AG + GEMM stores from the multiplying warps.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language import debug_barrier

from .signal import claim

# Triton 3.9 renamed both; the arguments are the same.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

HANDS = gl.constexpr(2)  # tile indices in flight between the loading warp and the others
NO_TILE = gl.constexpr(-1)  # ends the other warps


@gluon.jit
def make_rings(a_desc, b_desc, STAGES: gl.constexpr, READERS: gl.constexpr):
    """(A panels, B panels, full barriers, free barriers) and (tile indices, full barriers, free barriers).

    READERS: how many groups of warps take each tile index.
    """
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [STAGES] + a_desc.block_type.shape, a_desc.layout)
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)
    panel_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    panel_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tile_ring = gl.allocate_shared_memory(gl.int32, [HANDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tile_full = gl.allocate_shared_memory(gl.int64, [HANDS, 1], mbarrier.MBarrierLayout())
    tile_free = gl.allocate_shared_memory(gl.int64, [HANDS, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(panel_full.index(stage), count=1)
        mbarrier.init(panel_free.index(stage), count=1)
    for hand in gl.static_range(HANDS):
        mbarrier.init(tile_full.index(hand), count=1)
        mbarrier.init(tile_free.index(hand), count=READERS)
    fence_async_shared()
    return (a_ring, b_ring, panel_full, panel_free), (tile_ring, tile_full, tile_free)


@gluon.jit
def claim_and_hand_over(tiles, turn, counter_ptr, total):
    """Loading warp: claim the next tile and give its index, or NO_TILE, to the multiplying warps."""
    tile_ring, tile_full, tile_free = tiles
    index = claim(counter_ptr).to(gl.int32)
    index = gl.where(index < total, index, NO_TILE)
    hand = turn % HANDS
    mbarrier.wait(tile_free.index(hand), (turn // HANDS & 1) ^ 1)
    tile_ring.index(hand).store(gl.full([1], index, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(tile_full.index(hand), count=1)
    return index


@gluon.jit
def take_over(tiles, turn, WARPS: gl.constexpr):
    """Multiplying (or storing) warps: the next tile index, or NO_TILE."""
    tile_ring, tile_full, tile_free = tiles
    hand = turn % HANDS
    mbarrier.wait(tile_full.index(hand), turn // HANDS & 1)
    index = gl.max(tile_ring.index(hand).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)
    mbarrier.arrive(tile_free.index(hand), count=1)
    return index


@gluon.jit
def load_tile(panels, step, a_desc, b_desc, a_row, b_col, k_steps,
              BLOCK_K: gl.constexpr, STAGES: gl.constexpr, B_IS_NK: gl.constexpr):  # fmt: skip
    """Loading warp: bring all panels of one tile through the ring; `step` counts panels since the kernel began."""
    a_ring, b_ring, panel_full, panel_free = panels
    for k in range(k_steps):
        stage = step % STAGES
        mbarrier.wait(panel_free.index(stage), (step // STAGES & 1) ^ 1)
        full = panel_full.index(stage)
        mbarrier.expect(full, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        tma_load(a_desc, [a_row, k * BLOCK_K], full, a_ring.index(stage))
        if B_IS_NK:
            tma_load(b_desc, [b_col, k * BLOCK_K], full, b_ring.index(stage))
        else:
            tma_load(b_desc, [k * BLOCK_K, b_col], full, b_ring.index(stage))
        step += 1
    return step


@gluon.jit
def multiply_tile(panels, step, k_steps, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
                  B_IS_NK: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """Multiplying warps: acc [BLOCK_M, BLOCK_N] fp32 of one tile. A panel is freed once the product behind it has been issued
    and its own is done, so that the tensor cores always have the next one queued."""
    a_ring, b_ring, panel_full, panel_free = panels
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, BLOCK_N, 16]
    )
    acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout)
    for k in range(k_steps):
        stage = step % STAGES
        mbarrier.wait(panel_full.index(stage), step // STAGES & 1)
        b = b_ring.index(stage)
        if B_IS_NK:
            b = b.permute((1, 0))
        acc = warpgroup_mma(a_ring.index(stage), b, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=[acc])
        if k > 0:
            mbarrier.arrive(panel_free.index((step - 1) % STAGES), count=1)
        step += 1
    acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    mbarrier.arrive(panel_free.index((step - 1) % STAGES), count=1)
    return acc, step


@gluon.jit
def fence_for_tma():
    """After an acquire, before TMA reads what it guards: the acquire orders ordinary loads, TMA is another proxy (rule 2)."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def stores_are_written():
    """Wait until this thread's TMA stores are written, not only read out of shared memory, as tma.store_wait does."""
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def split_tile(tile, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """The left and right halves [BLOCK_M, BLOCK_N / 2] of a tile."""
    return tile.reshape((BLOCK_M, 2, BLOCK_N // 2)).permute((0, 2, 1)).split()


@gluon.jit
def store_tile(out_desc, half, left, right, row, col, BLOCK_N: gl.constexpr):
    """Store a finished tile by TMA, its two halves through one buffer, beside which four stages fit."""
    _store_half(out_desc, half, left.to(out_desc.dtype), row, col)
    _store_half(out_desc, half, right.to(out_desc.dtype), row, col + BLOCK_N // 2)


@gluon.jit
def _store_half(out_desc, half, values, row, col):
    tma.store_wait(0)
    debug_barrier()
    half.store(values)
    fence_async_shared()
    debug_barrier()
    tma_store(out_desc, [row, col], half)


@gluon.jit
def make_outbox(desc, HALVES: gl.constexpr):
    """Buffers of one half tile each between the multiplying warps and a storing one: (halves, full barriers, free barriers)."""
    halves = gl.allocate_shared_memory(desc.dtype, [HALVES] + desc.block_type.shape, desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [HALVES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [HALVES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(HALVES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    fence_async_shared()
    return halves, full, free


@gluon.jit
def put_half(outbox, sent, values, HALVES: gl.constexpr):
    """Multiplying warps: hand a half tile over; `sent` counts them since the kernel began."""
    halves, full, free = outbox
    slot = sent % HALVES
    mbarrier.wait(free.index(slot), (sent // HALVES & 1) ^ 1)
    halves.index(slot).store(values.to(halves.dtype))
    fence_async_shared()
    debug_barrier()
    mbarrier.arrive(full.index(slot), count=1)
    return sent + 1


@gluon.jit
def store_halves(out_desc, outbox, sent, row, col, BLOCK_N: gl.constexpr, HALVES: gl.constexpr):
    """Storing warp: store the two halves of a tile at (row, col); their buffers are free once they have been read."""
    halves, full, free = outbox
    for half in gl.static_range(2):
        slot = sent % HALVES
        mbarrier.wait(full.index(slot), sent // HALVES & 1)
        tma_store(out_desc, [row, col + half * (BLOCK_N // 2)], halves.index(slot))
        tma.store_wait(0)
        mbarrier.arrive(free.index(slot), count=1)
        sent += 1
    return sent


@gluon.jit
def load_halves(panels, step, desc, row, col, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    """Loading warp: bring the two halves of a tile [BLOCK_M, BLOCK_N] through the ring, in the place of B's panels."""
    _, b_ring, panel_full, panel_free = panels
    for half in gl.static_range(2):
        stage = step % STAGES
        mbarrier.wait(panel_free.index(stage), (step // STAGES & 1) ^ 1)
        full = panel_full.index(stage)
        mbarrier.expect(full, desc.block_type.nbytes)
        place = b_ring.index(stage)._reinterpret(desc.dtype, desc.block_type.shape, desc.layout)
        tma_load(desc, [row, col + half * (BLOCK_N // 2)], full, place)
        step += 1
    return step


@gluon.jit
def add_halves(panels, step, left, right, desc, STAGES: gl.constexpr):
    """Multiplying warps: (left, right) + the halves that load_halves brought, in fp32. desc: any with their shape."""
    _, b_ring, panel_full, panel_free = panels
    stage = step % STAGES
    mbarrier.wait(panel_full.index(stage), step // STAGES & 1)
    place = b_ring.index(stage)._reinterpret(desc.dtype, desc.block_type.shape, desc.layout)
    left += place.load(left.type.layout).to(gl.float32)
    mbarrier.arrive(panel_free.index(stage), count=1)
    step += 1
    stage = step % STAGES
    mbarrier.wait(panel_full.index(stage), step // STAGES & 1)
    place = b_ring.index(stage)._reinterpret(desc.dtype, desc.block_type.shape, desc.layout)
    right += place.load(right.type.layout).to(gl.float32)
    mbarrier.arrive(panel_free.index(stage), count=1)
    return left, right, step + 1
