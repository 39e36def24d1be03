"""Ranks that hold different numbers of rows: values and gradients are those of one process, exactly, in integers."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from overlap_train import (
    AttentionHeads,
    OverlapConfig,
    OverlapMismatchError,
    SequenceLayout,
    SequenceShards,
    attention_output_linear,
    qkv_all_to_all,
)
from overlap_train.ulysses import exchange, parts
from tests.processes import refusal, run_ranks, values
from tests.tp_ulysses_cases import DIM, HIDDEN, NAMES, B, Problem, divided, expected, grid, integers

CONFIG = OverlapConfig(method="chunked", timeout_s=20.0)
TWO, FOUR = ((5, 3), (1, 7), (8, 0)), ((4, 4, 2, 6), (0, 0, 1, 7))


def _exact(
    rank: int, world: int, config: OverlapConfig, every: tuple[tuple[int, ...], ...], kv: tuple[int, ...],
    in_parts: bool = False, tensor: int = 1,
) -> list[int]:  # fmt: skip
    """Returns how many parts the last projection had. Memory is NaN until it is written."""
    torch.use_deterministic_algorithms(True)
    if in_parts:
        parts._MIB = 1 << 10  # a KiB stands for a MiB
    g, cuts = grid(tensor), []
    cut, exchange.cut_exchange = exchange.cut_exchange, lambda *args: cuts.append(cut(*args)) or cuts[-1]  # type: ignore[func-returns-value]
    for number, lengths in enumerate(every):
        for heads in (AttentionHeads(8, count, DIM) for count in kv):
            problem = Problem(sum(lengths), heads, SequenceLayout(lengths=lengths), seed=10 * number)
            dy = integers(problem.s, B, HIDDEN, seed=99)
            found = divided(g, problem, dy, config)
            for name, actual, right in zip(NAMES, found, expected(g, problem, dy), strict=True):
                assert torch.equal(actual, right), f"{name}, {lengths}, {heads}, rank {rank}"
    return [len(places) for places in cuts]


@pytest.mark.parametrize("gathered_input", ["regather", "keep"])
@pytest.mark.parametrize("every", [TWO, FOUR], ids=["2 ranks", "4 ranks"])
def test_values_and_gradients_are_those_of_one_process(every: tuple[tuple[int, ...], ...], gathered_input: str) -> None:
    """Fewer KV heads than ranks, too."""
    config = replace(CONFIG, gathered_input=gathered_input)
    values(run_ranks(len(every[0]), _exact, config, every, (1, 8)))


def test_by_collectives() -> None:
    values(run_ranks(2, _exact, replace(CONFIG, method="collective"), TWO, (1, 2)))


@pytest.mark.parametrize("method", ["fused", "direct"])
def test_by_kernels(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "1")
    values(run_ranks(2, _exact, replace(CONFIG, method=method), TWO[:1], (1,)))


@pytest.mark.parametrize("method", ["chunked", "collective"])
def test_in_parts_of_which_some_are_padding(method: str) -> None:
    config = replace(CONFIG, method=method, exchange_mib=12)
    for counts in values(run_ranks(2, _exact, config, ((3, 29), (24, 7)), (2,), True)):
        assert min(counts) > 1


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("gathered_input", ["regather", "keep"])
def test_beside_tensor_parallelism(gathered_input: str, in_parts: bool) -> None:
    config = replace(CONFIG, gathered_input=gathered_input, exchange_mib=12)
    values(run_ranks(4, _exact, config, ((6, 10), (40, 8), (0, 4)), (2, 4), in_parts, 2))


def _frozen(rank: int, world: int) -> None:
    """Weights, the input, or everything; two micro-batches in flight."""
    torch.use_deterministic_algorithms(True)
    layout, heads, group = SequenceLayout(lengths=(5, 2)), AttentionHeads(4, 2, DIM), dist.group.WORLD
    x = integers(layout.lengths[rank], B, HIDDEN, seed=rank).requires_grad_()
    w = integers(heads.features, HIDDEN, seed=8).requires_grad_()
    w_out = integers(HIDDEN, 4 * DIM, seed=9).requires_grad_()

    def block(x: torch.Tensor, w: torch.Tensor, w_out: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv_all_to_all(x, w, shards=SequenceShards(group, layout), heads=heads, config=CONFIG)
        assert q.shape == (7, B, 2, DIM)
        return attention_output_linear(
            (q + k - v).flatten(2), w_out, shards=SequenceShards(group, layout), config=CONFIG
        )

    def gradients(*leaves: torch.Tensor) -> list[torch.Tensor]:
        y = block(*leaves)
        assert y.shape == x.shape
        return list(torch.autograd.grad(y.sum(), [t for t in leaves if t.requires_grad]))

    plain = gradients(x, w, w_out)
    assert [t.shape for t in plain] == [x.shape, w.shape, w_out.shape]
    for frozen in range(3):
        leaves = [t.detach() if i == frozen else t for i, t in enumerate((x, w, w_out))]
        rest = [t for i, t in enumerate(plain) if i != frozen]
        assert all(torch.equal(a, b) for a, b in zip(gradients(*leaves), rest, strict=True)), frozen
    first, second = block(x, w, w_out).sum(), block(2 * x, w, w_out).sum()
    in_flight = [torch.autograd.grad(loss, (x, w)) for loss in (first, second)]
    assert torch.equal(in_flight[0][1], plain[1]) and torch.equal(in_flight[1][1], 2 * plain[1])
    with torch.no_grad():
        y = block(x, w, w_out)
        assert torch.equal(y.add_(1.0).sum() - y.numel(), first)  # results may be written into


def test_frozen_operands_and_microbatches() -> None:
    values(run_ranks(2, _frozen))


def _refused(rank: int, world: int) -> list[str]:
    g, group, heads = grid(tensor=2), dist.group.WORLD, AttentionHeads(4, 2, 4)
    w, x, whole = torch.ones(heads.features, 8), torch.ones(3, 1, 8), torch.ones(12, 1, 8)

    def layout(*lengths: int, kind: str = "contiguous") -> SequenceLayout:
        return SequenceLayout(kind, lengths=lengths)

    calls = (
        lambda: qkv_all_to_all(x, w, shards=SequenceShards(group, layout(5, 3, 2)), heads=heads),
        lambda: qkv_all_to_all(x, w, shards=SequenceShards(group, layout(5, 3, 5, -1)), heads=heads),
        lambda: qkv_all_to_all(x, w, shards=SequenceShards(group, layout(2, 2, 4, 4)), heads=heads),
        lambda: qkv_all_to_all(x, w, shards=SequenceShards(group, layout(3, 3, 3, 3, kind="zigzag")), heads=heads),
        lambda: attention_output_linear(whole, w, shards=SequenceShards(group, layout(2, 2, 4, 5))),
        lambda: qkv_all_to_all(x, w, heads=heads, shards=g.shards(layout(5, 9))),
        lambda: qkv_all_to_all(x, w, heads=heads, shards=g.shards(layout(8, 4))),
    )
    return [refusal(call) for call in calls]


def test_lengths_that_do_not_fit_are_refused_by_name() -> None:
    for said in values(run_ranks(4, _refused)):
        for text, right in zip(
            said,
            (
                "linear_qkv: layout.lengths=(5, 3, 2) must be 4 numbers, the rows of each rank of the group",
                "linear_qkv: layout.lengths=(5, 3, 5, -1) must not be negative, nor all 0",
                "linear_qkv: the input has shape (3, 1, 8); by layout.lengths=(2, 2, 4, 4) rank 0 has 2 rows in it",
                "linear_qkv: layout.lengths=(3, 3, 3, 3) must be without zigzag and document_starts",
                "linear_proj: the input has shape (12, 1, 8); by layout.lengths=(2, 2, 4, 5) all ranks together have 13 rows",
                "linear_qkv: layout.lengths=(5, 9) must be divisible by the 2 ranks of tp_group",
                "linear_qkv: the input has shape (3, 1, 8); by layout.lengths=(8, 4) rank 0 has 4 rows in it",
            ),
            strict=True,
        ):
            assert right in text


def _differ(rank: int, world: int, output: bool) -> str:
    """Each rank has as many rows as it says, and blocks are equally long."""
    group, heads = dist.group.WORLD, AttentionHeads(4, 2, 4)
    config, w = replace(CONFIG, timeout_s=3.0), torch.ones(heads.features, 8)
    layout = SequenceLayout(lengths=(3, 5) if rank else (5, 3))
    try:
        if output:
            attention_output_linear(torch.ones(8, 1, 4), w[:, :8], shards=SequenceShards(group, layout), config=config)
        else:
            qkv_all_to_all(torch.ones(5, 1, 8), w, shards=SequenceShards(group, layout), heads=heads, config=config)
    except OverlapMismatchError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("output", [False, True])
def test_ranks_that_say_other_lengths_are_named(output: bool) -> None:
    for said, own in zip(values(run_ranks(2, _differ, output)), ("rows 5 + 3", "rows 3 + 5"), strict=True):
        assert own in said, said
