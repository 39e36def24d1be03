"""Models with experts whose exchange overlaps, too: losses and gradients are those of Megatron's own exchange, in Megatron's ways
to train; what cannot overlap stays Megatron's, and the table says why."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_model import GPTModel

from overlap_train import OverlapConfig, shutdown
from overlap_train.integrations.megatron import gpt_block_spec, provide_accumulation_fusion, report
from overlap_train.integrations.megatron.experts import why_not_experts
from overlap_train.integrations.megatron.table import counters
from overlap_train.ops import grouped
from overlap_train.ops.experts import OVERFLOW
from tests.megatron import layout
from tests.megatron.linears import model_config
from tests.megatron.models import FULL_RECOMPUTE, LLAMA, Recipe, assembled, gpt, quietly_enable, train_experts
from tests.megatron.test_training import assert_close
from tests.megatron.workers import on_ranks

MIXTRAL = dict(
    LLAMA, num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=24, moe_token_dispatcher_type="alltoall",
    moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.01, expert_model_parallel_size=2,
    expert_tensor_parallel_size=1,
)  # fmt: skip
OURS = OverlapConfig(experts=True)
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "one expert a rank, top 1": dict(num_moe_experts=2, moe_router_topk=1, moe_router_pre_softmax=True),
    "shared experts": dict(moe_shared_expert_intermediate_size=16),
    "dropped tokens": dict(moe_expert_capacity_factor=0.6),
    "recomputed": dict(recompute_granularity="selective", recompute_modules=["moe"]),
    "recomputed layers": FULL_RECOMPUTE,
    "fused activation": dict(bias_activation_fusion=True),
    "no gated unit": dict(gated_linear_unit=False, activation_func=torch.nn.functional.gelu),
    "gradients in main_grad": dict(gradient_accumulation_fusion=True),
    "16 bits": dict(bf16=True, params_dtype=torch.bfloat16),
    "without tensor parallelism": dict(tensor_model_parallel_size=1, sequence_parallel=False),
}


def mixtral(overlap: OverlapConfig | None, **changes: Any) -> GPTModel:
    """The same weights at every call."""
    provide_accumulation_fusion()
    settings = {**MIXTRAL, **changes}
    layout.use(settings.get("tensor_model_parallel_size", 2), expert_parallel=settings["expert_model_parallel_size"])
    config = model_config(**settings)
    return assembled(config, gpt_block_spec(config), overlap)


train = partial(train_experts, microbatches=2, by_adam=False)
Trained = tuple[list[float], dict[str, torch.Tensor]]  # losses, gradients of the last step


def assert_alike(found: Trained, expected: Trained, is_half: bool = False) -> None:
    """is_half: parameters have 16 bits."""
    assert found[0] == pytest.approx(expected[0], rel=2e-3 if is_half else 1e-6)
    if not is_half:
        assert_close(found[1], expected[1])
        return
    for key, gradient in expected[1].items():
        assert (found[1][key] - gradient).norm() <= 0.03 * gradient.norm() + 1e-6, key


def prefer(model: GPTModel, shift: Callable[[], list[float]]) -> None:
    """Let routers add these numbers to the logits of experts."""
    for layer in model.decoder.layers:
        plain = layer.mlp.router.routing

        def routed(logits: torch.Tensor, *rest: Any, plain: Any = plain, **more: Any) -> Any:
            return plain(logits + torch.tensor(shift(), dtype=logits.dtype), *rest, **more)

        layer.mlp.router.routing = routed


def rows_of(model: GPTModel) -> list[Any]:
    return [row for row in report(model).linears if row.slot == "experts"]


@pytest.mark.parametrize("name", VARIANTS)
@on_ranks
def test_training_is_that_of_megatrons_exchange(name: str) -> None:
    changes = VARIANTS[name]
    expected = train(mixtral(None, **changes))
    model = mixtral(OURS, **changes)
    keys = [name for name, _ in model.named_parameters()]
    assert_alike(train(model), expected, is_half=changes.get("bf16", False))
    assert keys == [name for name, _ in mixtral(None, **changes).named_parameters()]
    rows = rows_of(model)
    calls = 4 * (2 if "recomputed" in name else 1)
    assert [row.method for row in rows] == ["chunked"] * 2 and {row.calls for row in rows} == {f"overlapped {calls}"}
    assert not [row for row in report(model).linears if "local_experts" in row.name]
    into = {layer.mlp.overlap.plan.config.main_grad for layer in model.decoder.layers}
    assert into == {"accumulate" if changes.get("gradient_accumulation_fusion") else "off"}
    assert counters(model)["overlap_train/experts/overlapped_calls"] == 2 * calls


@on_ranks
def test_a_layer_of_experts_can_be_enabled_alone() -> None:
    model = mixtral(None, tensor_model_parallel_size=1, sequence_parallel=False)
    quietly_enable(model.decoder.layers[0].mlp, OURS)
    assert [row.method for row in rows_of(model)] == ["-", "megatron"]


STAYS = {  # changes to the model -> what the error, or the table, says
    "expert-parallel size 1": dict(expert_model_parallel_size=1, expert_tensor_parallel_size=None),
    "moe_token_dispatcher_type='allgather'": dict(moe_token_dispatcher_type="allgather"),
    "moe_pad_expert_input_to_capacity=True": dict(
        moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True
    ),
    "add_bias_linear=True": dict(add_bias_linear=True),
    "moe_apply_probs_on_input=True": dict(
        moe_apply_probs_on_input=True, moe_router_topk=1, moe_router_pre_softmax=True
    ),
}


@pytest.mark.parametrize("what", STAYS)
@on_ranks
def test_what_cannot_overlap_is_an_error_or_stays_megatrons(what: str) -> None:
    with pytest.raises(ValueError, match="experts=True: " + re.escape(what)):
        mixtral(OURS, **STAYS[what])
    with pytest.raises(ValueError, match="experts=True: " + re.escape(what)):  # and not that nothing overlaps there
        mixtral(OURS, **dict(tensor_model_parallel_size=1, sequence_parallel=False) | STAYS[what])
    expected = train(mixtral(None, **STAYS[what]), steps=1)
    model = mixtral(OverlapConfig(experts=True, on_unsupported="fallback"), **STAYS[what])
    assert_alike(train(model, steps=1), expected)
    assert len(rows_of(model)) == 2
    assert all(row.method == "megatron" and row.reason.startswith(what) for row in rows_of(model))


@on_ranks
def test_experts_under_transformer_engines_op_fuser_stay_megatrons() -> None:
    """Beside them a part of the model that goes by other settings."""
    layer = mixtral(None).decoder.layers[0].mlp
    assert why_not_experts(layer) is None
    layer.config.use_transformer_engine_op_fuser = True
    assert str(why_not_experts(layer)).startswith("use_transformer_engine_op_fuser=True: ")


@pytest.mark.parametrize("of_weight", [False, True])
@on_ranks
def test_experts_whose_weights_are_sharded_again_stay_megatrons(of_weight: bool) -> None:
    model = mixtral(None)
    for layer in model.decoder.layers:
        linear = layer.mlp.experts.local_experts[0].linear_fc1
        (linear.weight if of_weight else linear).gtp_remat_size = 2
    with pytest.raises(ValueError, match="experts=True: generalized tensor parallelism shards the weights again"):
        quietly_enable(model, OURS)


@on_ranks
def test_who_forgets_to_ask_for_experts_hears_of_them() -> None:
    with pytest.raises(ValueError, match=r"tensor_model_parallel_size=1 .*experts=True, --overlap-train-experts"):
        mixtral(OverlapConfig(), tensor_model_parallel_size=1, sequence_parallel=False)


@on_ranks
def test_a_dense_model_has_no_experts() -> None:
    with pytest.raises(ValueError, match=r"the model has no MoELayer.*leave out --overlap-train-experts"):
        gpt(Recipe(LLAMA, overlap=OURS))


@on_ranks
def test_calls_that_fall_back_train_alike_and_are_counted() -> None:
    """Every other micro-batch, with Megatron's fusion of gradients."""
    fused = dict(gradient_accumulation_fusion=True)
    expected = train(mixtral(None, **fused))
    model = mixtral(OURS, **fused)
    layer, calls = model.decoder.layers[0].mlp, []
    plain = type(layer).preprocess

    def preprocess(self: Any, *arguments: Any) -> Any:
        calls.append(self)
        self.config.cpu_offloading = len(calls) // 2 % 2 == 0
        try:
            return plain(self, *arguments)
        finally:
            self.config.cpu_offloading = False

    with patch.object(type(layer), "preprocess", preprocess):
        assert_alike(train(model), expected)
    for row in rows_of(model):
        assert row.overlapped_calls == 2 and [count for _, count in row.fallback_calls] == [2], row
        assert row.fallback_calls[0][0].startswith("cpu_offloading=True")


