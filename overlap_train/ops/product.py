"""The library's product of an engine: torch.mm, or of operands with one byte an element torch's scaled one."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn.functional import ScalingType

from ..gpu.cublaslt import add_product
from .blocks import BLOCK, tails, times


class Fp8Matrix(NamedTuple):
    """The right operand b [K, N] of a product in fp8, and both scales: a @ b = (a8 @ b8) * a_inverse * b_inverse.

    b_nk: [N, K], contiguous: both operands lie along the contraction, as tensor cores want them. a_inverse, b_inverse: fp32 [1].
    dtype: of the product. fast: sum in fewer bits than fp32, as forward passes do.
    """

    b_nk: torch.Tensor
    a_inverse: torch.Tensor
    b_inverse: torch.Tensor
    dtype: torch.dtype
    fast: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.b_nk.shape[1], self.b_nk.shape[0]

    @property
    def nbytes(self) -> int:
        return self.b_nk.nbytes

    def multiply(
        self, a_mk: torch.Tensor, out: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """a_mk [M, K] @ b [K, N] + bias [N] -> [M, N]. CPUs multiply the same numbers in fp32."""
        if a_mk.is_cuda:
            how = dict(scale_a=self.a_inverse, scale_b=self.b_inverse, out_dtype=self.dtype, use_fast_accum=self.fast)
            out = a_mk.new_empty(a_mk.shape[0], self.shape[1], dtype=self.dtype) if out is None else out
            return torch._scaled_mm(a_mk, self.b_nk.t(), **how, bias=bias, out=out)
        product = a_mk.float() @ self.b_nk.t().float() * (self.a_inverse * self.b_inverse)
        product = product if bias is None else product + bias
        return product.to(self.dtype) if out is None else out.copy_(product)

    def accumulate(self, out: torch.Tensor, a_mk: torch.Tensor) -> None:
        """out [M, N] += a_mk [M, K] @ b [K, N], without a rounding to self.dtype."""
        if not add_product(out, a_mk, self.b_nk, self.a_inverse, self.b_inverse):
            out.add_(self._replace(dtype=torch.float32).multiply(a_mk))


class BlockMatrix(NamedTuple):
    """The right operand b [K, N] of a product of e4m3 with a scale for each block (blocks.py). Sums are in fp32.

    b_nk: [N, K], contiguous. b_inverse: its inverse scales: of squares [N/128, K/128 up to a multiple of 4]; of pieces, as in a
    weight gradient, [K/128, N]. a_inverse: those of the left operand, [K/128, M], or of an engine that multiplies the rows of one
    rank after the other, [W, K/128, M/W]; None: it comes in packed rows.
    """

    b_nk: torch.Tensor
    b_inverse: torch.Tensor
    dtype: torch.dtype
    a_inverse: torch.Tensor | None = None
    in_pieces: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.b_nk.shape[1], self.b_nk.shape[0]

    @property
    def nbytes(self) -> int:
        return self.b_nk.nbytes

    def multiply(
        self, a_mk: torch.Tensor, out: torch.Tensor | None = None, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As Fp8Matrix's; a_mk: [M, *] packed, or [M, K]."""
        if a_mk.is_cuda:
            a_mk, a_inverse = self._left(a_mk)
            of_b = _PIECES if self.in_pieces else _SQUARES
            out = a_mk.new_empty(len(a_mk), self.shape[1], dtype=self.dtype) if out is None else out
            told: Any = [a_inverse.t()], [_PIECES], [], [self.b_inverse.t()], [of_b], [], bias, self.dtype
            return torch._scaled_mm_v2(a_mk, self.b_nk.t(), *told, out=out)  # functional.scaled_mm has no `out`
        product = self.in_fp32(a_mk)
        product = product if bias is None else product + bias
        return product.to(self.dtype) if out is None else out.copy_(product)

    def accumulate(self, out: torch.Tensor, a_mk: torch.Tensor) -> None:
        """As Fp8Matrix's; a_mk: [M, K]. Both operands are in pieces."""
        assert self.in_pieces and self.a_inverse is not None
        if not add_product(out, a_mk, self.b_nk, self.a_inverse, self.b_inverse, by_blocks=True):
            out.add_(self._replace(dtype=torch.float32).multiply(a_mk))

    def in_fp32(self, a_mk: torch.Tensor) -> torch.Tensor:
        """a_mk @ b of the same numbers, in fp32."""
        (a_mk, a_inverse), b_inverse = self._left(a_mk), self.b_inverse.t()
        if not self.in_pieces:
            b_inverse = self.b_inverse.repeat_interleave(BLOCK, 0)[:, : self.shape[0] // BLOCK]
        return times(a_mk, a_inverse.t()) @ times(self.b_nk, b_inverse).t()

    def of_rank(self, rank: int) -> BlockMatrix:
        """The same for the rows of one rank."""
        apart = self.a_inverse is not None and self.a_inverse.dim() == 3
        return self._replace(a_inverse=self.a_inverse[rank]) if apart else self  # type: ignore[index]

    def _left(self, a_mk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(numbers [M, K], inverse scales [K/128, M]) of the left operand."""
        k = self.shape[0]
        return (a_mk[:, :k], tails(a_mk, k).t().contiguous()) if self.a_inverse is None else (a_mk, self.a_inverse)


_PIECES, _SQUARES = ScalingType.BlockWise1x128.value, ScalingType.BlockWise128x128.value
Right: TypeAlias = torch.Tensor | Fp8Matrix | BlockMatrix


def product(
    bias: torch.Tensor | None, a_mk: torch.Tensor, b_kn: Right, out: torch.Tensor | None = None
) -> torch.Tensor:
    """a_mk [M, K] @ b_kn [K, N] + bias [N] -> [M, N]. Engines call torch.mm themselves where that does it."""
    if not isinstance(b_kn, torch.Tensor):
        return b_kn.multiply(a_mk, out, bias)
    return torch.mm(a_mk, b_kn, out=out) if bias is None else torch.addmm(bias, a_mk, b_kn, out=out)
