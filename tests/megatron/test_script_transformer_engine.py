"""Models built from Megatron's TransformerEngine spec (over a stand-in for TE) train the same with overlap and without."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.megatron import te_stand_in
from tests.processes import run_ranks, values

RMS = dict(normalization="RMSNorm", gated_linear_unit=True, add_bias_linear=False)
ZERO_CENTERED = dict(normalization="LayerNorm", layernorm_zero_centered_gamma=True, add_bias_linear=True)
QKV_BIAS = dict(normalization="RMSNorm", add_bias_linear=False, add_qkv_bias=True)
DROPOUT = dict(hidden_dropout=0.0, attention_dropout=0.0)


ARCHITECTURES = {"rms": RMS, "zero-centered": ZERO_CENTERED, "qkv-bias": QKV_BIAS}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What `everything` found in each of two fresh processes: TransformerEngine must be there before Megatron is."""
    return values(run_ranks(2, everything, limit_s=250.0))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_training_with_overlap_is_training_without(ranks: list[dict[str, Any]], architecture: str):
    for facts in (rank[architecture] for rank in ranks):
        assert facts["overlapped"] == pytest.approx(facts["own"], rel=1e-5)
        assert facts["keys"] and facts["sharded keys"] and facts["parameters"]
        assert facts["methods"] == {"chunked"}
        assert facts["calls"] == {"overlapped 6"}
        assert facts["norm calls"] == 2 * 2 * 6  # layers, norms, microbatches of three steps
        assert facts["gradients"] < 1e-5


def test_a_second_enable_changes_nothing_and_evaluation_is_transformer_engines(ranks: list[dict[str, Any]]):
    for facts in (rank["evaluate"] for rank in ranks):
        assert facts["calls"] == {"overlapped 1, evaluation mode 1"}
        assert facts["same output"]


def test_the_weight_gradient_goes_into_main_grad_only_where_transformer_engine_adds_there_too(
    ranks: list[dict[str, Any]],
):
    for facts in (rank["main_grad"] for rank in ranks):
        assert facts == {"unfused": (False, True), "fused": (True, False), "same": True}


def test_calls_that_fall_back_do_as_overlapped_ones(ranks: list[dict[str, Any]]):
    for facts in (rank["mixed"] for rank in ranks):
        assert facts == {
            (False, "accumulate", "float32"): pytest.approx(0, abs=1e-6),
            (True, "accumulate", "float32"): pytest.approx(0, abs=1e-6),
            (True, "accumulate", "bfloat16"): pytest.approx(0, abs=2**-7),
            (True, "off", "float32"): pytest.approx(0, abs=1e-6),
        }


def test_what_cannot_overlap_stays_transformer_engines(ranks: list[dict[str, Any]]):
    for facts in (rank["refusals"] for rank in ranks):
        assert facts["delayed"] == {"output_layer"}
        assert "use_transformer_engine_op_fuser=True" in facts["fuser"]
        assert "TEFusedMLPWithGroupedLinear in the model" in facts["fused by its spec"]


def everything(rank: int, world: int) -> dict[str, Any]:
    """Called in each process: all the facts by name."""
    te_stand_in.install()
    facts: dict[str, Any] = {name: compare(architecture) for name, architecture in ARCHITECTURES.items()}
    return {
        **facts, "evaluate": evaluate(), "main_grad": main_grad(), "mixed": mixed(), "refusals": refusals(),
    }  # fmt: skip


