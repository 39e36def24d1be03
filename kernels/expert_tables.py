"""What the kernels of experts are told of one call's rows (ops/expert_tables.py says what each table has). The GPU works it out
while the host waits for the number of rows that it has to make room for.

counts [W, E]     rows by rank and expert; rank r has experts r E/W to (r+1) E/W
"""

import triton
import triton.language as tl

from . import signal_words as words

PAIR_WORDS = tl.constexpr(words.PAIR_WORDS)
PIECE_WORDS = tl.constexpr(words.PIECE_WORDS)
SEGMENT_WORDS = tl.constexpr(words.SEGMENT_WORDS)
PEER_WORDS = tl.constexpr(words.PEER_WORDS)
FIRST_PIECES = tl.constexpr(words.FIRST_PIECES)
MAX_CHUNKS = tl.constexpr(words.MAX_CHUNKS)
PIECE = tl.constexpr(words.PIECE)
AT_ONCE = tl.constexpr(32)  # pairs or pieces that a program works out at once


@triton.jit
def _first_of_chunk(number, here):
    """The first expert of chunk `number`. Chunks grow evenly, since the first tiles wait for all of the first one."""
    chunks = tl.minimum(here, MAX_CHUNKS)
    return tl.maximum(number, tl.cdiv(here * number * (number + 1), chunks * (chunks + 1)))


@triton.jit
def _chunk_at(place, scale, here):
    """The chunk of an expert; scale: each expert counts so often."""
    chunk = tl.zeros_like(place)
    for number in range(1, tl.minimum(here, MAX_CHUNKS)):
        chunk += (place >= scale * _first_of_chunk(number, here)).to(tl.int32)
    return chunk


@triton.jit
def _rows_here(counts_ptr, rank, world, here, WORLD_2: tl.constexpr, HERE_2: tl.constexpr):
    """Rows for each of this rank's experts, from this rank, rank-1, ...: [HERE_2, WORLD_2]."""
    expert, turn = tl.arange(0, HERE_2)[:, None], tl.arange(0, WORLD_2)[None, :]
    source_ptr = counts_ptr + (rank - turn + world) % world * (world * here)
    return tl.load(source_ptr + rank * here + expert, mask=(expert < here) & (turn < world), other=0)


@triton.jit
def _fill_pairs(pairs_ptr, capacity, counts_ptr, rank, program, programs, world, here, WORLD_2: tl.constexpr,
                HERE_2: tl.constexpr, BLOCK_M: tl.constexpr, LEAST: tl.constexpr):  # fmt: skip
    """This program's pairs, by expert, then row."""
    rows, number = tl.sum(_rows_here(counts_ptr, rank, world, here, WORLD_2, HERE_2), 1), tl.arange(0, HERE_2)
    ends, tiles = tl.cumsum(rows, 0), tl.cdiv(rows, BLOCK_M)
    count, total, tile_ends = tl.sum(tiles, 0), tl.sum(rows, 0), tl.cumsum(tiles, 0)
    for first_slot in range(program * AT_ONCE, count, programs * AT_ONCE):
        slots = first_slot + tl.arange(0, AT_ONCE)
        expert = tl.sum((tile_ends[None, :] <= slots[:, None]).to(tl.int32), 1)
        is_it = expert[:, None] == number[None, :]
        start = tl.sum(tl.where(is_it, (ends - rows)[None, :], 0), 1)
        first = start + BLOCK_M * (slots - tl.sum(tl.where(is_it, (tile_ends - tiles)[None, :], 0), 1))
        to_ptr, inside = pairs_ptr + PAIR_WORDS * (1 + slots), (slots < count) & (slots < capacity)
        tl.store(to_ptr, expert, mask=inside)
        tl.store(to_ptr + 1, first, mask=inside)
        tl.store(to_ptr + 2, tl.sum(tl.where(is_it, ends[None, :], 0), 1), mask=inside)
        tl.store(to_ptr + 3, _chunk_at(expert, 1, here), mask=inside)
    if program == 0:
        tl.store(pairs_ptr, count)
        tl.store(pairs_ptr + 1, tl.maximum(total, LEAST))
        tl.store(pairs_ptr + 2, world)


