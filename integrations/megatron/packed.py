"""Packed micro-batches (Megatron's PackedSeqParams): their documents, read from the device once, and attention within these."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention.varlen import varlen_attn

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.transformer_config import TransformerConfig

ZIGZAG = "zigzag"  # of a pack: within each of its documents
ZIGZAG_OF_PACK = "zigzag_pack"  # over all of its rows, whatever documents they belong to
_CUTS_PACKS = "_overlap_train_cuts_packs"  # attribute of a model's config
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
        if tuple(after - before for before, after in pairwise(self.starts)) == self.lengths:
            return None
        spans = zip(self.starts, self.lengths, strict=False)
        with torch.inference_mode(False):  # training may ask next
            return torch.cat([torch.arange(start, start + length, device="cpu") for start, length in spans])

    def places(self, device: torch.device) -> torch.Tensor | None:
        """row_numbers on a device."""
        rows = self.row_numbers
        return None if rows is None else self._kept("places", device, lambda: rows)

    def offsets(self, device: torch.device) -> torch.Tensor:
        """int32 [documents + 1]: where each begins among the rows of all documents, without padding; then their end."""
        numbers = [0, *accumulate(self.lengths)]
        return self._kept("offsets", device, lambda: torch.tensor(numbers, dtype=torch.int32, device="cpu"))

    def padding(self, rows: int, device: torch.device) -> torch.Tensor | None:
        """bool [rows]: which rows of the sequence belong to no document, where some of them lie between documents; else None."""
        numbers = self.row_numbers
        if numbers is None:
            return None
        every = partial(torch.ones, rows, dtype=torch.bool, device="cpu")
        return self._kept(f"padding {rows}", device, lambda: every().index_fill(0, numbers, False))

    @cached_property
    def _there(self) -> dict[tuple[str, torch.device], torch.Tensor]:
        return {}

    def _kept(self, name: str, device: torch.device, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """What is made on the CPU, sent to a device once for all layers: the host waits then."""
        key = (name, device)
        if key not in self._there:
            with torch.inference_mode(False):  # as above
                self._there[key] = make().to(device)
        return self._there[key]


def cut_of(packed: PackedSeqParams | None, config: TransformerConfig) -> str:
    """How Megatron has cut the rows over the context-parallel ranks: as this pack says, or else the model's config, or
    cuts_packs_as_sequences; else "zigzag", as Megatron-Core up to 0.19."""
    said = (getattr(holder, "cp_partition_mode", None) for holder in (packed, config))
    default = ZIGZAG_OF_PACK if packed is not None and getattr(config, _CUTS_PACKS, False) else ZIGZAG
    return next((mode for mode in said if mode is not None), default)


def cuts_packs_as_sequences(config: TransformerConfig) -> None:
    """Note that whoever trains this model cuts its packs with Megatron's use_per_sequence_balancing: packs do not say so."""
    setattr(config, _CUTS_PACKS, True)


def documents_of(packed: PackedSeqParams) -> Documents:
    """The documents of a packed micro-batch (cu_seqlens_q). The first call for these lengths waits for the device; `packed` keeps
    the answer for later ones."""
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


class Softmax(NamedTuple):
    """How scores become weights."""

    scale: float
    is_causal: bool
    dropout: float


def packed_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, softmax: Softmax
) -> torch.Tensor:
    """[t, n, d] from q [t, n, d] and k, v [t, g, d] with n a multiple of g. torch's variable-length attention has one kernel for
    all documents, for 16 bits on GPUs and without dropout. Elsewhere each document is a call of its own."""
    at_once = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and not softmax.dropout
    attend, places = _at_once if at_once else _one_by_one, documents.places(q.device)
    if places is None:
        context = attend(q[: documents.end], k[: documents.end], v[: documents.end], documents, softmax)
        return F.pad(context, (0, 0, 0, 0, 0, len(q) - documents.end))
    q_rows, k_rows, v_rows = (x.index_select(0, places) for x in (q, k, v))
    context = attend(q_rows, k_rows, v_rows, documents, softmax)
    return torch.zeros_like(q).index_copy(0, places, context)


def _at_once(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, softmax: Softmax) -> torch.Tensor:
    """Rows beyond the last document would give it NaN gradients (pytorch #176793), therefore there are none."""
    offsets, longest = documents.offsets(q.device), max(documents.lengths)
    options: dict[str, object] = {"scale": softmax.scale, "window_size": (-1, 0 if softmax.is_causal else -1)}
    if q.size(1) != k.size(1):
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.12
            options["enable_gqa"] = True
        else:
            k, v = (x.repeat_interleave(q.size(1) // k.size(1), dim=1) for x in (k, v))
    return varlen_attn(q, k, v, offsets, offsets, longest, longest, **options)  # type: ignore[arg-type,return-value]


def _one_by_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: Documents, softmax: Softmax
) -> torch.Tensor:
    parts = zip(*(x.transpose(0, 1).split(documents.lengths, dim=1) for x in (q, k, v)), strict=True)
    contexts = [
        F.scaled_dot_product_attention(
            q_rows, k_rows, v_rows, dropout_p=softmax.dropout, is_causal=softmax.is_causal, scale=softmax.scale,
            enable_gqa=q.size(1) != k.size(1),
        )
        for q_rows, k_rows, v_rows in parts
    ]  # fmt: skip
    return torch.cat(contexts, dim=1).transpose(0, 1)
