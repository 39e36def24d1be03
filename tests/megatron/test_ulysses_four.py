"""Four CPU processes: Ulysses 4, and tensor parallelism 2 with Ulysses 2, train and save as one rank does.

Over tensor parallelism and Ulysses a sequence as short as here stays whole. In parts: as if it were long.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from overlap_train import OverlapConfig, SequenceLayout
from overlap_train.integrations.megatron import report
from overlap_train.ulysses import two_groups as two_group_calls
from tests.megatron import layout, models, ulysses
from tests.megatron.test_lora import adapted
from tests.megatron.ulysses import Run
from tests.processes import failed_checks, run_ranks, values

STEPS = 5  # of two micro-batches
LAYOUTS = {"ulysses 4": (1, 4), "tp 2 x ulysses 2": (2, 2), "tp 2 x ulysses 2 in parts": (2, 2)}
OTHERS = (
    "the group may change with the call", "the table is there before anything is exchanged", "no sequence parallelism",
    "wrapped after enable()",
)  # fmt: skip
CHUNKED = OverlapConfig(method="chunked")
BESIDE = "all-to-all over 2 CP ranks not overlapped: too short to be cut into parts; asked for"
IN_PARTS = "2 parts that hide exchanges; asked for"


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What failed in each process, with its traceback."""
    return values(run_ranks(4, everything, tmp_path_factory.mktemp("checkpoints"), limit_s=250.0))


@pytest.mark.parametrize("name", [*LAYOUTS, *OTHERS])
def test_four_ranks(failures: list[dict[str, str]], name: str):
    for failed in failures:
        assert failed.get(name) is None, failed[name]


def everything(rank: int, world: int, folder: Path) -> dict[str, str]:
    layout.prepare()
    expected = Expected(folder)
    checks = {name: partial(trains_as_one_rank, expected, folder, name) for name in LAYOUTS}
    others = (
        partial(the_group_may_change_with_the_call, rank),
        partial(the_table_is_there_before_anything_is_exchanged, rank),
        partial(without_sequence_parallelism_linears_overlap_over_tp_alone, expected),
        wrapped_linears_overlap_over_tp_alone,
    )
    checks |= dict(zip(OTHERS, others, strict=True))
    failed = failed_checks(checks)
    layout.leave()
    return failed


class Expected:
    """What one rank has: gradients, losses, weights; it has saved its weights."""

    def __init__(self, folder: Path) -> None:
        self.gradients = {packed: ulysses.gradients(Run(packed=packed)) for packed in (False, True)}
        self.losses, model = models.train(Run(), STEPS)
        self.weights = ulysses.weights(model)
        ulysses.save(model.module, folder / "one")


def trains_as_one_rank(expected: Expected, folder: Path, name: str) -> None:
    two_group_calls.parts_that_hide = lambda rows, n, k: 2 if "in parts" in name else 1
    run = Run(*LAYOUTS[name], CHUNKED)
    kept = Run(*LAYOUTS[name], OverlapConfig(method="chunked", gathered_input="keep"))
    packed = Run(*LAYOUTS[name], OverlapConfig(method="collective"), packed=True)
    for one in (run, kept, packed):
        assert ulysses.difference(ulysses.gradients(one), expected.gradients[one.packed], relative=True) < 5e-6
    losses, model = models.train(run, STEPS)
    assert losses == pytest.approx(expected.losses, rel=2e-6) and losses[-1] < losses[0], "it learns"
    assert ulysses.difference(ulysses.weights(model), expected.weights) < 2e-5
    rows = {row.name: row for row in report(model).linears}
    with torch.no_grad():
        models.forward_step(run, models.batches(), model.eval())
    check_table(name, rows, [row for row in report(model).linears if row.slot in ("qkv", "proj")])
    if "in parts" in name:
        return
    model.train()
    ulysses.save(model.module, folder / name)
    trained = ulysses.weights(model)
    ulysses.load(model.module, folder / "one")
    assert ulysses.difference(ulysses.weights(model), expected.weights) == 0, "saved by one rank"
    alone = models.wrap(Run(), ulysses.gpt(Run()))
    ulysses.load(alone.module, folder / name)
    assert ulysses.difference(ulysses.weights(alone), trained) == 0, "loaded by one rank"


