"""Which rows of a sequence each rank of a context-parallel group holds, and where they lie after an all-to-all.

`W` ranks. Received rows come rank after rank; attention wants them in the order of the sequence:

    contiguous   rank r holds the r-th of W equal parts
    zigzag       the sequence is cut into 2 W chunks, and rank r holds chunks r and 2 W - 1 - r (Megatron's causal balance)
    documents    zigzag within each document of a packed sequence (Megatron with packed_seq_params)
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

LAYOUTS = ("contiguous", "zigzag")


@dataclass(frozen=True)
class SequenceLayout:
    """kind: contiguous or zigzag. document_starts: of a packed sequence, first row of each document, then the end of the last;
    zigzag is then within each. Padded lengths, since each is cut into 2 W chunks."""

    kind: str = "contiguous"
    document_starts: tuple[int, ...] = ()

    def error(self, rows: int, world_size: int, name: str) -> str | None:
        """Why `rows` rows of all ranks cannot lie like this, or None."""
        if self.kind not in LAYOUTS:
            return f"{name}: layout.kind={self.kind!r} is not one of {', '.join(LAYOUTS)}"
        if self.kind == "contiguous":
            return None
        starts = self.document_starts or (0, rows)
        if starts[0] != 0 or starts[-1] != rows:
            return (
                f"{name}: layout.document_starts={starts} must begin with 0 and end with the {rows} rows of all ranks"
            )
        lengths = [after - before for before, after in pairwise(starts)]
        wrong = next((length for length in lengths if length <= 0 or length % (2 * world_size)), None)
        if wrong is None:
            return None
        return (
            f"{name}: a sequence or document of {wrong} rows cannot be cut into the {2 * world_size} equal chunks of a "
            f"zigzag over {world_size} ranks; pad it to a multiple of {2 * world_size}"
        )

    def received_rows(self, rows: int, world_size: int) -> torch.Tensor | None:
        """int64 [rows]: where row i of the sequence is among the received ones; None: there. On the CPU."""
        if self.kind == "contiguous" or world_size == 1:
            return None
        starts = self.document_starts or (0, rows)
        parts = [_zigzag(first, end, rows, world_size) for first, end in pairwise(starts)]
        return torch.cat(parts)


def _zigzag(first: int, end: int, rows: int, world_size: int) -> torch.Tensor:
    """Of one sequence or document, rows first ... end."""
    chunk = (end - first) // (2 * world_size)
    place = torch.arange(end - first)
    number, within = place // chunk, place % chunk
    second = number >= world_size
    rank = torch.where(second, 2 * world_size - 1 - number, number)
    return rank * (rows // world_size) + first // world_size + second * chunk + within
