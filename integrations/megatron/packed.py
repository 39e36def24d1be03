"""The documents of a packed micro-batch (Megatron's PackedSeqParams), read from the device once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.transformer_config import TransformerConfig

_KEPT = "_overlap_train_documents"  # attribute of a PackedSeqParams, which all layers of a forward get


@dataclass(frozen=True)
class Documents:
    """The documents of a packed sequence. starts: first row of each document with its padding, then the end of the last. lengths:
    rows without padding."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def end(self) -> int:
        """Rows from here on belong to no document."""
        return self.starts[-1]

    def with_rest(self, rows: int) -> tuple[int, ...]:
        """The starts of a sequence of `rows` rows: those beyond the last document count as one more document."""
        return self.starts if self.end == rows else (*self.starts, rows)

    @cached_property  # all layers of a forward ask: 32000 rows took 6 ms
    def row_numbers(self) -> torch.Tensor | None:
        """Rows that belong to documents and are no padding, on the CPU; None: all up to `end`."""
        if all(
            after - before == length
            for (before, after), length in zip(pairwise(self.starts), self.lengths, strict=True)
        ):
            return None
        spans = zip(self.starts, self.lengths, strict=False)
        with torch.inference_mode(False):  # training may ask next
            return torch.cat([torch.arange(start, start + length, device="cpu") for start, length in spans])


def cut_of(packed: PackedSeqParams | None, config: TransformerConfig) -> str:
    """How Megatron has cut the rows over the context-parallel ranks: as this pack says, or else the model's config. Where neither
    says anything it is "zigzag": Megatron-Core up to 0.19 cuts in no other way."""
    said = (getattr(holder, "cp_partition_mode", None) for holder in (packed, config))
    return next((mode for mode in said if mode is not None), "zigzag")


def documents_of(packed: PackedSeqParams) -> Documents:
    """The documents of a packed micro-batch, as self-attention has them (cu_seqlens_q). The first call for these lengths waits
    for the device; `packed` keeps the answer for later ones."""
    real, padded = packed.cu_seqlens_q, getattr(packed, "cu_seqlens_q_padded", None)
    padded = real if padded is None else padded
    key = [(id(x), 0 if x.is_inference() else x._version) for x in (real, padded)]
    kept = getattr(packed, _KEPT, None)
    if kept is None or kept[0] != key:
        kept = key, _read(real, padded), (real, padded)  # held, because an id may be used again
        setattr(packed, _KEPT, kept)
    return kept[1]


def _read(real: torch.Tensor, padded: torch.Tensor) -> Documents:
    """Documents of no rows, with which Megatron fills up its batches, are left out."""
    ends, real_ends = (x.flatten().tolist() for x in (padded, real))
    lengths = [after - before for before, after in pairwise(real_ends)]
    documents = [(end, length) for (start, end), length in zip(pairwise(ends), lengths, strict=False) if end > start]
    return Documents((ends[0], *(end for end, _ in documents)), tuple(length for _, length in documents))
