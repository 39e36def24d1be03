"""TP x Ulysses between four processes: values and gradients are those of one process, exactly or within rounding."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint

from overlap_train import (
    AttentionHeads,
    OverlapConfig,
    QkNorm,
    Rotary,
    SequenceLayout,
    SequenceShards,
    attention_output_linear,
    qkv_all_to_all,
    shutdown,
)
from overlap_train.group.registry import domain_of
from overlap_train.group.slots import SLOTS
from overlap_train.ulysses import parts
from overlap_train.ulysses.two_groups import nodes_of_groups
from tests.linear_cases import rounding_bound
from tests.processes import run_ranks, values
from tests.tp_ulysses_cases import (
    DIM,
    HIDDEN,
    LAYOUTS,
    NAMES,
    B,
    Grid,
    Problem,
    divided,
    expected,
    grid,
    integers,
    ulysses_across_nodes,
)

CONFIG = OverlapConfig(method="chunked", exchange_mib=12, timeout_s=20.0)  # in parts, where a KiB stands for a MiB


def _cut_small() -> None:
    """In this process 1 KiB counts as 1 MiB: sequences of 48 rows pass in parts."""
    parts._MIB = 1 << 10


def _exact(
    rank: int, world: int, config: OverlapConfig | None, kv: int, in_parts: bool, across_nodes: bool = False,
    of_ulysses: OverlapConfig | None = None,
) -> int:  # fmt: skip
    """Every layout. Returns the bytes of a slot of this rank's Ulysses group. of_ulysses: its settings, where calls say nothing
    and each group goes by its own."""
    if in_parts:
        _cut_small()
    g = grid()
    if across_nodes:
        ulysses_across_nodes(g.tensor, g.ulysses, config, torch.device("cpu"))
        config = None
    if of_ulysses is not None:
        domain_of(g.tensor, config, torch.device("cpu"))
        domain_of(g.ulysses, of_ulysses, torch.device("cpu"))
        config = None
    for number, layout in enumerate(LAYOUTS):
        problem = Problem(48, AttentionHeads(8, kv, DIM), layout, seed=10 * number)
        dy = integers(problem.s, B, HIDDEN, seed=99)
        found = divided(g, problem, dy, config)
        for name, actual, right in zip(NAMES, found, expected(g, problem, dy), strict=True):
            assert torch.equal(actual, right), f"{name}, {layout}, rank {rank}: {(actual - right).abs().max()}"
    return domain_of(g.ulysses, config, torch.device("cpu")).layout.slot_bytes


def test_without_a_config_the_exchange_goes_by_its_own_groups() -> None:
    settled = values(run_ranks(4, _exact, CONFIG, 2, True))
    own = run_ranks(4, _exact, replace(CONFIG, gathered_input="keep", exchange_mib=64), 2, True, False, CONFIG)
    assert values(own) == settled, "cut by the exchange's limit, and sent again"


@pytest.mark.parametrize(  # each pair of two of them, and in parts what planted faults need
    ("gathered_input", "kv", "in_parts"),
    [
        ("regather", 2, True),
        ("regather", 4, True),
        ("keep", 4, True),
        ("keep", 8, True),
        ("keep", 2, False),
        ("keep", 4, False),
        ("regather", 8, False),
    ],
)
def test_values_and_gradients_are_those_of_one_process(gathered_input: str, kv: int, in_parts: bool) -> None:
    """Each tensor-parallel rank has half of the KV heads. Of two, both ranks of Ulysses need the same one."""
    config = replace(CONFIG, gathered_input=gathered_input)
    for slot in values(run_ranks(4, _exact, config, kv, in_parts)):
        assert (SLOTS * slot <= CONFIG.exchange_mib << 10) == in_parts


def test_ulysses_across_nodes() -> None:
    """gloo carries the exchanges, each tensor-parallel group is a node."""
    values(run_ranks(4, _exact, CONFIG, 4, True, True))


UNUSABLE = 0  # nodes that cannot be served: three ranks each in a group of two


def _nodes_of_groups(rank: int, world: int, tensor: list[int], ulysses: list[int]) -> tuple[int, int]:
    """tensor, ulysses: of each rank, into how many nodes the group falls, or UNUSABLE."""
    g, cpu = grid(), torch.device("cpu")
    domains = [
        domain_of(group, replace(CONFIG, node_ranks=3 if nodes[rank] == UNUSABLE else 2 // nodes[rank]), cpu)
        for group, nodes in ((g.tensor, tensor), (g.ulysses, ulysses))
    ]
    found = nodes_of_groups(g.shards(), None, cpu, "linear_qkv")
    for domain in domains:
        domain.agreement.exchange = None  # type: ignore[assignment, method-assign]
    assert nodes_of_groups(g.shards(), None, cpu, "linear_proj") == found, "asked once"
    return found


@pytest.mark.parametrize(
    ("tensor", "ulysses", "expected"),
    [
        ([2, 2, 2, 2], [2, 2, 2, 2], (2, 2)),
        ([2, 2, 1, 1], [2, 1, 2, 1], (2, 2)),  # both of rank 0 do
        ([1, 1, 2, 2], [1, 2, 1, 2], (2, 2)),  # both of rank 3
        ([2, 2, 2, 2], [1, 1, 1, 1], (1, 2)),
        ([1, 1, 1, 1], [1, 2, 1, 2], (2, 1)),
        ([2, 2, 1, 1], [1, 2, 1, 2], (2, 2)),  # both of rank 1
        ([1, 1, 1, 1], [1, 1, 1, 1], (1, 1)),
        ([1, 1, 1, 1], [UNUSABLE, 1, UNUSABLE, 1], (2, 1)),
    ],
)
def test_all_ranks_know_of_one_whose_groups_both_span_nodes(
    tensor: list[int], ulysses: list[int], expected: tuple[int, int]
) -> None:
    """Ranks 0 and 1, 2 and 3 are tensor-parallel, 0 and 2, 1 and 3 exchange."""
    assert values(run_ranks(4, _nodes_of_groups, tensor, ulysses)) == [expected] * 4


def _before_and_after_shutdown(rank: int, world: int) -> list[tuple[int, int]]:
    g, cpu, found = grid(), torch.device("cpu"), []
    for node_ranks in (1, 2):
        for group in (g.tensor, g.ulysses):
            domain_of(group, replace(CONFIG, node_ranks=node_ranks), cpu)
        found.append(nodes_of_groups(g.shards(), None, cpu, "linear_qkv"))
        shutdown()
    return found


def test_ranks_ask_again_after_shutdown() -> None:
    assert values(run_ranks(4, _before_and_after_shutdown)) == [[(2, 2), (1, 1)]] * 4


def test_by_collectives() -> None:
    values(run_ranks(4, _exact, replace(CONFIG, method="collective"), 4, True))


@pytest.mark.parametrize("method", ["fused", "direct"])
def test_the_product_by_kernels(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange goes by copies beside them."""
    monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "1")
    values(run_ranks(4, _one_layout, method))


