"""Grouped products for Hopper: which rows, of which expert, a tile has, and how finished rows leave.

A rank's R rows lie in placed order (ops/routing.py): by expert, then source rank, own rows first. They are cut into pairs of
strips, of BLOCK_M rows of one expert each, the last one of an expert with fewer. Tables made from the matrix of counts say
where (ops/expert_tables.py).

Tiles go through the pairs in order, in groups that share columns. STORERS warps take quarters out of the outbox
(hopper_stores.py) through registers: an expert's rows end anywhere, and TMA stores whole strips only.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language import debug_barrier

from . import signal_words as words
from .hopper_scaled import BLOCK, BLOCKS, no_whole_product, scales_of_strip, whole_product
from .hopper_stores import put_quarter
from .hopper_tiles import NO_TILE, PARTS, WARPS, claim_tile, fence_for_tma, load_tile, next_tile, wait_for_panel
from .signal import signal_word, wait_signal
from .tiles import tile_in_groups

PAIR_WORDS = gl.constexpr(words.PAIR_WORDS)
PIECE_WORDS = gl.constexpr(words.PIECE_WORDS)
SEGMENT_WORDS = gl.constexpr(words.SEGMENT_WORDS)
PEER_WORDS = gl.constexpr(words.PEER_WORDS)
FIRST_PIECES = gl.constexpr(words.FIRST_PIECES)
SLICE = gl.constexpr(8)  # rows of a quarter that the storing warps have in registers


@gluon.jit
def in_vectors(count):
    """count, a multiple of 8, in a form that shows it. Triton itself notes only multiples of 16; of other rows of 16-bit elements
    it would store two bytes at once, and not 16."""
    return count // 8 * 8


@gluon.jit
def tile_of_experts(index, pairs_ptr, n, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr):
    """Tile `index` -> (expert, first row, end of the expert's rows, chunk, tile column)."""
    pair, tile_n = tile_in_groups(index, gl.load(pairs_ptr), gl.cdiv(n, BLOCK_N), GROUP_M)
    pair_ptr = pairs_ptr + PAIR_WORDS * (1 + pair)
    return gl.load(pair_ptr), gl.load(pair_ptr + 1), gl.load(pair_ptr + 2), gl.load(pair_ptr + 3), tile_n


@gluon.jit
def strip_at(first, pairs_ptr, PART: gl.constexpr, ROWS: gl.constexpr):
    """The row from which strip PART of the pair at row `first` is read. It is moved up where the strip would end beyond all
    rows."""
    return gl.minimum(first + PART * ROWS, gl.load(pairs_ptr + 1) - ROWS)


@gluon.jit
def load_experts(panels, tiles, desc, b_desc, b_at_ptr, pairs_ptr, segments_ptr, counter_ptr, waits, n, k, WORLD: gl.constexpr,
                 BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr,
                 B_IS_NK: gl.constexpr, WAITS: gl.constexpr):  # fmt: skip
    """The loading warp: claims tiles, and brings the strips of their pairs, and the panels of their expert's B, through the ring.
    b_at_ptr: where each one's B begins, in steps of b_desc's. WAITS: once their rows are here."""
    ROWS: gl.constexpr = BLOCK_M // PARTS
    bound = gl.load(pairs_ptr) * gl.cdiv(n, BLOCK_N)
    k_steps = gl.cdiv(k, BLOCK_K)
    here = gl.full([], 0, gl.int64)  # a bit for each signal that has been waited for
    step = 0
    turn = 0
    index = claim_tile(tiles, turn, counter_ptr, bound)
    while index != NO_TILE:
        expert, first, end, chunk, tile_n = tile_of_experts(index, pairs_ptr, n, BLOCK_N, GROUP_M)
        if WAITS:
            end = gl.minimum(first + BLOCK_M, end)
            here = _wait_for_rows(here, pairs_ptr, segments_ptr, expert, first, end, chunk, waits, WORLD)
        upper, lower = strip_at(first, pairs_ptr, 0, ROWS), strip_at(first, pairs_ptr, 1, ROWS)
        step = load_tile(panels, step, desc, desc, b_desc, upper, lower, tile_n * BLOCK_N, 0, k_steps, BLOCK_K, STAGES,
                         B_IS_NK, gl.load(b_at_ptr + expert))  # fmt: skip
        turn += 1
        index = claim_tile(tiles, turn, counter_ptr, bound)


@gluon.jit
def _wait_for_rows(here, pairs_ptr, segments_ptr, expert, first, end, chunk, waits, WORLD: gl.constexpr):
    """here, after the ranks whose rows of an expert lie from `first` to `end` have sent this chunk."""
    signals_ptr, expected, abort_ptr, record_ptr, limit = waits
    for source in range(gl.load(pairs_ptr + 2)):  # unrolled, the code of a wait would be there for each
        segment_ptr = segments_ptr + (expert * WORLD + source) * SEGMENT_WORDS
        has_rows = gl.maximum(gl.load(segment_ptr), first) < gl.minimum(gl.load(segment_ptr + 1), end)
        word = signal_word(source, chunk)
        if has_rows & ((here >> word) & 1 == 0):
            wait_signal(signals_ptr, word, expected, abort_ptr, record_ptr, limit, True)
            fence_for_tma()
            here |= gl.full([], 1, gl.int64) << word
    return here


@gluon.jit
def multiply_experts(panels, tiles, outbox, b_desc, b_half_desc, scales, pairs_ptr, abort_ptr, n, k, PART: gl.constexpr,
                     BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
                     STAGES: gl.constexpr, B_IS_NK: gl.constexpr, SCALING: gl.constexpr):  # fmt: skip
    """A multiplying group: multiplies strip PART of each tile that the loading warp hands over, and puts it into the outbox.
    scales: with BLOCKS those behind the rows of a, elements from row to row, and those of all experts' B."""
    ROWS: gl.constexpr = BLOCK_M // PARTS
    k_steps = gl.cdiv(k, BLOCK_K)
    step = 0
    turn = 0
    index = next_tile(tiles, turn, WARPS)
    while index != NO_TILE:
        expert, first, end, _, tile_n = tile_of_experts(index, pairs_ptr, n, BLOCK_N, GROUP_M)
        by = 1.0
        if SCALING == BLOCKS:
            a_ptr, a_row, b_ptr = scales
            b_ptr += expert * (n // BLOCK) * (gl.cdiv(k, 4 * BLOCK) * 4)
            row = strip_at(first, pairs_ptr, PART, ROWS)
            wait_for_panel(panels, step, STAGES)
            by = scales_of_strip(a_ptr, a_row, 1, b_ptr, row, ROWS, tile_n * BLOCK_N, n, k)
        # In fp8 a strip without rows is multiplied, too, as in hopper_gemm_reduce_scatter.py.
        if SCALING == BLOCKS or first + PART * ROWS < end:
            left, right, step = whole_product(panels, step, b_desc, b_half_desc, k_steps, by, PART, ROWS, BLOCK_N, STAGES,
                                              B_IS_NK, SCALING)  # fmt: skip
        else:
            left, right, step = no_whole_product(panels, step, k_steps, ROWS, BLOCK_N, STAGES)
        if gl.load(abort_ptr, volatile=True) != 0:
            left, right = left + float("nan"), right + float("nan")
        put_quarter(outbox, turn, left, PART, 0, BUFFERS=1)
        put_quarter(outbox, turn, right, PART, 1, BUFFERS=1)
        turn += 1
        index = next_tile(tiles, turn, WARPS)


@gluon.jit
def take_quarter(outbox, turn, part, half):
    """Storing warps: quarter (part, half) of tile number `turn`, once it is there."""
    quarters, full, _ = outbox
    mbarrier.wait(full.index(part * 2 + half), turn & 1)
    return quarters.index(half)


@gluon.jit
def leave_quarter(outbox, part, half):
    """Storing warps: all of them have read the quarter."""
    _, _, free = outbox
    debug_barrier()
    mbarrier.arrive(free.index(part * 2 + half), count=1)


@gluon.jit
def store_rows(quarter, to_ptr, shift, row, low, high, col, n, STORERS: gl.constexpr):
    """Storing warps: store rows `low` to `high` of a quarter, which begins at row `row`, `shift` rows further on in to_ptr
    [*, n], from column `col` on."""
    ROWS: gl.constexpr = quarter.shape[0]
    COLS: gl.constexpr = quarter.shape[1]
    VECTOR: gl.constexpr = 128 // to_ptr.dtype.element_ty.primitive_bitwidth
    layout: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 * VECTOR // COLS, COLS // VECTOR], [STORERS, 1], [1, 0])
    cols = col + gl.arange(0, COLS, gl.SliceLayout(0, layout))
    for start in gl.static_range(0, ROWS, SLICE):
        rows = row + start + gl.arange(0, SLICE, gl.SliceLayout(1, layout))
        places = gl.expand_dims((rows + shift).to(gl.int64) * n, 1) + gl.expand_dims(cols, 0)
        inside = gl.expand_dims((rows >= low) & (rows < high), 1) & gl.expand_dims(cols < n, 0)
        gl.store(to_ptr + places, quarter.slice(start, SLICE).load(layout), mask=inside)
