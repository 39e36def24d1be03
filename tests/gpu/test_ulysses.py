"""Ulysses on GPUs: the passes between received rows and heads against torch's indexing, and a whole attention block against one
GPU that has the whole sequence. (Exact products of the linears: test_operators.py.)"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from overlap_train import (
    AttentionHeads,
    QkNorm,
    Rotary,
    SequenceLayout,
    SequenceShards,
    attention_output_linear,
    forget_graphs,
    graphed,
    linear_all_to_all,
    qkv_all_to_all,
)
from overlap_train.ulysses.attention_layout import pack, unpack
from tests.attention_reference import core_attention, rotated, split
from tests.linear_cases import OPERATORS, Case, cut_into

HIDDEN, QUERY, DIM = 1024, 8, 128


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("heads", [AttentionHeads(8, 2, 128), AttentionHeads(3, 3, 96)], ids=str)
def test_heads_are_rotated_as_on_the_cpu(device: torch.device, heads: AttentionHeads, interleaved: bool) -> None:
    """Of each pair's two terms one is zero: what is added could cancel, and leave any share of a rounding."""
    s, b = 1000, 2
    pairs = torch.rand(s, 32) < 0.5
    has_cos = (pairs.repeat_interleave(2, 1) if interleaved else pairs.repeat(1, 2)).float()
    rows = torch.randperm(s)
    turn = Rotary(torch.randn(s, 64) * has_cos, torch.randn(s, 64) * (1 - has_cos), interleaved)
    packed, bias = torch.randn(s, b, heads.features).bfloat16(), torch.randn(heads.features).bfloat16()
    counts = (heads.query, heads.kv, heads.kv)
    grads = [torch.randn(b, count, s, heads.dim).permute(2, 0, 1, 3).bfloat16() for count in counts]

    def outcome(where: torch.device) -> list[torch.Tensor]:
        q, k, v = (torch.full((s, b, count, heads.dim), torch.nan, dtype=torch.bfloat16).to(where) for count in counts)
        angles = Rotary(turn.cos.to(where), turn.sin.to(where), interleaved)
        unpack(packed.to(where), bias.to(where), rows.to(where), (q, k, v), angles)
        dq, dk, dv = (grad.to(where) for grad in grads)
        return [part.cpu() for part in (q, k, v, pack((dq, dk, dv), rows.to(where), angles))]

    for ours, right in zip(outcome(device), outcome(torch.device("cpu")), strict=True):
        torch.testing.assert_close(
            ours, right, rtol=2 * torch.finfo(torch.bfloat16).eps, atol=0.0
        )  # bias and rotation round


