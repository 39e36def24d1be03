"""enable() and report(): what is turned, what is left alone and why, what is refused, and what is printed."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from overlap_train import OverlapConfig, shutdown
from overlap_train.integrations.megatron import (
    OverlappedColumnParallelLinear,
    OverlappedRowParallelLinear,
    enable,
    report,
)
from overlap_train.integrations.megatron.reporting import LinearReport, Report
from overlap_train.tuned.passes import Pass
from overlap_train.tuned.table import Winner, key_of, save
from tests.megatron.linears import model_config
from tests.megatron.models import BATCH, LLAMA, SEQUENCE, Recipe, gpt, quietly_enable, train, wrap
from tests.megatron.test_spec import MIXTURE
from tests.megatron.workers import Workers

PLAIN = Recipe(LLAMA)


def in_place() -> None:
    model = gpt(PLAIN)
    before = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    quietly_enable(model, OverlapConfig())
    assert dict(model.named_modules()) == before, "the same module objects"
    assert all(p is parameters[name] for name, p in model.named_parameters()), "the same parameter objects"
    turned = {name: type(m) for name, m in before.items() if hasattr(m, "overlap")}
    layer = {
        "self_attention.linear_qkv": OverlappedColumnParallelLinear,
        "self_attention.linear_proj": OverlappedRowParallelLinear,
        "mlp.linear_fc1": OverlappedColumnParallelLinear,
        "mlp.linear_fc2": OverlappedRowParallelLinear,
    }
    expected = {f"decoder.layers.{k}.{name}": kind for k in range(2) for name, kind in layer.items()}
    assert turned == {**expected, "output_layer": OverlappedColumnParallelLinear}


def test_turns_the_models_own_linears(workers: Workers) -> None:
    workers.call(in_place)


def marks() -> None:
    """Megatron-FSDP looks at these two; SharedExpertMLP and GPTModel must not find these other two."""
    model = gpt(replace(PLAIN, overlap=OverlapConfig()))
    for name, module in model.named_modules():
        if hasattr(module, "overlap"):
            dim = 1 if name.endswith(("proj", "fc2")) else 0
            assert (module.tensor_model_parallel, module.partition_dim) == (True, dim)
            assert not hasattr(module, "parallel_mode")
            assert not hasattr(module, "finish_init")


def test_attributes_that_megatron_looks_at(workers: Workers) -> None:
    workers.call(marks)


def idempotent() -> None:
    model = gpt(PLAIN)
    first = quietly_enable(model, OverlapConfig())
    states = [module.overlap for module in model.modules() if hasattr(module, "overlap")]
    assert quietly_enable(model, OverlapConfig()) == first
    again = [module.overlap for module in model.modules() if hasattr(module, "overlap")]
    assert all(a is b for a, b in zip(states, again, strict=True))
    with pytest.raises(ValueError, match=r"method='collective'.*overlaps already"):
        enable(model, OverlapConfig(method="collective"))


def test_second_call_changes_nothing(workers: Workers) -> None:
    workers.call(idempotent)


def some_slots() -> None:
    model = gpt(PLAIN)
    quietly_enable(model, OverlapConfig(slots=("qkv", "output")))
    linears = {linear.name: linear for linear in report(model).linears}
    assert linears["decoder.layers.0.self_attention.linear_qkv"].method == "chunked"
    assert linears["output_layer"].method == "chunked"
    left = linears["decoder.layers.0.mlp.linear_fc1"]
    assert (left.method, left.reason, left.fprop) == ("megatron", "not enabled", "-")
    assert type(model.decoder.layers[0].mlp.linear_fc1) is ColumnParallelLinear


def test_only_the_slots_asked_for(workers: Workers) -> None:
    workers.call(some_slots)


def virtual_pipeline() -> None:
    chunks = [gpt(PLAIN), gpt(PLAIN)]
    with contextlib.redirect_stdout(io.StringIO()):
        names = [linear.name for linear in enable(chunks, OverlapConfig()).linears]
    assert "chunk0.decoder.layers.0.mlp.linear_fc1" in names
    assert "chunk1.output_layer" in names
    assert len(names) == 2 * (2 * 4 + 1)


def test_chunks_of_a_virtual_pipeline(workers: Workers) -> None:
    workers.call(virtual_pipeline)


def pipeline_stage() -> None:
    """The first of two stages has no output layer, and that is no mistake."""
    stage = gpt(PLAIN)
    del stage.output_layer
    with pytest.raises(ValueError, match="'output'"):
        enable(stage, OverlapConfig())
    stage.config.pipeline_model_parallel_size = 2
    quietly_enable(stage, OverlapConfig())
    assert type(stage.decoder.layers[0].mlp.linear_fc1) is OverlappedColumnParallelLinear


def test_first_pipeline_stage_needs_no_output_layer(workers: Workers) -> None:
    workers.call(pipeline_stage)


def mixture() -> None:
    model = gpt(Recipe({**LLAMA, **MIXTURE}))
    quietly_enable(model, OverlapConfig())
    experts = [linear for linear in report(model).linears if "expert" in linear.name]
    assert len(experts) == 2 * 2
    assert all(x.method == "megatron" and x.reason.startswith("expert") for x in experts)
    assert not any(hasattr(module, "overlap") for module in model.decoder.layers[1].mlp.modules())
    dense = [linear for linear in report(model).linears if "expert" not in linear.name]
    assert all(linear.method == "chunked" for linear in dense)


def test_experts_are_left_alone(workers: Workers) -> None:
    workers.call(mixture)


class SomebodysLinear(RowParallelLinear):
    """A class that Megatron does not know; enable() must not overrule it."""


def other_classes() -> None:
    model = gpt(PLAIN)
    model.decoder.layers[0].mlp.linear_fc2.__class__ = SomebodysLinear
    quietly_enable(model, OverlapConfig())
    left = next(x for x in report(model).linears if x.name == "decoder.layers.0.mlp.linear_fc2")
    assert left.reason == "SomebodysLinear is not a linear of Megatron-Core's local layer spec"
    for layer in model.decoder.layers:
        layer.mlp.linear_fc2.__class__ = SomebodysLinear
    with pytest.raises(ValueError, match=r"'fc2'.*only SomebodysLinear there.*leave the slot out"):
        enable(model, OverlapConfig())


def test_subclasses_are_left_alone(workers: Workers) -> None:
    workers.call(other_classes)


REFUSED = {
    "tensor_model_parallel_size": (1, "one rank"),
    "sequence_parallel": (False, "all-gather and reduce-scatter"),
    "tp_comm_overlap": (True, "exclude each other"),
    "transformer_impl": ("inference_optimized", "for training"),
    "fp8": ("e4m3", "TransformerEngine"),
    "cpu_offloading": (True, "stays on the GPU"),
}


def refused(field: str, fallback: bool) -> None:
    model = gpt(PLAIN)
    value, rule = REFUSED[field]
    setattr(model.config, field, value)
    if not fallback:
        with pytest.raises(ValueError, match=rf"{field}={value!r}.*{rule}.*set it to .*on_unsupported='fallback'"):
            enable(model, OverlapConfig())
    else:
        printed = quietly_enable(model, OverlapConfig(on_unsupported="fallback"))
        assert torch.distributed.get_rank() or f"{field}={value!r}" in printed, "never a silent switch-off"
        assert all(x.method == "megatron" for x in report(model).linears)
    assert not any(hasattr(module, "overlap") for module in model.modules())


@pytest.mark.parametrize("fallback", [False, True], ids=["error", "fallback"])
@pytest.mark.parametrize("field", REFUSED)
def test_settings_that_rule_out_overlap(workers: Workers, field: str, fallback: bool) -> None:
    workers.call(refused, field, fallback)


def wrapped() -> None:
    model = wrap(PLAIN, gpt(PLAIN))
    for late in (model, model.module):
        with pytest.raises(ValueError, match=r"wrapped in DistributedDataParallel.*on the bare model"):
            enable(late, OverlapConfig())
    quietly_enable(model, OverlapConfig(on_unsupported="fallback"))
    assert not any(hasattr(module, "overlap") for module in model.modules())
    with pytest.raises(ValueError, match="no model chunk"):
        enable([], OverlapConfig())


def test_after_data_parallelism(workers: Workers) -> None:
    workers.call(wrapped)


def missing_slot() -> None:
    """With fallback, a missing slot leaves the others overlapped and is reported."""
    model = gpt(PLAIN)
    del model.output_layer
    printed = quietly_enable(model, OverlapConfig(on_unsupported="fallback"))
    assert torch.distributed.get_rank() or "'output'" in printed
    assert all(linear.method == "chunked" for linear in report(model).linears)


def test_missing_slot_with_fallback(workers: Workers) -> None:
    workers.call(missing_slot)


def no_linears() -> None:
    with pytest.raises(ValueError, match=r"slots=.*no ColumnParallelLinear or RowParallelLinear.*'qkv'.*none there"):
        enable(torch.nn.Linear(2, 2), OverlapConfig())


def test_a_model_without_parallel_linears(workers: Workers) -> None:
    workers.call(no_linears)


def printed_table() -> str:
    return quietly_enable(gpt(Recipe({**LLAMA, "num_layers": 4})), OverlapConfig(method="collective"))


def test_rank_zero_prints_one_table(workers: Workers) -> None:
    table, nothing = workers.call(printed_table)
    assert nothing == ""
    header, rule, *rows = table.splitlines()
    assert header.split() == ["linear", "fprop", "dgrad", "wgrad", "method", "reason"]
    assert set(rule) == {"-"}
    column = ["AG(x) + GEMM", "GEMM + RS", "AG(x) under dgrad, then GEMM", "collective", "asked for"]
    row = ["GEMM + RS", "AG(dy) + GEMM", "GEMM with the gathered dy", "collective", "asked for"]
    assert {cells(line)[0]: cells(line)[1:] for line in rows} == {
        "decoder.layers.0-3.self_attention.linear_qkv": column,
        "decoder.layers.0-3.self_attention.linear_proj": row,
        "decoder.layers.0-3.mlp.linear_fc1": column,
        "decoder.layers.0-3.mlp.linear_fc2": row,
        "output_layer": column,
    }


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def counts_in_the_table() -> str:
    _, model = train(replace(PLAIN, overlap=OverlapConfig(), microbatches=1), steps=3)
    model.eval()
    model(torch.zeros(2, 16, dtype=torch.long), torch.arange(16).expand(2, -1), None)
    return str(report(model))


def test_calls_are_counted_in_the_table(workers: Workers) -> None:
    for table in workers.call(counts_in_the_table):
        assert table.splitlines()[0].split()[-1] == "calls"
        assert all(cells(line)[-1] == "overlapped 3, evaluation mode 1" for line in table.splitlines()[2:])


def test_like_linears_share_a_row() -> None:
    def linear(layer: int, reason: str) -> LinearReport:
        return LinearReport(f"decoder.layers.{layer}.mlp.linear_fc1", "fc1", "-", "-", "-", "megatron", reason)

    lines = str(Report(tuple(linear(k, "frozen weight" if k == 3 else "expert") for k in (0, 1, 2, 3, 5)))).splitlines()
    assert [line.split()[0] for line in lines[2:]] == [
        "decoder.layers.0-2,5.mlp.linear_fc1",
        "decoder.layers.3.mlp.linear_fc1",
    ]


FC1 = "decoder.layers.0.mlp.linear_fc1"


def tuned(folder: str) -> list[tuple[str, str]]:
    """Method and reason of an fc1 with a measurement of each pass, before its first call and after, and a product's sizes."""
    shutdown()  # the domain of other tests has read another folder
    n, k = gpt(PLAIN).get_submodule(FC1).weight.shape
    fprop = Pass("gather", SEQUENCE * BATCH, n, k, torch.float32, 2)
    if torch.distributed.get_rank() == 0:
        # Beside it a larger M, which the report names while M is not known.
        winners = [Winner(fprop, "chunked", {}), Winner(fprop.dgrad, "collective", {})]
        winners += [Winner(replace(w.measured, m=64 * SEQUENCE), w.method, {}) for w in winners]
        save(folder, key_of(torch.device("cpu"), 2), winners)
    torch.distributed.barrier()
    recipe = replace(PLAIN, overlap=OverlapConfig(tuning_dir=folder), microbatches=1)
    bare = gpt(recipe)  # without data parallelism: its weight gradients are returned
    reports = [report(bare)]
    bare(torch.zeros(BATCH, SEQUENCE, dtype=torch.long), torch.arange(SEQUENCE).expand(BATCH, -1), None)
    reports += [report(bare), report(train(recipe, steps=1)[1])]
    shutdown()
    rows = [next(x for x in each.linears if x.name == FC1) for each in reports]
    return [*((row.method, row.reason) for row in rows), (f"N={n} K={k}", f"N={k} K={n}")]