def check_table(name: str, rows: dict[str, Any], evaluated: list[Any]) -> None:
    """After training; and what is said of an attention's linears after validation, too."""
    qkv = rows["decoder.layers.0.self_attention.linear_qkv"]
    proj = rows["decoder.layers.1.self_attention.linear_proj"]
    reason = {"ulysses 4": "asked for", "tp 2 x ulysses 2": BESIDE, "tp 2 x ulysses 2 in parts": IN_PARTS}[name]
    assert {(row.method, row.reason) for row in (qkv, proj, *evaluated)} == {("chunked", reason)}
    fc1 = rows["decoder.layers.0.mlp.linear_fc1"]
    assert (fc1.method, fc1.reason) == ("megatron", "tensor-parallel size 1: nothing to communicate") or (
        name != "ulysses 4" and (fc1.method, fc1.reason) == ("chunked", "asked for")
    )
    if reason == IN_PARTS:
        assert (qkv.fprop, qkv.dgrad) == ("AG(x) + GEMM (TP 2), A2A (CP 2)", "A2A(dy) (CP 2), GEMM + RS (TP 2)")
        assert (proj.fprop, proj.dgrad) == ("A2A(x) (CP 2), GEMM + RS (TP 2)", "AG(dy) + GEMM (TP 2), A2A (CP 2)")
        assert (qkv.wgrad, proj.wgrad) == ("AG(x) under dgrad, then GEMM", "A2A(x) under dgrad, then GEMM")
        assert {row.calls for row in evaluated} == {f"overlapped {2 * STEPS + 1}"}


def the_group_may_change_with_the_call(rank: int) -> None:
    """Of a model with context parallelism 4 pairs of ranks cut two documents (cp_group of packed_seq_params)."""
    if "cp_group" not in PackedSeqParams.__dataclass_fields__:
        return  # Megatron-Core 0.16
    packed = partial(
        PackedSeqParams, "thd", *[torch.tensor([0, 8, 16], dtype=torch.int32)] * 2, max_seqlen_q=8, max_seqlen_kv=8
    )
    x = torch.randn(16, 1, 32, generator=torch.Generator().manual_seed(1))
    rows = SequenceLayout("zigzag", (0, 8, 16)).rows_of_ranks(16, 2, x.device)[rank % 2]
    expected, _ = ulysses.gpt(Run()).decoder.layers[0].self_attention(x, None, packed_seq_params=packed())
    model = ulysses.gpt(Run(1, 4, CHUNKED))
    pair = [torch.distributed.new_group([first, first + 1]) for first in (0, 2)][rank // 2]
    of_pair = packed(local_cp_size=2, cp_group=pair)
    y, _ = model.decoder.layers[0].self_attention(x[rows], None, packed_seq_params=of_pair)
    assert float((y - expected[rows]).abs().max()) < 1e-6


def the_table_is_there_before_anything_is_exchanged(rank: int) -> None:
    """Micro-batches may have no context parallelism (local_cp_size 1 of packed_seq_params)."""
    model = ulysses.gpt(Run(2, 2, CHUNKED))
    ends = torch.tensor([0, 16], dtype=torch.int32)
    packed = PackedSeqParams("thd", ends, ends, max_seqlen_q=16, max_seqlen_kv=16, local_cp_size=1)
    x = torch.randn(16, 1, 32, generator=torch.Generator().manual_seed(1)).chunk(2)[rank % 2]
    model.decoder.layers[0].self_attention(x, None, packed_seq_params=packed)
    beside = "all-to-all over 2 CP ranks not overlapped: context-parallel size 1: nothing to communicate; asked for"
    assert [row.reason for row in report(model).linears if row.calls == "overlapped 1"] == [beside] * 2


def without_sequence_parallelism_linears_overlap_over_tp_alone(expected: Expected) -> None:
    run = Run(2, 2, CHUNKED)
    run = replace(run, architecture={**run.architecture, "sequence_parallel": False})
    assert ulysses.difference(ulysses.gradients(run), expected.gradients[False], relative=True) < 5e-6
    _, model = models.train(run, 1)
    row = report(model).linears[0]
    said = "all-to-all over 2 CP ranks not overlapped: no sequence parallelism: exchange and tensor parallelism overlap"
    assert row.fprop == "GEMM + AR" and row.reason.startswith(said), row


def wrapped_linears_overlap_over_tp_alone() -> None:
    """Also where they have exchanged before."""
    model, x = ulysses.gpt(Run(2, 2, CHUNKED)), torch.randn(4, 1, 32)
    attention, alone = model.decoder.layers[0].self_attention, model.decoder.layers[1].self_attention
    with patch.object(two_group_calls, "parts_that_hide", lambda rows, n, k: 2):
        attention(x, None)
        adapted(model, "to_wrap")
        for each in (attention, alone):
            each(x, None)
    rows = [row for row in report(model).linears if row.slot in ("qkv", "proj")]
    beside = "all-to-all over 2 CP ranks not overlapped: wrapped, as by LoRA; asked for"
    assert {(row.method, row.reason) for row in rows} == {("chunked", beside)}
    assert {row.fprop for row in rows} == {"AG(x) + GEMM", "GEMM + RS"}
    assert [row.calls for row in rows] == ["overlapped 2"] * 2 + ["overlapped 1"] * 2
