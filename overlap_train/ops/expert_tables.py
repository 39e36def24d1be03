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

from ..kernels.signal_words import FIRST_PIECES, MAX_CHUNKS, PAIR_WORDS, PEER_WORDS, PIECE, PIECE_WORDS, SEGMENT_WORDS
from ..select.tiles import HOPPER_TILE

_BLOCK_M = HOPPER_TILE.block_m
# Rows of an expert and source, in the mean, from which on pairs go in the order in which sources arrive, own rows first: they
# fill half a group of tiles that share columns. Of shorter ones each expert's weight would be read anew for each source.
_LONG_SEGMENT = HOPPER_TILE.group_m * _BLOCK_M // 2
LEAST_ROWS = _BLOCK_M // HOPPER_TILE.parts  # that a strip is read from

Counts: TypeAlias = np.ndarray[Any, np.dtype[np.int32]]


class Tables(NamedTuple):
    pairs: torch.Tensor
    pieces: torch.Tensor
    peers: torch.Tensor
    segments: torch.Tensor


def chunk_count(experts_here: int) -> int:
    return min(MAX_CHUNKS, experts_here)


def expert_tables(counts: Counts, rank: int, moved: Callable[[Counts], torch.Tensor]) -> Tables:
    """Tables of `rank`. counts: rows [W, W, E/W] from a rank to another's experts. moved: moves them to a device, all at once.
    The GPU stands still until they are there."""
    in_sent_order, segments = before_each(counts), np.zeros((*counts.shape[:0:-1], SEGMENT_WORDS), np.int32)
    by_expert = counts[:, rank].T
    segments[..., 0] = first = before_each(by_expert[None])[0]
    segments[..., 1] = first + by_expert
    segments[..., 2] = in_sent_order[:, rank].T - first
    found = [_pairs(segments, rank), *_pieces(counts, in_sent_order[rank], rank), segments]
    table = moved(np.concatenate([each.ravel() for each in found]))
    parts = table.split([each.size for each in found])
    return Tables(*(part.view(each.shape) for part, each in zip(parts, found, strict=True)))


def _pairs(segments: Counts, rank: int) -> Counts:
    here, world, _ = segments.shape
    starts, ends = segments[:, 0, 0], segments[:, -1, 1]
    counts = (ends - starts + (_BLOCK_M - 1)) // _BLOCK_M
    expert, number = _runs(np.arange(here, dtype=np.int32), counts)
    first, end, chunk = starts[expert] + number * _BLOCK_M, ends[expert], _order(world, here, rank).chunks[expert]
    pairs: Counts = np.empty((1 + len(expert), PAIR_WORDS), np.int32)
    pairs[0] = len(expert), max(ends[-1], LEAST_ROWS), world, 0
    of_pairs = pairs[1:]
    of_pairs[:, 0], of_pairs[:, 1], of_pairs[:, 2], of_pairs[:, 3] = expert, first, end, chunk
    if ends[-1] >= _LONG_SEGMENT * here * world:
        of_pair = segments[expert]
        begins = np.maximum(of_pair[..., 0], first[:, None])
        turns = (begins < np.minimum(of_pair[..., 1], first[:, None] + _BLOCK_M)) * ((rank - np.arange(world)) % world)
        pairs[1:] = of_pairs[np.argsort(turns.max(1) + world * chunk, kind="stable")]
    return pairs


def _pieces(counts: Counts, in_sent_order: Counts, rank: int) -> tuple[Counts, Counts]:
    """(pieces, peers). in_sent_order: where this rank's rows for each expert begin there."""
    world, _, here = counts.shape
    of_call = _order(world, here, rank)
    sent, totals = counts[rank], counts.sum(0, dtype=np.int32)
    pieces: Counts = (sent + (PIECE - 1)) // PIECE
    in_chunks = np.add.reduceat(pieces, of_call.firsts, 1)
    pieces[:, of_call.firsts] += in_chunks == 0
    segments = np.empty((world, here, PIECE_WORDS), np.int32)
    segments[..., 0], segments[..., 1], segments[..., 2] = in_sent_order, sent, of_call.parts
    # At each rank what comes before its experts' rows from here: those of experts before, and from ranks before.
    segments[..., 3] = totals.cumsum(1) - totals + counts[:rank].sum(0)
    which, number = _runs(of_call.experts, pieces.ravel()[of_call.experts])
    number *= PIECE
    table: Counts = np.empty((1 + len(which), PIECE_WORDS), np.int32)
    table[0] = len(which), 0, 0, 0
    np.take(segments.reshape(-1, PIECE_WORDS), which, 0, out=table[1:])
    table[1:, 0] += number
    table[1:, 1] = np.minimum(table[1:, 1] - number, PIECE)
    table[1:, 3] += number
    peers = np.zeros((world, PEER_WORDS), np.int32)
    peers[:, 0], peers[:, 1], peers[:, 2] = totals.sum(1), counts.sum((1, 2)), counts[:, rank].sum(1)
    peers[:, FIRST_PIECES : FIRST_PIECES + len(of_call.firsts)] = np.maximum(in_chunks, 1)
    return table, peers


class _Order(NamedTuple):
    """What is the same in all calls. chunks: of each expert. firsts: the first expert of each chunk. parts [W, E/W]: rank x
    MAX_CHUNKS + chunk. experts: rank x E/W + expert in the order in which rows are sent."""

    chunks: Counts
    firsts: Counts
    parts: Counts
    experts: Counts


@functools.cache
def _order(world: int, here: int, rank: int) -> _Order:
    ends = _ends_of_chunks(here)
    firsts = np.concatenate(([0], ends[:-1]))
    numbers: Counts = np.arange(world, dtype=np.int32)
    chunks: Counts = np.searchsorted(ends, np.arange(here), "right").astype(np.int32)
    ranks: Counts = (rank + numbers) % world * here
    experts = [(ranks[:, None] + np.arange(first, end)).ravel() for first, end in zip(firsts, ends, strict=True)]
    return _Order(chunks, firsts, numbers[:, None] * MAX_CHUNKS + chunks, np.concatenate(experts))


def _ends_of_chunks(here: int) -> Counts:
    """The expert behind each chunk's last one. Chunks grow evenly, since the first tiles wait for all of the first one."""
    count = chunk_count(here)
    numbers = np.arange(1, count + 1)
    return np.maximum(numbers, -(-here * numbers * (numbers + 1) // (count * (count + 1))))


def _runs(values: Counts, lengths: Counts) -> tuple[Counts, Counts]:
    """Each value in a run of its length, and the number of each in its run."""
    which: Counts = np.repeat(values, lengths)
    starts = lengths.cumsum(dtype=np.int32) - lengths
    return which, np.arange(len(which), dtype=np.int32) - np.repeat(starts, lengths)


def before_each(counts: Counts) -> Counts:
    """How much comes before each, in each of the matrices."""
    flat = counts.reshape(len(counts), -1)
    return (flat.cumsum(1, dtype=np.int32) - flat).reshape(counts.shape)
