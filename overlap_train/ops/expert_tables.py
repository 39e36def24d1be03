"""What kernels of experts are told of one call's rows, worked out from the matrix of counts (ops/routing.py): int32 tables.

    pairs     [P + 1, 4]     P, max(R, 64), W, 0; then of each pair of strips: expert, first row, end of the expert's rows, chunk
    pieces    [Q + 1, 4]     Q, 0, 0, 0; then of each piece: first row in sent order, rows, rank x MAX_CHUNKS + chunk, place there
    peers     [W, 16]        of each rank: rows it receives, rows it sends, those of them to here, 0; pieces of each chunk for it
    segments  [E/W, W, 4]    of each expert and source rank: first row, end, what leads from a row to its place in sent order, 0

Rows are those in placed order, of this rank or of the one that a piece goes to. A pair is BLOCK_M rows of one expert, the last
one of an expert fewer. A chunk is the rows of some of a rank's experts, one after the other: there are as many chunks as signals
of a rank, or one for each expert. Pieces go chunk by chunk, the own ones first, since nothing brings them sooner; then to rank+1,
.... A rank and chunk without rows have an empty piece.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from ..kernels.signal_words import FIRST_PIECES, MAX_CHUNKS, PEER_WORDS, PIECE
from ..select.tiles import HOPPER_TILE

_BLOCK_M = HOPPER_TILE.block_m
# Rows of an expert and source, in the mean, from which on pairs go in the order in which sources arrive, own rows first: they
# fill half a group of tiles that share columns. Of shorter ones each expert's weight would be read anew for each source.
_LONG_SEGMENT = HOPPER_TILE.group_m * _BLOCK_M // 2
LEAST_ROWS = _BLOCK_M // HOPPER_TILE.parts  # that a strip is read from

Counts: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


class Tables(NamedTuple):
    pairs: torch.Tensor
    pieces: torch.Tensor
    peers: torch.Tensor
    segments: torch.Tensor


def chunk_count(experts_here: int) -> int:
    return min(MAX_CHUNKS, experts_here)


def expert_tables(counts: Counts, rank: int, moved: Callable[[torch.Tensor], torch.Tensor]) -> Tables:
    """Tables of `rank`. counts: rows [W, W, E/W] from a rank to another's experts. moved: moves them to a device, all at once."""
    here = counts.shape[2]
    chunks: Counts = np.searchsorted(_ends_of_chunks(here), np.arange(here), "right").astype(np.int64)  # of each expert
    found = [
        _pairs(counts[:, rank].T, rank, chunks),
        *_pieces(counts, rank, chunks),
        _segments(counts, rank),
    ]
    table = moved(torch.from_numpy(np.concatenate([each.ravel() for each in found]).astype(np.int32)))
    parts = table.split([each.size for each in found])
    return Tables(*(part.view(each.shape) for part, each in zip(parts, found, strict=True)))


def _ends_of_chunks(here: int) -> Counts:
    """The expert behind each chunk's last one. Chunks grow evenly, since the first tiles wait for all of the first one."""
    count = chunk_count(here)
    numbers = np.arange(1, count + 1)
    return np.maximum(numbers, -(-here * numbers * (numbers + 1) // (count * (count + 1))))


def _pairs(by_expert: Counts, rank: int, chunks: Counts) -> Counts:
    """by_expert: rows of each expert and source rank."""
    totals, (_, world) = by_expert.sum(1), by_expert.shape
    starts = _before(totals)
    counts: Counts = -(-totals // _BLOCK_M)
    expert, number = _runs(counts)
    first, end, chunk = starts[expert] + _BLOCK_M * number, (starts + totals)[expert], chunks[expert]
    pairs = np.stack((expert, first, end, chunk), 1)
    if by_expert.size and by_expert.mean() >= _LONG_SEGMENT:
        rows, begins = by_expert[expert], _before(by_expert)[expert]
        has = (rows > 0) & (begins < np.minimum(first + _BLOCK_M, end)[:, None]) & (begins + rows > first[:, None])
        turn = np.where(has, (rank - np.arange(world)) % world, 0).max(1)
        pairs = pairs[np.lexsort((turn, chunk))]
    return np.concatenate(([[len(expert), max(int(totals.sum()), LEAST_ROWS), world, 0]], pairs))


def _pieces(counts: Counts, rank: int, chunks: Counts) -> tuple[Counts, Counts]:
    """(pieces, peers)."""
    world, _, here = counts.shape
    firsts, order = _order_of_pieces(world, here, rank)
    sent: Counts = counts[rank]
    pieces: Counts = -(-sent // PIECE)
    in_chunks = np.add.reduceat(pieces, firsts, 1)
    pieces[:, firsts] += in_chunks == 0
    part = np.arange(world)[:, None] * MAX_CHUNKS + chunks
    # At each rank what comes before its experts' rows from here: those of experts before, and from ranks before.
    totals = counts.sum(0)
    place = np.cumsum(totals, 1) - totals + counts[:rank].sum(0)
    segments = np.stack((_before(sent), sent, part, place), 2).reshape(-1, 4)[order]
    which, number = _runs(pieces.ravel()[order])
    table = segments.astype(np.int32)[which]
    number *= PIECE
    table[:, 0] += number
    table[:, 1] = np.minimum(table[:, 1] - number, PIECE)
    table[:, 3] += number
    peers = np.zeros((world, PEER_WORDS), np.int64)
    peers[:, 0], peers[:, 1], peers[:, 2] = totals.sum(1), counts.sum((1, 2)), counts[:, rank].sum(1)
    peers[:, FIRST_PIECES : FIRST_PIECES + len(firsts)] = np.maximum(in_chunks, 1)
    return np.concatenate(([[len(which), 0, 0, 0]], table)), peers


@functools.cache
def _order_of_pieces(world: int, here: int, rank: int) -> tuple[Counts, Counts]:
    """(the first expert of each chunk, (rank, expert) as rank x E/W + expert in the order in which they are sent)."""
    ends = _ends_of_chunks(here)
    firsts: Counts = np.concatenate(([0], ends[:-1]))
    ranks: Counts = (rank + np.arange(world)) % world * here
    return firsts, np.concatenate([
        (ranks[:, None] + np.arange(first, end)).ravel() for first, end in zip(firsts, ends, strict=True)
    ])  # fmt: skip


def _segments(counts: Counts, rank: int) -> Counts:
    by_expert = counts[:, rank].T
    first = _before(by_expert)
    sent = np.stack([_before(of_rank)[rank] for of_rank in counts], 1)
    return np.stack((first, first + by_expert, sent - first, np.zeros_like(first)), 2)


def _runs(lengths: Counts) -> tuple[Counts, Counts]:
    """(0, 0, .., 1, 1, ..) in runs of `lengths`, and the number of each in its run."""
    which: Counts = np.repeat(np.arange(len(lengths)), lengths)
    return which, np.arange(len(which)) - _before(lengths)[which]


def _before(counts: Counts) -> Counts:
    """How much comes before each, row by row."""
    flat = counts.ravel()
    before: Counts = (np.cumsum(flat) - flat).reshape(counts.shape)
    return before
