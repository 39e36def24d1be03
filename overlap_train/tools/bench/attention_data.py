"""One rank's attention block of the Ulysses benchmark: inputs, the call that is timed, and the check of its results.

x [s/W, 1, hidden] -> y [s/W, 1, hidden]        dx, dw_qkv and dw_proj from dy, by autograd
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F

from ...group.registry import check as check_timeouts
from ...ulysses.attention_layout import Rotary
from ...ulysses.layout import AttentionHeads
from ..measure.models import Model
from ..measure.timing import Call
from ..measure.world import World

Block = Callable[["Data"], torch.Tensor]
Outcome = tuple[torch.Tensor, ...]  # y, dx, dw_qkv, dw_proj
NAMES = ("y", "dx", "dw_qkv", "dw_proj")
TILE = 128  # rows and columns; no kernel of ours has larger tiles in both


@dataclass(frozen=True)
class Data:
    """One rank's input, weights and output gradient; angles of the whole sequence."""

    heads: AttentionHeads
    x: torch.Tensor
    w_qkv: torch.nn.Parameter
    w_proj: torch.nn.Parameter
    dy: torch.Tensor
    rotary: Rotary

    @classmethod
    def make(cls, model: Model, tokens: int, world: World, dtype: torch.dtype, seed: int) -> Data:
        own = torch.Generator(world.device).manual_seed(1000 * seed + world.rank)
        shared = torch.Generator(world.device).manual_seed(1000 * seed + 999)
        (n, k), (hidden, features) = model.linears["qkv"], model.linears["proj"]

        def normal(*shape: int, generator: torch.Generator) -> torch.Tensor:
            return torch.randn(*shape, dtype=dtype, device=world.device, generator=generator)

        heads = AttentionHeads(model.num_attention_heads, model.num_query_groups, model.head_width)
        angles = torch.randn(tokens, heads.dim // 2, device=world.device, generator=shared).repeat(1, 2)
        return cls(
            heads,
            normal(tokens // world.size, 1, k, generator=own).requires_grad_(),
            torch.nn.Parameter(normal(n, k, generator=shared) / k**0.5),
            torch.nn.Parameter(normal(hidden, features, generator=shared) / features**0.5),
            normal(tokens // world.size, 1, hidden, generator=own),
            Rotary(angles.cos(), angles.sin()),
        )


def forward_backward(block: Block, data: Data) -> Call:
    """The call that is timed; returns an Outcome."""
    leaves = [data.x, data.w_qkv, data.w_proj]

    def call(index: int) -> Outcome:
        y = block(data)
        with torch.autograd.set_multithreading_enabled(False):
            return (y.detach(), *torch.autograd.grad(y, leaves, data.dy))

    return call


def check_block(block: Block, data: Data, decoy: Data, expected: Outcome) -> None:
    """Run twice on other inputs, so that whatever is left in slots and freed memory is wrong, then compare all results with the
    baseline's. Raises RuntimeError."""
    other = forward_backward(block, decoy)
    for index in range(2):
        other(index)
    check_outcome(cast(Outcome, forward_backward(block, data)(0)), expected)


def check_outcome(outcome: Outcome, expected: Outcome) -> None:
    """Both round at other places: of 2048 and 4096 tokens of two CPU ranks in bf16 no tile differs by more than 0.01."""
    check_timeouts()
    tolerance = 8 * torch.finfo(expected[0].dtype).eps
    for name, ours, theirs in zip(NAMES, outcome, expected, strict=True):
        error = worst_tile(ours, theirs)
        if not error <= tolerance:
            raise RuntimeError(
                f"{name} differs from torch's block by {error:.3g} of the norm of a tile; rounding explains {tolerance:.3g}"
            )


def worst_tile(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference in a tile of TILE x TILE elements, over the norm that theirs has there, or has in an average tile
    where that is more. Over the norm of the whole, a missing tile of 4096 x 4096 elements would be 0.03."""
    errors, norms = [], []
    for mine, other in zip(*(x.flatten(0, -2).split(32 * TILE) for x in (ours, theirs)), strict=True):
        errors.append(_norms_of_tiles(mine.double() - other.double()))
        norms.append(_norms_of_tiles(other.double()))
    error, norm = torch.cat(errors), torch.cat(norms)
    return float((error / norm.clamp_min(norm.square().mean().sqrt())).max())


def _norms_of_tiles(x: torch.Tensor) -> torch.Tensor:
    """x [rows, columns] -> [tiles, tiles]."""
    return F.avg_pool2d(x.square()[None, None], TILE, ceil_mode=True, divisor_override=1)[0, 0].sqrt()