def _one_layout(rank: int, world: int, method: str) -> None:
    _cut_small()
    g, problem = grid(), Problem(16, AttentionHeads(4, 2, DIM), SequenceLayout("zigzag"))
    dy, config = integers(problem.s, B, HIDDEN, seed=99), replace(CONFIG, method=method, exchange_mib=3)
    for name, actual, right in zip(NAMES, divided(g, problem, dy, config), expected(g, problem, dy), strict=True):
        assert torch.equal(actual, right), name


def _within_rounding(rank: int, world: int) -> list[bytes]:
    """bf16, random numbers, against fp64: the projections alone, without attention. Returns all bits."""
    _cut_small()
    g, s, heads, layout = grid(), 48, AttentionHeads(4, 4, DIM), SequenceLayout("zigzag")
    generator = torch.Generator().manual_seed(4)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    x, w, dy = random(s, B, HIDDEN), random(2, heads.features, HIDDEN), random(2, s, B, heads.features)
    own, w_own = g.rows(x, layout).requires_grad_(), w[g.t].clone().requires_grad_()
    found = qkv_all_to_all(own, w_own, heads=heads, shards=g.shards(layout), config=CONFIG)
    mine = dy.unflatten(-1, (4, 3, DIM))[g.t].chunk(2, 2)[g.r].unbind(3)
    gradients = torch.autograd.grad(found, (own, w_own), [t.contiguous() for t in mine])
    dist.all_reduce(of_weight := gradients[1].double(), group=g.ulysses)
    exact = (x.double() @ w[g.t].double().t()).unflatten(-1, (4, 3, DIM)).chunk(2, 2)[g.r].unbind(3)
    bound = rounding_bound(x.flatten(0, 1), w[g.t].t(), x.dtype, 1)
    bounds = bound.view(s, B, 4, 3, DIM).chunk(2, 2)[g.r].unbind(3)
    for actual, right, limit in zip(found, exact, bounds, strict=True):
        assert bool(((actual.double() - right).abs() <= limit).all())
    both, weights = dy.movedim(0, 2).flatten(2).flatten(0, 1), w.flatten(0, 1)  # of both tensor-parallel ranks
    dx, limit = both.double() @ weights.double(), rounding_bound(both, weights, x.dtype, 2)
    dx, limit = (g.rows(t.view(s, B, -1), layout) for t in (dx, limit))
    assert bool(((gradients[0].double() - dx).abs() <= limit).all())
    rows = dy[g.t].flatten(0, 1)
    dw, limit = rows.double().t() @ x.flatten(0, 1).double(), rounding_bound(rows.t(), x.flatten(0, 1), x.dtype, 8)
    assert bool(((of_weight - dw).abs() <= limit).all())
    out = attention_output_linear(
        mine[0].flatten(2).contiguous(),
        w_own.detach()[: 4 * DIM].t().contiguous(),
        shards=g.shards(layout),
        config=CONFIG,
    )
    return [t.detach().float().numpy().tobytes() for t in (*found, *gradients, out)]


