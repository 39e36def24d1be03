"""Grouped products: rows that lie by expert, each group with the weight of its expert. By the library, a product for each expert;
on GPUs in bf16 one grouped kernel, where experts are many."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from ..group.domain import OverlapDomain
from .blocks import BLOCK, squares, unpacked_rows
from .quantize import Quantized
from .routing import Places

LEAST_EXPERTS = 8  # below, a product for each expert is as fast


def _has_kernel(device: torch.device) -> bool:
    """Whether a grouped product is a kernel there, and not operations between which the host waits."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


class GroupedProduct:
    """Products with the weights [N, K] of this rank's experts. transposed: of rows [*, K] with w.T; else of rows [*, N].
    first: weights[0] as the caller has it. Weights that lie apart are put together where it has an attribute `stacked`, and kept
    there, until it is set to None; else each is multiplied by itself.

    depth: of the contraction. scales: of the weights, for kernels; None: they have none.
    """

    scales: torch.Tensor | None = None

    def __init__(self, weights: Sequence[torch.Tensor], transposed: bool, first: Any = None) -> None:
        self._weights, self.transposed, self._first, self.dtype = weights, transposed, first, weights[0].dtype
        n, k = weights[0].shape
        self.features, self.depth = (n, k) if transposed else (k, n)

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
                b_kn = weight.t() if self.transposed else weight
                torch.mm(rows[first : first + count], b_kn, out=out[start : start + count])

    def _is_grouped(self, rows: torch.Tensor) -> bool:
        if len(self._weights) < LEAST_EXPERTS or not _has_kernel(rows.device):
            return False
        fits = rows.dtype == torch.bfloat16 and not any(size % 8 for size in self._weights[0].shape)
        return fits and rows.is_contiguous() and self._stacked is not None

    def _grouped(self, rows: torch.Tensor, places: Places) -> torch.Tensor:
        assert self._stacked is not None, "asked by _is_grouped"
        b = self._stacked.mT if self.transposed else self._stacked
        return torch.nn.functional.grouped_mm(rows, b, offs=places.ends)

    @cached_property
    def order(self) -> int:
        """1: each weight lies right behind the one before it, as those of one parameter; -1: right before it, as Megatron's
        distributed optimizer has them; 0: otherwise."""
        first, last = self._weights[0], self._weights[-1]
        at, size = [weight.data_ptr() for weight in self._weights], first.nbytes
        step = 1 if len(at) == 1 or at[1] > at[0] else -1
        lie_together = at == [*range(at[0], at[0] + step * size * len(at), step * size)]
        # What lies between two parts of one memory is part of it, too.
        lie_together = lie_together and first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
        return step if lie_together and all(weight.is_contiguous() for weight in self._weights) else 0

    @property
    def is_reversed(self) -> bool:
        return self.order == -1

    @property
    def stack(self) -> torch.Tensor:
        """The weights as one tensor [E/W, N, K], contiguous, the last expert's first if `is_reversed`: a copy for this product,
        where they lie otherwise and none is kept."""
        stacked = self._memory(self._weights[-1]) if self.is_reversed else self._stacked
        if stacked is None:
            return torch.stack([*self._weights])
        return stacked if stacked.data_ptr() % 16 == 0 else stacked.clone()  # TMA reads what starts on 16 bytes

    @cached_property
    def _stacked(self) -> torch.Tensor | None:
        """[E/W, N, K], if there is one. Weights that lie in this order are not copied."""
        if self.order == 1:
            return self._memory(self._weights[0])
        if not hasattr(self._first, "stacked"):
            return None
        if not isinstance(self._first.stacked, torch.Tensor):  # None, or that of a call in fp8
            self._first.stacked = torch.stack([*self._weights])
        kept: torch.Tensor = self._first.stacked
        return kept

    def _memory(self, lowest: torch.Tensor) -> torch.Tensor:
        """The memory of all weights, which begins with that of `lowest`."""
        return lowest.as_strided((len(self._weights), *lowest.shape), (lowest.numel(), *lowest.stride()))


class BlockProduct:
    """The same in fp8, with a scale for each block (blocks.py): rows, packed, with e4m3 numbers of the weights. What is made of
    the weights is kept where `first` has an attribute `stacked`. The library multiplies what these numbers stand for: in bf16
    exactly that, except beyond its range."""

    transposed, is_reversed = True, False  # kernels get both operands along the contraction

    def __init__(self, domain: OverlapDomain, weights: Sequence[torch.Tensor], transposed: bool, first: Any) -> None:
        self._domain, self.dtype, self._experts = domain, weights[0].dtype, len(weights)
        n, k = weights[0].shape
        self.features, self.depth = (n, k) if transposed else (k, n)
        kept = getattr(first, "stacked", None)
        if not isinstance(kept, Quantized):  # none, or that of a call that is not in fp8
            is_kept, product = hasattr(first, "stacked"), GroupedProduct(weights, True)
            stack = product.stack if product.order == 1 else torch.stack([*weights])
            kept = squares(domain, stack.flatten(0, 1), is_kept or transposed, is_kept or not transposed, n)
            if is_kept:
                first.stacked = kept
        numbers, scales = (kept.rows, kept.inverse) if transposed else (kept.columns, kept.inverse_of_columns)
        assert numbers is not None and scales is not None, "both are kept"
        self.stack, self.scales = numbers.view(self._experts, self.features, self.depth), scales

    @cached_property
    def _of_values(self) -> GroupedProduct:
        rows, pieces = self._experts * self.features // BLOCK, self.depth // BLOCK
        numbers = self.stack.view(rows, BLOCK, pieces, BLOCK).to(self.dtype)
        values = numbers * self.scales[:, None, :pieces, None].to(self.dtype)
        return GroupedProduct(values.view(self.stack.shape).unbind(0), True)

    def into(self, out: torch.Tensor, places: Places, rows: torch.Tensor) -> None:
        """As GroupedProduct's; rows: packed, as they have come."""
        self._of_values.into(out, places, unpacked_rows(self._domain, rows, self.depth, self.dtype))

    def out_of(self, a: torch.Tensor, places: Places, out: torch.Tensor) -> None:
        """As GroupedProduct's; a: packed."""
        self._of_values.out_of(unpacked_rows(self._domain, a, self.depth, self.dtype), places, out)
