"""All-to-alls of groups that span nodes, on CPU processes that are told where a node ends.

Long sequences, an attention, slots that are used again, and what every rank says when one of them is wrong or gone. test_nodes.py
has every shape, and the faults of what crosses the network.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from overlap_train import (
    AttentionHeads,
    OverlapConfig,
    OverlapMismatchError,
    OverlapTimeoutError,
    SequenceShards,
    all_gather_linear,
    all_to_all_linear,
    attention_output_linear,
    linear_all_to_all,
    linear_reduce_scatter,
    qkv_all_to_all,
    shutdown,
)
from overlap_train.group.registry import made_domain
from overlap_train.group.workspace import SlotUse
from overlap_train.nodes.gloo import HostEngine
from overlap_train.nodes.ops import InterNodeGemmAllToAll
from overlap_train.ulysses import parts
from overlap_train.ulysses.layout import SequenceLayout
from tests.linear_cases import to_heads, to_rows
from tests.processes import run_ranks, values
from tests.protocol.test_nodes import case_of

TIMEOUT_S = 2.0


def _in_parts(rank: int, world: int) -> None:
    """Six positions of each rank's in three parts, each but the first sent before the one before it is multiplied."""
    parts._MIB = 1 << 10  # of this process: as if 1 KiB were one
    for gathered_input in ("regather", "keep"):
        case = case_of(2, exchange_mib=2, timeout_s=20.0, gathered_input=gathered_input)
        to_heads(case, (6, 2), 16, 8)
        to_rows(case, (6, 2), 8, 16)
    domain = made_domain(dist.group.WORLD)
    assert domain is not None and isinstance(domain.engine, HostEngine)


def test_long_sequences_pass_between_nodes_in_parts() -> None:
    values(run_ranks(4, _in_parts, limit_s=60))


def _attention(config: OverlapConfig, rank: int, world: int) -> list[torch.Tensor]:
    """Projections around something that stands for an attention, and their gradients."""
    generator = torch.Generator().manual_seed(rank)
    heads, layout = AttentionHeads(query=8, kv=2, dim=4), SequenceLayout("zigzag")
    x = torch.randint(-2, 3, (4, 3, 16), generator=generator).float().requires_grad_()
    w, w_out = (torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(9)).float().requires_grad_()
                for shape in ((48, 16), (16, 32)))  # fmt: skip
    options = dict(shards=SequenceShards(dist.group.WORLD, layout), config=config)
    q, k, v = qkv_all_to_all(x, w, heads=heads, **options)
    y = attention_output_linear((q + k + v).flatten(2), w_out, **options)
    return [y, *torch.autograd.grad(y.sum(), (x, w, w_out))]


def _same_attention(rank: int, world: int) -> bool:
    """By blocks that are read where they arrive, with fewer KV heads than ranks, and by gloo over all ranks."""
    found = [_attention(case_of(2, method).config, rank, world) for method in ("chunked", "collective")]
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_an_attention_between_nodes_is_that_of_collectives() -> None:
    assert values(run_ranks(4, _same_attention, limit_s=60)) == [True] * 4


def _in_any_order(rank: int, world: int, seed: int) -> None:
    """All operators share slots. Their order is one of the seed, who is late one of the rank."""
    order, late = random.Random(seed), random.Random(world * seed + rank)
    options = dict(group=dist.group.WORLD, config=case_of(2, timeout_s=20.0).config)
    operators: list[tuple[Callable[..., torch.Tensor], int]] = [
        (all_gather_linear, 1), (linear_reduce_scatter, world), (linear_all_to_all, 1), (all_to_all_linear, world),
    ]  # fmt: skip
    for step in range(1, 41):
        operator, ranks = order.choice(operators)
        wide = ranks if operator is all_to_all_linear else 1
        x, w = torch.full((12, 16), float(step)), torch.ones(12, 16 * wide)
        time.sleep(late.choice((0.0, 0.0, 0.01)))
        assert bool((operator(x, w, **options) == 16 * ranks * step).all()), (operator.__name__, step)


@pytest.mark.parametrize("seed", [1, 2])
def test_operators_follow_each_other_in_any_order(seed: int) -> None:
    values(run_ranks(6, _in_any_order, seed, limit_s=60))


def _read_late(rank: int, world: int, fault: bool) -> str:
    """Exchanges one after the other. Rank 1 reads what it has received a while after it has come."""
    if fault:
        SlotUse.take = lambda self: 0  # type: ignore[method-assign] # of this process: the slot of the call before
    if rank == 1:
        received = InterNodeGemmAllToAll.received

        def read_late(self: InterNodeGemmAllToAll) -> torch.Tensor:
            self._call.wait_for_all()
            time.sleep(0.05)
            return received(self)

        InterNodeGemmAllToAll.received = read_late  # type: ignore[method-assign]
    options = dict(group=dist.group.WORLD, config=case_of(2, timeout_s=5.0).config)
    try:
        for step in range(6):
            y = linear_all_to_all(torch.full((4, 8), float(step)), torch.ones(8, 8), **options)
            assert bool((y == 8 * step).all())
    except (AssertionError, OverlapTimeoutError, OverlapMismatchError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("fault", [False, True])
def test_a_slot_is_not_used_again_before_it_is_read(fault: bool) -> None:
    outcomes = run_ranks(4, _read_late, fault, limit_s=60, grace_s=10)
    said = [outcome.value or outcome.error for outcome in outcomes]
    assert any(text != "nothing" for text in said) == fault, said


def _mistake(rank: int, world: int) -> tuple[str, str]:
    """The last rank calls the other all-to-all."""
    options = dict(group=dist.group.WORLD, config=case_of(2, timeout_s=TIMEOUT_S).config)
    x = torch.ones(8, 8)
    calls = [
        lambda: linear_all_to_all(x, torch.ones(8, 8), name="qkv", **options),
        lambda: all_to_all_linear(x, torch.ones(8, 8 * world), name="proj", **options),
    ]
    for call in calls:
        call()
    try:
        calls[rank == world - 1]()
        for _ in range(3):  # a rank that was not wrong may find out in its next calls only
            calls[0]()
    except (OverlapMismatchError, OverlapTimeoutError) as error:
        time.sleep(TIMEOUT_S)  # gloo brings what was sent before only as long as this process lives
        return type(error).__name__, str(error)
    return "", "no error"


def test_every_rank_raises_when_one_calls_the_other_all_to_all() -> None:
    """Blocks carry their sender's word past who takes them from the network: all who are in the right call name the wrong one."""
    *right, wrong = values(run_ranks(4, _mistake, limit_s=60))
    for kind, text in right:
        assert kind == "OverlapMismatchError", text
        assert re.search(
            r"is in qkv/fprop \[linear_all_to_all.*, but rank 3 is in proj/fprop \[all_to_all_linear", text
        ), text
    assert wrong[0] == "OverlapMismatchError" and re.search("rank 3 is in proj/fprop.*but rank . is in qkv", wrong[1])


def _halved(rank: int, world: int) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        for node_ranks in (1, 3):
            case = replace(case_of(node_ranks, timeout_s=20.0), dtype=dtype)
            to_rows(case, (5, 2), 12, 20)
            shutdown()


def test_nodes_of_one_rank_and_of_several() -> None:
    values(run_ranks(3, _halved, limit_s=60))