def test_random_numbers_are_within_their_rounding_and_the_same_on_every_run() -> None:
    first, second = (values(run_ranks(4, _within_rounding)) for _ in range(2))
    assert first == second


def _main_grad(rank: int, world: int, gathered_input: str) -> None:
    """Added in fp32, part by part: neither 257 nor its sum with 1/1024 is a number of bf16."""
    _cut_small()
    g, config = grid(), replace(CONFIG, gathered_input=gathered_input)
    heads, x = AttentionHeads(4, 4, DIM), torch.ones(12, B, HIDDEN, dtype=torch.bfloat16)

    def weight(*shape: int) -> torch.nn.Parameter:
        w = torch.nn.Parameter(torch.ones(*shape, dtype=torch.bfloat16))
        w.main_grad = torch.full(w.shape, 2.0**-10)
        return w

    w, w_out = weight(heads.features, HIDDEN), weight(HIDDEN, 4 * DIM)
    q, k, v = qkv_all_to_all(x, w, heads=heads, config=config, shards=g.shards())
    dq = torch.zeros_like(q)
    dq[[0, 24]], dq[[23, 47], -1] = 128.0, 1.0  # first and last rows of each tensor-parallel group
    torch.autograd.backward((q, k, v), (dq, torch.zeros_like(k), torch.zeros_like(v)))
    of_queries = w.main_grad.view(4, 3, DIM, HIDDEN)[:, 0]
    assert w.grad is None and torch.equal(of_queries, torch.full_like(of_queries, 257.0 + 2.0**-10))
    y = attention_output_linear(
        torch.ones(48, B, 2 * DIM, dtype=torch.bfloat16), w_out, config=config, shards=g.shards()
    )
    dy = torch.zeros_like(y)
    dy[0], dy[-1, -1] = 64.0, 0.5  # of each tensor-parallel rank's rows
    y.backward(dy)
    assert w_out.grad is None and torch.equal(w_out.main_grad, torch.full_like(w_out.main_grad, 257.0 + 2.0**-10))


@pytest.mark.parametrize("gathered_input", ["regather", "keep"])
def test_main_grad_accumulation(gathered_input: str) -> None:
    values(run_ranks(4, _main_grad, gathered_input))


