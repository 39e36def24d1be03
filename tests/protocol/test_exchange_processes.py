"""linear_all_to_all and all_to_all_linear between real processes: what test_processes.py shows of the others, and their sums."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint

from overlap_train import (
    AttentionHeads,
    OverlapConfig,
    OverlapMismatchError,
    SequenceShards,
    all_to_all_linear,
    attention_output_linear,
    linear_all_to_all,
    qkv_all_to_all,
    shutdown,
)
from overlap_train.group.registry import domain_of
from overlap_train.ulysses import parts
from tests.linear_cases import OPERATORS, Case, to_heads, to_rows
from tests.processes import refusal, run_ranks, values


def _case(method: str, **settings: Any) -> Case:
    config = OverlapConfig(method=method, timeout_s=30.0, **settings)
    return Case(dist.group.WORLD, torch.device("cpu"), config)


def _in_parts(rank: int, world: int, methods: tuple[str, ...]) -> None:
    """Six positions of each rank's in three parts: the blocks of a part lie apart in the caller's tensors."""
    parts._MIB = 1 << 10  # of this process: as if 1 KiB were one
    for method in methods:
        case = Case(dist.group.WORLD, torch.device("cpu"), OverlapConfig(method=method, exchange_mib=1, timeout_s=20.0))
        for gathered_input in ("regather", "keep"):
            case = replace(case, config=replace(case.config, gathered_input=gathered_input))
            to_heads(case, (6, 2), 16, 8)
            to_rows(case, (6, 2), 8, 16)


def test_long_sequences_pass_through_in_parts() -> None:
    values(run_ranks(2, _in_parts, ("chunked", "collective")))


def test_long_sequences_pass_through_kernels_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    values(run_ranks(2, _in_parts, ("fused", "direct")))


def _bits_in_parts(rank: int, world: int) -> bool:
    """Whether y and dx of a pass in parts have the bits of one that is whole. (dw is a sum over the parts.)"""
    parts._MIB = 1 << 10
    found = []
    for mib in (1, 512):
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(12, 1, 24, generator=generator).requires_grad_()
        w = torch.randn(40, 24 * world, generator=generator)
        config = OverlapConfig(method="fused", exchange_mib=mib, timeout_s=20.0)
        y = all_to_all_linear(x, w, group=dist.group.WORLD, config=config)
        found.append((y, *torch.autograd.grad(y, x, torch.ones_like(y))))
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_parts_give_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert values(run_ranks(2, _bits_in_parts)) == [True, True]


def _memory_of_a_batch(rank: int, world: int) -> int:
    """What one slot has after exchanges of 24 positions with a batch of 4, in parts. exchange_mib counts KiB here."""
    parts._MIB = 1 << 10
    case = _case("chunked", exchange_mib=12)
    to_heads(case, (24, 4), 16, 8)
    to_rows(case, (24, 4), 8, 16)
    return domain_of(case.group, case.config, case.device).layout.slot_bytes


def test_a_batch_takes_no_more_memory_than_the_setting() -> None:
    """A position takes 4 rows of 16 features, 256 bytes. Of 24 positions 16 fit, which makes two parts of 12."""
    assert values(run_ranks(2, _memory_of_a_batch)) == [12 * 256] * 2


def _other_lengths(rank: int, world: int, in_parts: bool) -> list[str]:
    """What a first call says in which this rank has 4 or 6 positions, then a later one. Parts have 2 positions."""
    parts._MIB = 1 << 10
    case, said = _case("chunked", exchange_mib=1 if in_parts else 512), []
    heads = AttentionHeads(query=4, kv=2, dim=8)
    s, options, shards = 4 + 2 * rank, dict(group=case.group, config=case.config), SequenceShards(case.group)
    calls = {
        "heads": lambda: linear_all_to_all(torch.ones(s, 1, 16), torch.ones(64, 16), **options),
        "rows": lambda: all_to_all_linear(torch.ones(2 * s, 1, 32), torch.ones(16, 64), **options),
        "qkv": lambda: qkv_all_to_all(
            torch.ones(s, 1, 16), torch.ones(64, 16), heads=heads, shards=shards, config=case.config
        ),
        "output": lambda: attention_output_linear(
            torch.ones(2 * s, 1, 32), torch.ones(16, 64), shards=shards, config=case.config
        ),
    }
    for call in calls.values():
        with pytest.raises((ValueError, OverlapMismatchError)) as raised:
            call()
        said.append(str(raised.value))
        shutdown()  # after a mismatch nothing else is called
    return said


@pytest.mark.parametrize("in_parts", [False, True])
def test_ranks_with_other_numbers_of_rows_are_named(in_parts: bool) -> None:
    for rank, said in enumerate(values(run_ranks(2, _other_lengths, in_parts))):
        for text in said:
            assert text.endswith("where numbers of rows differ, which only experts take, pad them to the largest")
            mine, theirs = (4, 6) if rank == 0 else (6, 4)
            if in_parts:
                assert f"a part of {mine} positions" in text and "a call that this rank has not made" in text
            else:
                found = [int(number) for number in re.findall(r"input \[(\d+), ", text)]
                assert found in ([mine, theirs], [2 * mine, 2 * theirs])


def _backward_after_backward(rank: int, world: int) -> None:
    """Each takes two of the three slots: of x that is sent again, and of dx."""
    case = _case("chunked")
    x = case.integers(4 * world, 8, seed=rank).float().requires_grad_()
    w = case.integers(8, 8 * world, seed=9).float().requires_grad_()
    losses = [all_to_all_linear(n * x, w, group=case.group, config=case.config).sum() for n in (1, 2, 3)]
    gradients = [torch.autograd.grad(loss, (x, w)) for loss in losses]
    for n, (dx, dw) in enumerate(gradients, start=1):
        assert torch.equal(dx, n * gradients[0][0]) and torch.equal(dw, n * gradients[0][1])


def test_backward_passes_after_each_other() -> None:
    values(run_ranks(3, _backward_after_backward))


def _main_grad(rank: int, world: int, gathered_input: str) -> None:
    """Added in fp32, block by block: neither 257 nor its sum with 1/1024 is a number of bf16."""
    case = _case("chunked", gathered_input=gathered_input)
    ones = torch.ones(4, 2, 8, dtype=torch.bfloat16)
    of_rank = torch.arange(1.0, world + 1).repeat_interleave(8)  # rank r's features are r + 1
    for operator, x, expected in (
        (linear_all_to_all, ones.repeat(1, 1, world), torch.ones(8 * world, 8 * world)),
        (all_to_all_linear, ones.repeat(world, 1, 1) * (rank + 1), of_rank.expand(8 * world, -1)),
    ):
        w = torch.nn.Parameter(torch.ones(8 * world, 8 * world, dtype=torch.bfloat16))
        w.main_grad = torch.full(w.shape, 2.0**-10)
        y = operator(x, w, group=case.group, config=case.config)
        dy = torch.zeros_like(y).unflatten(0, (-1, 4))  # of every rank's rows, or of the own ones
        dy[:, 0], dy[:, -1, -1] = 128.0, 1.0
        y.backward(dy.flatten(0, 1))
        assert w.grad is None and torch.equal(w.main_grad, 257 * expected + 2.0**-10)
    w.grad_added_to_main_grad, w.zero_out_wgrad = False, True
    operator(x, w, group=case.group, config=case.config).sum().backward()
    assert w.grad_added_to_main_grad and w.grad is not None and not w.grad.any()


@pytest.mark.parametrize("gathered_input", ["regather", "keep"])
def test_main_grad_accumulation(gathered_input: str) -> None:
    values(run_ranks(2, _main_grad, gathered_input))


def _blocks_in_order(rank: int, world: int, method: str) -> list[float]:
    """What each row of y is, where rank s adds sums[n] to the rows of the n-th rank after it."""
    sums = torch.tensor([2.0**24, -(2.0**24), 1.0])
    x = torch.zeros(4 * world, 8)
    x[:, 0] = torch.stack([sums[(target - rank) % world] for target in range(world)]).repeat_interleave(4)
    y = all_to_all_linear(x, torch.ones(1, 8 * world), group=dist.group.WORLD, config=OverlapConfig(method=method))
    return y.flatten().tolist()


@pytest.mark.parametrize("method", ["chunked", "fused", "direct"])
def test_blocks_are_added_in_the_order_in_which_they_arrive(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The own one, then that of the nearest preceding rank: in fp32, 2^24 - 2^24 + 1 is 1 in this order and 0 in the other."""
    if method != "chunked":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert values(run_ranks(3, _blocks_in_order, method)) == [[1.0] * 4] * 3