@on_ranks
def test_more_rows_than_slots_hold_are_a_collective_and_counted() -> None:
    """The router sends all tokens of both ranks to the experts of the first."""
    shutdown()  # else slots are as large as those of the tests before
    results = []
    for overlap in (None, OverlapConfig(experts=True, experts_room=1.0)):
        model = mixtral(overlap)
        prefer(model, lambda: [9.0, 9.0, 0.0, 0.0])
        results.append(train(model))
    assert_alike(results[1], results[0])
    assert {row.fallback_calls for row in rows_of(model)} == {((OVERFLOW, 4),)}
    assert {(row.method, row.calls) for row in rows_of(model)} == {("collective", "not overlapped 4")}
    assert {row.method for row in rows_of(model)} == {"collective"}


@pytest.mark.parametrize("fused", [False, True])
@on_ranks
def test_weights_that_lie_apart_are_put_together_once_in_their_step(fused: bool) -> None:
    """Where many experts are one kernel. By when they change, as far as Megatron's fusion of gradients tells it, else in each
    micro-batch; forward and backward take the same."""
    changes = dict(num_moe_experts=16, bf16=True, params_dtype=torch.bfloat16, gradient_accumulation_fusion=fused)
    expected = train(mixtral(None, **changes))
    stacked, stack = list[int](), torch.stack

    def counted(tensors: Any, *rest: Any, **more: Any) -> torch.Tensor:
        stacked.extend([1] * (len(tensors) == 8 and tensors[0].dim() == 2))
        return stack(tensors, *rest, **more)

    with patch.object(grouped, "_has_kernel", lambda device: True), patch.object(torch, "stack", counted):
        assert_alike(train(mixtral(OURS, **changes)), expected, is_half=True)
    assert len(stacked) == 2 * 2 * 2 * (1 if fused else 2)
    assert expected[0][:2] != pytest.approx(expected[0][2:], rel=2e-3)


