"""enable() and report(): what is turned, what is left alone and why, what is refused, and what is printed."""

from __future__ import annotations

import contextlib
import io
import warnings
from dataclasses import replace
from typing import Any
from unittest import mock

import megatron.core
import pytest
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from overlap_train import OverlapConfig
from overlap_train.config import SLOTS
from overlap_train.group.registry import made_domain
from overlap_train.integrations.megatron import (
    OverlappedColumnParallelLinear,
    OverlappedRowParallelLinear,
    enable,
    gpt_block_spec,
    report,
)
from overlap_train.integrations.megatron import ahead as under_test
from overlap_train.integrations.megatron.linears import overlapped_linears
from overlap_train.ops import rehearsal
from tests.megatron.linears import assert_same, column_pair, model_config, row_pair, run
from tests.megatron.models import LLAMA, Recipe, assembled, batches, forward_backward, gpt, quietly_enable, wrap
from tests.megatron.test_path_matrix import column_input, row_input
from tests.megatron.test_spec import MIXTURE
from tests.megatron.workers import on_ranks

PLAIN, OVERLAPPED = Recipe(LLAMA), Recipe(LLAMA, overlap=OverlapConfig())


@on_ranks
def test_turns_the_models_own_linears() -> None:
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
    for name, module in model.named_modules():  # Megatron-FSDP looks at these two; others must not find the other two
        if hasattr(module, "overlap"):
            dim = 1 if name.endswith(("proj", "fc2")) else 0
            assert (module.tensor_model_parallel, module.partition_dim) == (True, dim)
            assert not hasattr(module, "parallel_mode") and not hasattr(module, "finish_init")


@on_ranks
def test_second_call_changes_nothing() -> None:
    """A second call changes and prints nothing, also behind DDP; another config is an error, also with fallback."""
    model = gpt(PLAIN)
    assert bool(quietly_enable(model, OverlapConfig())) == (torch.distributed.get_rank() == 0)
    states, first = overlaps(model), report(model)
    for again in (model, wrap(PLAIN, model), model):
        assert quietly_enable(again, OverlapConfig(slots=SLOTS[::-1])) == ""
        assert report(again) == first
        assert all(a is b for a, b in zip(states, overlaps(again), strict=True))
        for other in (OverlapConfig(method="collective"), OverlapConfig(on_unsupported="fallback")):
            with pytest.raises(
                ValueError, match=r"config: (method|on_unsupported)=.*linear_proj overlaps already with"
            ):
                enable(again, other)


def overlaps(model: torch.nn.Module) -> list[Any]:
    return [module.overlap for module in model.modules() if hasattr(module, "overlap")]


@on_ranks
def test_second_call_takes_what_was_added() -> None:
    """A linear that came after the first enable() is overlapped by the second, unless DDP has come between them."""
    model = gpt(OVERLAPPED)
    new = model.output_layer = gpt(PLAIN).output_layer
    wrapped = wrap(PLAIN, model)
    with pytest.raises(ValueError, match="wrapped in DistributedDataParallel"):
        enable(wrapped, OverlapConfig())
    assert type(new) is ColumnParallelLinear
    model.output_layer = gpt(PLAIN).output_layer
    for parameter in model.parameters():
        parameter.__dict__.pop("main_grad", None)
    quietly_enable(model, OverlapConfig())
    assert type(model.output_layer) is OverlappedColumnParallelLinear


