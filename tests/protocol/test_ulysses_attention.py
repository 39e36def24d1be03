"""qkv_all_to_all and attention_output_linear around an attention, between processes, against the attention of one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import pytest
import torch
import torch.distributed as dist

from overlap_train import (
    AttentionHeads,
    OverlapConfig,
    OverlapMismatchError,
    OverlapTimeoutError,
    QkNorm,
    Rotary,
    SequenceLayout,
    SequenceShards,
    attention_output_linear,
    linear_all_to_all,
    qkv_all_to_all,
    shutdown,
)
from tests.processes import refusal, run_ranks, values

S, B, HIDDEN, DIM = 16, 2, 24, 8  # rows of all ranks, two sequences
EPS = 0.1
LAYOUTS = (SequenceLayout(), SequenceLayout("zigzag"), SequenceLayout("zigzag", (0, 8, 16)))
LENGTHS = {1: (16,), 2: (11, 5), 4: (4, 7, 0, 5)}


@dataclass(frozen=True)
class Weights:
    qkv: torch.Tensor
    bias: torch.Tensor
    proj: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        return [getattr(self, field.name) for field in fields(self)]

    def leaves(self) -> Weights:
        return Weights(*(t.clone().requires_grad_() for t in self.tensors()))

    def gradients(self, has_norm: bool) -> list[torch.Tensor]:
        return [t.grad for t in self.tensors()[: None if has_norm else 3]]  # type: ignore[misc]

    def norm(self, is_there: bool) -> QkNorm | None:
        return QkNorm(self.q_norm, self.k_norm, EPS) if is_there else None


def rotary(features: int, interleaved: bool) -> Rotary:
    """Of the first `features` of each head."""
    angles = torch.randn(S, features // 2, generator=torch.Generator().manual_seed(5))
    angles = angles.repeat_interleave(2, -1) if interleaved else angles.repeat(1, 2)
    return Rotary(angles.cos(), angles.sin(), interleaved)


def rotated(x: torch.Tensor, turn: Rotary | None) -> torch.Tensor:
    """x [s, b, heads, dim], pair by pair: an independent reading of what Rotary says."""
    if turn is None:
        return x
    r, y = turn.cos.shape[-1], x.clone()
    for pair in range(r // 2):
        i, j = (2 * pair, 2 * pair + 1) if turn.interleaved else (pair, pair + r // 2)
        cos, sin = turn.cos[:, i, None, None], turn.sin[:, i, None, None]
        y[..., i], y[..., j] = x[..., i] * cos - x[..., j] * sin, x[..., j] * cos + x[..., i] * sin
    return y


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal, over [s, b, heads, dim], with fewer KV heads than query heads -> [s, b, features]."""
    q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
    y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return y.permute(2, 0, 1, 3).flatten(2)


def normalised(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, (DIM,), weight, EPS)


def of_one_process(
    x: torch.Tensor, w: Weights, heads: AttentionHeads, turn: Rotary | None, has_norm: bool
) -> torch.Tensor:
    groups = (x @ w.qkv.t() + w.bias).view(S, B, heads.kv, heads.per_group + 2, DIM)
    q, k, v = groups[:, :, :, :-2].flatten(2, 3), groups[:, :, :, -2], groups[:, :, :, -1]
    if has_norm:
        q, k = normalised(q, w.q_norm), normalised(k, w.k_norm)
    return attention(rotated(q, turn), rotated(k, turn), v) @ w.proj.t()