def _modes(rank: int, world: int, gathered_input: str) -> None:
    """Frozen weights, inputs without gradients, recomputation, two micro-batches in flight, no gradients at all."""
    _cut_small()
    g, config = grid(), replace(CONFIG, gathered_input=gathered_input)
    heads, common = AttentionHeads(4, 2, DIM), dict(config=config, shards=g.shards(SequenceLayout("zigzag")))
    x = integers(12, B, HIDDEN, seed=rank).requires_grad_()
    w, w_out = (
        integers(heads.features, HIDDEN, seed=8).requires_grad_(),
        integers(HIDDEN, 4 * DIM, seed=9).requires_grad_(),
    )

    def block(x: torch.Tensor, w: torch.Tensor, w_out: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv_all_to_all(x, w, heads=heads, **common)
        return attention_output_linear((q + k - v).flatten(2), w_out, **common)

    def gradients(run: object, *leaves: torch.Tensor) -> list[torch.Tensor]:
        y = run(*leaves)  # type: ignore[operator]
        return list(torch.autograd.grad(y.sum(), [t for t in leaves if t.requires_grad]))

    plain = gradients(block, x, w, w_out)
    for frozen in range(3):
        leaves = [t.detach() if i == frozen else t for i, t in enumerate((x, w, w_out))]
        rest = [t for i, t in enumerate(plain) if i != frozen]
        assert all(torch.equal(a, b) for a, b in zip(gradients(block, *leaves), rest, strict=True)), frozen
    (alone,) = gradients(block, x.detach(), w.detach(), w_out)
    assert torch.equal(alone, plain[2])

    def recomputed(*leaves: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(block, *leaves, use_reentrant=False)

    assert all(torch.equal(a, b) for a, b in zip(gradients(recomputed, x, w, w_out), plain, strict=True))
    first, second = block(x, w, w_out).sum(), block(2 * x, w, w_out).sum()
    in_flight = [torch.autograd.grad(loss, (x, w)) for loss in (first, second)]
    assert torch.equal(in_flight[0][1], plain[1]) and torch.equal(in_flight[1][1], 2 * plain[1])
    with torch.no_grad():
        assert torch.equal(block(x, w, w_out).sum(), first)


@pytest.mark.parametrize("gathered_input", ["regather", "keep"])
def test_frozen_operands_recomputation_and_microbatches(gathered_input: str) -> None:
    values(run_ranks(4, _modes, gathered_input))


def _normalised_and_rotated(rank: int, world: int) -> None:
    """As without tensor parallelism, where that is tested against one process: the same ranks of Ulysses have the same heads."""
    _cut_small()
    g, s, layout = grid(), 48, SequenceLayout("zigzag")
    angles = torch.randn(s, DIM // 2, generator=torch.Generator().manual_seed(5)).repeat(1, 2)
    norm = QkNorm(torch.full((DIM,), 1.5, requires_grad=True), torch.full((DIM,), 0.5, requires_grad=True), 0.1)
    common = dict(qk_norm=norm, rotary=Rotary(angles.cos(), angles.sin()), config=CONFIG)
    heads, x = AttentionHeads(4, 4, DIM), torch.randn(s, B, HIDDEN, generator=torch.Generator().manual_seed(6))
    w = torch.randn(heads.features, HIDDEN, generator=torch.Generator().manual_seed(7 + g.t))
    of_rank = layout.rows_of_ranks(s, 2, torch.device("cpu"))[g.r]
    results = []
    alone, both = SequenceShards(g.ulysses, layout), g.shards(layout)
    for own, shards in ((x[of_rank], alone), (g.rows(x, layout), both)):
        heads_of_rank = qkv_all_to_all(own, w, heads=heads, shards=shards, **common)
        q, k, v = heads_of_rank
        loss = (q * k).sum() + (k * v).sum()
        results.append((*heads_of_rank, *torch.autograd.grad(loss, (norm.q_weight, norm.k_weight))))
    for ours, right in zip(*results, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-4, atol=1e-3)


def test_norms_and_rotary_positions() -> None:
    values(run_ranks(4, _normalised_and_rotated))


def _alone(rank: int, world: int) -> None:
    """A tensor-parallel group of one rank is none."""
    g = grid(tensor=1)
    assert isinstance(g, Grid) and g.tensor.size() == 1
    problem = Problem(16, AttentionHeads(4, 2, DIM), SequenceLayout("zigzag"))
    dy = integers(problem.s, B, HIDDEN, seed=99)
    for actual, right in zip(divided(g, problem, dy, CONFIG), expected(g, problem, dy), strict=True):
        assert torch.equal(actual, right)


def _one_rank_of_ulysses(rank: int, world: int, gathered_input: str) -> None:
    """Several layers: what the first one keeps for its backward, later ones must not write over."""
    g, config = grid(tensor=2), replace(CONFIG, gathered_input=gathered_input)
    assert g.ulysses.size() == 1
    common = dict(shards=g.shards(), config=config)
    leaves = [(integers(8, B, 8, seed=rank + i), integers(HIDDEN, 8, seed=7 + rank + i)) for i in range(5)]
    leaves = [(x.requires_grad_(), w.requires_grad_()) for x, w in leaves]
    ys = [attention_output_linear(x, w, **common, name=f"layer {i}") for i, (x, w) in enumerate(leaves)]
    dy = integers(*ys[0].shape, seed=3)
    all_dy = dy.repeat(2, 1, 1)  # the same on both ranks
    for y, (x, w) in zip(ys, leaves, strict=True):
        (dw,) = torch.autograd.grad(y, w, dy)
        assert torch.equal(dw, all_dy.flatten(0, 1).t() @ x.detach().flatten(0, 1))


@pytest.mark.parametrize("gathered_input", ["keep", "regather"])
def test_a_ulysses_group_of_one_rank(gathered_input: str) -> None:
    values(run_ranks(2, _one_rank_of_ulysses, gathered_input))


def test_a_tensor_parallel_group_of_one_rank() -> None:
    values(run_ranks(2, _alone))