@on_ranks
def test_only_the_slots_asked_for_of_all_chunks_of_a_virtual_pipeline() -> None:
    chunks = [gpt(PLAIN), gpt(PLAIN)]
    line = quietly_enable(chunks, OverlapConfig(slots=("qkv", "output"), gathered_input="keep"))
    assert torch.distributed.get_rank() or line == (
        "overlap_train: 6 linears in 4 layers prepared; the table follows in the first step\n"
    )
    linears = {linear.name: linear for linear in report(chunks).linears}
    assert len(linears) == 2 * (2 * 4 + 1)
    for name in ("chunk0.decoder.layers.0.self_attention.linear_qkv", "chunk1.output_layer"):
        assert (linears[name].method, linears[name].reason) == ("-", "not called yet")
        assert linears[name].wgrad == "GEMM with x kept"
    left = linears["chunk0.decoder.layers.0.mlp.linear_fc1"]
    assert (left.method, left.reason, left.fprop) == ("megatron", "not enabled", "-")
    assert type(chunks[0].decoder.layers[0].mlp.linear_fc1) is ColumnParallelLinear


@on_ranks
def test_first_pipeline_stage_needs_no_output_layer() -> None:
    """The first of two stages has no output layer, and that is no mistake."""
    stage = gpt(PLAIN)
    del stage.output_layer
    named = OverlapConfig(slots=("fc1", "output"))
    with pytest.raises(ValueError, match="'output'"):
        enable(stage, named)
    stage.config.pipeline_model_parallel_size = 2
    quietly_enable(stage, named)
    assert type(stage.decoder.layers[0].mlp.linear_fc1) is OverlappedColumnParallelLinear


@on_ranks
def test_experts_are_left_alone() -> None:
    model = gpt(replace(OVERLAPPED, architecture={**LLAMA, **MIXTURE}))
    experts = [linear for linear in report(model).linears if "expert" in linear.name]
    assert len(experts) == 2 * 2
    assert all(x.method == "megatron" and x.reason.startswith("expert") for x in experts)
    assert not any(hasattr(module, "overlap") for module in model.decoder.layers[1].mlp.modules())
    dense = [linear for linear in report(model).linears if "expert" not in linear.name]
    assert all(linear.reason == "not called yet" for linear in dense)
    model = gpt(Recipe({**LLAMA, **MIXTURE, "moe_layer_freq": [1, 1]}))  # no dense linear is left for fc1
    with pytest.raises(
        ValueError, match=r"for 'fc1' \(only experts there\); leave out .* \(--overlap-train-slots qkv,output\)"
    ):
        enable(model, OverlapConfig(slots=("qkv", "fc1", "output")))
    assert overlaps(model) == []
    line = quietly_enable(model, OverlapConfig())
    assert torch.distributed.get_rank() or line.startswith("overlap_train: 5 linears in 2 layers prepared;")


class SomebodysLinear(RowParallelLinear):
    """A class that Megatron does not know; enable() must not overrule it."""


@on_ranks
def test_subclasses_are_left_alone() -> None:
    model = gpt(PLAIN)
    model.decoder.layers[0].mlp.linear_fc2.__class__ = SomebodysLinear
    quietly_enable(model, OverlapConfig())
    left = next(x for x in report(model).linears if x.name == "decoder.layers.0.mlp.linear_fc2")
    assert left.reason == "SomebodysLinear has no overlapped form"
    model = gpt(PLAIN)
    for layer in model.decoder.layers:
        layer.mlp.linear_fc2.__class__ = SomebodysLinear
    with pytest.raises(ValueError, match=r"'fc2'.*only SomebodysLinear there.*leave out"):
        enable(model, OverlapConfig(slots=("fc1", "fc2")))
    quietly_enable(model, OverlapConfig())
    assert len(overlaps(model)) == 7


