"""The core attention against Megatron's DotProductAttention: values and gradients, masks, grouped queries, refusals."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType

from overlap_train.integrations.megatron import SDPACoreAttention
from tests.megatron import layout
from tests.megatron.linears import model_config
from tests.megatron.workers import Workers, on_ranks

SEQUENCE, BATCH, HEAD = 10, 2, 8


def build(kind: type, mask_type: AttnMaskType = AttnMaskType.causal, **arguments: Any) -> torch.nn.Module:
    """Four heads over two ranks: two here, with as many or half as many groups."""
    changes = {"attention_dropout": 0.0, **arguments.pop("config_changes", {})}
    return kind(model_config(**changes), layer_number=3, attn_mask_type=mask_type, attention_type="self", **arguments)


def inputs(groups: int, keys: int = SEQUENCE) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(layout.use().rank())
    shapes = ((SEQUENCE, 2), (keys, groups), (keys, groups))
    return [torch.randn(s, BATCH, heads, HEAD, generator=generator).requires_grad_() for s, heads in shapes]


def compare(groups: int, mask: torch.Tensor | None, keys: int = SEQUENCE, **arguments: Any) -> None:
    """Both in fp32; they sum the same terms in another order, so a few roundings apart."""
    results = []
    for kind in (DotProductAttention, SDPACoreAttention):
        q, k, v = inputs(groups, keys)
        context = build(kind, **arguments)(q, k, v, mask)
        assert context.shape == (SEQUENCE, BATCH, 2 * HEAD)
        context.backward(torch.randn(context.shape, generator=torch.Generator().manual_seed(9)))
        results.append((context, q.grad, k.grad, v.grad))
    for own, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-5, atol=2e-6)


def causal(groups: int, **arguments: Any) -> None:
    compare(groups, mask=None, **{"config_changes": {"num_query_groups": 2 * groups}, **arguments})


@pytest.mark.parametrize("groups", [2, 1], ids=["a key for each query head", "one key for two query heads"])
def test_causal(workers: Workers, groups: int) -> None:
    workers.call(causal, groups)


@on_ranks
def test_scales() -> None:
    causal(2, softmax_scale=0.3)
    scaling = {"apply_query_key_layer_scaling": True, "attention_softmax_in_fp32": True}
    causal(2, config_changes=scaling)


@on_ranks
def test_explicit_mask_decides_alone() -> None:
    hidden = torch.rand(BATCH, 1, SEQUENCE, SEQUENCE, generator=torch.Generator().manual_seed(5)) < 0.4
    hidden[..., 0] = False  # each query sees one key at least
    for mask_type in (AttnMaskType.padding, AttnMaskType.arbitrary, AttnMaskType.causal):
        compare(1, hidden, mask_type=mask_type, config_changes={"num_query_groups": 2})


@on_ranks
def test_no_mask_and_other_number_of_keys() -> None:
    compare(2, None, mask_type=AttnMaskType.no_mask)
    compare(2, None, keys=7, mask_type=AttnMaskType.no_mask)


@on_ranks
def test_one_query_sees_the_whole_cache() -> None:
    q, k, v = inputs(2)
    attention = build(SDPACoreAttention)
    last = attention(q, k, v, None)[-1:]
    torch.testing.assert_close(attention(q[-1:], k, v, None), last, rtol=1e-5, atol=1e-6)


def dropout(sequence_parallel: bool, forked: bool) -> torch.Tensor:
    """With values of one the context of a query is the sum of the weights that dropout kept, rescaled."""
    layout.use(seed=3)
    changes = {"attention_dropout": 0.5, "sequence_parallel": sequence_parallel}
    attention = build(SDPACoreAttention, config_changes=changes)
    q, ones = torch.zeros(SEQUENCE, BATCH, 2, HEAD), torch.ones(SEQUENCE, BATCH, 2, HEAD)
    with get_cuda_rng_tracker().fork() if forked else contextlib.nullcontext():
        context = attention(q, q, ones, None)
    assert context.ne(1).any()
    assert attention.eval()(q, q, ones, None).eq(1).all()
    return context


def test_dropout_differs_between_ranks(workers: Workers) -> None:
    """Heads are split over ranks, so each draws its own numbers, in one fork of the generator.

    Under sequence parallelism Megatron's block has forked already; without, the attention does it.
    """
    left, right = workers.call(dropout, True, True)
    assert not torch.equal(left, right)
    alone = workers.call(dropout, False, False)
    assert torch.equal(alone[0], left)
    assert torch.equal(alone[1], right)
    not_forked = workers.call(dropout, True, False)
    assert torch.equal(*not_forked), "the attention leaves forking to the block"


@on_ranks
def test_refusals_name_the_setting() -> None:
    for changes, named in (({"window_size": (4, 0)}, "window_size"), ({"softmax_type": "off-by-one"}, "softmax_type")):
        with pytest.raises(ValueError, match=rf"config\.{named}=.*layer spec"):
            build(SDPACoreAttention, config_changes=changes)
    config = model_config()
    config.context_parallel_size = 2
    with pytest.raises(ValueError, match=r"config\.context_parallel_size=2: .*whole sequence"):
        SDPACoreAttention(config, 1, AttnMaskType.causal, "self")
    q, k, v = inputs(2)
    attention = build(SDPACoreAttention)
    ends = torch.tensor([0, 10], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"packed_seq_params.qkv_format='sbhd': .*'thd'"):
        attention(q, k, v, None, packed_seq_params=PackedSeqParams("sbhd", ends, ends))
    with pytest.raises(ValueError, match=r"attention_mask beside packed_seq_params"):
        attention(q, k, v, torch.ones(1), packed_seq_params=PackedSeqParams("thd", ends, ends))
    with pytest.raises(ValueError, match=r"attention_bias=Tensor.*attention_mask"):
        attention(q, k, v, None, attention_bias=torch.zeros(1))
    with pytest.raises(ValueError, match=r"5 queries and 10 keys.*pass attention_mask"):
        attention(q[:5], k, v, None)
