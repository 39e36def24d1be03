"""What kernels of experts are told of one call's rows, worked out on the GPU (kernels/expert_tables.py): int32 tables.

    pairs     [P + 1, 4]     P, max(R, 64), W, -; then of each pair of strips: expert, first row, end of the expert's rows, chunk
    pieces    [Q + 1, 4]     Q, -, -, -; then of each piece: first row in sent order, rows, rank x MAX_CHUNKS + chunk, place there
    peers     [W, 16]        of each rank: rows it receives, rows it sends, those of them to here, -; pieces of each chunk for it
    segments  [E/W, W, 4]    of each expert and source rank: first row, end, what leads from a row to its place in sent order, -
    ends      [E/W]          where each expert's rows end

Words `-`, and those behind what there is, hold anything. Rows are those in placed order, of this rank or of the one that a piece
goes to (routing.py). A pair is BLOCK_M rows of one expert, the last one of an expert fewer. A chunk is the rows of some of a
rank's experts, one after the other: there are as many chunks as signals of a rank, or one for each expert. Pieces go chunk by
chunk, the own ones first, since nothing brings them sooner; then to rank+1, .... A rank and chunk without rows have an empty
piece.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..gpu.launch import Launch, LaunchCache
from ..kernels.signal_words import MAX_CHUNKS, PAIR_WORDS, PEER_WORDS, PIECE, PIECE_WORDS, SEGMENT_WORDS
from ..select.tiles import HOPPER_TILE

_BLOCK_M = HOPPER_TILE.block_m
LEAST_ROWS = _BLOCK_M // HOPPER_TILE.parts  # that a strip is read from
_PROGRAMS = 33  # that make tables: the last one fills what is small


class Tables(NamedTuple):
    pairs: torch.Tensor
    pieces: torch.Tensor
    peers: torch.Tensor
    segments: torch.Tensor
    ends: torch.Tensor

    @property
    def most_pairs(self) -> int:
        """Pairs that there is room for."""
        return len(self.pairs) - 1


def expert_chunks(experts_here: int) -> int:
    return min(MAX_CHUNKS, experts_here)


def expert_tables(launches: LaunchCache, counts: torch.Tensor, rank: int, most_rows: int, most_pairs: int) -> Tables:
    """Tables of `rank`, which sends at most so many rows. counts: rows by rank and expert, int32 [W, E] of the device.
    most_pairs: that there is room for; what does not fit is left out."""
    world, experts = counts.shape
    here = experts // world
    most_pieces = most_rows // PIECE + experts + world * MAX_CHUNKS
    shapes = (
        (1 + most_pairs, PAIR_WORDS),
        (1 + most_pieces, PIECE_WORDS),
        (world, PEER_WORDS),
        (here, world, SEGMENT_WORDS),
    )
    sizes = [torch.Size(shape).numel() for shape in shapes]
    parts = counts.new_empty(sum(sizes) + here).split([*sizes, here])
    tables = Tables(*(part.view(shape) for part, shape in zip(parts, (*shapes, (here,)), strict=True)))
    values = (*(tensor.data_ptr() for tensor in (counts, *tables)), most_pairs, most_pieces)
    launches.run(("expert tables", counts.shape), values, expert_tables_launch, counts, tables, rank, most_pieces)
    return tables


def expert_tables_launch(counts: torch.Tensor, tables: Tables, rank: int, most_pieces: int) -> Launch:
    from ..kernels.expert_tables import expert_tables_kernel

    world, experts = counts.shape
    here = experts // world
    tensors = dict(counts_ptr=counts) | {f"{name}_ptr": table for name, table in tables._asdict().items()}
    numbers = dict(most_pairs=tables.most_pairs, most_pieces=most_pieces)
    constants = dict(
        WORLD_2=_power_of_two(world, 8), HERE_2=_power_of_two(here, 32), EXPERTS_2=_power_of_two(experts, 64),
        BLOCK_M=_BLOCK_M, LEAST=LEAST_ROWS, num_warps=8,
    )  # fmt: skip
    replaced = tuple((name,) for name in (*tensors, *numbers))
    arguments = tensors | numbers | dict(rank=rank, world=world, here=here)
    return Launch(expert_tables_kernel, (_PROGRAMS,), arguments, constants, replaced)


def _power_of_two(count: int, least: int) -> int:
    """One that is as large. least: one kernel serves all smaller counts, since each takes seconds to compile."""
    return max(least, 1 << (count - 1).bit_length())
