"""The table of a model's linears: when it is printed, by whom, and what it says of linears, methods and calls that fell back."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from overlap_train import OverlapConfig, shutdown
from overlap_train.integrations.megatron import print_table, report
from overlap_train.integrations.megatron.linears import overlapped_linears
from overlap_train.integrations.megatron.table import LinearReport, Report
from tests.megatron.linears import OFFLOADED, fall_back
from tests.megatron.models import BATCH, LLAMA, SEQUENCE, Recipe, batches, forward_backward, gpt, train, wrap
from tests.megatron.workers import Workers

OVERLAPPED = Recipe(LLAMA, overlap=OverlapConfig())
FOUR_LAYERS = replace(OVERLAPPED, architecture={**LLAMA, "num_layers": 4})
MEGATRON = LinearReport("output_layer", "output", "-", "-", "-", "megatron", ("expert",))


def rows_of(table: str) -> list[list[str]]:
    """The cells of the rows between the rules."""
    _, _, rows, *_ = re.split("^(-+)$", table, flags=re.MULTILINE)
    return [cells(line) for line in rows.strip().splitlines()]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def printed(action: Callable[[], Any]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        action()
    return output.getvalue()


def logits(model: torch.nn.Module) -> torch.Tensor:
    positions = torch.arange(SEQUENCE).expand(BATCH, -1)
    return model(torch.zeros(BATCH, SEQUENCE, dtype=torch.long), positions, None)


def first_step(model: torch.nn.Module) -> str:
    return printed(lambda: logits(model).square().mean().backward())


def steps() -> list[str]:
    """What is printed by validation, then by two steps of two micro-batches, then when somebody asks for the table."""
    recipe = replace(FOUR_LAYERS, overlap=OverlapConfig(method="collective"))
    model = wrap(recipe, gpt(recipe))

    def validate() -> None:
        with torch.no_grad():
            logits(model.eval())
        model.train()

    def step() -> None:
        model.zero_grad_buffer()
        forward_backward(recipe, model, batches())

    return [printed(action) for action in (validate, step, step, lambda: print_table(model))]


def test_rank_zero_prints_one_table_in_the_first_training_step(workers: Workers) -> None:
    (before, table, *after), others = workers.call(steps)
    assert [before, *after] == [""] * 3 and others == [""] * 4
    summary, heading, rule, *rows, last_rule, row_linears, column_linears = table.splitlines()
    assert summary == "overlap_train: 0 of 17 linears run our operators; the other 17: collective overlaps nothing"
    assert heading.split() == ["linear", "method", "calls", "reason"]
    assert set(rule) == {"-"} and rule == last_rule and len(rule) == max(map(len, rows)) <= 120
    names = ["self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2"]
    names = [*(f"decoder.layers.0-3.{name}" for name in names), "output_layer"]
    calls = ["collective", "not overlapped 2", "asked for"]
    assert [cells(line) for line in rows] == [[name, *calls] for name in names]
    assert row_linears == "proj, fc2: fprop GEMM + RS; dgrad AG(dy) + GEMM; wgrad GEMM with the gathered dy"
    assert column_linears == (
        "qkv, fc1, output: fprop AG(x) + GEMM; dgrad GEMM + RS; wgrad AG(x) under dgrad, then GEMM"
    )


def untouched() -> str:
    return first_step(gpt(FOUR_LAYERS))


def test_the_pages_show_what_is_printed(workers: Workers) -> None:
    table, _ = workers.call(untouched)
    for page in ("README.md", "docs/quick-start.md"):
        assert f"```\n{table}```" in (Path(__file__).parents[2] / page).read_text(), page


def recomputed() -> str:
    """Full recomputation: the first forward has no gradient, the second runs inside backward."""
    changes = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    return first_step(gpt(replace(OVERLAPPED, architecture={**LLAMA, **changes})))


def partly_frozen() -> str:
    """The first layer takes no gradient at all, and the output layer's weight is frozen."""
    model = gpt(OVERLAPPED)
    for part in (model.embedding, model.decoder.layers[0], model.output_layer):
        part.requires_grad_(False)
    return first_step(model)


def pipelined() -> str:
    """Three forwards before the first backward."""
    model = gpt(OVERLAPPED)
    losses = [logits(model).sum() for _ in range(3)]
    table = printed(lambda: [value.backward() for value in losses])
    assert all(linear.overlap.on_gradient is None for linear in overlapped_linears(model)), "later calls cost nothing"
    return table


