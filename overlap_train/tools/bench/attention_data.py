"""One rank's attention block of the Ulysses benchmark: inputs, the call that is timed, and the check of its results.

x [s/W, 1, hidden] -> y [s/W, 1, hidden]        dx, dw_qkv and dw_proj from dy, by autograd
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch

from ...operators.attention_layout import Rotary
from ...planning.heads import AttentionHeads
from ...runtime.registry import check as check_timeouts
from ..measure.models import Model
from ..measure.timing import Call
from ..measure.world import World

Block = Callable[["Data"], torch.Tensor]
Outcome = tuple[torch.Tensor, ...]  # y, dx, dw_qkv, dw_proj


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


def check_outcome(call: Call, expected: Outcome) -> None:
    """Run twice, then compare with the baseline's: both round at other places, so by norms."""
    call(0)
    outcome = cast(Outcome, call(1))
    check_timeouts()
    tolerance = 8 * torch.finfo(expected[0].dtype).eps
    for name, ours, theirs in zip(("y", "dx", "dw_qkv", "dw_proj"), outcome, expected, strict=True):
        error = float((ours.double() - theirs.double()).norm() / theirs.double().norm())
        if not error <= tolerance:
            raise RuntimeError(
                f"{name} differs from torch's block by {error:.3g} of its norm; rounding explains {tolerance:.3g}"
            )
