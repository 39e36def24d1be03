"""Models with experts, of Megatron's TransformerEngine spec, checked on each rank of test_transformer_engine.py, where TE is.

Two layers of a few numbers, TP 2 x EP 2; the rest is as in Mixtral 8x7B, Qwen3-30B-A3B and DeepSeek-V3: which linears there are,
and what is normalised.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.pipeline_parallel.utils import set_streams
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from overlap_train import OverlapConfig
from overlap_train.integrations.megatron import SDPACoreAttention, provide_accumulation_fusion, report
from overlap_train.integrations.megatron.experts import weights_of
from overlap_train.ops.quantize import Quantized
from tests.megatron import layout
from tests.megatron.models import LLAMA, assembled, train_experts
from tests.megatron.test_latent_attention import Core

EXPERTS = dict(
    num_layers=2, hidden_size=32, num_attention_heads=4, num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=16,
    moe_token_dispatcher_type="alltoall", moe_router_load_balancing_type="none", pipeline_dtype=torch.float32, bf16=True,
    tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=2, expert_tensor_parallel_size=1,
    use_cpu_initialization=True,
)  # fmt: skip
MIXTRAL = dict(LLAMA)
QWEN3 = dict(**LLAMA, qk_layernorm=True, kv_channels=16)
DEEPSEEK = dict(
    LLAMA, num_query_groups=4, multi_latent_attention=True, q_lora_rank=16, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=8,
    v_head_dim=8, rope_type="rope", qk_layernorm=True, ffn_hidden_size=64, moe_layer_freq=[0, 1],
    moe_shared_expert_intermediate_size=16,
)  # fmt: skip
IN_TURN: dict[str, Any] = {}
TOGETHER = dict(overlap_moe_expert_parallel_comm=True)  # two micro-batches in one schedule
DELAYED = dict(**TOGETHER, delay_wgrad_compute=True)


class _Nothing:
    """A stream or an event where all work is complete."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: _Nothing()


@contextmanager
def streams_on_cpu() -> Iterator[None]:
    """Let Megatron's dispatcher and its schedule of two micro-batches, which ask for CUDA's streams, run on the CPU."""
    cuda = dict(Stream=_Nothing, Event=_Nothing, current_stream=_Nothing, stream=lambda stream: nullcontext())
    of_recomputation = dict.fromkeys(("activation_recompute_forward", "fp8_autocast"), lambda **_: nullcontext())
    of_recomputation |= dict(FP8GlobalStateManager=SimpleNamespace(is_fp8_enabled=lambda: False))
    with ExitStack() as stack:
        for changes in (
            patch.multiple(torch.cuda, **cuda),
            patch.multiple(torch.cuda.nvtx, range_push=_Nothing, range_pop=_Nothing),
            patch.object(torch.Tensor, "record_stream", lambda *_: None),
            patch.object(moe_utils, "te_general_gemm", None, create=True),  # not in the stand-in
            patch.multiple(random, create=True, **of_recomputation),
            patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _on_cpu),
        ):
            stack.enter_context(changes)
        set_streams(_Nothing(), _Nothing())
        yield


def _on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def model_of(architecture: dict[str, Any], schedule: dict[str, Any], fuses: bool, overlap: OverlapConfig | None) -> Any:
    """The same weights at every call."""
    layout.prepare()
    layout.use(2, expert_parallel=2)
    kind = MLATransformerConfig if "q_lora_rank" in architecture else TransformerConfig
    config = kind(**{**EXPERTS, **architecture, **schedule, "gradient_accumulation_fusion": fuses})
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    for layer in spec.layer_specs:
        parts = layer.submodules.self_attention.submodules
        parts.core_attention = Core if config.multi_latent_attention else SDPACoreAttention
        if architecture is QWEN3:  # the spec of a TransformerEngine as old as the stand-in's has Apex' norms there
            parts.q_layernorm = parts.k_layernorm = TENorm
    return assembled(config, spec, overlap)


train = partial(train_experts, microbatches=3, by_adam=True)


def _assert_alike(found: tuple[Any, Any], expected: tuple[Any, Any], told: str = "") -> None:
    """Losses, and gradients of the last step. told: before what differs."""
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0, msg=lambda text: told + text)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-6, msg=lambda text: told + text)


@streams_on_cpu()
def _assert_trains_alike(architecture: dict[str, Any]) -> None:
    """By each schedule of Megatron, with its fusion of gradients and without: the same losses and gradients as without overlap,
    and all linears overlap that send something."""
    provide_accumulation_fusion()  # the output layer is Megatron's own
    expected = train(model_of(architecture, IN_TURN, False, None))
    for main_grad in ("accumulate", "off"):  # delayed by TransformerEngine itself
        model = model_of(architecture, DELAYED, True, OverlapConfig(main_grad=main_grad))
        model.config.cpu_offloading = True  # calls fall back, and nothing else
        _assert_alike(train(model), expected)
    for schedule, fuses in product((IN_TURN, TOGETHER, DELAYED), (False, True)):
        model = model_of(architecture, schedule, fuses, OverlapConfig())
        _assert_alike(train(model), expected, told=f"{schedule}, {fuses}: ")
        sends = [row for row in report(model).linears if not row.reason.startswith(("expert:", "the same weight"))]
        assert {row.calls for row in sends} == {"overlapped 6"}, report(model)
        assert len(sends) == (11 if architecture is DEEPSEEK else 5), report(model)