class Block:
    """An attention on `tokens` rows, the same numbers on every rank. kv: its KV heads. With a zigzag and with lengths it
    normalises q and k."""

    def __init__(self, case: Case, layout: SequenceLayout, kv: int, tokens: int) -> None:
        generator = torch.Generator(case.device).manual_seed(1)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            numbers = torch.randn(*shape, device=case.device, generator=generator)
            return (numbers * scale).bfloat16().requires_grad_()

        self.case, self.layout, self.tokens, self.heads = case, layout, tokens, AttentionHeads(QUERY, kv, DIM)
        self.x, self.dy = normal(tokens, 1, HIDDEN), normal(tokens, 1, HIDDEN).detach()
        self.w_qkv = normal(self.heads.features, HIDDEN, scale=HIDDEN**-0.5)
        self.w_proj = normal(HIDDEN, QUERY * DIM, scale=(QUERY * DIM) ** -0.5)
        self.norm = QkNorm(normal(DIM), normal(DIM), 1e-6) if layout.kind == "zigzag" or layout.lengths else None
        of_norm = [] if self.norm is None else [self.norm.q_weight, self.norm.k_weight]
        self.weights = [self.w_qkv, self.w_proj, *of_norm]
        angles = torch.randn(tokens, DIM // 2, device=case.device, generator=generator).repeat(1, 2)
        self.rotary = Rotary(angles.cos(), angles.sin())

    def mine(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows."""
        rows = self.layout.rows_of_ranks(self.tokens, self.case.world, whole.device)[self.case.rank]
        return whole.detach()[rows[rows >= 0]]

    def of_one_gpu(self) -> tuple[torch.Tensor, ...]:
        """y, dx of this rank's rows; gradients of all weights, of all rows."""
        q, k, v = split(self.x @ self.w_qkv.t(), self.heads)
        if self.norm is not None:
            q, k = (F.rms_norm(x, (DIM,), w, self.norm.eps) for x, w in ((q, self.weights[2]), (k, self.weights[3])))
        y = core_attention(*rotated(q, k, v, self.rotary)) @ self.w_proj.t()
        dx, *dw = torch.autograd.grad(y, [self.x, *self.weights], self.dy)
        return self.mine(y), self.mine(dx), *dw

    def of_ranks(self, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The same by the group; dw of this rank's rows."""
        shards, config = SequenceShards(self.case.group, self.layout), self.case.config
        q, k, v = qkv_all_to_all(
            x, self.w_qkv, shards=shards, heads=self.heads, qk_norm=self.norm, rotary=self.rotary,
            config=config,
        )  # fmt: skip
        out = core_attention(q, k, v)
        y = attention_output_linear(out, self.w_proj, shards=shards, config=config)
        return y.detach(), *torch.autograd.grad(y, [x, *self.weights], dy)

    def check(self, outcome: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
        """By the norms of the differences: both round, at other places."""
        y, dx, *dw = outcome
        for part in dw:
            dist.all_reduce(part, group=self.case.group)
        for ours, right in zip((y, dx, *dw), expected, strict=True):
            error = float((ours.double() - right.double()).norm() / right.double().norm())
            assert error < 8 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("layout", [SequenceLayout(), SequenceLayout("zigzag")], ids=str)
@pytest.mark.parametrize("kv", [4, 1])  # 1: k and v go to every rank
@pytest.mark.parametrize("parts", [1, 3])
def test_a_block_gives_what_one_gpu_gives(case: Case, layout: SequenceLayout, kv: int, parts: int) -> None:
    needed = 3 * 1536 * AttentionHeads(QUERY, kv, DIM).features * 2
    mib = 512 if parts == 1 else -(-needed // parts) // (1 << 20) + 1
    block = Block(replace(case, config=replace(case.config, exchange_mib=mib)), layout, kv, 1536 * case.world)
    expected = block.of_one_gpu()
    for _ in range(3):
        block.check(block.of_ranks(block.mine(block.x).requires_grad_(), block.mine(block.dy)), expected)


@pytest.mark.parametrize("parts", [1, 3])
def test_ranks_with_different_numbers_of_rows(case: Case, parts: int) -> None:
    """The first has all rows of the longest shard, the last few of them."""
    lengths = tuple(1536 - 1400 * rank // max(1, case.world - 1) for rank in range(case.world))
    mib = 512 if parts == 1 else -(-3 * 1536 * AttentionHeads(QUERY, 1, DIM).features * 2 // parts) // (1 << 20) + 1
    case = replace(case, config=replace(case.config, exchange_mib=mib))
    block = Block(case, SequenceLayout(lengths=lengths), 1, sum(lengths))
    expected = block.of_one_gpu()
    for _ in range(3):
        block.check(block.of_ranks(block.mine(block.x).requires_grad_(), block.mine(block.dy)), expected)


def in_parts(case: Case) -> Case:
    """Of 4096 rows a rank and 512 features a rank that are exchanged there are four parts of 1024 rows."""
    return replace(case, config=replace(case.config, exchange_mib=3 * case.world))


@pytest.mark.parametrize("method", ["fused", "direct", "chunked"])
@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("operator", ["to_heads", "to_rows"])
def test_long_sequences_pass_in_parts(case: Case, operator: str, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of to_heads are pulled, but for the last. Features of each number of chunks, so that plans are its own."""
    for name, count in cut_into(lambda m_shard: chunks).items():
        monkeypatch.setattr(name, count)
    for seed in range(3):
        OPERATORS[operator](
            in_parts(case), (4096, 1), 256 + 8 * chunks if operator == "to_heads" else 512, 512, seed=seed
        )


@pytest.mark.parametrize("method", ["fused", "chunked"])
def test_replays_of_parts_are_right(case: Case) -> None:
    """Parts that are pulled, and the last one, which is pushed."""
    case, features = in_parts(case), 512 * case.world
    x, w = case.integers(4096 * case.world, 256, seed=1), case.integers(features, 256, seed=2)
    mine, weight = case.mine(x, 0).detach(), case.mine(w, None).detach()
    expected = (x @ w.t()).chunk(case.world, dim=1)[case.rank].to(case.dtype)

    def run() -> torch.Tensor:
        return linear_all_to_all(mine, weight, group=case.group, config=case.config)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            assert torch.equal(run(), expected)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"), graphed(case.group):
        y = run()
    for _ in range(5):
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, expected)
        assert torch.equal(run(), expected)
    forget_graphs(case.group)


# Several: where their rows lie is found on the GPU, and not sent from the CPU.
@pytest.mark.parametrize("documents", [1, 3])
@pytest.mark.parametrize("method", ["fused", "direct", "chunked"])
def test_replays_of_a_block_are_right(case: Case, documents: int) -> None:
    starts = tuple(part * case.world for part in ((0, 128, 160, 512) if documents == 3 else ()))
    block = Block(case, SequenceLayout("zigzag", document_starts=starts), 4, 512 * case.world)
    expected, x, dy = block.of_one_gpu(), block.mine(block.x).requires_grad_(), block.mine(block.dy)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            block.check(block.of_ranks(x, dy), expected)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"), graphed(case.group):
        outcome = block.of_ranks(x, dy)
    for _ in range(4):
        graph.replay()
        block.check(tuple(part.clone() for part in outcome), expected)
    forget_graphs(case.group)  # for the tests behind this one, which may need more symmetric memory
