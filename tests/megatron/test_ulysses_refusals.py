"""What a Ulysses attention cannot do is refused by name, with the way out, on every rank."""

from __future__ import annotations

import pytest
import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention

from overlap_train import OverlapConfig
from overlap_train.integrations.megatron import enable, gpt_block_spec
from tests.megatron import layout, ulysses
from tests.megatron.linears import model_config
from tests.megatron.models import LLAMA
from tests.megatron.ulysses import Run
from tests.megatron.workers import on_ranks

OVERLAP = OverlapConfig(method="collective")
SETTINGS = {
    "gate": ({"attention_output_gate": True},
             r"attention_output_gate=True: .*set it to False; take .* with cp_comm_type"),
    "softmax": ({"softmax_type": "off-by-one"}, r"softmax_type='off-by-one': .*heads.*'vanilla'"),
    "clip": ({"qk_clip": True}, r"cp_comm_type='a2a' in the model's config, but qk_clip=True: .*logits"),
    "heads": ({"num_attention_heads": 3, "kv_channels": 8, "num_query_groups": 3},
              r"heads per TP rank: heads.query=3 .* divides 3; take "),
    "window": ({"window_size": (4, 0)}, r"config.window_size=\(4, 0\): sliding windows"),
    "ring": ({"cp_comm_type": "p2p"}, r"cp_comm_type='p2p': .*--cp-comm-type a2a"),
    "default": ({"cp_comm_type": None}, r"cp_comm_type=None: .*--cp-comm-type a2a"),
}  # fmt: skip


@pytest.mark.parametrize("case", SETTINGS)
@on_ranks
def test_settings(case: str) -> None:
    changes, said = SETTINGS[case]
    with pytest.raises(ValueError, match=said):
        ulysses.gpt(Run(context_parallel=2, architecture={**LLAMA, **changes}))


@on_ranks
def test_calls() -> None:
    """Refused before anything is exchanged; a rank that raises alone would leave the others waiting."""
    model = ulysses.gpt(Run(context_parallel=2, overlap=OVERLAP))
    attention, x = model.decoder.layers[0].self_attention, torch.zeros(8, 2, 32)
    for name in ("key_value_states", "inference_context", "attention_bias", "rotary_pos_cos"):
        with pytest.raises(ValueError, match=rf"{name}=Tensor: a Ulysses attention .* {name}=None only"):
            attention(x, None, **{name: torch.zeros(1)})
    with pytest.raises(ValueError, match=r"rotary_pos_emb has 5 rows: this rank has 8 of the 16"):
        attention(x, None, rotary_pos_emb=torch.zeros(5, 1, 1, 8))
    ends = torch.tensor([0, 6, 16], dtype=torch.int32)
    packed = PackedSeqParams("thd", ends, ends, max_seqlen_q=10)
    with pytest.raises(ValueError, match=r"document of 6 rows cannot be cut .*Ulysses, context parallelism 2"):
        attention(x[:, :1], None, packed_seq_params=packed)
    with pytest.raises(ValueError, match=r"sequence or document of 14 rows cannot be cut"):
        attention(x[:7], None)


class Own(SelfAttention):
    """A user's."""


@on_ranks
def test_another_attention_is_refused_or_left_alone() -> None:
    """One that is none of Megatron's own, in a built model: refused, or left alone where the user says so."""
    model = ulysses.gpt(Run(context_parallel=2))
    for layer in model.decoder.layers:
        layer.self_attention.__class__ = Own
    before = dict(model.named_parameters())
    with pytest.raises(ValueError, match=r"cp_comm_type='a2a' .*, but Own: .* form; take .*on_unsupported='fallback'"):
        enable(model, OVERLAP)
    table = enable(model, OverlapConfig(method="collective", on_unsupported="fallback"))
    assert "cp_comm_type='a2a' in the model's config, but Own: " in table.problem
    (reason,) = {row.reason for row in table.linears if row.slot == "qkv"}
    assert reason == (
        "context parallelism: Own: only Megatron-Core's SelfAttention has an overlapped form; "
        "tensor-parallel size 1: nothing to communicate"
    )
    assert all(type(layer.self_attention) is Own for layer in model.decoder.layers)
    assert all(before[name] is parameter for name, parameter in model.named_parameters())


@on_ranks
def test_every_layer_of_the_local_spec_is_ulysses() -> None:
    layout.use(1, context_parallel=2)
    config = model_config(
        tensor_model_parallel_size=1, sequence_parallel=False, context_parallel_size=2, cp_comm_type=["a2a", "p2p"]
    )
    with pytest.raises(ValueError, match=r"cp_comm_type='p2p'"):
        GPTModel(config, gpt_block_spec(config), 48, 16)


@on_ranks
def test_a_cut_that_is_not_known_is_refused() -> None:
    """Taken for a zigzag, rows would be mixed up without a word."""
    model, x = ulysses.gpt(Run(context_parallel=2)), torch.randn(8, 1, 32)
    packed = PackedSeqParams("thd", *[torch.tensor([0, 16], dtype=torch.int32)] * 2)
    packed.cp_partition_mode = "two_chunk"
    with pytest.raises(ValueError, match=r"cp_partition_mode='two_chunk'.*is not one of contiguous, zigzag"):
        model.decoder.layers[0].self_attention(x, None, packed_seq_params=packed)
    model.config.cp_partition_mode = "two_chunk"
    with pytest.raises(ValueError, match="sequence with cp_partition_mode='two_chunk'"):
        model.decoder.layers[0].self_attention(x, None)


@on_ranks
def test_the_group_may_change_with_the_call() -> None:
    """packed_seq_params may turn context parallelism off for one micro-batch: each rank then has whole sequences."""
    model = ulysses.gpt(Run(context_parallel=2, overlap=OVERLAP))
    attention = model.decoder.layers[0].self_attention
    ends = torch.tensor([0, 5, 16], dtype=torch.int32)
    packed = PackedSeqParams("thd", ends, ends, max_seqlen_q=11, max_seqlen_kv=11, local_cp_size=1)
    x = torch.randn(16, 1, 32, generator=torch.Generator().manual_seed(1))
    y, _ = attention(x, None, packed_seq_params=packed)
    alone, _ = ulysses.gpt(Run()).decoder.layers[0].self_attention(x, None, packed_seq_params=packed)
    torch.testing.assert_close(y, alone, rtol=1e-5, atol=1e-6)
    assert dict(attention.linear_qkv.overlap.fallback_calls) == {"context-parallel size 1: nothing to communicate": 1}