def mixtral_trains_by_all_schedules() -> None:
    _assert_trains_alike(MIXTRAL)


def qwen3_trains_by_all_schedules() -> None:
    _assert_trains_alike(QWEN3)


def deepseek_trains_by_all_schedules() -> None:
    _assert_trains_alike(DEEPSEEK)


@streams_on_cpu()
def experts_overlap_as_sequential_and_as_grouped_linears() -> None:
    """Of TransformerEngine's spec, with its fusion of gradients and without."""
    for grouped, fuses in product((False, True), (False, True)):
        architecture = dict(MIXTRAL, moe_grouped_gemm=grouped)
        if grouped and fuses:  # its output is thrown away, and made again when that of fc2 has its gradient
            architecture |= dict(recompute_granularity="selective", recompute_modules=["moe_act"])
        expected = train(model_of(architecture, IN_TURN, fuses, None))
        model = model_of(architecture, IN_TURN, fuses, OverlapConfig(experts=True))
        assert type(model.decoder.layers[0].mlp.experts).__name__ == ("TEGroupedMLP" if grouped else "SequentialMLP")
        _assert_alike(train(model), expected)
        rows = [row for row in report(model).linears if "experts" in row.name]
        assert [(row.slot, row.calls) for row in rows] == [("experts", "overlapped 6")] * 2, report(model)


def experts_in_transformer_engines_fp8_are_as_in_ours() -> None:
    """To the bit, sequential and grouped; not in fp8 where TransformerEngine leaves a layer out. The stand-in has no fp8."""
    state = sys.modules["transformer_engine.pytorch.fp8"].FP8GlobalStateManager
    settings = OverlapConfig(experts=True, slots=("output",))
    with streams_on_cpu(), patch("megatron.core.fp8_utils.get_fp8_recipe"):
        for grouped in (False, True):
            sizes = dict(MIXTRAL, moe_grouped_gemm=grouped, hidden_size=128, moe_ffn_hidden_size=128)
            tes = dict(sizes, fp8="e4m3", fp8_recipe="blockwise")
            for enabled, fp8 in ((True, "blockwise"), (False, "off")):
                expected = train(model_of(sizes, IN_TURN, True, replace(settings, fp8=fp8)))
                state.is_fp8_enabled.return_value = enabled
                model = model_of(tes, IN_TURN, True, settings)
                found = train(model)
                assert found[0] == expected[0]
                assert all(torch.equal(found[1][name], gradient) for name, gradient in expected[1].items())
                rows = [row for row in report(model).linears if row.slot == "experts"]
                first = weights_of(model.decoder.layers[0].mlp.experts, "linear_fc1")[0]
                assert isinstance(first.stacked, Quantized) == enabled  # kept for the step
                said = "fp8 blockwise" if enabled else "not in fp8: experts"
                assert [(row.calls, row.reason.endswith(said)) for row in rows] == [("overlapped 6", True)] * 2, report(
                    model
                )
        state.is_fp8_enabled.return_value = True
        model = model_of(dict(tes, hidden_size=64), IN_TURN, True, settings)  # stays TransformerEngine's
        for layer in model.decoder.layers:  # of which the stand-in has no padding
            unpadded = dict(quantization_padding=lambda *given: given, quantization_unpadding=lambda rows, _: rows)
            vars(layer.mlp.experts).update(unpadded)
        train(model)
        reasons = {row.reason for row in report(model).linears if row.slot == "experts"}
        assert reasons == {"fp8 with weights [256, 64], not a multiple of 128"}, reasons
        with pytest.raises(ValueError, match="fp8_recipe='tensorwise': experts have a scale for each block"):
            model_of(dict(tes, fp8="hybrid", fp8_recipe="tensorwise"), IN_TURN, True, settings)


def shared_experts_that_hide_the_exchange_of_others_stay_megatrons() -> None:
    """Their linears do not send: Megatron gathers and scatters for them, beside the exchange."""
    with streams_on_cpu(), patch.object(SharedExpertMLP, "stream", None):
        schedule = dict(moe_shared_expert_overlap=True)
        expected = train(model_of(DEEPSEEK, schedule, False, None))
        model = model_of(DEEPSEEK, schedule, False, OverlapConfig())
        _assert_alike(train(model), expected)
        shared = [row for row in report(model).linears if "shared_experts" in row.name]
        assert len(shared) == 2 and {row.method for row in shared} == {"megatron"}
