"""The table of a model's linears: when it is printed, by whom, and what it says about shapes, models and calls that fell back."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from overlap_train import OverlapConfig, shutdown
from overlap_train.group.registry import made_domain
from overlap_train.integrations.megatron import print_table, report
from overlap_train.integrations.megatron.enabling import first_table, reporting
from overlap_train.integrations.megatron.enabling.table import LinearReport, Report
from overlap_train.integrations.megatron.linears.in_model import overlapped_linears
from overlap_train.select.method import Method
from overlap_train.select.passes import Pass
from overlap_train.select.table import Winner, key_of, save
from tests.megatron.linears import column_pair, run
from tests.megatron.models import (
    BATCH,
    LLAMA,
    SEQUENCE,
    Recipe,
    batches,
    forward_backward,
    gpt,
    train,
    wrap,
)
from tests.megatron.test_path_matrix import column_input
from tests.megatron.workers import Workers

OVERLAPPED = Recipe(LLAMA, overlap=OverlapConfig())
FC1, FC2 = "decoder.layers.0.mlp.linear_fc1", "decoder.layers.0.mlp.linear_fc2"


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


def tokens(sequence: int = SEQUENCE) -> tuple[torch.Tensor, torch.Tensor, None]:
    return torch.zeros(BATCH, sequence, dtype=torch.long), torch.arange(sequence).expand(BATCH, -1), None


def loss(model: torch.nn.Module, sequence: int = SEQUENCE) -> torch.Tensor:
    return model(*tokens(sequence)).square().mean()


def steps() -> list[str]:
    """What is printed by validation, then by two steps of two micro-batches, then when somebody asks for the table."""
    recipe = replace(OVERLAPPED, architecture={**LLAMA, "num_layers": 4}, overlap=OverlapConfig(method="collective"))
    model = wrap(recipe, gpt(recipe))

    def validate() -> None:
        with torch.no_grad():
            model.eval()(*tokens())
        model.train()

    def step() -> None:
        model.zero_grad_buffer()
        forward_backward(recipe, model, batches())

    return [printed(action) for action in (validate, step, step, lambda: print_table(model))]


def test_rank_zero_prints_one_table_in_the_first_training_step(workers: Workers) -> None:
    (before, table, *after), others = workers.call(steps)
    assert [before, *after] == [""] * 3 and others == [""] * 4
    summary, heading, rule, *rows, last_rule, row_linears, column_linears = table.splitlines()
    assert summary == "overlap_train: 17 of 17 linears run our operators, 17 of them not overlapped (collective)"
    assert heading.split() == ["linear", "method", "calls", "reason"]
    assert set(rule) == {"-"} and rule == last_rule and len(rule) == max(map(len, rows)) <= 120
    names = [f"decoder.layers.0-3.{name}" for name in ("self_attention.linear_proj", "self_attention.linear_qkv")]
    names += ["decoder.layers.0-3.mlp.linear_fc1", "decoder.layers.0-3.mlp.linear_fc2", "output_layer"]
    calls = ["collective", "not overlapped 1, evaluation mode 1", "asked for"]
    assert [cells(line) for line in rows] == [[name, *calls] for name in names]
    assert row_linears == "proj, fc2: fprop GEMM + RS; dgrad AG(dy) + GEMM; wgrad GEMM with the gathered dy"
    assert column_linears == (
        "qkv, fc1, output: fprop AG(x) + GEMM; dgrad GEMM + RS; wgrad AG(x) under dgrad, then GEMM"
    )


def test_linears_of_the_method_collective_are_counted_apart() -> None:
    rows = [LinearReport("fc1", "fc1", "F", "D", "W", "collective", "", 3, (("evaluation mode", 1),))]
    assert rows[0].calls == "not overlapped 3, evaluation mode 1"
    for method in ("fused", "collective / chunked", "in turn", "megatron"):
        rows.append(replace(rows[0], method=method))
        assert rows[-1].calls == "overlapped 3, evaluation mode 1", method
    rows.append(LinearReport("fc2", "fc2", "-", "-", "-", "megatron", ""))
    summary = first_table.heading(Report(tuple(rows)))
    assert summary == "overlap_train: 5 of 6 linears run our operators, 1 of them not overlapped (collective)"


def first_step() -> str:
    model = gpt(replace(OVERLAPPED, architecture={**LLAMA, "num_layers": 4}))
    return printed(lambda: loss(model).backward())


def test_the_pages_show_what_is_printed(workers: Workers) -> None:
    table, _ = workers.call(first_step)
    for page in ("README.md", "docs/quick-start.md"):
        assert f"```\n{table}```" in (Path(__file__).parents[2] / page).read_text(), page


def recomputed() -> str:
    """Full recomputation: the first forward has no gradient, the second runs inside backward."""
    changes = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    model = gpt(replace(OVERLAPPED, architecture={**LLAMA, **changes}))
    return printed(lambda: loss(model).backward())


def partly_frozen() -> str:
    """The first layer takes no gradient at all, and the output layer's weight is frozen."""
    model = gpt(OVERLAPPED)
    for part in (model.embedding, model.decoder.layers[0], model.output_layer):
        part.requires_grad_(False)
    return printed(lambda: loss(model).backward())