@pytest.mark.parametrize("order", [("encoder", "decoder"), ("decoder", "encoder")])
@pytest.mark.parametrize("on_unsupported", ["error", "fallback"])
@on_ranks
def test_each_linear_goes_by_its_own_settings(order: tuple[str, str], on_unsupported: str) -> None:
    """Of two models in one, that of TransformerEngine's overlap keeps Megatron's linears."""
    config = model_config(tp_comm_overlap=True, **LLAMA)
    parts = {"encoder": assembled(config, gpt_block_spec(config)), "decoder": gpt(PLAIN)}
    both = torch.nn.ModuleDict({name: parts[name] for name in order})
    quietly_enable(both, OverlapConfig(on_unsupported=on_unsupported))
    assert (len(overlaps(parts["encoder"])), len(overlaps(parts["decoder"]))) == (0, 9)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        tokens = torch.arange(32).reshape(2, 16)
        sum(model(tokens, tokens % 16, None).sum() for model in parts.values()).backward()
    assert torch.distributed.get_rank() or printed.getvalue().startswith(
        "overlap_train: 9 of 18 linears run our operators; the other 9: tp_comm_overlap=True in the model's config: "
        "TransformerEngine's overlap and this one exclude each other\n"
    )


@on_ranks
def test_one_linear_alone() -> None:
    for make, x in ((column_pair, column_input()), (row_pair, row_input())):
        own = make().own
        expected = run(own, x)["y"]
        line = quietly_enable(own, OverlapConfig())
        assert torch.distributed.get_rank() or line.startswith("overlap_train: 1 linear prepared; ")
        torch.testing.assert_close(run(own, x)["y"], expected, rtol=0, atol=0)
        (row,) = report(own).linears
        assert (row.name, row.calls) == (type(own).__name__, "overlapped 1")


@on_ranks
def test_fp64_falls_back() -> None:
    for overlap in (OverlapConfig(on_unsupported="fallback"), OverlapConfig()):
        pair, x = column_pair(overlap), column_input().double()
        pair.own.double(), pair.overlapped.double()
        if overlap.on_unsupported == "error":
            with pytest.raises(ValueError, match=r"dtype torch\.float64"):
                pair.overlapped(x)
            continue
        assert_same(run(pair.own, x), run(pair.overlapped, x))
        assert pair.counts == (0, {"torch.float64 tensors": 1})


REFUSED = {
    "tensor_model_parallel_size": (1, "one rank.*2 or more"),
    "tp_comm_overlap": (True, "exclude each other.*False"),
    "transformer_impl": ("inference_optimized", "for training.*'local'"),
    "use_transformer_engine_op_fuser": (True, "without calling.*leave out --use-transformer-engine-op-fuser"),
    "fp8": ("e4m3", "TransformerEngine.*leave out --fp8-format"),
    "fp4": ("e2m1", "TransformerEngine.*leave out --fp4-format"),
    "cpu_offloading": (True, "stays on the GPU.*leave out --cpu-offloading-num-layers"),
    "fine_grained_activation_offloading": (True, "stays on the GPU.*leave out --fine-grained-activation-offloading"),
}


@on_ranks
def test_fp8_of_transformer_engine_needs_it() -> None:
    model = gpt(PLAIN)
    model.config.fp8, model.config.fp8_recipe = "hybrid", "tensorwise"
    with pytest.raises(ValueError, match=r"fp8='hybrid' in the.*only TransformerEngine's"):
        enable(model, OverlapConfig())


@on_ranks
def test_settings_that_rule_out_overlap() -> None:
    for field, (value, rule) in REFUSED.items():
        model = gpt(PLAIN)
        setattr(model.config, field, value)
        with pytest.raises(ValueError, match=rf"{field}={value!r} in the.*{rule}.*on_unsupported='fallback'"):
            enable(model, OverlapConfig())
        assert overlaps(model) == []
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            printed = quietly_enable(model, OverlapConfig(on_unsupported="fallback"))
        assert torch.distributed.get_rank() or [str(each.message) for each in warned] == printed.splitlines()[:1]
        assert torch.distributed.get_rank() or f"{field}={value!r}" in printed, "never a silent switch-off"
        assert "fallback" not in printed, "that is what was asked for"
        assert torch.distributed.get_rank() or printed.startswith(
            "overlap_train: 0 of 9 linears run our operators; the other"
        )
        assert all(x.method == "megatron" for x in report(model).linears)
        assert overlaps(model) == []


