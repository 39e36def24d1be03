"""Layer specs: what is exchanged, what stays Megatron's, and models built from them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from overlap_train.integrations.megatron import LayerNorm, RMSNorm, SDPACoreAttention, gpt_block_spec
from tests.megatron import layout
from tests.megatron.linears import model_config
from tests.megatron.models import LLAMA, SEQUENCE, assembled
from tests.megatron.workers import on_ranks

MIXTURE = {"num_moe_experts": 2, "moe_layer_freq": [0, 1], "moe_router_load_balancing_type": "none"}


def build(config: Any, make_spec: Callable[[Any], Any] = gpt_block_spec) -> GPTModel:
    layout.use(config.tensor_model_parallel_size)
    return assembled(config, make_spec(config))


@on_ranks
def test_norms_and_attention_are_exchanged() -> None:
    for normalization, norm in (("RMSNorm", RMSNorm), ("LayerNorm", LayerNorm)):
        config = model_config(normalization=normalization, qk_layernorm=True)
        model = build(config)
        for layer in model.decoder.layers:
            assert type(layer.self_attention.linear_qkv) is type(layer.mlp.linear_fc1) is ColumnParallelLinear
            assert type(layer.self_attention.linear_proj) is type(layer.mlp.linear_fc2) is RowParallelLinear
            assert type(layer.input_layernorm) is type(layer.pre_mlp_layernorm) is norm
            assert type(layer.self_attention.q_layernorm) is type(layer.self_attention.k_layernorm) is norm
            assert type(layer.self_attention.core_attention) is SDPACoreAttention
        assert type(model.decoder.final_layernorm) is norm


@on_ranks
def test_checkpoint_keys_and_results_of_the_local_spec() -> None:
    """Without sequence parallelism Megatron's own local spec can be built: keys must be the same."""
    config = model_config(sequence_parallel=False, **LLAMA, qk_layernorm=True)
    own = build(config, lambda config: get_gpt_decoder_block_spec(config, False, normalization="RMSNorm"))
    ours = build(config)
    assert list(own.state_dict()) == list(ours.state_dict())
    assert own.sharded_state_dict().keys() == ours.sharded_state_dict().keys()
    ours.load_state_dict(own.state_dict())
    tokens = torch.arange(SEQUENCE).expand(2, -1)
    mask = torch.triu(torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool), diagonal=1)
    logits = [model.eval()(tokens, tokens, mask) for model in (own, ours)]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-5)


@on_ranks
def test_called_by_the_spec_flag() -> None:
    """Megatron 0.19 calls what `--spec` names with a config that holds the TransformerConfig."""
    config = model_config(**LLAMA)
    model = build(config, lambda config: gpt_block_spec(SimpleNamespace(transformer=config), vp_stage=None))
    assert type(model.decoder.final_layernorm) is RMSNorm
    assert len(model.decoder.layers) == config.num_layers
    config.multi_latent_attention = True
    with pytest.raises(ValueError, match=r"multi_latent_attention=True.*own spec"):
        gpt_block_spec(config)
