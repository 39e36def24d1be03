"""Grouped products: rows that lie by expert, each group with the weight of its expert. By the library, a product for each expert;
on GPUs in bf16 one grouped kernel, where experts are many."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from .routing import Places

_LEAST_EXPERTS = 8  # below, a product for each expert is as fast


class StackedWeights:
    """Weights of experts that lie apart, as one tensor [E/W, N, K], kept for the next calls: `weights[0].stacked =
    StackedWeights()` asks for it. It takes as much memory as they. Whoever changes a weight calls `clear()` before the next call,
    as of Fp8Copies (quantize.py)."""

    def __init__(self) -> None:
        self.clear()

    def __reduce__(self) -> tuple[Any, ...]:  # other weights', as a copy or from a file: empty
        return StackedWeights, ()

    def clear(self) -> None:
        self._made, self._made_of = torch.empty(0), list[tuple[int, int]]()

    def of(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        of = [(weight.data_ptr(), 0 if weight.is_inference() else weight._version) for weight in weights]
        if self._made_of != of:
            self._made, self._made_of = torch.stack([*weights]), of
        return self._made


def _has_kernel(device: torch.device) -> bool:
    """Whether a grouped product is a kernel there, and not operations between which the host waits."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


class GroupedProduct:
    """Products with the weights [N, K] of this rank's experts. transposed: of rows [*, K] with w.T; else of rows [*, N].
    stack: where those that lie apart are kept together; None: each is multiplied by itself."""

    def __init__(self, weights: Sequence[torch.Tensor], transposed: bool, stack: StackedWeights | None = None) -> None:
        self._weights, self._transposed, self._stack = weights, transposed, stack
        self.features: int = weights[0].shape[0 if transposed else 1]

    def into(self, out: torch.Tensor, places: Places, rows: torch.Tensor) -> None:
        """rows, in the order of their message, or all in placed order -> their places in out [R, features]."""
        if not len(rows):
            return
        if not self._is_grouped(rows):
            starts = places.starts if places.index is None else places.in_message
            self._by_expert(out, places.starts, rows, starts, places.counts)
        elif places.index is None:
            out.copy_(self._grouped(rows, places))
        else:
            out.index_copy_(0, places.index, self._grouped(rows, places))

    def out_of(self, a: torch.Tensor, places: Places, out: torch.Tensor) -> None:
        """The rows of a, in placed order, at `places` -> out, in the order of their message."""
        if not self._is_grouped(a):
            self._by_expert(out, places.in_message, a, places.starts, places.counts)
        elif len(out):
            rows = a if places.index is None else a.index_select(0, places.index)
            out.copy_(self._grouped(rows, places))

    def _by_expert(
        self, out: torch.Tensor, to: Sequence[int], rows: torch.Tensor, at: Sequence[int], counts: Sequence[int]
    ) -> None:
        for weight, start, first, count in zip(self._weights, to, at, counts, strict=True):
            if count:
                b_kn = weight.t() if self._transposed else weight
                torch.mm(rows[first : first + count], b_kn, out=out[start : start + count])

    def _is_grouped(self, rows: torch.Tensor) -> bool:
        if len(self._weights) < _LEAST_EXPERTS or not _has_kernel(rows.device):
            return False
        fits = rows.dtype == torch.bfloat16 and not any(size % 8 for size in self._weights[0].shape)
        return fits and rows.is_contiguous() and self._stacked is not None

    def _grouped(self, rows: torch.Tensor, places: Places) -> torch.Tensor:
        assert self._stacked is not None, "asked by _is_grouped"
        b = self._stacked.mT if self._transposed else self._stacked
        return torch.nn.functional.grouped_mm(rows, b, offs=places.ends)

    @cached_property
    def _stacked(self) -> torch.Tensor | None:
        """[E/W, N, K], if there is one. Weights that lie one after the other, as those of one parameter, are not copied."""
        first, size = self._weights[0], self._weights[0].numel()
        origin, storage = first.storage_offset(), first.untyped_storage().data_ptr()
        lie_together = all(
            weight.is_contiguous() and weight.untyped_storage().data_ptr() == storage
            and weight.storage_offset() == origin + number * size
            for number, weight in enumerate(self._weights)
        )  # fmt: skip
        if lie_together:
            return first.as_strided((len(self._weights), *first.shape), (size, *first.stride()), origin)
        return None if self._stack is None else self._stack.of(self._weights)
