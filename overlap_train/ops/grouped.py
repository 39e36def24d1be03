"""Grouped products: rows that lie by expert, each group with the weight of its expert. By the library, a product for each expert;
on GPUs in bf16 one grouped kernel, where experts are many."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, reduce
from operator import or_
from typing import Any, NamedTuple

import torch

from ..group.domain import OverlapDomain
from .blocks import BLOCK, squares, unpacked_rows
from .launch_experts import MOST_STEPS
from .quantize import Quantized
from .routing import Places

_LEAST_EXPERTS = 8  # below, a product for each expert is as fast


def _has_kernel(device: torch.device) -> bool:
    """Whether a grouped product is a kernel there, and not operations between which the host waits."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


class GroupedProduct:
    """Products with the weights [N, K] of this rank's experts. transposed: of rows [*, K] with w.T; else of rows [*, N].
    first: weights[0] as the caller has it. The library multiplies weights that lie apart each by itself; where `first` has an
    attribute `stacked` they are put together, and kept there until it is set to None. Kernels read `matrices`.

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
        if len(self._weights) < _LEAST_EXPERTS or not _has_kernel(rows.device):
            return False
        fits = rows.dtype == torch.bfloat16 and not any(size % 8 for size in self._weights[0].shape)
        return fits and rows.is_contiguous() and self.stacked is not None

    def _grouped(self, rows: torch.Tensor, places: Places) -> torch.Tensor:
        assert self.stacked is not None, "asked by _is_grouped"
        b = self.stacked.mT if self.transposed else self.stacked
        return torch.nn.functional.grouped_mm(rows, b, offs=places.ends)

    @cached_property
    def matrices(self) -> Matrices:
        """The weights as a kernel finds them."""
        return Matrices.of(self._weights)

    @cached_property
    def stacked(self) -> torch.Tensor | None:
        """[E/W, N, K], if there is one. Weights that lie one after the other, as those of one parameter, are not copied."""
        first, last = self._weights[0], self._weights[-1]
        at, size = [weight.data_ptr() for weight in self._weights], first.nbytes
        # What lies between two parts of one memory is part of it, too.
        is_one = first.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
        is_one = is_one and at == [*range(at[0], at[0] + size * len(at), size)]
        if is_one and all(weight.is_contiguous() for weight in self._weights):
            return first.as_strided((len(at), *first.shape), (first.numel(), *first.stride()))
        if not hasattr(self._first, "stacked"):
            return None
        if not isinstance(self._first.stacked, torch.Tensor):  # None, or that of a call in fp8
            self._first.stacked = torch.stack([*self._weights])
        kept: torch.Tensor = self._first.stacked
        return kept


class Matrices(NamedTuple):
    """Matrices of one shape, contiguous, wherever they lie in one GPU's memory. lowest: the first of them there. at: how many
    times 16 bytes each begins behind that."""

    lowest: torch.Tensor
    at: tuple[int, ...]

    @classmethod
    def of(cls, matrices: Sequence[torch.Tensor]) -> Matrices:
        """A copy, side by side, where TMA does not reach them: it wants starts on 16 bytes, and has MOST_STEPS of these."""
        starts = [*map(torch.Tensor.data_ptr, matrices)]
        lowest = min(starts)
        are_reached = max(starts) - lowest < 16 * MOST_STEPS and reduce(or_, starts) % 16 == 0
        if not are_reached or not all(map(torch.Tensor.is_contiguous, matrices)):
            matrices = torch.stack([*matrices]).unbind(0)
            starts = [*map(torch.Tensor.data_ptr, matrices)]
            lowest = starts[0]
        return cls(matrices[starts.index(lowest)], tuple([(start - lowest) // 16 for start in starts]))


class BlockProduct:
    """The same in fp8, with a scale for each block (blocks.py): rows, packed, with e4m3 numbers of the weights. What is made of
    the weights is kept where `first` has an attribute `stacked`. The library multiplies what these numbers stand for: in bf16
    exactly that, except beyond its range."""

    transposed = True  # kernels get both operands along the contraction

    def __init__(self, domain: OverlapDomain, weights: Sequence[torch.Tensor], transposed: bool, first: Any) -> None:
        self._domain, self.dtype, self._experts = domain, weights[0].dtype, len(weights)
        n, k = weights[0].shape
        self.features, self.depth = (n, k) if transposed else (k, n)
        kept = getattr(first, "stacked", None)
        if not isinstance(kept, Quantized):  # none, or that of a call that is not in fp8
            is_kept, stack = hasattr(first, "stacked"), GroupedProduct(weights, True).stacked
            stack = torch.stack([*weights]) if stack is None else stack
            kept = squares(domain, stack.flatten(0, 1), is_kept or transposed, is_kept or not transposed, n)
            if is_kept:
                first.stacked = kept
        numbers, scales = (kept.rows, kept.inverse) if transposed else (kept.columns, kept.inverse_of_columns)
        assert numbers is not None and scales is not None, "both are kept"
        self.stack, self.scales = numbers.view(self._experts, self.features, self.depth), scales

    @cached_property
    def matrices(self) -> Matrices:
        """The weights as a kernel finds them."""
        step = self.stack[0].nbytes // 16
        return Matrices(self.stack[0], tuple(range(0, self._experts * step, step)))

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