def test_each_pass_says_how_it_runs_and_what_was_measured(workers: Workers, tmp_path: Path) -> None:
    for before, called, trained, (fprop, dgrad) in workers.call(tuned, str(tmp_path)):
        assert before[0] == called[0] == trained[0] == "chunked / collective"
        for m, (_, reason) in ((64 * SEQUENCE, before), (SEQUENCE * BATCH, called), (SEQUENCE * BATCH, trained)):
            assert reason == f"auto: tuned for M={m} {fprop} on cpu / auto: tuned for M={m} {dgrad} on cpu"


def kept_input() -> Any:
    model = gpt(PLAIN)
    quietly_enable(model, OverlapConfig(gathered_input="keep"))
    return {linear.slot: linear.wgrad for linear in report(model).linears}


def test_report_says_what_backward_does_about_the_input(workers: Workers) -> None:
    wgrad = workers.call(kept_input)[0]
    assert wgrad["qkv"] == wgrad["fc1"] == wgrad["output"] == "GEMM with x kept"
    assert wgrad["proj"] == wgrad["fc2"] == "GEMM with the gathered dy"


def test_config_helper_has_no_hidden_refusal() -> None:
    """The models of these tests really meet the conditions, so a refusal above is about the field it names."""
    config = model_config(**LLAMA)
    assert (config.tensor_model_parallel_size, config.sequence_parallel, config.tp_comm_overlap) == (2, True, False)
