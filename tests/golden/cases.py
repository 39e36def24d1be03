"""What is recorded: every public operator by every method that CPUs run, forward and backward, as a hash of each case.

Inputs are small integers, so that every sum is exact and no processor rounds otherwise; with `noise` they are normally
distributed, for two checkouts that are compared on one machine. Only public names of the package are used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

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
                yield from _linears(name, rank, group, config, Inputs(dtype, noise))
    plain = OverlapConfig(method="chunked", timeout_s=60)
    inputs, group = Inputs(torch.float32, noise), dist.new_group()
    yield f"{world} ranks, input kept", lambda: _column(rank, group, replace(plain, gathered_input="keep"), inputs, ())
    yield (
        f"{world} ranks, fp32 main_grad of bf16",
        lambda: _main_grad(rank, group, plain, Inputs(torch.bfloat16, noise)),
    )
    yield from _attentions(rank, world, group, plain, inputs)
    if world == 4:
        yield from _attentions_under_tp(rank, plain, inputs)


def _linears(name: str, rank: int, group: dist.ProcessGroup, config: OverlapConfig, inputs: Inputs) -> Iterator[Case]:
    batches = ((5,), ()) if config.method in LIBRARY else ((),)
    for batch in batches:
        shape = f"{name}, {'ragged' if batch else 'even'}"
        yield f"{shape}: all_gather_linear", lambda b=batch: _column(rank, group, config, inputs, b)
        yield f"{shape}: linear_reduce_scatter", lambda b=batch: _row(rank, group, config, inputs, b)
        yield f"{shape}: linear_dgrad_all_reduce", lambda b=batch: _replicated_column(rank, group, config, inputs, b)
        yield f"{shape}: linear_all_reduce", lambda b=batch: _all_reduced(rank, group, config, inputs, b)
        if config.method in LIBRARY and not config.node_ranks:
            yield f"{shape}: experts", lambda b=batch: _experts(rank, group, config, inputs, b)
        if config.method != "low_latency":
            yield f"{shape}: linear_all_to_all", lambda b=batch: _to_heads(rank, group, config, inputs, b)
            yield f"{shape}: all_to_all_linear", lambda b=batch: _to_rows(rank, group, config, inputs, b)


def _sizes(batch: tuple[int, ...]) -> tuple[int, int, int]:
    """(rows of a rank, K, N of a rank)"""
    return (3, 36, 28) if batch else (16, 32, 16)


def _results(y: torch.Tensor, inputs: Inputs, rank: int, *leaves: torch.Tensor) -> list[torch.Tensor]:
    y.backward(inputs.make(90 + rank, *y.shape))
    return [y, *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _column(
    rank: int, group: dist.ProcessGroup, config: OverlapConfig, inputs: Inputs, batch: tuple[int, ...]
) -> list[torch.Tensor]:
    rows, k, n = _sizes(batch)
    x, w, bias = inputs.leaf(rank, rows, *batch, k), inputs.leaf(10 + rank, n, k), inputs.leaf(20 + rank, n)
    return _results(all_gather_linear(x, w, bias, group=group, config=config), inputs, rank, x, w, bias)


def _row(
    rank: int, group: dist.ProcessGroup, config: OverlapConfig, inputs: Inputs, batch: tuple[int, ...]
) -> list[torch.Tensor]:
    rows, n, k = _sizes(batch)
    x, w, bias = inputs.leaf(rank, rows * group.size(), *batch, k), inputs.leaf(10 + rank, n, k), inputs.leaf(20, n)
    return _results(linear_reduce_scatter(x, w, bias, group=group, config=config), inputs, rank, x, w, bias)


def _replicated_column(
    rank: int, group: dist.ProcessGroup, config: OverlapConfig, inputs: Inputs, batch: tuple[int, ...]
) -> list[torch.Tensor]:
    rows, k, n = _sizes(batch)
    x, w, bias = inputs.leaf(0, rows, *batch, k), inputs.leaf(10 + rank, n, k), inputs.leaf(20 + rank, n)
    return _results(linear_dgrad_all_reduce(x, w, bias, group=group, config=config), inputs, rank, x, w, bias)


def _all_reduced(
    rank: int, group: dist.ProcessGroup, config: OverlapConfig, inputs: Inputs, batch: tuple[int, ...]
) -> list[torch.Tensor]:
    rows, n, k = _sizes(batch)
    x, w, bias = inputs.leaf(rank, rows, *batch, k), inputs.leaf(10 + rank, n, k), inputs.leaf(20, n)
    return _results(linear_all_reduce(x, w, bias, group=group, config=config), inputs, 0, x, w, bias)


def _to_heads(
    rank: int, group: dist.ProcessGroup, config: OverlapConfig, inputs: Inputs, batch: tuple[int, ...]
) -> list[torch.Tensor]:
    rows, k, n = _sizes(batch)
    x, w, bias = inputs.leaf(rank, rows, *batch, k), inputs.leaf(10, 4 * n, k), inputs.leaf(20, 4 * n)
    return _results(linear_all_to_all(x, w, bias, group=group, config=config), inputs, rank, x, w, bias)


def _to_rows(
    rank: int, group: dist.ProcessGroup, config: OverlapConfig, inputs: Inputs, batch: tuple[int, ...]
) -> list[torch.Tensor]:
    rows, n, k = _sizes(batch)
    x, w, bias = (
        inputs.leaf(rank, rows * group.size(), *batch, k),
        inputs.leaf(10, n, k * group.size()),
        inputs.leaf(20, n),
    )
    return _results(all_to_all_linear(x, w, bias, group=group, config=config), inputs, rank, x, w, bias)


def _experts(
    rank: int, group: dist.ProcessGroup, config: OverlapConfig, inputs: Inputs, batch: tuple[int, ...]
) -> list[torch.Tensor]:
    _, k, n = _sizes(batch)
    tokens, experts = 12 + rank * len(batch), 2 * group.size()
    x, w1, w2 = inputs.leaf(rank, tokens, k), inputs.leaf(10 + rank, 2, n, k), inputs.leaf(20 + rank, 2, k, n)
    probs = inputs.leaf(30 + rank, tokens, experts)
    chosen = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(rank)) < 0.5
    routing = expert_routing(chosen, group=group, config=config)
    y, p = dispatch_linear(x, w1, routing, probs, config=config)
    z = linear_combine(y.clamp(-2, 2) * p.detach()[:, None], w2, routing, config=config)
    p.backward(inputs.make(60 + rank, *p.shape), retain_graph=True)
    return [y, p, *_results(z, inputs, rank, x, w1, w2, probs)]


def _main_grad(rank: int, group: dist.ProcessGroup, config: OverlapConfig, inputs: Inputs) -> list[torch.Tensor]:
    x, w = inputs.leaf(rank, 16, 32), inputs.leaf(10 + rank, 16, 32)
    w.main_grad, w.grad_added_to_main_grad = torch.ones(16, 32), False
    for _ in range(2):
        all_gather_linear(x, w, group=group, config=config).backward(inputs.make(90 + rank, 16 * group.size(), 16))
    return [w.main_grad, x.grad]


def _attentions(
    rank: int, world: int, group: dist.ProcessGroup, config: OverlapConfig, inputs: Inputs
) -> Iterator[Case]:
    layouts = {
        "contiguous": SequenceLayout(),
        "zigzag": SequenceLayout("zigzag"),
        "packed": SequenceLayout("zigzag", (0, 16, 48)),
        "lengths": SequenceLayout(lengths=tuple(range(3, 3 + world))),
    }
    for name, layout in layouts.items():
        for method in LIBRARY:
            shards, settings = SequenceShards(group, layout), replace(config, method=method)
            yield (
                f"{world} ranks, {method}, {name}: attention",
                lambda shards=shards, settings=settings: _attention(
                    shards, AttentionHeads(8, 2, 4), settings, inputs, 48
                ),
            )
    fewer = AttentionHeads(4, 1, 4)
    yield f"{world} ranks: fewer KV heads", lambda: _attention(SequenceShards(group), fewer, config, inputs, 48)
    in_parts = replace(config, exchange_mib=1)
    heads = AttentionHeads(8, 4, 32)
    yield f"{world} ranks: parts", lambda: _attention(SequenceShards(group), heads, in_parts, inputs, 2048)


def _attentions_under_tp(rank: int, config: OverlapConfig, inputs: Inputs) -> Iterator[Case]:
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    tensor, ulysses = pairs[rank // 2], pairs[2 + rank % 2]
    for layout in (SequenceLayout(), SequenceLayout("zigzag")):
        shards = SequenceShards(ulysses, layout, tensor)
        yield (
            f"TP x Ulysses, {layout.kind}",
            lambda shards=shards: _attention(shards, AttentionHeads(4, 1, 4), config, inputs, 48),
        )


def _attention(
    shards: SequenceShards, heads: AttentionHeads, config: OverlapConfig, inputs: Inputs, s: int
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
    return [q, k, v, *_results(y, inputs, rank, x, w, bias, proj)]