def pipelined() -> str:
    """Three forwards before the first backward."""
    model = gpt(OVERLAPPED)
    losses = [loss(model) for _ in range(3)]
    table = printed(lambda: [value.backward() for value in losses])
    assert all(linear.overlap.on_gradient is None for linear in overlapped_linears(model)), "later calls cost nothing"
    return table


def one_kind(slots: tuple[str, ...], frozen: bool) -> str:
    """Column linears only, or row linears only, which all overlap or all fall back."""
    model = gpt(replace(OVERLAPPED, overlap=OverlapConfig(slots=slots)))
    for linear in overlapped_linears(model):
        linear.requires_grad_(not frozen)
    return printed(lambda: loss(model).backward())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("slots", [("qkv", "fc1", "output"), ("proj", "fc2")], ids=["column", "row"])
def test_every_kind_of_linear_leads_to_the_table(workers: Workers, slots: tuple[str, ...], frozen: bool) -> None:
    table, nothing = workers.call(one_kind, slots, frozen)
    summary, heading, _ = table.split("\n", 2)
    counted = re.fullmatch(r"overlap_train: (\d+) of (\d+) linears run our operators", summary)
    assert nothing == "" and table.count("\nlinear ") == 1 and heading.startswith("linear ") and counted is not None
    assert (counted[1] == "0") is frozen and counted[1] in ("0", str(len(slots) * 2 - ("output" in slots)))
    assert table.count("frozen weight 1" if frozen else "overlapped 1") == len(slots)