@on_ranks
def test_after_data_parallelism() -> None:
    model = wrap(PLAIN, gpt(PLAIN))
    for late in (model, model.module):
        with pytest.raises(ValueError, match=r"wrapped in DistributedDataParallel.*on the bare model"):
            enable(late, OverlapConfig())
    quietly_enable(model, OverlapConfig(on_unsupported="fallback"))
    assert not any(hasattr(module, "overlap") for module in model.modules())
    with pytest.raises(ValueError, match="no model chunk"):
        enable([], OverlapConfig())


@on_ranks
def test_missing_slot_with_fallback() -> None:
    """With fallback, a missing slot leaves the others overlapped and is reported."""
    model = gpt(PLAIN)
    del model.output_layer
    printed = quietly_enable(model, OverlapConfig(on_unsupported="fallback", slots=("fc1", "output")))
    assert torch.distributed.get_rank() or "'output'" in printed
    assert {x.reason for x in report(model).linears if x.slot == "fc1"} == {"not called yet"}


@on_ranks
def test_what_is_no_model_with_parallel_linears_or_no_config_is_refused() -> None:
    none = r"slots=.*no ColumnParallelLinear or RowParallelLinear.*'qkv', 'proj'.*'output'; build"
    with pytest.raises(ValueError, match=none):
        enable(torch.nn.Linear(2, 2), OverlapConfig())
    with pytest.raises(ValueError, match=r"config=\{'method': 'fused'\} must be an OverlapConfig, such as "):
        enable(torch.nn.Identity(), {"method": "fused"})  # type: ignore[arg-type]


@on_ranks
def test_a_version_that_nobody_has_tried_is_named_on_rank_zero() -> None:
    for version in ("0.2.0", "0.15.3", "0.16.1rc3", "0.19.2", "0.20.0.dev1+gabc", "0.21.0", "1.0.0"):
        is_tried = version.startswith(("0.16", "0.19", "0.20"))
        for overlaps_now in (True, False):
            model = gpt(PLAIN)
            model.config.cpu_offloading = not overlaps_now
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(megatron.core, "__version__", version)
                told = quietly_enable(model, OverlapConfig(on_unsupported="fallback"))
            says = f"\noverlap_train: Megatron-Core {version} was not tested" in told
            assert says == (torch.distributed.get_rank() == 0 and not is_tried)


@pytest.mark.parametrize("sequence_parallel", [True, False])
@on_ranks
def test_what_is_foreseen_at_the_first_call_is_what_all_linears_plan(sequence_parallel: bool) -> None:
    """Once, by the first linear that is called, as if its domain were one of GPUs."""
    recipe = replace(OVERLAPPED, architecture={**LLAMA, "sequence_parallel": sequence_parallel})
    model = gpt(recipe)
    asked, compiled, foresee = list[Any](), list[Any](), under_test.foresee

    def on_gpu(group: Any, rows: int, calls: Any, name: str) -> None:
        asked.append((name, calls := list(calls)))
        with mock.patch.object(made_domain(group), "on_gpu", True):
            foresee(group, rows, calls, name)

    with (
        mock.patch.object(under_test, "foresee", on_gpu),
        mock.patch.object(rehearsal, "compile_ahead", lambda domain, calls: compiled.append(list(calls))),
    ):
        forward_backward(recipe, wrap(recipe, model), batches())
    ((name, calls),), (ahead,) = asked, compiled
    assert name == "decoder.layers.0.self_attention.linear_qkv" and len(calls) == 2 * 4 + 1
    found = {w: plan for plan, (x, w, bias) in ahead}
    assert len(found) == 5 and all(x.requires_grad for _, (x, _, _) in ahead)
    for linear in overlapped_linears(model)[:4]:
        plan = linear.overlap.plan
        # Neither where a weight gradient goes nor the number of x's dimensions changes what is compiled.
        same = replace(found[linear.weight], config=plan.config, request=plan.request)
        assert repr(same) == repr(plan)  # passes are equal only to themselves
