"""A warp-specialised tile GEMM for Hopper, in Gluon: one warp claims tiles, waits and loads; two warp groups multiply.

The plain Triton kernels (all_gather_gemm.py, gemm_reduce_scatter.py) run anywhere and reach 74 to 91 % of cuBLAS on H200,
because their loads, waits and stores stop the tensor cores. Here they do not: this form reached 96 to 105 % of cuBLAS on the
shapes of benchmarks/. Only the loading warp waits for signals, while the tiles before are still being multiplied.

The two multiplying groups, PART 0 and 1, have a strip of BLOCK_M / PARTS rows each, a tile's upper one and its lower one. They do
not wait for one another: one stores what it has while the other keeps the tensor cores busy, as far ahead as the ring lets it be
(and the storing warp, which takes part 0 first). In step they stood still for each store; apart they are 1 to 5 % faster,
2 to 3 % at K = 4096.

Shared memory: a ring of STAGES panels of A, a strip [BLOCK_M / PARTS, BLOCK_K] for each group, and of B, and a ring of two tile
indices that the loading warp hands over. Each ring slot has a `full` barrier (its content is there) and a `free` one (all have
read it). What a group has multiplied leaves through hopper_stores.py.

Chunks need not hold whole tiles, nor whole strips. The strips of a tile may be of two chunks, or of two ranks (tiles.py): each is
loaded and stored by itself. A strip at a chunk's end reads rows beyond it, of the next chunk or zeros, and stores none of them.
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

from .arrivals import claim_below
from .tiles import WHOLE

# Triton 3.9 renamed them; the arguments are the same.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_shared = gl.shared_memory_descriptor
reinterpret = _shared.reinterpret if hasattr(_shared, "reinterpret") else _shared._reinterpret

PARTS = gl.constexpr(2)  # groups of warps that multiply
WARPS = gl.constexpr(4)  # of each: what one instruction of the tensor cores takes
QUEUE_DEPTH = gl.constexpr(2)  # tile indices in flight between the loading warp and the others
NO_TILE = gl.constexpr(-1)  # ends the other warps


@gluon.jit
def make_rings(a_desc, b_desc, STAGES: gl.constexpr, READERS: gl.constexpr):
    """(A panels, B panels, full barriers, free barriers) and (tile indices, full barriers, free barriers).

    READERS: how many groups of warps take each tile index.
    """
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [STAGES * PARTS] + a_desc.block_type.shape, a_desc.layout)
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_type.shape, b_desc.layout)
    panel_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    panel_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tile_ring = gl.allocate_shared_memory(gl.int32, [QUEUE_DEPTH, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tile_full = gl.allocate_shared_memory(gl.int64, [QUEUE_DEPTH, 1], mbarrier.MBarrierLayout())
    tile_free = gl.allocate_shared_memory(gl.int64, [QUEUE_DEPTH, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(panel_full.index(stage), count=1)
        mbarrier.init(panel_free.index(stage), count=PARTS)
    for place in gl.static_range(QUEUE_DEPTH):
        mbarrier.init(tile_full.index(place), count=1)
        mbarrier.init(tile_free.index(place), count=READERS)
    fence_async_shared()
    return (a_ring, b_ring, panel_full, panel_free), (tile_ring, tile_full, tile_free)


@gluon.jit
def same_in_warp(value):
    """value int32, the same in all threads. The assembler takes what one lane tells the others for the same in all of a warp, and
    keeps what depends on it in uniform registers: with Triton 3.8 AG + GEMM in fp8 with scales of blocks has 0.97 instead of 0.81
    of cuBLASLt's speed."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def claim_tile(tiles, turn, counter_ptr, bound, before=NO_TILE, LEAVES: gl.constexpr = False):
    """Loading warp: claim the next tile below `bound` and give its index, or NO_TILE, to the multiplying warps. before: the tile
    that it had before. LEAVES: see claim_below."""
    tile_ring, tile_full, tile_free = tiles
    index = claim_below(counter_ptr, before + 1, bound, LEAVES)
    index = same_in_warp(gl.where(index < bound, index, NO_TILE))
    place = turn % QUEUE_DEPTH
    mbarrier.wait(tile_free.index(place), (turn // QUEUE_DEPTH & 1) ^ 1)
    tile_ring.index(place).store(gl.full([1], index, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(tile_full.index(place), count=1)
    return index


@gluon.jit
def next_tile(tiles, turn, READING_WARPS: gl.constexpr):
    """A group of multiplying (or storing) warps: the next tile index, or NO_TILE."""
    tile_ring, tile_full, tile_free = tiles
    place = turn % QUEUE_DEPTH
    mbarrier.wait(tile_full.index(place), turn // QUEUE_DEPTH & 1)
    index = same_in_warp(gl.max(tile_ring.index(place).load(gl.BlockedLayout([1], [32], [READING_WARPS], [0])), 0))
    mbarrier.arrive(tile_free.index(place), count=1)
    return index


@gluon.jit
def load_tile(panels, step, upper_desc, lower_desc, b_desc, upper_row, lower_row, b_col, b_first_k, k_steps,
              BLOCK_K: gl.constexpr, STAGES: gl.constexpr, B_IS_NK: gl.constexpr, b_at=None):  # fmt: skip
    """Loading warp: bring all panels of one tile through the ring; `step` counts panels since the kernel began.

    upper_desc, lower_desc: of A, in strips, and the first row of each. b_desc: its block is a panel of B, or of the half that a
    half tile needs. b_first_k: the row of B that A's first column meets. b_at: the first coordinate of a descriptor with three,
    which says where an expert's B begins.
    """
    a_ring, _, panel_full, panel_free = panels
    for k in range(k_steps):
        stage = step % STAGES
        mbarrier.wait(panel_free.index(stage), (step // STAGES & 1) ^ 1)
        full = panel_full.index(stage)
        mbarrier.expect(full, PARTS * upper_desc.block_type.nbytes + b_desc.block_type.nbytes)
        tma_load(upper_desc, [upper_row, k * BLOCK_K], full, a_ring.index(stage * PARTS))
        tma_load(lower_desc, [lower_row, k * BLOCK_K], full, a_ring.index(stage * PARTS + 1))
        b_k = b_first_k + k * BLOCK_K
        b_row, b_column = (b_col, b_k) if B_IS_NK else (b_k, b_col)
        if b_at is None:
            tma_load(b_desc, [b_row, b_column], full, b_place(panels, stage, b_desc))
        else:
            tma_load(b_desc, [b_at, b_row, b_column], full, panels[1].index(stage))
        step += 1
    return step


@gluon.jit
def load_tile_or_half(panels, step, upper_desc, lower_desc, b_desc, b_half_desc, upper, row, col, b_first_k, side, k_steps,
                      BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, B_IS_NK: gl.constexpr):  # fmt: skip
    """As load_tile, for a whole tile or for one half of its columns (side)."""
    if side == WHOLE:
        step = load_tile(panels, step, upper_desc, lower_desc, b_desc, upper, row, col, b_first_k, k_steps,
                         BLOCK_K, STAGES, B_IS_NK)  # fmt: skip
    else:
        col += side * (BLOCK_N // 2)
        step = load_tile(panels, step, upper_desc, lower_desc, b_half_desc, upper, row, col, b_first_k, k_steps,
                         BLOCK_K, STAGES, B_IS_NK)  # fmt: skip
    return step


@gluon.jit
def b_place(panels, stage, desc, PLACE: gl.constexpr = 0):
    """Where a block [..., rows, columns] of `desc` lies in a stage: in the place of B's panel, which is as large as one block, or
    two or four."""
    place = panels[1].index(stage)
    FIT: gl.constexpr = (
        place.shape[-2] * place.shape[-1] * place.dtype.primitive_bitwidth // (8 * desc.block_type.nbytes)
    )
    shape: gl.constexpr = desc.block_type.shape[-2:]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(shape, desc.dtype)
    return reinterpret(place, desc.dtype, [FIT] + shape, layout).index(PLACE)


@gluon.jit
def wait_for_panel(panels, step, STAGES: gl.constexpr):
    """A multiplying group: wait until the next panel is there, and with it the signals of its rows."""
    mbarrier.wait(panels[2].index(step % STAGES), step // STAGES & 1)


@gluon.jit
def multiply_tile(panels, step, b_desc, k_steps, PART: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr,
                  STAGES: gl.constexpr, B_IS_NK: gl.constexpr):  # fmt: skip
    """One multiplying group: acc [ROWS, COLS] fp32, strip PART of a tile. A panel is freed once the next product
    has been issued and its own is done: the tensor cores always have the next one queued.

    b_desc: as for load_tile; its block has COLS columns.
    """
    a_ring, _, panel_full, panel_free = panels
    acc = no_product(panels, ROWS, COLS)
    for k in range(k_steps):
        stage = step % STAGES
        mbarrier.wait(panel_full.index(stage), step // STAGES & 1)
        b = b_place(panels, stage, b_desc)
        if B_IS_NK:
            b = b.permute((1, 0))
        acc = warpgroup_mma(a_ring.index(stage * PARTS + PART), b, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=[acc])
        if k > 0:
            mbarrier.arrive(panel_free.index((step - 1) % STAGES), count=1)
        step += 1
    acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    mbarrier.arrive(panel_free.index((step - 1) % STAGES), count=1)
    return acc, step


@gluon.jit
def pass_tile(panels, step, k_steps, ROWS: gl.constexpr, COLS: gl.constexpr, STAGES: gl.constexpr):
    """A multiplying group: let the panels of a tile go by in which it has no strip; acc [ROWS, COLS] fp32 is zero."""
    _, _, panel_full, panel_free = panels
    for _ in range(k_steps):
        stage = step % STAGES
        mbarrier.wait(panel_full.index(stage), step // STAGES & 1)
        mbarrier.arrive(panel_free.index(stage), count=1)
        step += 1
    return no_product(panels, ROWS, COLS), step


@gluon.jit
def no_product(panels, ROWS: gl.constexpr, COLS: gl.constexpr):
    """Zeros [ROWS, COLS] fp32, where the tensor cores add up a group's products."""
    DEPTH: gl.constexpr = 256 // panels[0].dtype.primitive_bitwidth  # one instruction takes 32 bytes of a row
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, COLS, DEPTH]
    )
    return gl.zeros((ROWS, COLS), gl.float32, layout)


@gluon.jit
def plus_bias(values, bias_ptr, col, n):
    """A multiplying group: values [ROWS, COLS] fp32 + bias [n] from column `col` on; values where there is no bias (None)."""
    if bias_ptr is not None:
        cols = col + gl.arange(0, values.shape[1], gl.SliceLayout(0, values.type.layout))
        values += gl.expand_dims(gl.load(bias_ptr + cols, mask=cols < n, other=0.0).to(gl.float32), 0)
    return values


@gluon.jit
def fence_for_tma():
    """After an acquire, before TMA reads what it guards: the acquire orders ordinary loads, TMA is another proxy (rule 2)."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def load_halves(panels, step, desc, upper_row, lower_row, col, halves, STAGES: gl.constexpr):
    """Loading warp: bring `halves` of a tile's strips, from column `col` on, through the ring, in the place of B's panels."""
    _, _, panel_full, panel_free = panels
    for half in range(halves):
        stage = step % STAGES
        mbarrier.wait(panel_free.index(stage), (step // STAGES & 1) ^ 1)
        full = panel_full.index(stage)
        mbarrier.expect(full, PARTS * desc.block_type.nbytes)
        tma_load(desc, [upper_row, col + half * desc.block_type.shape[1]], full, b_place(panels, stage, desc, 0))
        tma_load(desc, [lower_row, col + half * desc.block_type.shape[1]], full, b_place(panels, stage, desc, 1))
        step += 1
    return step


@gluon.jit
def add_half(panels, step, values, desc, PART: gl.constexpr, STAGES: gl.constexpr):
    """A multiplying group: values + its strip of one of the halves that load_halves brought, in fp32."""
    _, _, panel_full, panel_free = panels
    stage = step % STAGES
    mbarrier.wait(panel_full.index(stage), step // STAGES & 1)
    values += b_place(panels, stage, desc, PART).load(values.type.layout).to(gl.float32)
    mbarrier.arrive(panel_free.index(stage), count=1)
    return values, step + 1
