"""Grouped GEMM + AllToAll for Hopper: finished rows leave for the ranks that their tokens come from.

    a [R, K]        in placed order
    slot [*, N]     at each rank, in its sent order: the rows of a @ (b of their expert) that come from its tokens

Two storing warps take finished quarters of tiles and store each row's part at its place in the slot of its source. Rows of one
expert and source lie together here and there, so that one number leads from each of them to its place. They are counted for each
source; its signal follows the last one. A source without rows here gets its signal at once. Nobody waits.

    numbers [R]     one for each row; they lie behind all rows of the slot

ops/expert_tables.py has the tables.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .hopper_experts import (
    PEER_WORDS,
    SEGMENT_WORDS,
    in_vectors,
    leave_quarter,
    load_experts,
    multiply_experts,
    store_rows,
    strip_at,
    take_quarter,
    tile_of_experts,
)
from .hopper_scaled import UNSCALED, registers
from .hopper_stores import make_outbox_of
from .hopper_tiles import NO_TILE, PARTS, WARPS, make_rings, next_tile
from .signal import finalize_epoch, next_word, notify_peer, signal_word

STORERS = gl.constexpr(2)


@gluon.jit
def _send_quarter(quarter, like_ptr, numbers_ptr, segments_ptr, peers_ptr, places, word, expert, row, low, high, col, n,
                  WORLD: gl.constexpr):  # fmt: skip
    """Storing warps: store rows `low` to `high` of a quarter at their sources, with the first columns also their numbers, and
    count the rows of each source."""
    complete_ptr, memory_at_ptr, outgoing_at_ptr = places
    COLS: gl.constexpr = quarter.shape[1]
    for source in range(WORLD):
        segment_ptr = segments_ptr + (expert * WORLD + source) * SEGMENT_WORDS
        first = gl.maximum(low, gl.load(segment_ptr))
        end = gl.minimum(high, gl.load(segment_ptr + 1))
        if (first < end) & (col < n):
            shift = gl.load(segment_ptr + 2)
            slot = gl.load(memory_at_ptr + source)
            slot_ptr = gl.multiple_of(slot.to(like_ptr.dtype), 16)
            store_rows(quarter, slot_ptr, shift, row, first, end, col, n, STORERS)
            peer_ptr = peers_ptr + source * PEER_WORDS
            if numbers_ptr is not None:
                if col == 0:
                    sent = gl.load(peer_ptr + 1)
                    nbytes = sent.to(gl.int64) * n * (like_ptr.dtype.element_ty.primitive_bitwidth // 8)
                    theirs = (slot + nbytes).to(numbers_ptr.dtype)
                    rows = row + gl.arange(0, quarter.shape[0], gl.BlockedLayout([1], [32], [STORERS], [0]))
                    inside = (rows >= first) & (rows < end)
                    gl.store(theirs + rows + shift, gl.load(numbers_ptr + rows, mask=inside), mask=inside)
            signal_ptr = gl.load(outgoing_at_ptr + source).to(complete_ptr.dtype)
            total = gl.load(peer_ptr + 2) * gl.cdiv(n, COLS)
            notify_peer(complete_ptr + signal_word(source, 0), total, signal_ptr, word, end - first)


@gluon.jit
def _send(tiles, outbox, like_ptr, numbers_ptr, pairs_ptr, segments_ptr, peers_ptr, places, epoch_ptr, tag, n,
          WORLD: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr):  # fmt: skip
    """The storing warps: signal sources without rows here, then take quarters out of the outbox to where their rows belong."""
    ROWS: gl.constexpr = BLOCK_M // PARTS
    word = next_word(gl.load(epoch_ptr), tag)
    complete_ptr, outgoing_at_ptr = places[0], places[2]
    if gl.program_id(0) == 0:
        for source in range(WORLD):
            if gl.load(peers_ptr + source * PEER_WORDS + 2) == 0:
                signal_ptr = gl.load(outgoing_at_ptr + source).to(complete_ptr.dtype)
                notify_peer(complete_ptr + signal_word(source, 0), 0, signal_ptr, word, 0)
    turn = 0
    index = next_tile(tiles, turn, STORERS)
    while index != NO_TILE:
        expert, first, end, _, tile_n = tile_of_experts(index, pairs_ptr, n, BLOCK_N, GROUP_M)
        for number in range(2 * PARTS):
            part, half = number // 2, number % 2
            quarter = take_quarter(outbox, turn, part, half)
            low = first + part * ROWS
            row, high = strip_at(first, pairs_ptr, part, ROWS), gl.minimum(low + ROWS, end)
            _send_quarter(quarter, like_ptr, numbers_ptr, segments_ptr, peers_ptr, places, word, expert, row, low, high,
                          tile_n * BLOCK_N + half * (BLOCK_N // 2), n, WORLD)  # fmt: skip
            leave_quarter(outbox, part, half)
        turn += 1
        index = next_tile(tiles, turn, STORERS)


@gluon.jit(do_not_specialize=["tag"])
def hopper_gemm_combine_kernel(
    a_desc, like_ptr, numbers_ptr, b_desc, b_at_ptr, pairs_ptr, segments_ptr, peers_ptr, n, k, pitch, abort_ptr, counter_ptr,
    epoch_ptr, tag, complete_ptr, left_ptr, memory_at_ptr, outgoing_at_ptr, WORLD: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr, B_IS_NK: gl.constexpr,
    num_warps: gl.constexpr, b_half_desc=None, a_scale_ptr=None, b_scale_ptr=None,
    SCALING: gl.constexpr = UNSCALED,
):  # fmt: skip
    """a [max(R, BLOCK_M / PARTS), K] and each expert's b [N, K] or, without B_IS_NK, [K, N]: b_desc, b_at [E/W] (_anywhere in
    ops/launch_experts.py). numbers: fp32 [R], or None. like_ptr: a slot, for its dtype. In fp8 a is packed rows
    (ops/blocks.py), `pitch` bytes each."""
    gl.static_assert(num_warps == WARPS)  # of the first multiplying group
    n = in_vectors(n)
    panels, tiles = make_rings(a_desc, b_desc, STAGES, READERS=PARTS + 1)
    scales = (a_scale_ptr, pitch // 4, b_scale_ptr)
    outbox = make_outbox_of(like_ptr.dtype.element_ty, BLOCK_M // PARTS, BLOCK_N // 2, BUFFERS=1)
    places = (complete_ptr, memory_at_ptr, outgoing_at_ptr)
    gl.warp_specialize([
        (multiply_experts, (panels, tiles, outbox, b_desc, b_half_desc, scales, pairs_ptr, abort_ptr, n, k, 0, BLOCK_M, BLOCK_N,
                            BLOCK_K, GROUP_M, STAGES, B_IS_NK, SCALING)),
        (multiply_experts, (panels, tiles, outbox, b_desc, b_half_desc, scales, pairs_ptr, abort_ptr, n, k, 1, BLOCK_M, BLOCK_N,
                            BLOCK_K, GROUP_M, STAGES, B_IS_NK, SCALING)),
        (load_experts, (panels, tiles, a_desc, b_desc, b_at_ptr, pairs_ptr, segments_ptr, counter_ptr, None, n, k, WORLD, BLOCK_M,
                        BLOCK_N, BLOCK_K, GROUP_M, STAGES, B_IS_NK, False)),
        (_send, (tiles, outbox, like_ptr, numbers_ptr, pairs_ptr, segments_ptr, peers_ptr, places, epoch_ptr, tag, n, WORLD,
                 BLOCK_M, BLOCK_N, GROUP_M)),
    ], [WARPS, 1, STORERS], registers(SCALING, 2))  # fmt: skip
    finalize_epoch(left_ptr, epoch_ptr, next_word(gl.load(epoch_ptr), tag), WORLD)
