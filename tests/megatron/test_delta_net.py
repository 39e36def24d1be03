"""Models like Qwen3-Next's: a layer with a gated delta net in place of attention, then one with attention. Both have projections
that overlap. Losses and gradients are those of Megatron's own linears."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import megatron.core
import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec

from overlap_train import OverlapConfig
from overlap_train.integrations.megatron import gpt_block_spec, report
from overlap_train.integrations.megatron.norm import Norm
from tests.megatron import layout
from tests.megatron.linears import model_config
from tests.megatron.models import LLAMA, assembled, one_step
from tests.megatron.test_training import assert_close
from tests.megatron.workers import on_ranks

QWEN3_NEXT = dict(
    linear_conv_kernel_dim=4, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4,
    deterministic_mode=True,  # in which Megatron multiplies by torch
)  # fmt: skip


def qwen3_next(overlap: OverlapConfig | None) -> GPTModel:
    layout.use(2)
    config = model_config(tensor_model_parallel_size=2, sequence_parallel=True, **LLAMA, **QWEN3_NEXT)
    spec = gpt_block_spec(config)
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules, common

    common.HAVE_FLA, common.l2norm = True, partial(torch.nn.functional.normalize, dim=-1)  # of flash-linear-attention
    parts = GatedDeltaNetSubmodules(in_proj=ColumnParallelLinear, out_norm=Norm, out_proj=RowParallelLinear)
    spec.layer_specs[0].submodules.self_attention = ModuleSpec(GatedDeltaNet, submodules=parts)
    with patch("torch.cuda.current_device", return_value="cpu"):
        return assembled(config, spec, overlap)


@pytest.mark.skipif(megatron.core.__version__.startswith("0.16"), reason="has it in another form")
@on_ranks
def test_projections_of_a_gated_delta_net_overlap() -> None:
    expected_loss, expected = one_step(qwen3_next(None))
    model = qwen3_next(OverlapConfig())
    loss, actual = one_step(model)
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert_close(actual, expected)
    model.tower = torch.nn.MultiheadAttention(8, 2)  # whose out_proj is no linear of Megatron's
    linears = report(model).linears
    assert [x.slot for x in linears if "layers.0.self_attention" in x.name] == ["qkv", "proj"]
    assert len(linears) == 9 and {x.calls for x in linears} == {"overlapped 1"}
