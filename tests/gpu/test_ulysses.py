"""Ulysses on GPUs: the passes between received rows and heads against torch's indexing, and a whole attention block against the
same block with the group's all-to-all and cuBLAS. (Exact products of the linears: test_operators.py.)"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from overlap_train import AttentionHeads, Rotary, attention_output_linear, qkv_all_to_all
from overlap_train.operators.attention_layout import Heads, pack, pack_by_kernel, unpack, unpack_by_kernel
from overlap_train.planning.sequence import SequenceLayout
from overlap_train.tools.bench.attention_blocks import Data, by_nccl, core_attention, forward_backward
from overlap_train.tools.measure.models import Model
from overlap_train.tools.measure.world import World
from tests.gpu.conftest import share_gpus
from tests.linear_cases import Case

MODEL = Model("none", 1, 1024, 1024, 8, 4, kv_channels=128)


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
        q, k, v = (
            torch.empty(s, b, n, heads.dim, dtype=torch.bfloat16, device=where)
            for n in (heads.query, heads.kv, heads.kv)
        )
        return q, k, v

    expected, actual = empty(torch.device("cpu")), empty(device)
    unpack(packed, None, rows, expected, turn)
    unpack_by_kernel(packed.to(device), None, rows.to(device), actual, on_gpu)
    for ours, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), right)
    sent = pack_by_kernel(actual, rows.to(device), on_gpu)
    torch.testing.assert_close(sent.cpu(), pack(expected, rows, turn), rtol=2e-2, atol=2e-2)
    unpack_by_kernel(
        packed.to(device), bias.to(device), rows.to(device), actual, None
    )  # q, k, v of packed + bias, as they are
    torch.testing.assert_close(pack_by_kernel(actual, rows.to(device), None).cpu(), packed + bias)


@pytest.mark.parametrize("parts", [1, 3])
def test_a_block_gives_what_the_groups_all_to_all_gives(case: Case, parts: int) -> None:
    """Also where the sequence passes in parts. By the norms of the differences: both round, at other places."""
    if share_gpus():
        pytest.skip("NCCL serves one rank a GPU")
    tokens = 1536 * case.world
    here = World(case.group, case.device, case.rank, case.world)
    data = Data.make(MODEL, tokens, here, torch.bfloat16, seed=1)
    needed = 3 * 1536 * MODEL.linears["qkv"][0] * 2
    config = replace(case.config, exchange_mib=512 if parts == 1 else -(-needed // parts) // (1 << 20) + 1)

    def ours(data: Data) -> torch.Tensor:
        q, k, v = qkv_all_to_all(
            data.x, data.w_qkv, group=case.group, heads=data.heads, rotary=data.rotary, config=config
        )
        return attention_output_linear(core_attention(q, k, v), data.w_proj, group=case.group, config=config)

    expected = forward_backward(partial(by_nccl, here), data)(0)
    for _ in range(3):
        outcome = forward_backward(ours, data)(0)
    for mine, theirs in zip(outcome, expected, strict=True):  # type: ignore[call-overload]
        assert (
            float((mine.double() - theirs.double()).norm() / theirs.double().norm())
            < 8 * torch.finfo(torch.bfloat16).eps
        )
