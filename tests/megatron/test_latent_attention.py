"""Models like DeepSeek's: multi-latent attention, a dense layer, experts beside shared ones. All linears that send overlap; those
of experts stay Megatron's. Losses and gradients are those of Megatron's own linears."""

from __future__ import annotations

import dataclasses
from typing import Any

import megatron.core
import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import MLATransformerConfig

from overlap_train import OverlapConfig
from overlap_train.integrations.megatron import report
from overlap_train.integrations.megatron.norm import Norm
from tests.megatron import layout
from tests.megatron.models import LLAMA, assembled, one_step
from tests.megatron.test_training import assert_close
from tests.megatron.workers import on_ranks

DEEPSEEK = dict(
    num_layers=2, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64, q_lora_rank=16, kv_lora_rank=16, qk_head_dim=8,
    qk_pos_emb_head_dim=8, v_head_dim=8, rope_type="rope", qk_layernorm=True, num_moe_experts=4, moe_layer_freq=[0, 1],
    moe_router_topk=2, moe_ffn_hidden_size=16, moe_shared_expert_intermediate_size=16, moe_token_dispatcher_type="allgather",
    moe_router_load_balancing_type="none", use_cpu_initialization=True, params_dtype=torch.float32, transformer_impl="local",
)  # fmt: skip


class Core(torch.nn.Module):
    """Attention over keys and values of different sizes, which Megatron's own core does not take."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """q, k [s, b, heads, dim], v [s, b, heads, dim of v] -> [s, b, heads x dim of v]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.permute(2, 0, 1, 3).flatten(2)


def deepseek(expert_parallel: int, overlap: OverlapConfig | None) -> GPTModel:
    layout.use(expert_parallel=expert_parallel)
    sizes: dict[str, Any] = dict(
        tensor_model_parallel_size=2, sequence_parallel=True, expert_model_parallel_size=expert_parallel,
        expert_tensor_parallel_size=1 if expert_parallel > 1 else None,
    )  # fmt: skip
    config = MLATransformerConfig(**{**LLAMA, "num_query_groups": 4, **DEEPSEEK, **sizes})
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    for layer in spec.layer_specs:
        _replace_norms(layer)
    spec.layer_norm = Norm
    return assembled(config, spec, overlap)


def _replace_norms(spec: Any) -> None:
    """Without TransformerEngine Megatron has no norm for sequence parallelism."""
    parts = getattr(spec, "submodules", None)
    for field in dataclasses.fields(parts) if parts is not None else ():
        part = getattr(parts, field.name)
        if field.name == "core_attention":
            parts.core_attention = Core
        elif field.name.endswith("layernorm") and getattr(part, "__name__", "") != "IdentityOp" and part is not None:
            setattr(parts, field.name, Norm)
        elif dataclasses.is_dataclass(part):
            _replace_norms(part)


@pytest.mark.skipif(megatron.core.__version__.startswith("0.16"), reason="builds it with TransformerEngine alone")
@pytest.mark.parametrize("expert_parallel", [1, 2])
@on_ranks
def test_a_model_of_latent_attention_and_experts(expert_parallel: int) -> None:
    expected_loss, expected = one_step(deepseek(expert_parallel, None))
    model = deepseek(expert_parallel, OverlapConfig())
    loss, actual = one_step(model)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert_close(actual, expected)
    experts = [x for x in report(model).linears if "local_experts" in x.name]
    others = [x for x in report(model).linears if "local_experts" not in x.name]
    assert len(experts) == 2 * 4 // expert_parallel and {x.method for x in experts} == {"megatron"}
    projections = ["q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj", "proj"]
    names = {x.name.rpartition(".linear_")[2] for x in others}
    assert {*projections, "fc1", "fc2"} <= names and {x.calls for x in others} == {"overlapped 1"}
