"""From what an all-to-all brings to q, k and v, and back: every element in its place, rotated, in memory of its own."""

from __future__ import annotations

import pytest
import torch

from overlap_train import AttentionHeads, Rotary
from overlap_train.operators.attention_layout import AttentionLayout, pack, unpack

HEADS, S, B = AttentionHeads(6, 2, 8), 5, 3


def rotary(r: int, interleaved: bool, rows: int = S) -> Rotary:
    """Angles that are the same in both features of a pair."""
    angles = torch.randn(rows, r // 2, generator=torch.Generator().manual_seed(r))
    angles = angles.repeat_interleave(2, -1) if interleaved else angles.repeat(1, 2)
    return Rotary(angles.cos(), angles.sin(), interleaved)


def as_complex(x: torch.Tensor, turn: Rotary) -> torch.Tensor:
    """x [s, b, heads, dim] with its pairs turned as complex numbers."""
    r = turn.cos.shape[-1]
    pairs = x[..., :r].unflatten(-1, (-1, 2)) if turn.interleaved else x[..., :r].unflatten(-1, (2, -1)).transpose(-1, -2)
    angle = torch.complex(turn.cos, turn.sin)[:, :: 2 if turn.interleaved else 1][:, : r // 2]
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * angle[:, None, None])
    turned = turned if turn.interleaved else turned.transpose(-1, -2)
    return torch.cat((turned.flatten(-2), x[..., r:]), -1)


LAYOUTS = [
    AttentionLayout(HEADS, rows, turn)
    for rows in (None, torch.tensor([3, 0, 4, 1, 2]))
    for turn in (None, rotary(8, False), rotary(8, True), rotary(4, False), rotary(4, True))
]


def received(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(S, B, HEADS.features, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("layout", LAYOUTS, ids=range(len(LAYOUTS)))
def test_heads_are_where_megatron_has_them(layout: AttentionLayout) -> None:
    y, bias = received(), torch.arange(float(HEADS.features))
    q, k, v = unpack(y, bias, layout)
    assert [t.shape for t in (q, k, v)] == [(S, B, 6, 8), (S, B, 2, 8), (S, B, 2, 8)]
    heads = ((y if layout.rows is None else y[layout.rows]) + bias).view(S, B, 10, 8)  # q q q k v q q q k v
    expected = [heads[:, :, [0, 1, 2, 5, 6, 7]], heads[:, :, [3, 8]], heads[:, :, [4, 9]]]
    if layout.rotary is not None:
        expected[:2] = (as_complex(x, layout.rotary) for x in expected[:2])
    for actual, right in zip((q, k, v), expected, strict=True):
        torch.testing.assert_close(actual, right)
        assert actual.is_contiguous()


@pytest.mark.parametrize("layout", LAYOUTS, ids=range(len(LAYOUTS)))
def test_packing_is_the_transposed_map(layout: AttentionLayout) -> None:
    """What autograd makes of unpacking."""
    y = received().requires_grad_()
    parts = unpack(y, None, layout)
    gradients = [torch.randn_like(part) for part in parts]
    (expected,) = torch.autograd.grad(parts, y, gradients)
    sent = pack(*gradients, layout)
    torch.testing.assert_close(sent, expected)
    assert sent.is_contiguous()


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_rounds_once(interleaved: bool) -> None:
    turn, y = rotary(8, interleaved), received(torch.bfloat16)
    exact = unpack(y.float(), None, AttentionLayout(HEADS, None, turn))
    rounded = unpack(y, None, AttentionLayout(HEADS, None, turn))
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(rounded, exact, strict=True))
    back = pack(*(part.bfloat16() for part in exact), AttentionLayout(HEADS, None, turn))
    once = pack(*(part.bfloat16().float() for part in exact), AttentionLayout(HEADS, None, turn)).bfloat16()
    assert back.dtype == torch.bfloat16 and torch.equal(back, once)


@pytest.mark.parametrize("turn", [None, rotary(4, True, rows=1)], ids=["as it is", "rotated"])
@pytest.mark.parametrize("heads", [AttentionHeads(1, 1, 4), AttentionHeads(4, 2, 4)], ids=str)
def test_nothing_stays_in_symmetric_memory(heads: AttentionHeads, turn: Rotary | None) -> None:
    """A single row is contiguous where it lies."""
    y = torch.arange(float(heads.features)).view(1, 1, -1)
    parts = unpack(y, None, AttentionLayout(heads, None, turn))
    before = [part.clone() for part in parts]
    y.fill_(torch.nan)
    assert all(torch.equal(a, b) for a, b in zip(parts, before, strict=True))
