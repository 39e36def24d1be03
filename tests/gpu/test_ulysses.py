"""Ulysses on GPUs: the passes between received rows and heads against torch's indexing, and a whole attention block against one
GPU that has the whole sequence. (Exact products of the linears: test_operators.py.)"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from overlap_train import (
    AttentionHeads,
    Rotary,
    SequenceLayout,
    attention_output_linear,
    forget_graphs,
    graphed,
    qkv_all_to_all,
)
from overlap_train.operators.attention_layout import Heads, pack, pack_by_kernel, unpack, unpack_by_kernel
from overlap_train.tools.bench.attention_parts import core_attention, rotated, split
from tests.gpu.conftest import share_gpus
from tests.linear_cases import Case

HIDDEN, QUERY, DIM = 1024, 8, 128


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("heads", [AttentionHeads(8, 2, 128), AttentionHeads(3, 3, 96)], ids=str)
def test_heads_are_taken_out_and_put_back_as_on_the_cpu(
    device: torch.device, heads: AttentionHeads, interleaved: bool
) -> None:
    s, b = 256, 2
    rows = SequenceLayout("zigzag").rows_of_ranks(s, 4, torch.device("cpu")).flatten()
    turn = Rotary(torch.randn(s, 64), torch.randn(s, 64), interleaved)
    on_gpu = Rotary(turn.cos.to(device), turn.sin.to(device), interleaved)
    packed, bias = torch.randn(s, b, heads.features).bfloat16(), torch.randn(heads.features).bfloat16()

    def empty(where: torch.device) -> Heads:
        counts = (heads.query, heads.kv, heads.kv)
        q, k, v = (torch.empty(s, b, count, heads.dim, dtype=torch.bfloat16, device=where) for count in counts)
        return q, k, v

    expected, actual = empty(torch.device("cpu")), empty(device)
    unpack(packed, None, rows, expected, turn)
    unpack_by_kernel(packed.to(device), None, rows.to(device), actual, on_gpu)
    for ours, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), right)
    sent = pack_by_kernel(actual, rows.to(device), on_gpu)
    torch.testing.assert_close(sent.cpu(), pack(expected, rows, turn), rtol=2e-2, atol=2e-2)
    unpack_by_kernel(packed.to(device), bias.to(device), rows.to(device), actual, None)
    torch.testing.assert_close(pack_by_kernel(actual, rows.to(device), None).cpu(), packed + bias)


class Block:
    """An attention on `tokens` rows, the same numbers on every rank. kv: its KV heads."""

    def __init__(self, case: Case, layout: SequenceLayout, kv: int, tokens: int) -> None:
        generator = torch.Generator(case.device).manual_seed(1)

        def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
            numbers = torch.randn(*shape, device=case.device, generator=generator)
            return (numbers * scale).bfloat16().requires_grad_()

        self.case, self.layout, self.tokens, self.heads = case, layout, tokens, AttentionHeads(QUERY, kv, DIM)
        self.x, self.dy = normal(tokens, 1, HIDDEN), normal(tokens, 1, HIDDEN).detach()
        self.w_qkv = normal(self.heads.features, HIDDEN, scale=HIDDEN**-0.5)
        self.w_proj = normal(HIDDEN, QUERY * DIM, scale=(QUERY * DIM) ** -0.5)
        angles = torch.randn(tokens, DIM // 2, device=case.device, generator=generator).repeat(1, 2)
        self.rotary = Rotary(angles.cos(), angles.sin())

    def mine(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's rows."""
        rows = self.layout.rows_of_ranks(self.tokens, self.case.world, whole.device)[self.case.rank]
        return whole.detach()[rows]

    def of_one_gpu(self) -> tuple[torch.Tensor, ...]:
        """y, dx of this rank's rows; dw_qkv, dw_proj of all."""
        q, k, v = split(self.x @ self.w_qkv.t(), self.heads)
        y = core_attention(*rotated(q, k, v, self.rotary)) @ self.w_proj.t()
        dx, *dw = torch.autograd.grad(y, [self.x, self.w_qkv, self.w_proj], self.dy)
        return self.mine(y), self.mine(dx), *dw

    def of_ranks(self, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The same by the group; dw of this rank's rows."""
        group, config = self.case.group, self.case.config
        q, k, v = qkv_all_to_all(
            x, self.w_qkv, group=group, heads=self.heads, layout=self.layout, rotary=self.rotary, config=config
        )
        out = core_attention(q, k, v)
        y = attention_output_linear(out, self.w_proj, group=group, layout=self.layout, config=config)
        return y.detach(), *torch.autograd.grad(y, [x, self.w_qkv, self.w_proj], dy)

    def check(self, outcome: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
        """By the norms of the differences: both round, at other places."""
        y, dx, *dw = outcome
        for part in dw:
            dist.all_reduce(part, group=self.case.group)
        for ours, right in zip((y, dx, *dw), expected, strict=True):
            error = float((ours.double() - right.double()).norm() / right.double().norm())
            assert error < 8 * torch.finfo(torch.bfloat16).eps


def skip_where_gpus_are_shared() -> None:
    if share_gpus():
        pytest.skip("NCCL serves one rank a GPU")


@pytest.mark.parametrize("layout", [SequenceLayout(), SequenceLayout("zigzag")], ids=str)
@pytest.mark.parametrize("kv", [4, 1])  # 1: k and v go to every rank
@pytest.mark.parametrize("parts", [1, 3])
def test_a_block_gives_what_one_gpu_gives(case: Case, layout: SequenceLayout, kv: int, parts: int) -> None:
    skip_where_gpus_are_shared()
    needed = 3 * 1536 * AttentionHeads(QUERY, kv, DIM).features * 2
    mib = 512 if parts == 1 else -(-needed // parts) // (1 << 20) + 1
    block = Block(replace(case, config=replace(case.config, exchange_mib=mib)), layout, kv, 1536 * case.world)
    expected = block.of_one_gpu()
    for _ in range(3):
        block.check(block.of_ranks(block.mine(block.x).requires_grad_(), block.mine(block.dy)), expected)


@pytest.mark.parametrize("method", ["fused", "direct", "chunked"])
def test_replays_of_a_block_are_right(case: Case) -> None:
    skip_where_gpus_are_shared()
    block = Block(case, SequenceLayout("zigzag"), 4, 512 * case.world)
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