def _model(architecture: dict[str, Any]) -> Any:
    """A GPT of Megatron's TE spec, but for the core attention; the same weights at every call."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    from overlap_train.integrations.megatron import SDPACoreAttention
    from tests.megatron import layout
    from tests.megatron.linears import model_config

    layout.prepare()
    layout.use(2)
    config = model_config(**DROPOUT, **architecture)
    spec = get_gpt_layer_with_transformer_engine_spec()
    spec.submodules.self_attention.submodules.core_attention = SDPACoreAttention
    return GPTModel(config, spec, vocab_size=48, max_sequence_length=16, position_embedding_type="rope")


def _train(model: Any, steps: int = 3) -> list[float]:
    from tests.megatron import models

    recipe = models.Recipe({})
    wrapped = models.wrap(recipe, model)
    from megatron.core.distributed import finalize_model_grads

    model.config.finalize_model_grads_func = finalize_model_grads
    optimizer, data, losses = models.optimizer_of(wrapped), models.batches(), []
    for _ in range(steps):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        losses.append(models.forward_backward(recipe, wrapped, data))
        optimizer.step()
    return losses


def compare(architecture: dict[str, Any]) -> dict[str, Any]:
    """Facts about two trainings of the same model."""
    own, overlapped = _model(architecture), _model(architecture)
    from overlap_train import OverlapConfig
    from overlap_train.integrations.megatron import report
    from tests.megatron.models import quietly_enable

    before = dict(overlapped.named_parameters())
    quietly_enable(overlapped, OverlapConfig())
    after = dict(overlapped.named_parameters())
    metadata = {"dp_cp_group": _data_parallel_group()}
    facts: dict[str, Any] = {
        "keys": list(own.state_dict()) == list(overlapped.state_dict()),
        "sharded keys": own.sharded_state_dict(metadata=metadata).keys()
        == overlapped.sharded_state_dict(metadata=metadata).keys(),
        "parameters": before.keys() == after.keys() and all(before[name] is after[name] for name in before),
    }
    te_stand_in._Norm.calls = 0
    facts["overlapped"] = _train(overlapped)
    facts["norm calls"] = te_stand_in._Norm.calls - 2 * 3  # the block's final norm, each microbatch of three steps
    linears = [linear for linear in report(overlapped).linears if linear.slot is not None]
    facts["methods"] = {linear.method for linear in linears}
    facts["calls"] = {linear.calls for linear in linears}
    facts["own"] = _train(own)
    facts["gradients"] = max(
        float((a.main_grad - b.main_grad).abs().max())
        for a, b in zip(own.parameters(), overlapped.parameters(), strict=True)
    )
    return facts


def evaluate() -> dict[str, Any]:
    model = _model(RMS)
    import torch

    from overlap_train import OverlapConfig
    from overlap_train.integrations.megatron import report
    from tests.megatron.models import quietly_enable

    quietly_enable(model, OverlapConfig())
    tokens = torch.arange(32).reshape(2, 16)
    positions = torch.arange(16).expand(2, -1)
    trained = model(tokens, positions, None)
    quietly_enable(model, OverlapConfig())
    evaluated = model.eval()(tokens, positions, None)
    return {
        "calls": {linear.calls for linear in report(model).linears},
        "same output": torch.allclose(trained, evaluated, rtol=1e-4, atol=1e-5),
    }


def main_grad() -> dict[str, Any]:
    """(added to main_grad, returned) for TE without and with gradient accumulation fusion."""
    model = _model(RMS)
    import torch

    from overlap_train import OverlapConfig
    from tests.megatron.models import quietly_enable

    quietly_enable(model, OverlapConfig())
    linear = model.decoder.layers[0].mlp.linear_fc1
    facts: dict[str, Any] = {}
    gradients = []
    for name, fused in (("unfused", False), ("fused", True)):
        linear.fuse_wgrad_accumulation = fused
        weight = linear.weight
        weight.grad, weight.main_grad = None, torch.zeros_like(weight)
        linear(torch.linspace(-1, 1, 8 * 2 * 32).reshape(8, 2, 32))[0].square().sum().backward()
        facts[name] = (bool(weight.main_grad.any()), weight.grad is not None)
        gradients.append(weight.main_grad if fused else weight.grad)
    return {**facts, "same": torch.allclose(*gradients, rtol=1e-5)}


def mixed() -> dict[tuple[bool, str, str], float]:
    """Of (fusion, OverlapConfig.main_grad, dtype of main_grad): how far the gradient of a step in which an overlapped call and
    one of TE's follow each other is from the sum of both alone."""
    from tests.megatron.test_main_grad import GRADIENTS

    cases = ((False, *GRADIENTS[0]), *((True, *gradient) for gradient in GRADIENTS))
    return {
        (fusion, main_grad, str(dtype).removeprefix("torch.")): max(_errors(fusion, main_grad, dtype))
        for fusion, main_grad, dtype in cases
    }


def _errors(fusion: bool, main_grad: str, dtype: Any) -> Iterator[float]:
    model = _model(RMS).to(dtype)
    import torch

    from overlap_train import OverlapConfig
    from tests.megatron.models import quietly_enable
    from tests.megatron.test_main_grad import as_ddps_hook, as_in_ddp

    quietly_enable(model, OverlapConfig(main_grad=main_grad))
    mlp = model.decoder.layers[0].mlp
    for linear in (mlp.linear_fc1, mlp.linear_fc2):
        linear.fuse_wgrad_accumulation, weight = fusion, linear.weight
        x = torch.randn(8, 2, weight.shape[1], generator=torch.Generator().manual_seed(1)).to(dtype)

        def added(*modes: bool, linear: Any = linear, weight: Any = weight, x: Any = x) -> torch.Tensor:
            as_in_ddp(weight, dtype)
            weight.main_grad.zero_()
            for mode in modes:
                linear.train(mode)(x)[0].square().sum().backward()
                as_ddps_hook(weight)
            return weight.main_grad.clone()

        expected = added(True) + added(False)
        assert linear.fuse_wgrad_accumulation == fusion, "as before"
        yield from (
            float((added(*order) - expected).abs().max() / expected.abs().max())
            for order in ((True, False), (False, True))
        )


def refusals() -> dict[str, Any]:
    from overlap_train import OverlapConfig
    from overlap_train.integrations.megatron import report
    from tests.megatron.models import quietly_enable

    model = _model(RMS)
    for layer in model.decoder.layers:
        layer.self_attention.config.delay_wgrad_compute = True  # one config object for the whole model
    quietly_enable(model, OverlapConfig())
    delayed = {linear.name for linear in report(model).linears if linear.method != "megatron"}
    model = _model(RMS)
    model.config.use_transformer_engine_op_fuser = True
    return {"delayed": delayed, "fuser": _refusal(model), "fused by its spec": _refusal(_fused_by_its_spec())}


def _refusal(model: Any) -> str:
    from overlap_train import OverlapConfig
    from tests.megatron.models import quietly_enable

    try:
        quietly_enable(model, OverlapConfig())
    except ValueError as error:
        return str(error)
    return ""


def _fused_by_its_spec() -> Any:
    """A model whose spec was made with use_te_op_fuser: its settings do not say so. The stand-in is too old to have the class."""
    from megatron.core.extensions import transformer_engine as megatron_te
    from megatron.core.transformer.mlp import MLP

    megatron_te.TEFusedMLP = type("TEFusedMLP", (MLP,), {})
    model = _model(RMS)
    model.decoder.layers[1].mlp.__class__ = type("TEFusedMLPWithGroupedLinear", (megatron_te.TEFusedMLP,), {})
    return model


def _data_parallel_group() -> Any:
    from megatron.core import parallel_state

    return parallel_state.get_data_parallel_group(with_context_parallel=True)