@pytest.mark.parametrize(
    ("case", "layers", "calls"),
    [
        (recomputed, {"0-1": "chunked"}, {"overlapped 1", "overlapped 2"}),
        (partly_frozen, {"0": "megatron", "1": "chunked"}, {"frozen weight 1", "overlapped 1"}),
        (pipelined, {"0-1": "chunked"}, {"overlapped 3"}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_one_table_however_the_step_runs(
    workers: Workers, case: Callable[[], str], layers: dict[str, str], calls: set[str]
) -> None:
    table, nothing = workers.call(case)
    assert nothing == "" and table.count("linear ") == 1
    rows = rows_of(table)
    methods = {row[0].split(".")[2]: row[1] for row in rows if row[0].endswith("linear_fc1")}
    assert methods == layers
    assert {row[2] for row in rows} <= calls and len({row[0] for row in rows}) == len(rows)


def never_trained() -> list[str]:
    """Evaluation only: no gradient arrives, and the launcher asks for the table at the end."""
    model = gpt(OVERLAPPED).eval()
    return [
        printed(action) for action in (lambda: model(*tokens()), lambda: print_table(model), lambda: print_table(model))
    ]


def test_a_run_without_training_prints_it_when_asked(workers: Workers) -> None:
    (silent, table, again), others = workers.call(never_trained)
    assert [silent, again] == [""] * 2 and others == [""] * 3
    assert [row[1:] for row in rows_of(table)] == [["megatron", "evaluation mode 1", "evaluation mode"]] * 5
    assert "fprop" not in table


@pytest.mark.parametrize(
    ("rank", "tensor_rank", "replica", "stages", "heading"),
    [
        (0, 0, 0, 1, "overlap_train: "),
        (1, 1, 0, 1, None),
        (0, 0, 0, 2, "overlap_train: pipeline stage 0 of 2, layers counted within it: "),
        (4, 0, 0, 2, "overlap_train: pipeline stage 1 of 2, layers counted within it: "),
        (5, 1, 0, 2, None),
        (6, 0, 1, 2, None),
    ],
)
def test_the_first_rank_of_each_stage_prints(
    monkeypatch: pytest.MonkeyPatch, rank: int, tensor_rank: int, replica: int, stages: int, heading: str | None
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
    answers = {
        "model_parallel_is_initialized": True,
        "get_pipeline_model_parallel_world_size": stages,
        "get_pipeline_model_parallel_rank": rank // 4,
        "get_tensor_model_parallel_rank": tensor_rank,
        "get_data_parallel_rank": replica,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(first_table.parallel_state, name, lambda answer=answer, **kwargs: answer)
    text = printed(first_table.FirstTable(torch.nn.Identity()))
    assert text == ("" if heading is None else f"{heading}0 of 0 linears run our operators\n{Report(())}\n")


def counted() -> str:
    _, model = train(replace(OVERLAPPED, microbatches=1), steps=3)
    model.eval()(*tokens())
    return str(report(model))


def test_calls_are_counted_in_the_table(workers: Workers) -> None:
    for table in workers.call(counted):
        assert {row[2] for row in rows_of(table)} == {"overlapped 3, evaluation mode 1"}


def never_overlapped() -> list[LinearReport]:
    model = gpt(OVERLAPPED)
    x = torch.zeros(SEQUENCE // 2, BATCH, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.output_layer(x)
    for _ in range(3):
        model.output_layer.eval()(x)
    return [linear for linear in report(model).linears if linear.slot == "output"]


def test_a_linear_whose_calls_all_fell_back_is_megatrons_with_its_counts(workers: Workers) -> None:
    cast, evaluated = "autocast to torch.bfloat16 of torch.float32 tensors", "evaluation mode"
    for (row,) in workers.call(never_overlapped):
        assert (row.fprop, row.dgrad, row.wgrad, row.method, row.reason) == ("-", "-", "-", "megatron", evaluated)
        assert row.overlapped_calls == 0 and row.fallback_calls == ((cast, 1), (evaluated, 3))
        assert row.calls == f"{cast} 1, {evaluated} 3"


def tuned(folder: str) -> dict[str, tuple[str, str]]:
    """Method and reason of fc1 before its first call, after calls of two lengths, and in a second model of the same names."""
    shutdown()  # the domain of other tests has read another folder
    recipe = replace(OVERLAPPED, overlap=OverlapConfig(tuning_dir=folder), microbatches=1)
    bare, second = gpt(recipe), gpt(recipe)
    n, k = bare.get_submodule(FC1).weight.shape
    short, long = (Pass("gather", sequence * BATCH, n, k, torch.float32, 2) for sequence in (SEQUENCE // 4, SEQUENCE))
    scatter = Pass("scatter", SEQUENCE * BATCH, *bare.get_submodule(FC2).weight.shape, torch.float32, 2)
    if torch.distributed.get_rank() == 0:
        winners = [Winner(short, Method("collective"), {}), Winner(short.dgrad, Method("collective"), {})]
        winners += [
            Winner(long, Method("chunked"), {}),
            Winner(long.dgrad, Method("collective"), {}),
            Winner(scatter, Method("chunked"), {}),
        ]
        save(folder, key_of(torch.device("cpu"), 2), winners)
    torch.distributed.barrier()

    def row(model: torch.nn.Module, name: str = FC1) -> tuple[str, str]:
        return next((x.method, x.reason) for x in report(model).linears if x.name == name)

    rows = {"before": row(bare)}
    for name, model, sequence in (("short", bare, SEQUENCE // 4), ("other", second, SEQUENCE), ("same", bare, None)):
        if sequence is not None:
            loss(model, sequence)
        rows[name] = row(model)
    loss(bare)
    rows["long"], rows["row linear"] = row(bare), row(bare, FC2)
    rows["trained"] = row(train(recipe, steps=1)[1])
    shutdown()
    rows["freed"] = row(bare)
    return rows


def test_each_linear_says_how_its_last_call_ran_and_what_was_measured(workers: Workers, tmp_path: Path) -> None:
    for rows in workers.call(tuned, str(tmp_path)):
        assert rows["before"] == ("-", "not called yet")
        for name in ("short", "same"):
            method, reason = rows[name]
            assert method == "collective" and "M=8 " in reason and "M=32 " not in reason
        for name in ("other", "long", "trained"):
            method, reason = rows[name]
            assert method == "chunked / collective"
            assert reason.startswith("auto: tuned for M=32 ") and " / M=32 " in reason
        assert rows["row linear"][1].startswith("auto: tuned for M=32 ")
        assert rows["freed"] == ("-", "symmetric memory has been freed (overlap_train.shutdown)")


def in_turn(folder: str) -> dict[str, tuple[str, str]]:
    """Method and reason of fc1 in models that share a trial: of `eager` while methods take turns, of `graph` as if a CUDA graph
    had captured it meanwhile, and after calls of `eager` have ended the trial."""
    shutdown()
    recipe = replace(OVERLAPPED, overlap=OverlapConfig(tuning_dir=folder, tune_steps=10), microbatches=1)
    models = {name: gpt(recipe) for name in ("eager", "once", "graph")}

    def step(name: str, calls: int = 1) -> None:
        for _ in range(calls):
            loss(models[name]).backward()

    def row(name: str) -> tuple[str, str]:
        return next((x.method, x.reason) for x in report(models[name]).linears if x.name == FC1)

    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step("eager")
        rows = {"first": row("eager")}
        step("eager", 8)
        step("once")
        rows["trying"] = row("eager")
        (domain,) = {made_domain(linear.tp_group) for linear in overlapped_linears(models["graph"])}
        with mock.patch.multiple(domain, is_capturing=lambda: True, graphed=True):
            step("graph")
        rows["captured"] = row("graph")
        # Of five methods, which there are where the interpreter runs kernels, the trial ends before the 17th.
        step("eager", 8)
        rows |= {f"{name} after": row(name) for name in models}
    shutdown()
    return rows


def test_a_linear_whose_methods_take_turns_says_so(workers: Workers, tmp_path: Path) -> None:
    for rows in workers.call(in_turn, str(tmp_path)):
        for name in ("first", "trying"):
            method, reason = rows[name]
            assert method == "in turn" and reason.startswith("auto: tries ") and "chunked" in reason
            assert reason.endswith(", until a linear has made 10 calls (tune_steps)")
        assert rows["eager after"][0] != "in turn" and rows["eager after"][1].startswith("auto: tuned for M=32 ")
        assert "trial that has ended" in rows["once after"][1], "it has not been called since"


def test_a_linear_in_a_graph_says_what_the_graph_runs_also_after_others_have_ended_its_trial(
    workers: Workers, tmp_path: Path
) -> None:
    """A graph keeps the untuned plan."""
    for rows in workers.call(in_turn, str(tmp_path)):
        assert rows["captured"] == ("chunked", "auto: not tuned: CPU tensors") == rows["graph after"]


def test_what_two_reasons_have_in_common_is_said_once() -> None:
    both = reporting._both
    assert both("asked for", "asked for") == "asked for"
    assert (
        both("auto: not tuned: a long GEMM", "auto: not tuned: a short GEMM")
        == "auto: not tuned: a long GEMM / a short GEMM"
    )
    assert both("auto: tuned for A", "auto: not tuned: B") == "auto: tuned for A / not tuned: B"
    assert both("auto: tuned for A; whole blocks", "auto: tuned for B") == "auto: tuned for A; whole blocks / B"
    assert both("asked for", "asked for; more") == "asked for / asked for; more"


def test_a_long_reason_goes_on_in_the_next_line() -> None:
    reason = " ".join(f"all-to-all-{number:06}" for number in range(20))
    linear = LinearReport("output_layer", "output", "-", "-", "-", "megatron", reason, overlapped_calls=8)
    for name, width in (("lm_head", 120), ("x" * 100, 100 + len("  megatron  overlapped 8  ") + 40)):
        _, _, row, *more, last = str(Report((linear, replace(linear, name=name, reason="")))).splitlines()
        lines = [cells(row)[3], *map(str.strip, more)]
        assert " ".join(lines) == reason and max(map(len, (row, *more))) <= width
        assert {line.index("all-to-all") for line in (row, *more)} == {row.index("all-to-all")}
        assert all(len(line) + len(" all-to-all-000000") > width for line in (row, *more[:-1])), "as many as fit"
        assert cells(last) == [name, "megatron", "overlapped 8"] and last == last.rstrip()


def test_passes_are_said_once_and_of_each_linear_where_a_slot_has_several() -> None:
    def row(name: str, slot: str | None, fprop: str) -> LinearReport:
        return LinearReport(name, slot, fprop, "D", "-" if fprop == "-" else "W", "fused", "")

    same = row("layers.0.qkv", "qkv", "F"), row("layers.1.fc1", "fc1", "F"), row("layers.0.fc1", "fc1", "-")
    rule, *passes = str(Report((*same, row("experts", None, "-")))).splitlines()[-2:]
    assert set(rule) == {"-"} and passes == ["qkv, fc1: fprop F; dgrad D; wgrad W"]
    *_, first, second = str(Report((*same, row("layers.2.qkv", "qkv", "G")))).splitlines()
    assert first == "layers.0.qkv, fc1: fprop F; dgrad D; wgrad W"
    assert second == "layers.2.qkv: fprop G; dgrad D; wgrad W"


def tied_fallback(zero_out: bool) -> None:
    """The output layer uses the embedding's weight: a call that falls back adds to that weight's main_grad."""
    pair = column_pair(bias=False, skip_weight_param_allocation=True)
    results = []
    for linear in (pair.own.eval(), pair.overlapped.eval()):
        weight = torch.nn.Parameter(torch.arange(10 * 12).reshape(10, 12) % 5 - 2.0)
        if linear is pair.overlapped:
            weight.main_grad, weight.grad_added_to_main_grad = torch.full_like(weight, 5.0), False
            weight.zero_out_wgrad = zero_out
        torch.use_deterministic_algorithms(True)  # fills with NaN what is left uninitialised
        results.append((run(linear, column_input(), weight=weight)["y"], weight))
        torch.use_deterministic_algorithms(False)
    (expected, own), (y, shared) = results
    assert torch.equal(y, expected)
    assert shared.grad_added_to_main_grad and torch.equal(shared.main_grad, own.grad + 5.0)
    assert not zero_out or not shared.grad.any(), "DDP adds weight.grad of a tied weight in spite of the mark"
    assert pair.counts == (0, {"evaluation mode": 1})


@pytest.mark.parametrize("zero_out", [False, True])
def test_a_tied_weight_falls_back(workers: Workers, zero_out: bool) -> None:
    workers.call(tied_fallback, zero_out)
