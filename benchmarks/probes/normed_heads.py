"""Does QK-norm pay within the pass that takes received rows out of symmetric memory? On one GPU, without an exchange.

    python benchmarks/probes/normed_heads.py

From received rows [s, 1, n] to rotated q, k and v, and back from their gradients, microseconds forward and backward, of:

    one pass      ours: split, norm and rotation at once
    separate      split by our kernel, then torch's rms_norm of q and of k, then rotation in torch's words: what Megatron does
    compiled      split by our kernel, then norms and rotation by torch.compile
    no norm       ours without a norm: what the norm adds to the pass
    no norm, separate; no norm, compiled      split and rotation in torch's words, of rows in place

and what `one pass` would take if it moved its bytes at the speed of a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from triton.testing import do_bench

from overlap_train import AttentionHeads, QkNorm, Rotary
from overlap_train.operators.attention_layout import Heads, pack, unpack
from overlap_train.operators.qk_norm import HeadNorm
from overlap_train.tools.bench.attention_parts import rotated

MODELS = {"Qwen3 8B": AttentionHeads(32, 8, 128), "Qwen3 32B": AttentionHeads(64, 8, 128)}
EPS = 1e-6


@dataclass(frozen=True)
class Problem:
    """What one rank receives of `tokens` rows, and its heads."""

    heads: AttentionHeads
    tokens: int

    @cached_property
    def packed(self) -> torch.Tensor:
        return self._normal(self.tokens, 1, self.heads.features)

    @cached_property
    def grads(self) -> Heads:
        return tuple(self._normal(*part.shape) for part in self.empty())  # type: ignore[return-value]

    @cached_property
    def norm(self) -> QkNorm:
        return QkNorm(self._normal(self.heads.dim), self._normal(self.heads.dim), EPS)

    @cached_property
    def rotary(self) -> Rotary:
        angles = torch.randn(self.tokens, self.heads.dim // 2, device="cuda").repeat(1, 2)
        return Rotary(angles.cos(), angles.sin())

    @cached_property
    def rows(self) -> torch.Tensor:
        return torch.arange(self.tokens, device="cuda")

    @cached_property
    def before(self) -> torch.Tensor:
        return self.packed.new_empty(self.tokens, 1, self.heads.kv, self.heads.per_group + 1, self.heads.dim)

    def empty(self) -> Heads:
        counts = (self.heads.query, self.heads.kv, self.heads.kv)
        q, k, v = (torch.empty(self.tokens, 1, n, self.heads.dim, dtype=torch.bfloat16, device="cuda") for n in counts)
        return q, k, v

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device="cuda")


def split(p: Problem, norm: HeadNorm | None, rotary: Rotary | None) -> Heads:
    into = p.empty()
    unpack(p.packed, None, p.rows, into, rotary, norm)
    return into


def in_torchs_words(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, norm: QkNorm, rotary: Rotary) -> Heads:
    q, k = (F.rms_norm(x, w.shape, w, EPS) for x, w in ((q, norm.q_weight), (k, norm.k_weight)))
    return rotated(q, k, v, rotary)


def split_in_torchs_words(packed: torch.Tensor, p: Problem) -> Heads:
    groups = packed.unflatten(-1, (p.heads.kv, p.heads.per_group + 2, p.heads.dim))
    q, k, v = groups.split((p.heads.per_group, 1, 1), dim=3)
    return rotated(q.flatten(2, 3), k.flatten(2, 3), v.flatten(2, 3).contiguous(), p.rotary)


def without_norm(p: Problem, words: Callable[..., Heads]) -> tuple[float, float]:
    """By autograd."""
    packed = p.packed.clone().requires_grad_()
    out = words(packed, p)
    backward = _us(lambda: torch.autograd.grad(out, packed, p.grads, retain_graph=True))
    return _us(lambda: words(packed, p)), backward


def one_pass(p: Problem, norm: HeadNorm | None) -> tuple[float, float]:
    return _us(lambda: split(p, norm, p.rotary)), _us(lambda: pack(p.grads, p.rows, p.rotary, norm))


def separate(p: Problem, words: Callable[..., Heads]) -> tuple[float, float]:
    """By autograd, between our kernels."""
    weights = [weight.requires_grad_() for weight in (p.norm.q_weight.clone(), p.norm.k_weight.clone())]
    norm, leaves = QkNorm(weights[0], weights[1], EPS), [part.requires_grad_() for part in split(p, None, None)]
    out = words(*leaves, norm, p.rotary)[:2]

    def backward() -> torch.Tensor:
        dq, dk, *_ = torch.autograd.grad(out, [*leaves[:2], *weights], p.grads[:2], retain_graph=True)
        return pack((dq, dk, p.grads[2]), p.rows, None)

    def forward() -> Heads:
        return words(*(part.requires_grad_() for part in split(p, None, None)), norm, p.rotary)

    return _us(forward), _us(backward)


def at_the_speed_of_a_copy(p: Problem) -> tuple[float, float]:
    """Rows and heads once each, and q and k once more, which are kept."""
    kept = p.heads.features - p.heads.kv * p.heads.dim
    source = torch.empty(p.tokens * (2 * p.heads.features + kept) // 2, dtype=torch.bfloat16, device="cuda")
    into = torch.empty_like(source)
    us = _us(lambda: into.copy_(source))
    return us, us


def _us(call: Callable[[], object]) -> float:
    return 1000 * do_bench(call, warmup=50, rep=200, return_mode="median")


def main() -> None:
    for name, whole in MODELS.items():
        for world in (2, 4, 8):
            for tokens in (8192, 32768):
                p = Problem(whole.of_rank(world), tokens)
                torch._dynamo.reset()  # which else compiles a function for a few shapes only
                compiled = torch.compile(in_torchs_words, dynamic=False)
                measured = {
                    "one pass": one_pass(p, HeadNorm(p.norm, p.before)), "separate": separate(p, in_torchs_words),
                    "compiled": separate(p, compiled), "no norm": one_pass(p, None),
                    "no norm, separate": without_norm(p, split_in_torchs_words),
                    "no norm, compiled": without_norm(p, torch.compile(split_in_torchs_words, dynamic=False)),
                    "copy": at_the_speed_of_a_copy(p),
                }  # fmt: skip
                times = ", ".join(f"{way} {fwd:.0f} + {bwd:.0f}" for way, (fwd, bwd) in measured.items())
                print(f"{name}, {world} ranks, {tokens} tokens: {times}", flush=True)


if __name__ == "__main__":
    main()
