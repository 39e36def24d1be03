"""Ulysses in models of Megatron's TransformerEngine spec, over a stand-in for TransformerEngine: its norms, linears and core
attention, the latter for this rank's heads."""

from __future__ import annotations

from typing import Any

import pytest

from tests.megatron import te_stand_in
from tests.processes import run_ranks, values


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What `everything` found in each of two fresh processes: TransformerEngine must be there before Megatron is."""
    return values(run_ranks(2, everything, limit_s=250.0))


def test_training_is_that_of_one_rank(ranks: list[dict[str, Any]]):
    for facts in ranks:
        assert facts["losses"] == pytest.approx(facts["alone"], rel=2e-6)
        assert facts["losses"][-1] < facts["losses"][0]


def test_qkv_and_projection_exchange_and_everything_keeps_its_name(ranks: list[dict[str, Any]]):
    for facts in ranks:
        assert facts["rows"]["qkv"] == ("GEMM + A2A (CP 2)", "chunked", "overlapped 6")
        assert facts["rows"]["proj"] == ("A2A(x) + GEMM (CP 2)", "chunked", "overlapped 6")
        assert facts["keys"] and facts["parameters"] and facts["classes"]


def test_norms_of_query_and_key_are_within_the_exchanges_pass(ranks: list[dict[str, Any]]):
    for facts in ranks:
        assert facts["normed losses"] == pytest.approx(facts["normed alone"], rel=2e-6)
        assert facts["norms"] == [("RMSNorm", True)] * 2, "zero-centered weights"


def test_rows_between_documents_are_zeros_whatever_the_core_attention_leaves_there(ranks: list[dict[str, Any]]):
    for facts in ranks:
        assert facts["padding"] == (True, True), "results of documents, all others zero; no gradient is NaN"


def test_other_layers_are_left_to_their_core_attention(ranks: list[dict[str, Any]]):
    if "p2p layer" not in ranks[0]:
        pytest.skip("Megatron-Core 0.16 looks one layer too far in a list of cp_comm_type")
    for facts in ranks:
        assert "context parallelism: cp_comm_type='p2p' is left to the core attention" in facts["p2p layer"]
        assert facts["a2a layer"] == "not called yet"
        assert facts["core attentions"] == (True, False)


def test_what_transformer_engine_would_have_to_do_is_refused(ranks: list[dict[str, Any]]):
    for facts in ranks:
        assert "attention_output_gate=True" in facts["gate"]
        assert "tensor_model_parallel_size=1" in facts["ring"] and "--cp-comm-type a2a" in facts["ring"]
        assert facts["left alone"] == "SelfAttention"


def test_calls_that_fall_back_add_to_the_same_gradient(ranks: list[dict[str, Any]]):
    for facts in ranks:
        assert facts["two kinds of call"] == {
            (False, "accumulate", "float32"): pytest.approx(0, abs=1e-6),
            (True, "accumulate", "float32"): pytest.approx(0, abs=1e-6),
            (True, "accumulate", "bfloat16"): pytest.approx(0, abs=2**-7),
            (True, "off", "float32"): pytest.approx(0, abs=1e-6),
        }


def everything(rank: int, world: int) -> dict[str, Any]:
    te_stand_in.install()
    return {
        **compare(),
        **with_norms(),
        **padded(),
        **per_layer(),
        **refusals(),
        "two kinds of call": two_kinds_of_call(),
    }


def model_of(context_parallel: int, **architecture: Any) -> Any:
    """A GPT of Megatron's TE spec; the same weights at every call."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention, TENorm
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    from tests.megatron import layout
    from tests.megatron.linears import model_config
    from tests.megatron.models import LLAMA

    layout.prepare()
    layout.use(1, context_parallel=context_parallel)
    TEDotProductAttention.cp_stream = object()  # it would make one on a GPU
    settings = {**LLAMA, "cp_comm_type": "a2a", **architecture}
    config = model_config(
        tensor_model_parallel_size=1, sequence_parallel=False, context_parallel_size=context_parallel, **settings
    )
    spec = get_gpt_layer_with_transformer_engine_spec()
    if config.qk_layernorm:  # the spec of a TransformerEngine as old as the stand-in's version has Apex' norms there
        parts = spec.submodules.self_attention.submodules
        parts.q_layernorm = parts.k_layernorm = TENorm
    return GPTModel(config, spec, vocab_size=48, max_sequence_length=16, position_embedding_type="rope")


def train(model: Any, context_parallel: int) -> list[float]:
    from megatron.core.distributed import finalize_model_grads

    from tests.megatron import models, ulysses

    model.config.finalize_model_grads_func = finalize_model_grads
    wrapped, data = ulysses.wrapped(model), ulysses.batches(ulysses.Run(context_parallel=context_parallel))
    optimizer, losses = models.optimizer_of(wrapped), []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(ulysses.forward_backward(wrapped, data))
        optimizer.step()
    return losses


def compare() -> dict[str, Any]:
    from overlap_train import OverlapConfig
    from overlap_train.integrations.megatron import report
    from tests.megatron.models import quietly_enable

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
    from overlap_train import OverlapConfig
    from overlap_train.integrations.megatron.attention.norms import norm_within
    from tests.megatron.models import quietly_enable

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
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams

    from overlap_train import OverlapConfig
    from tests.megatron.models import quietly_enable

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

    from overlap_train import OverlapConfig
    from overlap_train.integrations.megatron import provide_accumulation_fusion
    from tests.megatron import ulysses
    from tests.megatron.models import quietly_enable
    from tests.megatron.test_main_grad import GRADIENTS

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
    from overlap_train import OverlapConfig
    from overlap_train.integrations.megatron import report
    from tests.megatron.models import quietly_enable

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


def refusals() -> dict[str, Any]:
    from overlap_train import OverlapConfig
    from overlap_train.integrations.megatron import enable
    from tests.megatron.models import quietly_enable

    def said(model: Any) -> str:
        with pytest.raises(ValueError) as refused:
            enable(model, OverlapConfig())
        return str(refused.value)

    gated = model_of(2)
    gated.config.attention_output_gate = True
    facts = {"gate": said(gated), "ring": said(model_of(2, cp_comm_type="p2p"))}
    quietly_enable(gated, OverlapConfig(on_unsupported="fallback"))
    return {**facts, "left alone": type(gated.decoder.layers[0].self_attention).__name__}
