"""Checks of the operators' arguments, and what they ask of the domain.

A check that fails is reported as text instead of raised: the ranks of a group tell each other, so that all of them raise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from .domain import Demand

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Problem:
    """One operator call: what it needs, how many global rows M it has, on which device, and what is wrong with it."""

    demand: Demand
    rows: int
    device: torch.device
    error: str | None


def all_gather_problem(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup, name: str
) -> Problem:
    """all_gather_linear: gathers x [M, K] in forward and backward, scatters dx [M, K] in backward."""
    world = dist.get_world_size(group)
    error = _common_error(name, "x_shard_m", x, "w_shard_n", w, bias)
    rows = x.shape[:-1].numel() * world
    nbytes = rows * x.shape[-1:].numel() * x.element_size()
    return Problem(Demand(name, _shapes(x, w), nbytes), rows, x.device, error)


def reduce_scatter_problem(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, group: dist.ProcessGroup, name: str
) -> Problem:
    """linear_reduce_scatter: scatters y [M, N] in forward, gathers dy [M, N] in backward."""
    world = dist.get_world_size(group)
    error = _common_error(name, "x_shard_k", x, "w_shard_k", w, bias)
    if error is None and x.shape[0] % world:
        error = (
            f"{name}: x_shard_k has shape {tuple(x.shape)}; its first dimension must be divisible by the group's {world} ranks, "
            f"since each rank keeps that part of the output; pad the sequence to a multiple of {world}"
        )
    rows = x.shape[:-1].numel()
    nbytes = rows * w.shape[:1].numel() * x.element_size()
    return Problem(Demand(name, _shapes(x, w), nbytes), rows, x.device, error)


def _shapes(x: torch.Tensor, w: torch.Tensor) -> str:
    return f"input {list(x.shape)}, weight {list(w.shape)}, {str(x.dtype).removeprefix('torch.')}"


def _common_error(
    name: str, x_name: str, x: torch.Tensor, w_name: str, w: torch.Tensor, bias: torch.Tensor | None
) -> str | None:
    """What is wrong with the arguments of either operator, or None."""
    if x.dim() < 2 or w.dim() != 2:
        shapes = f"{x_name} has shape {tuple(x.shape)} and {w_name} {tuple(w.shape)}"
        return f"{name}: {shapes}; they need at least 2, and exactly 2 dimensions"
    if x.shape[-1] != w.shape[1]:
        return (
            f"{name}: {x_name} has {x.shape[-1]} features (last dimension of {tuple(x.shape)}), {w_name} {tuple(w.shape)} "
            f"expects {w.shape[1]}; they must be equal"
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