@triton.jit
def _fill_pieces(pieces_ptr, peers_ptr, capacity, counts_ptr, rank, program, programs, world, here, WORLD_2: tl.constexpr,
                 EXPERTS_2: tl.constexpr):  # fmt: skip
    """This program's pieces and, by the first program, what peers tells of pieces."""
    experts = world * here
    order, target = tl.arange(0, EXPERTS_2), tl.arange(0, WORLD_2)
    # The parts in which rows leave: chunk by chunk, of each those for this rank, rank+1, ..., by expert.
    chunk = _chunk_at(order, world, here)
    first_expert = _first_of_chunk(chunk, here)
    experts_of_chunk = tl.maximum(_first_of_chunk(chunk + 1, here) - first_expert, 1)
    in_chunk = order - world * first_expert
    to = (rank + in_chunk // experts_of_chunk) % world
    part = to * here + first_expert + in_chunk % experts_of_chunk
    exists = order < experts
    count = tl.cdiv(tl.load(counts_ptr + rank * experts + part, mask=exists, other=0), PIECE)
    for one in range(tl.minimum(here, MAX_CHUNKS)):
        is_of = (to[:, None] == target[None, :]) & (chunk == one)[:, None] & exists[:, None]
        of_target = tl.sum(tl.where(is_of, count[:, None], 0), 0)
        is_first = is_of & (in_chunk % experts_of_chunk == 0)[:, None]
        # an empty piece, whose signal is waited for
        count += tl.sum((is_first & (of_target == 0)[None, :]).to(tl.int32), 1)
        if program == 0:
            at_peer_ptr = peers_ptr + target * PEER_WORDS + FIRST_PIECES + one
            tl.store(at_peer_ptr, tl.maximum(of_target, 1), mask=target < world)
    ends = tl.cumsum(count, 0)
    pieces = tl.sum(count, 0)
    if program == 0:
        tl.store(pieces_ptr, pieces)
    own = tl.load(counts_ptr + rank * experts + order, mask=exists, other=0)
    of_all = tl.zeros((EXPERTS_2,), tl.int32)
    for source in range(world):
        of_all += tl.load(counts_ptr + source * experts + order, mask=exists, other=0)
    for first_slot in range(program * AT_ONCE, pieces, programs * AT_ONCE):
        slots = first_slot + tl.arange(0, AT_ONCE)
        inside = slots < pieces
        at = tl.sum((ends[None, :] <= slots[:, None]).to(tl.int32), 1)
        is_it = at[:, None] == order[None, :]
        mine = tl.sum(tl.where(is_it, part[None, :], 0), 1)
        number = PIECE * (slots - tl.sum(tl.where(is_it, (ends - count)[None, :], 0), 1))
        signal = tl.sum(tl.where(is_it, (to * MAX_CHUNKS + chunk)[None, :], 0), 1)
        is_before = order[None, :] < mine[:, None]
        first = tl.sum(tl.where(is_before, own[None, :], 0), 1)
        # At its rank: behind the rows for experts before, and those from ranks whose turn comes before.
        is_before = is_before & (order[None, :] >= (mine // here * here)[:, None])
        place = tl.sum(tl.where(is_before, of_all[None, :], 0), 1)
        peer = mine // here
        for turn in range(world):
            before = inside & (turn < (peer - rank + world) % world)
            place += tl.load(counts_ptr + (peer - turn + world) % world * experts + mine, mask=before, other=0)
        rows = tl.load(counts_ptr + rank * experts + mine, mask=inside, other=0) - number
        to_ptr, inside = pieces_ptr + PIECE_WORDS * (1 + slots), inside & (slots < capacity)
        tl.store(to_ptr, first + number, mask=inside)
        tl.store(to_ptr + 1, tl.minimum(rows, PIECE), mask=inside)
        tl.store(to_ptr + 2, signal, mask=inside)
        tl.store(to_ptr + 3, place + number, mask=inside)


@triton.jit
def _fill_segments(segments_ptr, ends_ptr, peers_ptr, counts_ptr, rank, world, here, WORLD_2: tl.constexpr,
                   HERE_2: tl.constexpr, EXPERTS_2: tl.constexpr):  # fmt: skip
    """segments, ends, and what peers tells of rows."""
    experts = world * here
    expert, turn, order = tl.arange(0, HERE_2), tl.arange(0, WORLD_2), tl.arange(0, EXPERTS_2)
    source, exists = (rank - turn + world) % world, turn < world
    rows = _rows_here(counts_ptr, rank, world, here, WORLD_2, HERE_2)
    ends = tl.cumsum(tl.sum(rows, 1), 0)
    tl.store(ends_ptr + expert, ends, mask=expert < here)
    end = (ends - tl.sum(rows, 1))[:, None] + tl.cumsum(rows, 1)
    inside = exists[:, None] & (order < experts)[None, :]
    of_ranks = tl.load(counts_ptr + source[:, None] * experts + order[None, :], mask=inside, other=0)
    before_here = tl.sum(tl.where((order < rank * here)[None, :], of_ranks, 0), 1)
    in_sent_order = before_here[None, :] + tl.cumsum(rows, 0) - rows
    to_ptr = segments_ptr + SEGMENT_WORDS * (expert[:, None] * world + source[None, :])
    inside = (expert < here)[:, None] & exists[None, :]
    tl.store(to_ptr, end - rows, mask=inside)
    tl.store(to_ptr + 1, end, mask=inside)
    tl.store(to_ptr + 2, in_sent_order - (end - rows), mask=inside)
    of_all = tl.sum(of_ranks, 0)
    is_for = (order // here)[None, :] == source[:, None]
    to_ptr = peers_ptr + source * PEER_WORDS
    tl.store(to_ptr, tl.sum(tl.where(is_for, of_all[None, :], 0), 1), mask=exists)
    tl.store(to_ptr + 1, tl.sum(of_ranks, 1), mask=exists)
    tl.store(to_ptr + 2, tl.sum(rows, 0), mask=exists)


@triton.jit(do_not_specialize=["most_pairs", "most_pieces", "rank", "world", "here"])
def expert_tables_kernel(counts_ptr, pairs_ptr, pieces_ptr, peers_ptr, segments_ptr, ends_ptr, most_pairs, most_pieces, rank,
                         world, here, WORLD_2: tl.constexpr, HERE_2: tl.constexpr, EXPERTS_2: tl.constexpr,
                         BLOCK_M: tl.constexpr, LEAST: tl.constexpr):  # fmt: skip
    """The tables of `rank`, `here` experts of each of `world` ranks. *_2: a power of two that is as large. most_*: as many as
    there is room for. LEAST: see ops/expert_tables.py. The last program fills what is small; others pairs, or pieces."""
    program, half = tl.program_id(0), (tl.num_programs(0) - 1) // 2
    if program < half:
        _fill_pairs(pairs_ptr, most_pairs, counts_ptr, rank, program, half, world, here, WORLD_2, HERE_2, BLOCK_M,
                    LEAST)  # fmt: skip
    elif program < 2 * half:
        _fill_pieces(pieces_ptr, peers_ptr, most_pieces, counts_ptr, rank, program - half, half, world, here, WORLD_2,
                     EXPERTS_2)  # fmt: skip
    else:
        _fill_segments(segments_ptr, ends_ptr, peers_ptr, counts_ptr, rank, world, here, WORLD_2, HERE_2, EXPERTS_2)
