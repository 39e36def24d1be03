"""The operators, one row each; what may be wrong with a call's arguments.

A check that fails is reported as text instead of raised: the ranks of a group exchange the texts, and all of them raise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..schedule.kinds import Kind

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def all_gather_error(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, world_size: int, name: str
) -> str | None:
    """What is wrong with the arguments of all_gather_linear, or None."""
    return _common_error(name, "x_shard_m", x, "w_shard_n", w, bias)


def reduce_scatter_error(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, world_size: int, name: str
) -> str | None:
    """What is wrong with the arguments of linear_reduce_scatter, or None."""
    error = _common_error(name, "x_shard_k", x, "w_shard_k", w, bias)
    return error or _rows_error(name, x, world_size)


def linear_all_to_all_error(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, world_size: int, name: str
) -> str | None:
    """What is wrong with the arguments of linear_all_to_all, or None."""
    error = _common_error(name, "x_shard_m", x, "w", w, bias)
    if error is None and w.shape[0] % world_size:
        error = (
            f"{name}: w has shape {tuple(w.shape)}; its {w.shape[0]} output features must be divisible by the group's "
            f"{world_size} ranks, since each rank gets that part of them; use another size or group"
        )
    return error


def all_to_all_linear_error(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, world_size: int, name: str
) -> str | None:
    """What is wrong with the arguments of all_to_all_linear, or None."""
    error = _common_error(name, "x_shard_k", x, "w", w, bias, of_input=world_size)
    return error or _rows_error(name, x, world_size)


def all_to_all_error(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, world_size: int, name: str
) -> str | None:
    """What is wrong with an exchange of the columns of x: nothing. Who makes x has looked at it, and the product at w."""
    assert x.shape[-1] % world_size == 0, "heads and shapes were looked at before"
    return None


def _rows_error(name: str, x: torch.Tensor, world_size: int) -> str | None:
    if x.shape[0] % world_size == 0:
        return None
    return (
        f"{name}: x_shard_k has shape {tuple(x.shape)}; its first dimension must be divisible by the group's "
        f"{world_size} ranks, "
        f"since each rank keeps that part of the output; pad the sequence to a multiple of {world_size}"
    )


def autocast_error(name: str, x: torch.Tensor) -> str | None:
    """What is wrong where autocast gives products another dtype than x's, or None. Libraries follow autocast and our kernels do
    not: the method would decide the dtype."""
    dtype = other_autocast(x)
    if dtype is None:
        return None
    return (
        f"{name}: autocast to {dtype} is on, the input has {x.dtype}, and operators multiply in the dtype of their input; cast "
        f"input and weight, or call inside torch.autocast({x.device.type!r}, enabled=False)"
    )


def other_autocast(x: torch.Tensor) -> torch.dtype | None:
    """Another dtype than x's that autocast gives to products, or None. Off everywhere, as mostly, it costs 0.1 microseconds."""
    if not torch._C._is_any_autocast_enabled():
        return None
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    return None if dtype == x.dtype else dtype


def shapes_of(x: torch.Tensor, w: torch.Tensor) -> str:
    return f"input {list(x.shape)}, weight {list(w.shape)}, {str(x.dtype).removeprefix('torch.')}"


def _common_error(
    name: str,
    x_name: str,
    x: torch.Tensor,
    w_name: str,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    of_input: int = 1,
) -> str | None:
    """What is wrong with the arguments of any operator, or None. of_input: x has this part of the features of w's input."""
    if x.dim() < 2 or w.dim() != 2:
        shapes = f"{x_name} has shape {tuple(x.shape)} and {w_name} {tuple(w.shape)}"
        return f"{name}: {shapes}; they need at least 2, and exactly 2 dimensions"
    if x.shape[-1] * of_input != w.shape[1]:
        ranks = "" if of_input == 1 else f" from {of_input} ranks together"
        return (
            f"{name}: {x_name} has {x.shape[-1]} features (last dimension of {tuple(x.shape)}), {w_name} {tuple(w.shape)} "
            f"expects {w.shape[1]}{ranks}; they must be equal"
        )
    if x.numel() == 0 or w.numel() == 0:
        return f"{name}: {x_name} {tuple(x.shape)} or {w_name} {tuple(w.shape)} is empty; dimensions must be at least 1"
    if x.dtype not in DTYPES:
        return f"{name}: {x_name} has dtype {x.dtype}; supported are {', '.join(map(str, DTYPES))}"
    others = {w_name: w} if bias is None else {w_name: w, "bias": bias}
    for other_name, other in others.items():
        if other.dtype != x.dtype:
            return f"{name}: {other_name} has dtype {other.dtype}, {x_name} {x.dtype}; they must be the same: cast one of them"
        if other.device != x.device:
            return f"{name}: {other_name} is on {other.device}, {x_name} on {x.device}; move one of them"
    if bias is not None and bias.shape != w.shape[:1]:
        return f"{name}: bias has shape {tuple(bias.shape)}; it must be [{w.shape[0]}], one per row of {w_name}"
    return None


@dataclass(frozen=True)
class OperatorSpec:
    """One operator.

    fprop: the kind of the forward pass; Kind.dgrad is that of the input gradient.
    error: what is wrong with (x, w, bias, world_size, name), or None. multiplies: False for an exchange alone.
    """

    name: str
    fprop: Kind
    error: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, int, str], str | None]
    multiplies: bool = True

    @property
    def sends_input(self) -> bool:
        """Whether forward sends the input, which the weight gradient then needs from the peers."""
        return self.fprop.receives

    def global_rows(self, x: torch.Tensor, world_size: int) -> int:
        """M: the rows of all ranks."""
        return x.shape[:-1].numel() * (world_size if self.fprop.gathers or self.fprop.splits_columns else 1)

    def slot_bytes(self, x: torch.Tensor, w: torch.Tensor, world_size: int) -> int:
        """Bytes of a slot: of what forward receives or, if it sends its output, of what backward receives, which is as large."""
        features = (x.shape[-1:] if self.sends_input else w.shape[:1]).numel()
        whole = self.global_rows(x, world_size) * features * x.element_size()
        return whole // world_size if self.fprop.splits_columns else whole


ALL_GATHER_LINEAR = OperatorSpec("all_gather_linear", Kind.AG_GEMM, all_gather_error)
LINEAR_REDUCE_SCATTER = OperatorSpec("linear_reduce_scatter", Kind.GEMM_RS, reduce_scatter_error)
LINEAR_ALL_TO_ALL = OperatorSpec("linear_all_to_all", Kind.GEMM_A2A, linear_all_to_all_error)
ALL_TO_ALL_LINEAR = OperatorSpec("all_to_all_linear", Kind.A2A_GEMM, all_to_all_linear_error)
# Beside a product of another group (ulysses/two_groups.py). x: what one rank sends, the columns of all ranks side by side.
ALL_TO_ALL = OperatorSpec("all_to_all", Kind.A2A_GEMM, all_to_all_error, multiplies=False)
