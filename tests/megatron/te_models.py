"""What models of Megatron's TransformerEngine spec do, as test_transformer_engine.py asks. Imported where TE is there already."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.extensions import transformer_engine as megatron_te
from megatron.core.extensions.transformer_engine import TEDotProductAttention, TENorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.mlp import MLP

from overlap_train import OverlapConfig
from overlap_train.integrations.megatron import SDPACoreAttention, enable, provide_accumulation_fusion, report
from overlap_train.integrations.megatron.norm import norm_within
from tests.megatron import layout, models, te_stand_in, ulysses
from tests.megatron.linears import model_config
from tests.megatron.models import LLAMA, quietly_enable
from tests.megatron.test_main_grad import GRADIENTS, as_ddps_hook, as_in_ddp

RMS = dict(normalization="RMSNorm", gated_linear_unit=True, add_bias_linear=False)
ZERO_CENTERED = dict(normalization="LayerNorm", layernorm_zero_centered_gamma=True, add_bias_linear=True)
QKV_BIAS = dict(normalization="RMSNorm", add_bias_linear=False, add_qkv_bias=True)
DROPOUT = dict(hidden_dropout=0.0, attention_dropout=0.0)


ARCHITECTURES = {"rms": RMS, "zero-centered": ZERO_CENTERED, "qkv-bias": QKV_BIAS}


def everything() -> dict[str, Any]:
    """All the facts by name."""
    facts: dict[str, Any] = {name: compare(architecture) for name, architecture in ARCHITECTURES.items()}
    return {
        **facts, "evaluate": evaluate(), "main_grad": main_grad(), "mixed": mixed(), "refusals": refusals(),
        **ulysses_compare(), **with_norms(), **padded(), **per_layer(), **ulysses_refusals(),
        "two kinds of call": two_kinds_of_call(),
    }  # fmt: skip


def model_of(context_parallel: int, tensor_parallel: int = 1, **architecture: Any) -> Any:
    """A GPT of Megatron's TE spec; the same weights at every call. Over TP with torch's core attention."""
    layout.prepare()
    layout.use(tensor_parallel, context_parallel=context_parallel)
    TEDotProductAttention.cp_stream = object()  # it would make one on a GPU
    ulysses = {**LLAMA, "cp_comm_type": "a2a"} if tensor_parallel == 1 else DROPOUT
    config = model_config(
        tensor_model_parallel_size=tensor_parallel, sequence_parallel=tensor_parallel > 1,
        context_parallel_size=context_parallel, **{**ulysses, **architecture},
    )  # fmt: skip
    spec = get_gpt_layer_with_transformer_engine_spec()
    if config.qk_layernorm:  # the spec of a TransformerEngine as old as the stand-in's version has Apex' norms there
        parts = spec.submodules.self_attention.submodules
        parts.q_layernorm = parts.k_layernorm = TENorm
    if tensor_parallel > 1:
        spec.submodules.self_attention.submodules.core_attention = SDPACoreAttention
    return GPTModel(config, spec, vocab_size=48, max_sequence_length=16, position_embedding_type="rope")


def train(model: Any, context_parallel: int = 1) -> list[float]:
    model.config.finalize_model_grads_func = finalize_model_grads
    wrapped, data = ulysses.wrapped(model), ulysses.batches(ulysses.Run(context_parallel=context_parallel))
    optimizer, losses = models.optimizer_of(wrapped), []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(ulysses.forward_backward(wrapped, data))
        optimizer.step()
    return losses


def compare(architecture: dict[str, Any]) -> dict[str, Any]:
    """Facts about two trainings of the same model."""
    own, overlapped = model_of(1, 2, **architecture), model_of(1, 2, **architecture)

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
    facts["overlapped"] = train(overlapped)
    facts["norm calls"] = te_stand_in._Norm.calls - 2 * 3  # the block's final norm, each microbatch of three steps
    linears = [linear for linear in report(overlapped).linears if linear.slot is not None]
    facts["methods"] = {linear.method for linear in linears}
    facts["calls"] = {linear.calls for linear in linears}
    facts["own"] = train(own)
    facts["gradients"] = max(
        float((a.main_grad - b.main_grad).abs().max())
        for a, b in zip(own.parameters(), overlapped.parameters(), strict=True)
    )
    return facts


def evaluate() -> dict[str, Any]:
    model = model_of(1, 2, **RMS)

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
    model = model_of(1, 2, **RMS)

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
    cases = ((False, *GRADIENTS[0]), *((True, *gradient) for gradient in GRADIENTS))
    return {
        (fusion, main_grad, str(dtype).removeprefix("torch.")): max(_errors(fusion, main_grad, dtype))
        for fusion, main_grad, dtype in cases
    }


def _errors(fusion: bool, main_grad: str, dtype: Any) -> Iterator[float]:
    model = model_of(1, 2, **RMS).to(dtype)

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
    model = model_of(1, 2, **RMS)
    for layer in model.decoder.layers:
        layer.self_attention.config.delay_wgrad_compute = True  # one config object for the whole model
    quietly_enable(model, OverlapConfig())
    delayed = {linear.name for linear in report(model).linears if linear.method != "megatron"}
    model = model_of(1, 2, **RMS)
    model.config.use_transformer_engine_op_fuser = True
    return {"delayed": delayed, "fuser": _refusal(model), "fused by its spec": _refusal(_fused_by_its_spec())}


def _refusal(model: Any) -> str:
    try:
        quietly_enable(model, OverlapConfig())
    except ValueError as error:
        return str(error)
    return ""


def _fused_by_its_spec() -> Any:
    """A model whose spec was made with use_te_op_fuser: its settings do not say so. The stand-in is too old to have the class."""
    megatron_te.TEFusedMLP = type("TEFusedMLP", (MLP,), {})
    model = model_of(1, 2, **RMS)
    model.decoder.layers[1].mlp.__class__ = type("TEFusedMLPWithGroupedLinear", (megatron_te.TEFusedMLP,), {})
    return model


def _data_parallel_group() -> Any:
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def ulysses_compare() -> dict[str, Any]:
    alone = model_of(1)
    keys, facts = list(alone.state_dict()), {"alone": train(alone, 1)}
    model = model_of(2)
    before, classes = dict(model.named_parameters()), names(model)
    quietly_enable(model, OverlapConfig(method="chunked"))
    after = dict(model.named_parameters())
    facts["losses"] = train(model, 2)  # type: ignore[assignment]
    rows = {row.slot: (row.fprop, row.method, row.calls) for row in report(model).linears}
    return {
        **facts,
        "rows": rows,
        "keys": list(model.state_dict()) == keys,
        "parameters": before.keys() == after.keys() and all(before[name] is after[name] for name in before),
        "classes": names(model) == classes,
    }


def with_norms() -> dict[str, Any]:
    settings: dict[str, Any] = dict(qk_layernorm=True, layernorm_zero_centered_gamma=True)
    facts: dict[str, Any] = {"normed alone": train(model_of(1, **settings), 1), "norms": []}
    model = model_of(2, **settings)
    quietly_enable(model, OverlapConfig(method="chunked"))
    for layer in model.decoder.layers:
        attention = layer.self_attention
        norm, _ = norm_within(attention.q_layernorm, attention.k_layernorm, attention.linear_qkv.weight)
        facts["norms"].append((type(attention.q_layernorm).__name__, norm is not None and norm().zero_centered))
    return {**facts, "normed losses": train(model, 2)}


def padded() -> dict[str, Any]:
    """Documents of 5 and 10 rows, padded to 8 and 16, and 8 rows of none: this rank has half of each."""
    model = model_of(2)
    quietly_enable(model, OverlapConfig(method="chunked"))
    real, ends = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 5, 15], [0, 8, 24]))
    packed = PackedSeqParams("thd", real, real, ends, ends, 16, 16)
    x = torch.randn(16, 1, model.config.hidden_size, requires_grad=True)
    attention = model.decoder.layers[0].self_attention
    attention.core_attention.kept_packed_seq_params.add("cu_seqlens_q_padded")  # as of TransformerEngine 1.8
    y, _ = attention(x, None, packed_seq_params=packed)
    y.square().sum().backward()
    rank = torch.distributed.get_rank()
    rows = ((0, 1, 6, 7), (2, 3, 4, 5))[rank], ((0, 1, 2, 3, 12, 13, 14, 15), tuple(range(4, 12)))[rank]
    counts = [row < 5 for row in rows[0]] + [row < 10 for row in rows[1]] + [False] * 4
    are_right = [bool(row.any()) == counted for row, counted in zip(y.detach()[:, 0], counts, strict=True)]
    gradients = (x.grad, *(parameter.grad for parameter in attention.parameters() if parameter.grad is not None))
    return {"padding": (bool(y.isfinite().all()) and all(are_right), all(bool(g.isfinite().all()) for g in gradients))}


def two_kinds_of_call() -> dict[tuple[bool, str, str], float]:
    """Of (fusion, OverlapConfig.main_grad, dtype of main_grad)."""
    provide_accumulation_fusion()  # the output layer is Megatron's own
    errors = {}
    for fusion, main_grad, dtype in ((False, *GRADIENTS[0]), *((True, *gradient) for gradient in GRADIENTS)):
        model = model_of(2, gradient_accumulation_fusion=fusion).to(dtype)
        quietly_enable(model, OverlapConfig(method="chunked", main_grad=main_grad))
        errors[fusion, main_grad, str(dtype).removeprefix("torch.")] = ulysses.error_of_two_kinds_of_call(model)
    return errors


def names(model: Any) -> dict[str, str]:
    """Class names of the linears, by which Megatron-FSDP and PEFT tools go."""
    return {
        name: type(module).__name__ for name, module in model.named_modules() if "layers" in name and "linear" in name
    }


def per_layer() -> dict[str, Any]:
    try:
        model = model_of(2, cp_comm_type=["a2a", "p2p"])
    except IndexError:
        return {}
    quietly_enable(model, OverlapConfig(slots=("qkv", "proj")))
    reasons = {row.name: row.reason for row in report(model).linears}
    cores = [layer.self_attention.core_attention for layer in model.decoder.layers]
    return {
        "a2a layer": reasons["decoder.layers.0.self_attention.linear_qkv"],
        "p2p layer": reasons["decoder.layers.1.self_attention.linear_qkv"],
        "core attentions": tuple(core.cp_group is None for core in cores),
    }


def ulysses_refusals() -> dict[str, Any]:
    def said(model: Any) -> str:
        with pytest.raises(ValueError) as refused:
            enable(model, OverlapConfig())
        return str(refused.value)

    gated = model_of(2)
    gated.config.attention_output_gate = True
    facts = {"gate": said(gated), "ring": said(model_of(2, cp_comm_type="p2p"))}
    quietly_enable(gated, OverlapConfig(on_unsupported="fallback"))
    return {**facts, "left alone": type(gated.decoder.layers[0].self_attention).__name__}
