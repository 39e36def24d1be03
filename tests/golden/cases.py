"""What is recorded: every public operator by every method that CPUs run, forward and backward, as a hash of each case.

Inputs are small integers, so that every sum is exact and no processor rounds otherwise; with `noise` they are normally
distributed, for two checkouts that are compared on one machine. Only public names of the package are used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from overlap_train import (
    AttentionHeads,
    OverlapConfig,
    Rotary,
    SequenceLayout,
    SequenceShards,
    all_gather_linear,
    all_to_all_linear,
    attention_output_linear,
    dispatch_linear,
    expert_routing,
    linear_all_reduce,
    linear_all_to_all,
    linear_combine,
    linear_dgrad_all_reduce,
    linear_reduce_scatter,
    qkv_all_to_all,
    shutdown,
)

LIBRARY, INTERPRETED = ("chunked", "collective"), ("fused", "direct", "low_latency")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
Linear = Callable[..., torch.Tensor]
TENSOR_PARALLEL = (all_gather_linear, linear_reduce_scatter, linear_dgrad_all_reduce, linear_all_reduce)
ULYSSES = (linear_all_to_all, all_to_all_linear)


@dataclass(frozen=True)
class Inputs:
    """Tensors that every rank makes alike. noise: normally distributed, and not integers."""

    dtype: torch.dtype
    noise: bool

    def make(self, seed: int, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        if self.noise:
            return torch.randn(shape, generator=generator).to(self.dtype)
        return torch.randint(-2, 3, shape, generator=generator).to(self.dtype)

    def leaf(self, seed: int, *shape: int) -> torch.Tensor:
        return self.make(seed, *shape).requires_grad_()


def hashes(rank: int, world: int, noise: bool) -> dict[str, str]:
    """The hash of what this rank gets in each case."""
    found = {}
    for name, run in _cases(rank, world, noise):
        digest = hashlib.sha256()
        for tensor in run():
            digest.update(str((tuple(tensor.shape), tensor.dtype)).encode())
            digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
        found[name] = digest.hexdigest()[:16]
    shutdown()
    return found


Case = tuple[str, Callable[[], list[torch.Tensor]]]


def _cases(rank: int, world: int, noise: bool) -> Iterator[Case]:
    for nodes in (1, 2) if world == 4 else (1,):
        group, on_nodes = dist.new_group(), {} if nodes == 1 else {"node_ranks": world // nodes}
        where = f"{world} ranks" + f", {nodes} nodes" * (nodes > 1)
        for dtype_name, dtype in DTYPES.items():
            # Whose bf16 products the interpreter gets wrong.
            of_kernels = () if dtype == torch.bfloat16 else INTERPRETED
            for method in (*LIBRARY, *(of_kernels if nodes == 1 else of_kernels[:1])):
                config = OverlapConfig(method=method, timeout_s=60, **on_nodes)
                name = f"{where}, {dtype_name}, {method}"
                yield from _linears(name, group, config, Inputs(dtype, noise))
    plain = OverlapConfig(method="chunked", timeout_s=60)
    inputs, group = Inputs(torch.float32, noise), dist.new_group()
    keeping = replace(plain, gathered_input="keep")
    yield f"{world} ranks, input kept", partial(_linear, all_gather_linear, group, keeping, inputs, ())
    yield f"{world} ranks, fp32 main_grad of bf16", partial(_main_grad, group, plain, Inputs(torch.bfloat16, noise))
    yield from _attentions(group, plain, inputs)
    if world == 4:
        yield from _attentions_under_tp(rank, plain, inputs)


def _linears(name: str, group: dist.ProcessGroup, config: OverlapConfig, inputs: Inputs) -> Iterator[Case]:
    batches = ((5,), ()) if config.method in LIBRARY else ((),)
    for batch in batches:
        shape, arguments = f"{name}, {'ragged' if batch else 'even'}", (group, config, inputs, batch)
        for operator in TENSOR_PARALLEL:
            yield f"{shape}: {operator.__name__}", partial(_linear, operator, *arguments)
        if config.method in LIBRARY and not config.node_ranks:
            yield f"{shape}: experts", partial(_experts, *arguments)
        if config.method != "low_latency":
            for operator in ULYSSES:
                yield f"{shape}: {operator.__name__}", partial(_linear, operator, *arguments)


def _sizes(batch: tuple[int, ...]) -> tuple[int, int, int]:
    """(rows of a rank, features of all ranks, features of a rank)"""
    return (3, 36, 28) if batch else (16, 32, 16)


def _results(y: torch.Tensor, dy: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    y.backward(dy)
    return [y, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _linear(
    operator: Linear, group: dist.ProcessGroup, config: OverlapConfig, inputs: Inputs, batch: tuple[int, ...]
) -> list[torch.Tensor]:
    (m, wide, narrow), rank, world = _sizes(batch), group.rank(), group.size()
    x_shape, w_shape, common = {
        all_gather_linear: ((m, *batch, wide), (narrow, wide), ()),
        linear_reduce_scatter: ((m * world, *batch, narrow), (wide, narrow), ("bias",)),
        linear_dgrad_all_reduce: ((m, *batch, wide), (narrow, wide), ("x",)),
        linear_all_reduce: ((m, *batch, narrow), (wide, narrow), ("bias", "dy")),
        linear_all_to_all: ((m, *batch, wide), (4 * narrow, wide), ("w", "bias")),
        all_to_all_linear: ((m * world, *batch, narrow), (wide, narrow * world), ("w", "bias")),
    }[operator]  # common: what all ranks have alike
    seed_x, seed_w, seed_bias, seed_dy = (0 if name in common else rank for name in ("x", "w", "bias", "dy"))
    x, w = inputs.leaf(seed_x, *x_shape), inputs.leaf(10 + seed_w, *w_shape)
    bias = inputs.leaf(20 + seed_bias, w_shape[0])
    y = operator(x, w, bias, group=group, config=config)
    return _results(y, inputs.make(90 + seed_dy, *y.shape), x, w, bias)


def _experts(
    group: dist.ProcessGroup, config: OverlapConfig, inputs: Inputs, batch: tuple[int, ...]
) -> list[torch.Tensor]:
    (_, k, n), rank = _sizes(batch), group.rank()
    tokens, experts = 12 + rank * len(batch), 2 * group.size()
    x, w1, w2 = inputs.leaf(rank, tokens, k), inputs.leaf(10 + rank, 2, n, k), inputs.leaf(20 + rank, 2, k, n)
    probs = inputs.leaf(30 + rank, tokens, experts)
    chosen = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(rank)) < 0.5
    routing = expert_routing(chosen, group=group, config=config)
    y, p = dispatch_linear(x, w1, routing, probs, config=config)
    z = linear_combine(y.clamp(-2, 2) * p.detach()[:, None], w2, routing, config=config)
    p.backward(inputs.make(60 + rank, *p.shape), retain_graph=True)
    return [y, p, *_results(z, inputs.make(90 + rank, *z.shape), x, w1, w2, probs)]


def _main_grad(group: dist.ProcessGroup, config: OverlapConfig, inputs: Inputs) -> list[torch.Tensor]:
    rank = group.rank()
    x, w = inputs.leaf(rank, 16, 32), inputs.leaf(10 + rank, 16, 32)
    w.main_grad, w.grad_added_to_main_grad = torch.ones(16, 32), False
    for _ in range(2):
        all_gather_linear(x, w, group=group, config=config).backward(inputs.make(90 + rank, 16 * group.size(), 16))
    return [w.main_grad, x.grad]


def _attentions(group: dist.ProcessGroup, config: OverlapConfig, inputs: Inputs) -> Iterator[Case]:
    world, run = group.size(), partial(_attention, inputs=inputs)
    layouts = {
        "contiguous": SequenceLayout(),
        "zigzag": SequenceLayout("zigzag"),
        "packed": SequenceLayout("zigzag", (0, 16, 48)),
        "lengths": SequenceLayout(lengths=tuple(range(3, 3 + world))),
    }
    for name, layout in layouts.items():
        for method in LIBRARY:
            shards, settings = SequenceShards(group, layout), replace(config, method=method)
            yield f"{world} ranks, {method}, {name}: attention", partial(run, shards, AttentionHeads(8, 2, 4), settings)
    shards, in_parts = SequenceShards(group), replace(config, exchange_mib=1)
    yield f"{world} ranks: fewer KV heads", partial(run, shards, AttentionHeads(4, 1, 4), config)
    yield f"{world} ranks: parts", partial(run, shards, AttentionHeads(8, 4, 32), in_parts, s=2048)


def _attentions_under_tp(rank: int, config: OverlapConfig, inputs: Inputs) -> Iterator[Case]:
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    tensor, ulysses = pairs[rank // 2], pairs[2 + rank % 2]
    for layout in (SequenceLayout(), SequenceLayout("zigzag")):
        shards = SequenceShards(ulysses, layout, tensor)
        yield f"TP x Ulysses, {layout.kind}", partial(_attention, shards, AttentionHeads(4, 1, 4), config, inputs)


def _attention(
    shards: SequenceShards, heads: AttentionHeads, config: OverlapConfig, inputs: Inputs, s: int = 48
) -> list[torch.Tensor]:
    rank, ranks, tensor = dist.get_rank(), shards.ranks, shards.tensor
    s = sum(shards.layout.lengths) or s
    rows = shards.layout.lengths[shards.rank] if shards.layout.lengths else s // (ranks * tensor)
    x, w = inputs.leaf(rank, rows, 2, 24), inputs.leaf(10 + rank % tensor, heads.features, 24)
    bias = inputs.leaf(20 + rank % tensor, heads.features)
    turn = inputs.make(30, s, heads.dim // 2).clamp(-1, 1)
    rotary = Rotary(turn, 1 - turn.abs())
    q, k, v = qkv_all_to_all(x, w, bias, shards=shards, heads=heads, rotary=rotary, config=config)
    mixed = q.flatten(2) + k.sum((2, 3), keepdim=True).flatten(2) + v.sum((2, 3), keepdim=True).flatten(2)
    proj = inputs.leaf(40 + rank % tensor, 24, mixed.shape[-1] * ranks)
    y = attention_output_linear(mixed, proj, shards=shards, config=config)
    return [q, k, v, *_results(y, inputs.make(90 + rank, *y.shape), x, w, bias, proj)]
