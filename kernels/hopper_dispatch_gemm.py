"""AllToAll + grouped GEMM for Hopper: ranks store their tokens' rows where the experts' ranks multiply them.

    x [T, K]        of this rank's tokens
    rows [R, K]     of this rank's slot, in placed order: every rank stores its own rows there, by expert, then source. In fp8
                    packed rows (ops/blocks.py), `pitch` bytes each
    y [R, N]      = rows @ (b of their expert)

Two warps of each CTA take rows straight from x, by the router's map, and store them at their places. They go in pieces, chunk by
chunk: a chunk is the rows of some experts, of all ranks; each rank signals its part of it. A tile waits for those whose rows it
has. The warps that send wait for nobody, and pieces are claimed: any one resident CTA sends them all (rule 4).

    numbers [T, E]  one for each token and expert; those of the rows lie behind the R rows of the slot

ops/expert_tables.py has the tables.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import signal_words as words_of
from .hopper_experts import (
    FIRST_PIECES,
    PEER_WORDS,
    PIECE_WORDS,
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
from .signal import MAX_CHUNKS, claim, finalize_epoch, next_word, notify_peer

# Warps that send, and that store: with the loading one they are the four that there is room for.
SENDERS = gl.constexpr(2)
STORERS = gl.constexpr(1)
PIECE = gl.constexpr(words_of.PIECE)


@gluon.jit
def _store(tiles, outbox, y_ptr, pairs_ptr, n, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP_M: gl.constexpr):
    """The storing warp: takes quarters out of the outbox into y."""
    ROWS: gl.constexpr = BLOCK_M // PARTS
    turn = 0
    index = next_tile(tiles, turn, STORERS)
    while index != NO_TILE:
        _, first, end, _, tile_n = tile_of_experts(index, pairs_ptr, n, BLOCK_N, GROUP_M)
        for number in range(2 * PARTS):
            part, half = number // 2, number % 2
            quarter = take_quarter(outbox, turn, part, half)
            low = first + part * ROWS
            row, high = strip_at(first, pairs_ptr, part, ROWS), gl.minimum(low + ROWS, end)
            store_rows(quarter, y_ptr, 0, row, low, high, tile_n * BLOCK_N + half * (BLOCK_N // 2), n, STORERS)
            leave_quarter(outbox, part, half)
        turn += 1
        index = next_tile(tiles, turn, STORERS)


@gluon.jit
def _send(x_ptr, tokens_ptr, places_ptr, numbers_ptr, pieces_ptr, peers_ptr, at_peers, word, pitch, STEP: gl.constexpr):
    """SENDERS warps: store this rank's rows, and their numbers, at the ranks of their experts."""
    sent_ptr, complete_ptr, memory_at_ptr, outgoing_at_ptr = at_peers
    VECTOR: gl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth  # what a thread stores at once: 16 bytes
    layout: gl.constexpr = gl.BlockedLayout([VECTOR], [32], [SENDERS], [0])
    lane = gl.arange(0, STEP, layout)
    bound = gl.load(pieces_ptr)
    index = claim(sent_ptr).to(gl.int32)
    while index < bound:
        piece_ptr = pieces_ptr + PIECE_WORDS * (1 + index)
        first, count, place = gl.load(piece_ptr), gl.load(piece_ptr + 1), gl.load(piece_ptr + 3)
        part = gl.load(piece_ptr + 2)
        target, chunk = part // MAX_CHUNKS, part % MAX_CHUNKS
        slot = gl.load(memory_at_ptr + target)
        slot_ptr = gl.multiple_of(slot.to(x_ptr.dtype), 16)
        for row in range(count):
            from_ptr = x_ptr + gl.load(tokens_ptr + first + row) * pitch
            to_ptr = slot_ptr + (place + row).to(gl.int64) * pitch
            for start in range(0, pitch, STEP):
                cols = start + lane
                gl.store(to_ptr + cols, gl.load(from_ptr + cols, mask=cols < pitch), mask=cols < pitch)
        if numbers_ptr is not None:
            received = gl.load(peers_ptr + target * PEER_WORDS)
            numbers = (slot + received.to(gl.int64) * pitch * (x_ptr.dtype.element_ty.primitive_bitwidth // 8)).to(
                numbers_ptr.dtype
            )
            rows = gl.arange(0, PIECE, gl.BlockedLayout([1], [32], [SENDERS], [0]))
            from_ptr = numbers_ptr + gl.load(places_ptr + first + rows, mask=rows < count)
            gl.store(numbers + place + rows, gl.load(from_ptr, mask=rows < count), mask=rows < count)
        pieces = gl.load(peers_ptr + target * PEER_WORDS + FIRST_PIECES + chunk)
        signal_ptr = gl.load(outgoing_at_ptr + target).to(complete_ptr.dtype) + chunk
        notify_peer(complete_ptr + part, pieces, signal_ptr, word)
        index = claim(sent_ptr).to(gl.int32)


@gluon.jit(
    do_not_specialize=["tag", "limit"], do_not_specialize_on_alignment=["tokens_ptr", "places_ptr", "numbers_ptr"]
)
def hopper_dispatch_gemm_kernel(
    x_ptr, tokens_ptr, places_ptr, numbers_ptr, rows_desc, b_desc, b_at_ptr, y_ptr, pairs_ptr, pieces_ptr, peers_ptr,
    segments_ptr, n, k, pitch, counter_ptr, signals_ptr, epoch_ptr, abort_ptr, record_ptr, tag, limit, sent_ptr,
    complete_ptr, left_ptr, memory_at_ptr, outgoing_at_ptr, WORLD: gl.constexpr, STEP: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, STAGES: gl.constexpr, B_IS_NK: gl.constexpr,
    num_warps: gl.constexpr, b_half_desc=None, a_scale_ptr=None, b_scale_ptr=None, SCALING: gl.constexpr = UNSCALED,
):  # fmt: skip
    """x [T, pitch], row tokens[i] of it in sent order, its number numbers[places[i]]; rows [*, K] of the slot; each expert's
    b [N, K] or, without B_IS_NK, [K, N]: b_desc, b_at [E/W] (_anywhere in ops/launch_experts.py); y [R, N]. numbers: fp32, or
    None. STEP: elements that a CTA has in flight."""
    gl.static_assert(num_warps == WARPS)  # of the first multiplying group
    n, pitch = in_vectors(n), in_vectors(pitch)
    panels, tiles = make_rings(rows_desc, b_desc, STAGES, READERS=PARTS + 1)
    scales = (a_scale_ptr, pitch // 4, b_scale_ptr)
    outbox = make_outbox_of(y_ptr.dtype.element_ty, BLOCK_M // PARTS, BLOCK_N // 2, BUFFERS=1)
    word = next_word(gl.load(epoch_ptr), tag)
    waits = (signals_ptr, word, abort_ptr, record_ptr, limit)
    at_peers = (sent_ptr, complete_ptr, memory_at_ptr, outgoing_at_ptr)
    gl.warp_specialize([
        (multiply_experts, (panels, tiles, outbox, b_desc, b_half_desc, scales, pairs_ptr, abort_ptr, n, k, 0, BLOCK_M, BLOCK_N,
                            BLOCK_K, GROUP_M, STAGES, B_IS_NK, SCALING)),
        (multiply_experts, (panels, tiles, outbox, b_desc, b_half_desc, scales, pairs_ptr, abort_ptr, n, k, 1, BLOCK_M, BLOCK_N,
                            BLOCK_K, GROUP_M, STAGES, B_IS_NK, SCALING)),
        (load_experts, (panels, tiles, rows_desc, b_desc, b_at_ptr, pairs_ptr, segments_ptr, counter_ptr, waits, n, k, WORLD,
                        BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, STAGES, B_IS_NK, True)),
        (_store, (tiles, outbox, y_ptr, pairs_ptr, n, BLOCK_M, BLOCK_N, GROUP_M)),
        (_send, (x_ptr, tokens_ptr, places_ptr, numbers_ptr, pieces_ptr, peers_ptr, at_peers, word, pitch, STEP)),
    ], [WARPS, 1, STORERS, SENDERS], registers(SCALING, 3))  # fmt: skip
    finalize_epoch(left_ptr, epoch_ptr, word, WORLD)
