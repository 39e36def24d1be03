"""Checks of the operators' arguments, and what ranks tell each other before the first call with some shapes.

A check that fails is reported as text instead of raised: the ranks of a group exchange the texts, and all of them raise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Request:
    """What one operator call, forward and backward, asks of its group. Ranks must agree on it.

    what: shapes, dtype and how it runs, in words. slot_bytes: symmetric memory that one of its calls receives; 0 for none.
    flagged_bytes: the same of a call whose data come as flagged words.
    """

    operator: str
    what: str
    slot_bytes: int
    flagged_bytes: int = 0

    @property
    def shares_memory(self) -> bool:
        return bool(self.slot_bytes or self.flagged_bytes)

    def covering(self, other: Request) -> Request:
        """This request, of memory that is enough for the other one, too."""
        return replace(
            self,
            slot_bytes=max(self.slot_bytes, other.slot_bytes),
            flagged_bytes=max(self.flagged_bytes, other.flagged_bytes),
        )


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