def _rounded_once(rank: int, world: int, method: str) -> float:
    """The largest error of a random bf16 product, as a fraction of what one rounding of the result allows beside sums in fp32."""
    generator = torch.Generator().manual_seed(1)
    x, w = torch.randn(8 * world, 96 * world, generator=generator), torch.randn(40, 96 * world, generator=generator)
    x, w = x.bfloat16(), w.bfloat16()
    config = OverlapConfig(method=method)
    y = all_to_all_linear(x.chunk(world, 1)[rank].contiguous(), w, group=dist.group.WORLD, config=config)
    x_rows = x.chunk(world)[rank].double()
    exact, magnitude = x_rows @ w.double().t(), x_rows.abs() @ w.double().abs().t()
    eps, eps32 = torch.finfo(torch.bfloat16).eps, torch.finfo(torch.float32).eps
    bound = exact.abs() * eps / 2 + magnitude * (x.shape[1] + world) * eps32
    return float(((y.double() - exact).abs() / bound).max())


@pytest.mark.parametrize("method", ["chunked", "collective"])
def test_a_sum_over_blocks_is_rounded_once(method: str) -> None:
    """Rounded after each block, it would leave this bound wherever the blocks' sums cancel."""
    worst = max(values(run_ranks(3, _rounded_once, method)))
    assert 0 < worst <= 1


def _of_one_rank(rank: int, world: int, method: str) -> None:
    case = _case(method)
    for operator in ("to_heads", "to_rows"):
        OPERATORS[operator](case, (4, 3), 20, 12, bias=True)


@pytest.mark.parametrize("method", ["fused", "direct"])
def test_kernels_of_a_single_rank(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody to send to or to wait for."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    values(run_ranks(1, _of_one_rank, method))


def _refused(rank: int, world: int) -> list[str]:
    """What sizes that cannot be divided say, on every rank."""
    calls = (
        (linear_all_to_all, torch.ones(4, 8), torch.ones(9, 8)),
        (all_to_all_linear, torch.ones(5, 8), torch.ones(8, 16)),
        (all_to_all_linear, torch.ones(4, 8), torch.ones(8, 8)),
    )
    settings = dict(group=dist.group.WORLD, config=OverlapConfig(method="chunked"), name="attention")
    return [refusal(*call, **settings) for call in calls]


def test_sizes_that_do_not_fit_are_refused_on_every_rank() -> None:
    for said in values(run_ranks(2, _refused)):
        assert "its 9 output features must be divisible by the group's 2 ranks" in said[0]
        assert "its first dimension must be divisible by the group's 2 ranks" in said[1]
        assert "8 features (last dimension of (4, 8)), w (8, 8) expects 8 from 2 ranks together" in said[2]
        assert all(text.startswith("attention: ") for text in said)