def _like_one_process(rank: int, world: int, method: str, kv_heads: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    layouts = (*LAYOUTS, SequenceLayout(lengths=LENGTHS[world]))
    for number, kv in enumerate(kv_heads):
        for layout in layouts:
            turn = (rotary(DIM, False), rotary(4, True), None)[(number + layouts.index(layout)) % 3]
            heads = AttentionHeads(4, kv, DIM)
            x, dy = (torch.randn(S, B, HIDDEN, generator=generator) for _ in range(2))
            shapes = ((heads.features, HIDDEN), (heads.features,), (HIDDEN, heads.query * DIM), (DIM,), (DIM,))
            weights = Weights(*(torch.randn(shape, generator=generator) / 4 for shape in shapes))
            has_norm = (number + layouts.index(layout)) % 2 == 0
            _compare(x, dy, weights, heads, layout, turn, has_norm, OverlapConfig(method=method, timeout_s=20.0))


def _compare(
    x: torch.Tensor, dy: torch.Tensor, weights: Weights, heads: AttentionHeads, layout: SequenceLayout, turn: Rotary | None,
    has_norm: bool, config: OverlapConfig,
) -> None:  # fmt: skip
    group, world, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    order = layout.rows_of_ranks(S, world, torch.device("cpu"))[rank]

    def mine(t: torch.Tensor) -> torch.Tensor:
        return t.detach()[order[order >= 0]].clone()

    whole, w = x.clone().requires_grad_(), weights.leaves()
    expected = of_one_process(whole, w, heads, turn, has_norm)
    expected.backward(dy)
    own, v = mine(x).requires_grad_(), weights.leaves()
    parts = qkv_all_to_all(
        own,
        v.qkv,
        v.bias,
        shards=SequenceShards(group, layout),
        heads=heads,
        qk_norm=v.norm(has_norm),
        rotary=turn,
        config=config,
    )
    y = attention_output_linear(attention(*parts), v.proj, shards=SequenceShards(group, layout), config=config)
    y.backward(mine(dy))
    torch.testing.assert_close(y, mine(expected), rtol=1e-4, atol=1e-4)
    assert whole.grad is not None
    torch.testing.assert_close(own.grad, mine(whole.grad), rtol=1e-4, atol=1e-4)
    for part, full in zip(v.gradients(has_norm), w.gradients(has_norm), strict=True):
        total = part.double()
        dist.all_reduce(total)
        torch.testing.assert_close(total, full.double(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("world", "kv_heads"), [(1, (1, 4)), (2, (1, 2, 4)), (4, (1, 2, 4))])
def test_an_attention_between_ranks_is_that_of_one_process(world: int, kv_heads: tuple[int, ...]) -> None:
    """Fewer KV heads than ranks, as many, and more."""
    values(run_ranks(world, _like_one_process, "chunked", kv_heads))


def test_an_attention_by_collectives() -> None:
    values(run_ranks(2, _like_one_process, "collective", (1, 2)))


def test_an_attention_by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "1")
    values(run_ranks(2, _like_one_process, "direct", (1,)))


def _copies(rank: int, world: int) -> list[list[float]]:
    """The weight gradients of one query head per rank, and of k and v, whose copies on the three ranks have other gradients."""
    heads, config = AttentionHeads(3, 1, 1), OverlapConfig(method="chunked")
    said = []
    for dtype, of_rank in ((torch.bfloat16, (256.0, 1.0, 1.0)), (torch.float32, (2.0**24, -(2.0**24), 1.0))):
        x, w = torch.ones(1, 4, dtype=dtype), torch.ones(5, 4, dtype=dtype, requires_grad=True)
        bias = torch.ones(5, dtype=dtype, requires_grad=True)
        y = linear_all_to_all(x, w, bias, group=dist.group.WORLD, heads=heads, config=config)
        y.backward(torch.tensor([[7.0, of_rank[rank], -of_rank[rank]]], dtype=dtype).expand(3, -1))
        assert w.grad is not None and bias.grad is not None
        assert bias.grad.tolist() == [21.0 * (n == rank) for n in range(3)] + [3 * of_rank[rank], -3 * of_rank[rank]]
        said.append(w.grad[:, 0].tolist())
    return said


def test_gradients_of_copied_heads_are_added_in_fp32_and_in_the_order_of_ranks() -> None:
    """256 + 1 is 256 in bf16, and 2^24 + 1 - 2^24 is 0 in fp32. The bias' gradient is that of the own columns."""
    expected = [[7.0] * 3 + [258.0, -258.0], [7.0] * 3 + [1.0, -1.0]]
    assert values(run_ranks(3, _copies)) == [expected] * 3


def _unused(rank: int, world: int) -> None:
    """Of q, k and v only k has a gradient; frozen weights and inputs."""
    heads, group = AttentionHeads(2, 2, 4), dist.group.WORLD
    x, w = torch.ones(2, 1, 8, requires_grad=True), torch.ones(heads.features, 8, requires_grad=True)
    _, k, _ = qkv_all_to_all(x, w, shards=SequenceShards(group), heads=heads)
    dx, dw = torch.autograd.grad(k.sum(), (x, w))
    assert torch.equal(dw.view(2, 3, 4, 8)[:, 1], torch.full((2, 4, 8), 2.0)) and dw.sum() == 2 * 64
    for of_x, of_w in ((x, w.detach()), (x.detach(), w)):
        _, k, _ = qkv_all_to_all(of_x, of_w, shards=SequenceShards(group), heads=heads)
        (gradient,) = torch.autograd.grad(k.sum(), (of_x if of_x.requires_grad else of_w,))
        assert torch.equal(gradient, dx if of_x.requires_grad else dw)


def test_parts_without_a_gradient() -> None:
    values(run_ranks(2, _unused))


def _norm_alone(rank: int, world: int) -> list[list[float]]:
    """Of a frozen projection, only the norm is trained; in parts, and in one. Then nothing is."""
    heads, group, config = AttentionHeads(2, 2, 8), dist.group.WORLD, OverlapConfig(method="chunked", exchange_mib=1)
    shards = [torch.randn(4096, 1, 16, generator=torch.Generator().manual_seed(number)) for number in range(world)]
    w = torch.randn(heads.features, 16, generator=torch.Generator().manual_seed(9))
    norm, gradients = QkNorm(torch.ones(8, requires_grad=True), torch.full((8,), 2.0, requires_grad=True), EPS), []
    for settings in (config, replace(config, exchange_mib=64)):
        q, k, _ = qkv_all_to_all(
            shards[rank], w, shards=SequenceShards(group), heads=heads, qk_norm=norm, config=settings
        )
        gradients += torch.autograd.grad((q * k).sum() + k.square().sum(), (norm.q_weight, norm.k_weight))
    own = (torch.cat(shards) @ w.chunk(world)[rank].t()).view(-1, 1, 3, 8)
    q, k = normalised(own[:, :, 0], norm.q_weight), normalised(own[:, :, 1], norm.k_weight)
    right = torch.autograd.grad((q * k).sum() + k.square().sum(), (norm.q_weight, norm.k_weight))
    for ours, expected in zip(gradients, (*right, *right), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-2)
    with torch.no_grad():
        q, _, _ = qkv_all_to_all(
            shards[rank], w, shards=SequenceShards(group), heads=heads, qk_norm=norm, config=config
        )
    assert not q.requires_grad
    return [gradient.tolist() for gradient in gradients]


def test_a_norm_alone_may_be_trained_and_gives_the_same_bits_again() -> None:
    first, second = (values(run_ranks(2, _norm_alone)) for _ in range(2))
    assert first == second


def _refused(rank: int, world: int) -> list[str]:
    heads, group, x = AttentionHeads(4, 2, 4), dist.group.WORLD, torch.ones(4, 1, 8)
    shards = SequenceShards(group)
    w, turn = torch.ones(heads.features, 8), Rotary(torch.ones(4, 4), torch.ones(4, 4))
    elsewhere = Rotary(torch.ones(8, 4), torch.ones(8, 4, device="meta"))
    calls: tuple[Callable[[], object], ...] = (
        lambda: qkv_all_to_all(x[:, 0], w, shards=shards, heads=heads),
        lambda: qkv_all_to_all(x, w, shards=shards, heads=heads, rotary=turn),
        lambda: qkv_all_to_all(x, w, shards=shards, heads=heads, rotary=Rotary(torch.ones(8, 3), torch.ones(8, 3))),
        lambda: qkv_all_to_all(x, w, shards=shards, heads=heads, rotary=Rotary(torch.ones(8, 6), torch.ones(8, 6))),
        lambda: qkv_all_to_all(x, w, shards=SequenceShards(group, SequenceLayout("zigzag", (0, 4))), heads=heads),
        lambda: qkv_all_to_all(x, w[1:], shards=shards, heads=heads),
        lambda: qkv_all_to_all(x, w, shards=shards, heads=AttentionHeads(3, 1, 4)),
        lambda: qkv_all_to_all(x, w[:24], torch.ones(32), shards=shards, heads=AttentionHeads(4, 1, 4)),
        lambda: qkv_all_to_all(x, w, shards=shards, heads=heads, rotary=elsewhere),
        lambda: attention_output_linear(x[:3], w[:, :16], shards=SequenceShards(group, SequenceLayout("zigzag"))),
        lambda: attention_output_linear(x[0], w[:, :16], shards=shards),
        lambda: SequenceShards(group, tp_group=group),
        lambda: qkv_all_to_all(x, w, shards=shards, heads=heads, rotary=Rotary(torch.ones(8, 0), torch.ones(8, 0))),
        lambda: qkv_all_to_all(x, w[0, 0], shards=shards, heads=heads),
        lambda: qkv_all_to_all(x, w, shards=SequenceShards(None), heads=heads),  # type: ignore[arg-type]
        lambda: linear_all_to_all(x, w[0, 0], group=group),
    )
    return [refusal(call) for call in calls]


def test_calls_that_do_not_fit_say_why() -> None:
    for said in values(run_ranks(2, _refused)):
        for text, expected in zip(
            said,
            (
                "linear_qkv: the input has shape (4, 8); it must be [sequence, batch, features]",
                "linear_qkv: rotary has cos (4, 4) and sin (4, 4); both must have a row for each of the 8 rows of all ranks",
                "linear_qkv: rotary turns 3 features of each head, which has 4",
                "linear_qkv: rotary turns 6 features of each head, which has 4",
                "layout.document_starts=(0, 4) must begin with 0 and end with the 8 rows of all ranks",
                "linear_qkv: w has 31 rows (shape (31, 8)), AttentionHeads(query=4, kv=2, dim=4) needs 32",
                "heads.query=3 query heads cannot be divided among the 2 ranks",
                "linear_qkv: bias has shape (32,); it must be [24], one per row of w",
                "linear_qkv: rotary has cos on cpu and sin on meta, the input is on cpu; move them there",
                "linear_proj: a sequence or document of 3 rows cannot be cut into the 4 equal chunks",
                "linear_proj: the input has shape (1, 8); it must be [sequence, batch, features]",
                "SequenceShards: tp_group is group; they must be two groups",
                "linear_qkv: rotary turns 0 features of each head, which has 4",
                "linear_qkv: w has 1 rows (shape ()), AttentionHeads(query=4, kv=2, dim=4) needs 32; they must be equal",
                "group=None: pass the tensor-parallel group",
                "linear_all_to_all: x_shard_m has shape (4, 1, 8) and w (); they need at least 2, and exactly 2 dimensions",
            ),
            strict=True,
        ):
            assert expected in text


def _refused_on_one(rank: int, world: int, what: str, first: bool) -> str:
    """One rank's argument does not fit; at the operator's first call, or later."""
    heads, group, x = AttentionHeads(4, 2, 4), dist.group.WORLD, torch.ones(4, 1, 8)
    w, config = torch.ones(heads.features, 8), OverlapConfig(method="chunked", timeout_s=5.0)
    if not first:
        qkv_all_to_all(x, w, shards=SequenceShards(group), heads=heads, config=config)
    wrong, rest = x[:, 0] if rank else x, dict(shards=SequenceShards(group), config=config)
    calls: dict[str, Callable[[], object]] = {
        "x": lambda: qkv_all_to_all(wrong, w, heads=heads, **rest),  # type: ignore[arg-type]
        "w": lambda: qkv_all_to_all(x, w[rank:], heads=heads, **rest),  # type: ignore[arg-type]
        "context": lambda: attention_output_linear(wrong, torch.ones(8, 16), **rest),  # type: ignore[arg-type]
    }
    with pytest.raises((ValueError, OverlapTimeoutError)) as raised:
        calls[what]()
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize(
    ("what", "wrong"),
    [
        ("x", "linear_qkv: the input has shape (4, 8); it must be [sequence, batch, features]"),
        (
            "w",
            "linear_qkv: w has 31 rows (shape (31, 8)), AttentionHeads(query=4, kv=2, dim=4) needs 32; they must be equal",
        ),
        ("context", "linear_proj: the input has shape (4, 8); it must be [sequence, batch, features]"),
    ],
)
def test_what_does_not_fit_on_one_rank_is_an_error_on_all_at_the_first_call(what: str, wrong: str) -> None:
    said = values(run_ranks(2, _refused_on_one, what, True))
    assert said == [f"ValueError: {wrong} (on rank 1 of the group)", f"ValueError: {wrong}"]


def test_what_does_not_fit_in_a_known_call_is_an_error_at_once_and_peers_name_the_rank() -> None:
    peer, one = values(run_ranks(2, _refused_on_one, "x", False))
    assert one == "ValueError: linear_qkv: the input has shape (4, 8); it must be [sequence, batch, features]"
    assert peer.startswith("OverlapPeerError") and "rank 1 of the group has ended" in peer


def _written_into(rank: int, world: int) -> None:
    """Residual connections and dropout write into what a projection returns."""
    group, config = dist.group.WORLD, OverlapConfig(method="chunked")
    heads, x = AttentionHeads(2, 2, 4), torch.ones(2, 1, 8, requires_grad=True)
    q, k, v = qkv_all_to_all(x, torch.ones(heads.features, 8), shards=SequenceShards(group), heads=heads, config=config)
    for t in (q, k, v):
        t.mul_(2.0)
    y = attention_output_linear(attention(q, k, v), torch.ones(8, 8), shards=SequenceShards(group), config=config)
    y.add_(x)
    y.sum().backward()
    assert x.grad is not None


def test_results_may_be_written_into() -> None:
    values(run_ranks(2, _written_into))


def _compiled(rank: int, world: int) -> int:
    """How many graphs torch.compile makes of a projection between two other operations."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    group, config, w = dist.group.WORLD, OverlapConfig(method="chunked"), torch.ones(8, 8 * world)

    def block(x: torch.Tensor) -> torch.Tensor:
        return attention_output_linear(x * 2, w, shards=SequenceShards(group), config=config) + 1

    y = torch.compile(block, backend=backend)(torch.ones(4, 1, 8))
    assert bool((y == 16 * world + 1).all())
    return len(graphs)


def test_torch_compile_leaves_the_output_projection_to_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # the Megatron tests set it
    assert values(run_ranks(2, _compiled, limit_s=100)) == [2, 2]


def _differ(rank: int, world: int, what: str) -> str:
    """The second rank has another layout, or another norm or rotation."""
    group, x = dist.group.WORLD, torch.ones(8, 1, 8)
    config = OverlapConfig(method="chunked", timeout_s=3.0)
    heads, layout = AttentionHeads(4, 2, 4), SequenceLayout("zigzag")
    w = torch.ones(heads.features, 8)
    qkv_all_to_all(x, w, shards=SequenceShards(group, layout), heads=heads, config=config)
    if rank and what == "layout":
        layout = SequenceLayout("zigzag", (0, 8, 16))
    norm = QkNorm(torch.ones(4), torch.ones(4), EPS) if what == "norm" and rank else None
    turn = None
    if what in ("eps", "zero-centered weights"):
        norm = QkNorm(torch.ones(4), torch.ones(4), EPS * (1 + (rank and what == "eps")), bool(rank and what != "eps"))
    if what in ("pairs", "rotated features"):
        turned = 2 if rank and what != "pairs" else 4
        turn = Rotary(torch.ones(16, turned), torch.ones(16, turned), interleaved=bool(rank and what == "pairs"))
    try:
        if what == "output layout":
            attention_output_linear(
                torch.ones(16, 1, 4), torch.ones(8, 8), shards=SequenceShards(group, layout), config=config
            )
            other = SequenceLayout() if rank else layout
            attention_output_linear(
                torch.ones(16, 1, 4), torch.ones(8, 8), shards=SequenceShards(group, other), config=config
            )
        else:
            qkv_all_to_all(
                x, w, shards=SequenceShards(group, layout), heads=heads, qk_norm=norm, rotary=turn, config=config
            )
    except OverlapMismatchError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("layout", "zigzag"),
        ("output layout", "contiguous"),
        ("norm", "normalised with eps 0.1"),
        ("eps", "normalised with eps 0.2"),
        ("zero-centered weights", "normalised with eps 0.1 around one"),
        ("pairs", "4 features rotated in neighbouring pairs"),
        ("rotated features", "2 features rotated"),
    ],
)
def test_ranks_that_share_the_sequence_otherwise_are_named(what: str, said: str) -> None:
    """The rows would be taken for others, or heads computed otherwise, silently."""
    outcomes = run_ranks(2, _differ, what)
    for outcome in outcomes:
        assert "zigzag" in (outcome.value or outcome.error), outcome
    assert said in outcomes[1].value, "each rank names what it is in itself"


def _little_memory(rank: int, world: int) -> None:
    """symmetric_mib holds for exchanges, too: more parts then."""
    config = OverlapConfig(method="chunked", timeout_s=20.0, symmetric_mib=3)
    x, w = torch.randn(4096, 64, generator=torch.Generator().manual_seed(rank)), torch.ones(64, 64)
    y = linear_all_to_all(x, w, group=dist.group.WORLD, config=config)
    assert torch.equal(y[rank * 4096 : (rank + 1) * 4096], x @ w[:32].t())
    shutdown()


def test_an_exchange_takes_no_more_memory_than_the_group_may_have() -> None:
    values(run_ranks(2, _little_memory))
