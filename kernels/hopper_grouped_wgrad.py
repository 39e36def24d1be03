"""Weight gradients of experts for Hopper, all of a rank in one kernel: a warp-specialised GEMM, as hopper_tiles.py has it.

    dw [E/W, N, K] = dy [rows of expert, N].T @ x [rows of expert, K]        or (ADDS) main_grad of each expert += that

Products are added up along rows, the slow dimension of both operands: tensor cores read operands of 16 bits that way, too.

An expert's rows end anywhere, and a panel must not have the next expert's: not even times zero, they may be infinite. TMA reads
zeros beyond an edge, but one descriptor serves all experts. Therefore it counts rows by three coordinates (_ragged, in
ops/grouped_wgrad.py). The third one is 2**30 less the rows that are left of the expert: 2**30 is its edge. The second one says
where that is in memory. The first one takes 2**30 rows off again, as addresses wrap around at 2**64 (the idea is that of
triton.tools.ragged_tma).

Sums are added to main_grad out of registers, by L2: no warp waits for what main_grad holds. One thread adds once to each element,
so every run gives the same bits. What is below 2**-126 counts as zero there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .hopper_scaled import UNSCALED, registers
from .hopper_stores import make_outbox, put_quarter, split_tile, store_strip
from .hopper_tiles import (
    NO_TILE,
    PARTS,
    WARPS,
    claim_tile,
    make_rings,
    next_tile,
    no_product,
    reinterpret,
    tma_load,
)
from .signal import claim
from .tiles import tile_in_groups

RAGGED = gl.constexpr(1 << 30)  # rows of a ragged descriptor


@gluon.jit
def _tile(index, sizes, ends_ptr, ADDS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, ROWS: gl.constexpr,
          GROUP_N: gl.constexpr):  # fmt: skip
    """Of a tile (expert, first row of dw, first column, end of the expert's rows, their number, panels). Without rows there is a
    panel of zeros, or none where the result is added."""
    _, n, k = sizes
    tiles_n, tiles_k = gl.cdiv(n, BLOCK_N), gl.cdiv(k, BLOCK_K)
    expert = index // (tiles_n * tiles_k)
    tile_n, tile_k = tile_in_groups(index % (tiles_n * tiles_k), tiles_n, tiles_k, GROUP_N)
    end = gl.load(ends_ptr + expert)
    rows = end - gl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    count = gl.cdiv(rows, ROWS)
    if not ADDS:
        count = gl.maximum(count, 1)
    return expert, tile_n * BLOCK_N, tile_k * BLOCK_K, end, rows, count


@gluon.jit
def _load(panels, tiles, dy_desc, x_desc, claimed_ptr, ends_ptr, sizes, ADDS: gl.constexpr, BLOCK_N: gl.constexpr,
          BLOCK_K: gl.constexpr, ROWS: gl.constexpr, GROUP_N: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """The loading warp: claims tiles, and brings dy, in a strip of columns for each group, and x through the ring. The last CTA's
    sets the counters to zero, as they were."""
    a_ring, b_ring, panel_full, panel_free = panels
    experts, n, k = sizes
    bound = experts * gl.cdiv(n, BLOCK_N) * gl.cdiv(k, BLOCK_K)
    step = 0
    turn = 0
    index = claim_tile(tiles, turn, claimed_ptr, bound)
    while index != NO_TILE:
        _, row, col, end, rows, count = _tile(index, sizes, ends_ptr, ADDS, BLOCK_N, BLOCK_K, ROWS, GROUP_N)
        for panel in range(count):
            stage = step % STAGES
            mbarrier.wait(panel_free.index(stage), (step // STAGES & 1) ^ 1)
            full = panel_full.index(stage)
            mbarrier.expect(full, PARTS * dy_desc.block_type.nbytes + x_desc.block_type.nbytes)
            at = RAGGED - rows + panel * ROWS
            for part in gl.static_range(PARTS):
                strip = row + part * (BLOCK_N // PARTS)
                tma_load(dy_desc, [RAGGED, end, at, strip], full, a_ring.index(stage * PARTS + part))
            tma_load(x_desc, [RAGGED, end, at, col], full, b_ring.index(stage))
            step += 1
        turn += 1
        index = claim_tile(tiles, turn, claimed_ptr, bound)
    if claim(claimed_ptr + 1) == gl.num_programs(0) - 1:
        gl.store(claimed_ptr, 0)
        gl.store(claimed_ptr + 1, 0)


@gluon.jit
def _multiply(panels, tiles, outbox, main_grads_ptr, ends_ptr, sizes, PART: gl.constexpr, ADDS: gl.constexpr,
              BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, ROWS: gl.constexpr, GROUP_N: gl.constexpr,
              STAGES: gl.constexpr):  # fmt: skip
    """A multiplying group: multiplies its strip of each tile, and adds it to main_grad, or puts it into the outbox."""
    HEIGHT: gl.constexpr = BLOCK_N // PARTS
    step = 0
    turn = 0
    index = next_tile(tiles, turn, WARPS)
    while index != NO_TILE:
        expert, row, col, _, _, count = _tile(index, sizes, ends_ptr, ADDS, BLOCK_N, BLOCK_K, ROWS, GROUP_N)
        if count > 0:
            acc, step = _product(panels, step, count, PART, HEIGHT, BLOCK_K, STAGES)
            left, right = split_tile(acc, HEIGHT, BLOCK_K)
            if ADDS:
                main_grad = gl.load(main_grads_ptr + expert)
                _add(main_grad, left, row + PART * HEIGHT, col, sizes)
                _add(main_grad, right, row + PART * HEIGHT, col + BLOCK_K // 2, sizes)
            else:
                put_quarter(outbox, turn, left, PART, 0, BUFFERS=1)
                put_quarter(outbox, turn, right, PART, 1, BUFFERS=1)
        turn += 1
        index = next_tile(tiles, turn, WARPS)


@gluon.jit
def _product(panels, step, count, PART: gl.constexpr, HEIGHT: gl.constexpr, COLS: gl.constexpr, STAGES: gl.constexpr):
    """acc [HEIGHT, COLS] fp32 of `count` panels, at least one. As multiply_tile, but for how the operands lie."""
    a_ring, b_ring, panel_full, panel_free = panels
    dtype: gl.constexpr = a_ring.dtype
    ROWS: gl.constexpr = b_ring.shape[3]
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEIGHT], dtype)
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLS], dtype)
    acc = no_product(panels, HEIGHT, COLS)
    for panel in range(count):
        stage = step % STAGES
        mbarrier.wait(panel_full.index(stage), step // STAGES & 1)
        a = reinterpret(a_ring.index(stage * PARTS + PART), dtype, [ROWS, HEIGHT], a_layout)
        b = reinterpret(b_ring.index(stage), dtype, [ROWS, COLS], b_layout)
        acc = warpgroup_mma(a.permute((1, 0)), b, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=[acc])
        if panel > 0:
            mbarrier.arrive(panel_free.index((step - 1) % STAGES), count=1)
        step += 1
    acc = warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    mbarrier.arrive(panel_free.index((step - 1) % STAGES), count=1)
    return acc, step


@gluon.jit
def _add(main_grad, values, row, col, sizes):
    """A multiplying group: main_grad [N, K] fp32, at that address, += values at (row, col), in two parts: all at once would not
    fit into shared memory, through which lines are put together."""
    COLS: gl.constexpr = values.shape[1] // 2
    left, right = split_tile(values, values.shape[0], values.shape[1])
    _add_lines(main_grad, left, row, col, sizes)
    _add_lines(main_grad, right, row, col + COLS, sizes)


@gluon.jit
def _add_lines(main_grad, values, row, col, sizes):
    """_add, as far as values lie inside. An instruction of a warp adds whole lines, four columns a thread: as a product lies in
    registers it would reach 32 bytes of eight lines each, and Qwen3's fc1 would take 741 us instead of 596."""
    _, n, k = sizes
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [WARPS, 1], [1, 0])
    values = gl.convert_layout(values, layout)
    rows = gl.expand_dims(row + gl.arange(0, values.shape[0], gl.SliceLayout(1, layout)), 1)
    cols = gl.expand_dims(col + gl.arange(0, values.shape[1], gl.SliceLayout(0, layout)), 0)
    starts, width = main_grad + 4 * k * rows.to(gl.int64), gl.where(rows < n, k, 0)
    gl.inline_asm_elementwise(  # addresses are worked out when they are needed: all together spill
        "{ .reg .pred inside; .reg .b64 place; setp.lt.s32 inside, $8, $12; mad.wide.s32 place, $8, 4, $4;"
        " @inside red.relaxed.gpu.global.add.v4.f32 [place], {$16, $17, $18, $19}; }"
        " mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;",
        "=r,=r,=r,=r,l,l,l,l,r,r,r,r,r,r,r,r,f,f,f,f", [starts, cols, width, values], dtype=gl.int32, is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def _store(tiles, outbox, dw_desc, ends_ptr, sizes, ADDS: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
           ROWS: gl.constexpr, GROUP_N: gl.constexpr):  # fmt: skip
    """The storing warp: stores each tile's quarters in dw as they come into the outbox. Where the result is added it has nothing
    to do."""
    if not ADDS:
        turn = 0
        index = next_tile(tiles, turn, 1)
        while index != NO_TILE:
            expert, row, col, _, _, _ = _tile(index, sizes, ends_ptr, ADDS, BLOCK_N, BLOCK_K, ROWS, GROUP_N)
            for part in gl.static_range(PARTS):
                store_strip(dw_desc, outbox, turn, expert, row + part * (BLOCK_N // PARTS), col, 2, part, BUFFERS=1)
            turn += 1
            index = next_tile(tiles, turn, 1)


@gluon.jit(do_not_specialize=["experts"])
def hopper_grouped_wgrad_kernel(
    dy_desc, x_desc, dw_desc, words_ptr, ends_ptr, experts, n, k, ADDS: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, ROWS: gl.constexpr, GROUP_N: gl.constexpr, STAGES: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """dy [R, N] and x [R, K], by ragged descriptors, into dw [E/W, N, K], or (ADDS; dw_desc is None) main_grad [N, K] fp32 of
    each expert; all 16-byte aligned rows.

    words_ptr: int64, two counters, which are zero before and afterwards; then (ADDS) the addresses of main_grad. ends_ptr: int32
    [E/W], where the rows of each expert end. ROWS: of a panel.
    """
    gl.static_assert(num_warps == WARPS)
    readers: gl.constexpr = PARTS if ADDS else PARTS + 1
    panels, tiles = make_rings(dy_desc, x_desc, STAGES, readers)
    sizes = (experts, n, k)
    if ADDS:
        outbox = ()
    else:
        outbox = make_outbox(dw_desc, BUFFERS=1)
    gl.warp_specialize([
        (_multiply, (panels, tiles, outbox, words_ptr + 2, ends_ptr, sizes, 0, ADDS, BLOCK_N, BLOCK_K, ROWS, GROUP_N, STAGES)),
        (_multiply, (panels, tiles, outbox, words_ptr + 2, ends_ptr, sizes, 1, ADDS, BLOCK_N, BLOCK_K, ROWS, GROUP_N, STAGES)),
        (_load, (panels, tiles, dy_desc, x_desc, words_ptr, ends_ptr, sizes, ADDS, BLOCK_N, BLOCK_K, ROWS, GROUP_N, STAGES)),
        (_store, (tiles, outbox, dw_desc, ends_ptr, sizes, ADDS, BLOCK_N, BLOCK_K, ROWS, GROUP_N)),
    ], [WARPS, 1, 1], registers(UNSCALED, 2))  # fmt: skip
