"""recipes/compare_mfu.py --cp on two CPU processes: Ulysses by NCCL and overlapped, beside the same batches without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt.settings import Settings
from mfu.flops import step_flops
from tests.megatron.workers import Workers
from tests.recipes.test_compare_mfu import HAS_MATPLOTLIB, run

VARIANTS = ("data_parallel", "nccl", "overlap")
LINE = "--model small --cp 2 --layers 1 --seq-length 32 --steps 2 --round-steps 2 --bitwise --peak-tflops 0.1"
STEPS = 3 + 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("ulysses") / "out"
    done = run(f"{LINE} --variants {','.join(VARIANTS)} --out {found}")
    assert done.returncode == 0, done.stderr[-3000:]
    return found


@pytest.fixture(scope="module")
def rows(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["variant"]: row for row in json.loads((folder / "mfu.json").read_text())["rows"]}


def test_losses_are_those_without_context_parallelism(folder: Path, rows: dict[str, dict[str, Any]]) -> None:
    losses = {row["variant"]: row["losses"] for row in json.loads((folder / "losses.json").read_text())["rows"]}
    assert tuple(losses) == (*VARIANTS, "overlap again")
    for name, values in losses.items():
        assert len(values) == STEPS == len(set(values))
        assert values == pytest.approx(losses["data_parallel"], rel=1e-5), name
    assert rows["data_parallel"]["loss_difference"] == 0.0 < rows["nccl"]["loss_difference"]
    assert rows["overlap again"]["same_bits"] is True


def test_tokens_and_flops_are_those_of_the_global_batch(rows: dict[str, dict[str, Any]]) -> None:
    settings = Settings(num_layers=1, seq_length=32, global_batch_size=2)
    for name in VARIANTS:
        row, seconds = rows[name], 1e-3 * rows[name]["step_ms"]
        assert (row["tp"], row["cp"], row["gbs"], row["ga"]) == (1, 2, 2, 2)
        assert row["tokens_per_s_per_gpu"] == pytest.approx(2 * 32 / seconds / 2)
        assert row["tflops_per_gpu"] == pytest.approx(step_flops(settings) / seconds / 2 / 1e12)
        assert row["speed_up"] == pytest.approx(rows["nccl"]["step_ms"] / row["step_ms"])
        assert row["exposed_ms"] == pytest.approx(row["forward_backward_ms"] - row["alone_ms"])


def test_both_projections_exchange_within_their_products(rows: dict[str, dict[str, Any]]) -> None:
    calls = {name: (row["overlapped_calls"], row["fallen_back_calls"]) for name, row in rows.items()}
    ours = 2 * 2 * STEPS  # projections and micro-batches
    assert calls == {"data_parallel": (0, 0), "nccl": (ours, 0), "overlap": (ours, 0), "overlap again": (ours, 0)}
    assert rows["overlap"]["symmetric_bytes"] > 0


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="matplotlib is not installed")
def test_pictures_are_drawn(folder: Path) -> None:
    for name in ("mfu.png", "loss-small-1-layers.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_what_cannot_share_a_sequence_is_refused_by_name() -> None:
    done = run("--model small --cp 2 --seq-length 32 --variants megatron,overlap")
    assert done.returncode != 0
    assert "compare_mfu: error: --variants megatron with --cp 2" in done.stderr and "take nccl" in done.stderr


@pytest.mark.parametrize("kv", [1, 2])
def test_without_communication_projections_are_those_of_one_rank(workers: Workers, kv: int) -> None:
    """Of one rank that stands for itself; with one KV head a copy of it goes to each of two ranks."""
    assert workers.call(compute_alone, kv) == [[], []]


@pytest.mark.parametrize("tensor_ranks", [1, 2])
def test_linears_that_tensor_parallelism_divides_gather_and_scatter_alone(tensor_ranks: int) -> None:
    """They have other rows and columns than those that exchange: taken for these, nothing was measured."""
    from types import SimpleNamespace

    from mfu import alone, alone_ulysses
    from overlap_train.integrations.megatron.linears import ulysses

    over_tp = ulysses.UlyssesColumnOverTP, ulysses.UlyssesRowOverTP
    classes = over_tp if tensor_ranks > 1 else (ulysses.UlyssesColumnParallelLinear, ulysses.UlyssesRowParallelLinear)
    linears: Any = [kind.__new__(kind) for kind in classes]
    for linear in linears:
        linear.tp_group = SimpleNamespace(size=lambda: tensor_ranks)
    exchanging = [alone_ulysses.HeadsAlone, alone_ulysses.SequenceAlone]
    expected = [alone.ColumnAlone, alone.RowAlone] if tensor_ranks > 1 else exchanging
    assert [alone._alone(linear) for linear in linears] == expected


def compute_alone(kv: int) -> list[str]:
    """Called on two ranks: what is wrong. The shapes are those of two ranks, and a product's rows are looked up again."""
    from types import SimpleNamespace

    from mfu.alone_ulysses import HeadsAlone, SequenceAlone
    from overlap_train import AttentionHeads, QkNorm, SequenceLayout
    from overlap_train.integrations.megatron.linears.exchange import Exchange

    heads, layout = AttentionHeads(query=4, kv=kv, dim=8), SequenceLayout("zigzag")
    order = layout.rows_of_ranks(8, 2, torch.device("cpu")).flatten()
    exchange = Exchange(SimpleNamespace(size=lambda: 2), heads, layout, order, order.argsort())  # type: ignore[arg-type]
    torch.manual_seed(0)
    x = torch.randn(4, 3, 16, requires_grad=True)
    w = torch.randn(heads.features, 16, requires_grad=True)
    column: Any = SimpleNamespace(weight=w, wholes=SimpleNamespace(main_grad="off"))
    q, k, v = HeadsAlone.to_heads(column, x, exchange, None, None)
    problems = []
    norm = QkNorm(torch.ones(8, requires_grad=True), torch.ones(8, requires_grad=True), eps=1e-9)
    q_normed, k_normed, v_normed = HeadsAlone.to_heads(column, x, exchange, norm, None)
    if not all(torch.allclose(t.square().mean(-1), torch.ones(1), rtol=1e-4) for t in (q_normed, k_normed)):
        problems.append("q and k are not normalised")
    (q_normed.square().sum() + k_normed.square().sum() + v_normed.sum()).backward()
    if not torch.equal(v_normed, v) or not all(t.grad.sum() > 0 for t in (norm.q_weight, norm.k_weight)):
        problems.append("v is another, or the norms' weights have no gradients")
    if [tuple(t.shape) for t in (q, k, v)] != [(8, 3, 2, 8), (8, 3, max(1, kv // 2), 8), (8, 3, max(1, kv // 2), 8)]:
        problems.append(f"shapes {q.shape}, {k.shape}, {v.shape}")
    copies = heads.sent_rows(2, torch.device("cpu"))
    sent = w if copies is None else w[copies]
    y = (x.flatten(0, 1) @ sent.t()).view(8, 3, -1)[order.argsort()]
    expected = torch.autograd.grad(y.square().sum(), (x, w))
    found = torch.autograd.grad(sum(t.square().sum() for t in (q, k, v)), (x, w))
    problems += [f"gradient {n}" for n in (0, 1) if not torch.allclose(found[n], expected[n], rtol=1e-4)]

    context, w_out = torch.randn(8, 3, 16, requires_grad=True), torch.randn(24, 32, requires_grad=True)
    row: Any = SimpleNamespace(weight=w_out, wholes=SimpleNamespace(main_grad="off"))
    z, _ = SequenceAlone.to_rows(row, context, exchange)
    wanted = (context[order].view(-1, 32) @ w_out.t()).view(4, 3, 24)
    problems += [] if torch.allclose(z, wanted, rtol=1e-4) else ["output"]
    expected = torch.autograd.grad(wanted.square().sum(), (context, w_out))
    found = torch.autograd.grad(z.square().sum(), (context, w_out))
    return problems + [
        f"output's gradient {n}" for n in (0, 1) if not torch.allclose(found[n], expected[n], rtol=1e-4, atol=1e-4)
    ]