@pytest.mark.parametrize(
    ("case", "calls"),
    [
        (recomputed, {"overlapped 1", "overlapped 2"}),
        (partly_frozen, {"overlapped 1"}),
        (pipelined, {"overlapped 3"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_one_table_however_the_step_runs(workers: Workers, case: Callable[[], str], calls: set[str]) -> None:
    table, nothing = workers.call(case)
    assert nothing == "" and table.count("linear ") == 1
    rows = rows_of(table)
    assert {row[0].split(".")[2]: row[1] for row in rows if row[0].endswith("linear_fc1")} == {"0-1": "chunked"}
    assert {row[2] for row in rows} <= calls and len({row[0] for row in rows}) == len(rows)


def never_trained() -> list[str]:
    """Evaluation only: no gradient arrives, and the launcher asks for the table at the end."""
    model = gpt(OVERLAPPED).eval()
    return [printed(action) for action in (lambda: logits(model), *[lambda: print_table(model)] * 2)]


def test_a_run_without_training_prints_it_when_asked(workers: Workers) -> None:
    (silent, table, again), others = workers.call(never_trained)
    assert [silent, again] == [""] * 2 and others == [""] * 3
    assert [row[1:] for row in rows_of(table)] == [["chunked", "overlapped 1", "auto: not tuned: CPU tensors"]] * 5


def counted() -> tuple[str, LinearReport, list[LinearReport]]:
    """The table after three steps and a validation; a linear whose calls all fell back; all after the memory is freed."""
    _, trained = train(replace(OVERLAPPED, microbatches=1), steps=3)
    logits(fall_back(trained))
    fall_back(trained, False)
    table = str(report(trained))
    model, x = gpt(OVERLAPPED), torch.zeros(SEQUENCE // 2, BATCH, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.output_layer(x)
    for _ in range(3):
        fall_back(model.output_layer)(x)
    (fell_back,) = (linear for linear in report(model).linears if linear.slot == "output")
    shutdown()
    return table, fell_back, list(report(trained).linears)


def test_calls_are_counted_by_path_and_reason(workers: Workers) -> None:
    cast = "autocast to torch.bfloat16 of torch.float32 tensors"
    for table, row, freed in workers.call(counted):
        assert {row[2] for row in rows_of(table)} == {f"overlapped 3, {OFFLOADED} 1"}
        assert (row.fprop, row.dgrad, row.wgrad, row.method, row.reason) == ("-", "-", "-", "megatron", OFFLOADED)
        assert row.overlapped_calls == 0 and row.fallback_calls == ((OFFLOADED, 3), (cast, 1))
        assert row.calls == f"{OFFLOADED} 3, {cast} 1"
        assert {row.reason for row in freed} == {"symmetric memory has been freed (overlap_train.shutdown)"}


def test_like_linears_share_a_row() -> None:
    """Layers that differ in nothing, and local experts, of which a layer may have 64."""
    layers = [
        replace(MEGATRON, name=f"layers.{k}.fc1", reasons=(("frozen" if k == 3 else "expert"),)) for k in range(6)
    ]
    experts = [
        replace(MEGATRON, name=f"layers.{layer}.mlp.experts.local_experts.{k}.linear_fc1")
        for layer in (1, 3)
        for k in range(64)
    ]
    names = [row[0] for row in rows_of(str(Report((*layers, *experts, replace(experts[0], method="-")))))]
    assert names[:2] == ["layers.0-2,4-5.fc1", "layers.3.fc1"]
    assert names[2:] == [
        f"layers.{k}.mlp.experts.local_experts.{n}.linear_fc1" for k, n in (("1,3", "0-63"), ("1", "0"))
    ]


def test_a_reason_says_what_is_exchanged_and_why_each_pass_has_its_method() -> None:
    row = replace(MEGATRON, method="fused / chunked", reasons=("tuned", "not tuned"), parts=2)
    assert row.reason == "2 parts that hide exchanges; tuned / not tuned"
    assert (
        replace(row, method="collective", parts=None, exchange="all-to-all").reason == "all-to-all; tuned / not tuned"
    )


def test_a_long_reason_goes_on_in_the_next_line() -> None:
    reason = " ".join(f"all-to-all-{number:06}" for number in range(20))
    linear = replace(MEGATRON, reasons=(reason,), overlapped_calls=8)
    for name, width in (("lm_head", 120), ("x" * 100, 100 + len("  megatron  overlapped 8  ") + 40)):
        _, _, row, *more, last = str(Report((linear, replace(linear, name=name, reasons=())))).splitlines()
        lines = [cells(row)[3], *map(str.strip, more)]
        assert " ".join(lines) == reason and max(map(len, (row, *more))) <= width
        assert {line.index("all-to-all") for line in (row, *more)} == {row.index("all-to-all")}
        assert cells(last) == [name, "megatron", "overlapped 8"] and last == last.rstrip()