@on_ranks
def test_experts_are_in_fp8_where_blocks_divide_their_weights() -> None:
    """Near what they are without, and not the same; their weights' copies are those of the step."""
    sizes = dict(moe_ffn_hidden_size=128, hidden_size=128)
    losses, _ = train(mixtral(None, **sizes), steps=3)
    model = mixtral(OverlapConfig(experts=True, fp8="blockwise", slots=("output",)), **sizes)
    found, _ = train(model, steps=3)
    assert found == pytest.approx(losses, rel=2e-2) and found != pytest.approx(losses, rel=1e-6)
    assert losses[:2] != pytest.approx(losses[-2:], rel=2e-2)
    assert all(row.reason.endswith(" / fp8 blockwise") for row in rows_of(model))


def test_only_where_it_is_a_kernel_a_product_of_many_experts_is_one() -> None:
    for capability, has_kernel in (((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True)):
        with patch.object(torch.cuda, "get_device_capability", lambda device, found=capability: found):
            assert grouped._has_kernel(torch.device("cuda")) is has_kernel


@on_ranks
def test_the_table_goes_by_calls_that_overlap() -> None:
    """A skewed step at the end does not make a collective of a row; what it is is counted."""
    shutdown()
    model, skewed = mixtral(OverlapConfig(experts=True, experts_room=1.5, fp8="tensorwise")), []

    def shift() -> list[float]:
        skewed.append(len(skewed) >= 4)
        return [9.0, 9.0, 0.0, 0.0] if skewed[-1] else [9.0, 0.0, 9.0, 0.0]

    prefer(model, shift)
    train(model)
    assert {row.method for row in rows_of(model)} == {"chunked"} and sum(skewed) == 4
    assert {row.calls for row in rows_of(model)} == {f"overlapped 2, {OVERFLOW} 2"}
    assert all(row.reason.endswith(" / not in fp8: experts") for row in rows_of(model))
    assert "collective overlaps nothing" not in report(model).heading


class Adapter(torch.nn.Module):
    """y = W x + s sum(x), as wrappers of PEFT and Megatron-Bridge stand around W. within: what they call it."""

    def __init__(self, linear: Any, within: str) -> None:
        super().__init__()
        self._within, self.scale = within, torch.nn.Parameter(torch.ones(()))
        setattr(self, within, linear)

    def __getattr__(self, name: str) -> Any:
        if name == "weight" and self._within == "base_layer":  # PEFT's have it
            return self.base_layer.weight
        return super().__getattr__(name)

    def forward(self, x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        y, bias = getattr(self, self._within)(x, *rest)
        return y + self.scale * x.sum(-1, keepdim=True), bias


def _adapt(model: GPTModel, within: str) -> GPTModel:
    for layer in model.decoder.layers:
        for expert in layer.mlp.experts.local_experts:
            expert.linear_fc1 = Adapter(expert.linear_fc1, within)
    return model


@pytest.mark.parametrize("within", ["base_layer", "to_wrap"])
@on_ranks
def test_wrapped_linears_keep_megatrons_exchange(within: str) -> None:
    """Wrapped before enable(), and after it."""
    expected = train(_adapt(mixtral(None), within), steps=1)
    before = _adapt(mixtral(None), within)
    quietly_enable(before, OverlapConfig(experts=True, on_unsupported="fallback"))
    for model in (before, _adapt(mixtral(OURS), within)):
        assert_alike(train(model, steps=1), expected)
        assert {row.reason for row in rows_of(model)} == {"Adapter in the place of an expert's linear"}


@on_ranks
def test_quantized_linears_keep_megatrons_exchange() -> None:
    model = mixtral(OURS)
    for layer in model.decoder.layers:
        layer.mlp.experts.local_experts[1].linear_fc2.te_quant_params = object()
    train(model, steps=1)
    assert {row.reason for row in rows_of(model)} == {"quantized by TransformerEngine (te_quant_params)"}


@on_ranks
def test_the_hook_by_which_data_parallelism_gathers_parameters_runs() -> None:
    model, seen = mixtral(OURS), []

    class Buckets:
        def __contains__(self, parameter: Any) -> bool:
            seen.append(parameter)
            return False

    ddp = SimpleNamespace(use_forward_hook=True, param_to_bucket_group=Buckets())
    expert = model.decoder.layers[0].mlp.experts.local_experts[1]
    for linear in (expert.linear_fc1, expert.linear_fc2):
        linear.register_forward_pre_hook(DistributedDataParallel._make_forward_pre_hook(ddp))
    train(model, steps=1)
    assert [id(each) for each in seen] == [id(expert.linear_fc1.weight), id(expert.linear_fc2.weight)] * 2
    assert {row.calls for row in rows_of(model)} == {"overlapped 2"}


HOOKS = {
    "before": lambda module, seen: module.register_forward_pre_hook(lambda *_: seen.append(module)),
    "before, with kwargs": lambda module, seen: module.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(module), with_kwargs=True
    ),
    "behind": lambda module, seen: module.register_forward_hook(lambda *_: seen.append(module)),
    "before backward": lambda module, seen: module.register_full_backward_pre_hook(lambda *_: seen.append(module)),
    "behind backward": lambda module, seen: module.register_full_backward_hook(lambda *_: seen.append(module)),
}


@pytest.mark.parametrize("hook", HOOKS)
@on_ranks
def test_calls_of_experts_with_other_hooks_are_megatrons(hook: str) -> None:
    model, seen = mixtral(OURS), []
    expert = model.decoder.layers[0].mlp.experts.local_experts[1]
    HOOKS[hook](expert.linear_fc2, seen)
    train(model, steps=1)
    assert seen == [expert.linear_fc2] * 2
    assert rows_of(model)[0].reason == "a hook on RowParallelLinear of the experts"
    assert [row.calls for row in rows_of(model)] == ["fallback 2", "overlapped 2"]


@on_ranks
def test_the_table_has_a_line_for_the_experts() -> None:
    model = mixtral(OURS)
    train(model, steps=1)
    table = str(report(model))
    (line,) = [line for line in table.splitlines() if "mlp.experts" in line]
    assert line.split()[:4] == ["decoder.layers.0-1.mlp.experts", "chunked", "overlapped", "2"]
    assert "experts: fprop A2A(x) + GEMM, GEMM + A2A (EP 2); dgrad A2A(dy) + GEMM" in table


@on_ranks
def test_numbers_that_no_operator_takes_are_an_error_or_stay_megatrons() -> None:
    alone = dict(tensor_model_parallel_size=1, sequence_parallel=False)
    x = torch.randn(4, 2, 32, generator=torch.Generator().manual_seed(7)).double()
    expected, _ = mixtral(None, **alone).double().decoder.layers[0].mlp(x)
    with pytest.raises(ValueError, match=r"dtype torch\.float64"):
        mixtral(OURS, **alone).double().decoder.layers[0].mlp(x)
    model = mixtral(OverlapConfig(experts=True, on_unsupported="fallback"), **alone).double()
    found, _ = model.decoder.layers[0].mlp(x)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert rows_of(model)[0].fallback_calls == (("torch.float64 tensors", 1),)
