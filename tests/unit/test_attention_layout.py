"""From what an all-to-all brings to q, k and v, and back: every element in its place, rotated, in memory of its own."""

from __future__ import annotations

import pytest
import torch

from overlap_train import AttentionHeads, Rotary
from overlap_train.ulysses.attention_layout import Heads, pack, unpack

HEADS, S, B = AttentionHeads(6, 2, 8), 5, 3


def rotary(r: int, interleaved: bool, rows: int = S) -> Rotary:
    """Angles that are the same in both features of a pair."""
    angles = torch.randn(rows, r // 2, generator=torch.Generator().manual_seed(r))
    angles = angles.repeat_interleave(2, -1) if interleaved else angles.repeat(1, 2)
    return Rotary(angles.cos(), angles.sin(), interleaved)


def as_complex(x: torch.Tensor, turn: Rotary) -> torch.Tensor:
    """x [s, b, heads, dim] with its pairs turned as complex numbers."""
    r = turn.cos.shape[-1]
    pairs = (
        x[..., :r].unflatten(-1, (-1, 2)) if turn.interleaved else x[..., :r].unflatten(-1, (2, -1)).transpose(-1, -2)
    )
    angle = torch.complex(turn.cos, turn.sin)[:, :: 2 if turn.interleaved else 1][:, : r // 2]
    turned = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * angle[:, None, None])
    turned = turned if turn.interleaved else turned.transpose(-1, -2)
    return torch.cat((turned.flatten(-2), x[..., r:]), -1)


CASES = [
    (rows, turn)
    for rows in (torch.arange(S), torch.tensor([3, 0, 4, 1, 2]))
    for turn in (None, rotary(8, False), rotary(8, True), rotary(4, False), rotary(4, True))
]


def received(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(S, B, HEADS.features, generator=torch.Generator().manual_seed(0)).to(dtype)


def unpacked(
    y: torch.Tensor, bias: torch.Tensor | None, rows: torch.Tensor, turn: Rotary | None, heads: AttentionHeads = HEADS
) -> Heads:
    """In memory that is NaN before."""
    into = tuple(
        y.new_full((S, y.shape[1], count, heads.dim), torch.nan) for count in (heads.query, heads.kv, heads.kv)
    )
    unpack(y, bias, rows, into, turn)  # type: ignore[arg-type]
    return into  # type: ignore[return-value]


@pytest.mark.parametrize(("rows", "turn"), CASES)
def test_heads_are_where_megatron_has_them(rows: torch.Tensor, turn: Rotary | None) -> None:
    y, bias = received(), torch.arange(float(HEADS.features))
    q, k, v = unpacked(y, bias, rows, turn)
    heads = (y[rows.argsort()] + bias).view(S, B, 10, 8)  # q q q k v q q q k v
    expected = [heads[:, :, [0, 1, 2, 5, 6, 7]], heads[:, :, [3, 8]], heads[:, :, [4, 9]]]
    if turn is not None:
        expected[:2] = (as_complex(x, turn) for x in expected[:2])
    for actual, right in zip((q, k, v), expected, strict=True):
        torch.testing.assert_close(actual, right)


def test_a_part_of_the_rows_leaves_the_others_alone() -> None:
    rows = torch.tensor([4, 1])
    part, whole = unpacked(received()[rows], None, rows, CASES[1][1]), unpacked(received(), None, *CASES[1])
    for some, all_ in zip(part, whole, strict=True):
        torch.testing.assert_close(some[rows], all_[rows])
        assert some[[0, 2, 3]].isnan().all()
    torch.testing.assert_close(pack(whole, rows, CASES[1][1]), pack(whole, *CASES[1])[rows])


@pytest.mark.parametrize("turn", [None, rotary(4, False)], ids=["not rotated", "rotated"])
def test_padding_is_left_out_and_sent_as_zeros(turn: Rotary | None) -> None:
    rows, y = torch.tensor([-1, 4, -1, 1]), received()[:4]
    y[rows < 0] = torch.nan
    part = unpacked(y, None, rows, turn)
    alone = unpacked(y[rows >= 0], None, rows[rows >= 0], turn)
    for ours, right in zip(part, alone, strict=True):
        torch.testing.assert_close(ours, right, equal_nan=True)
    sent = pack(part, rows, turn)
    assert bool((sent[rows < 0] == 0).all())
    assert torch.equal(sent[rows >= 0], pack(part, rows[rows >= 0], turn))


@pytest.mark.parametrize(("rows", "turn"), CASES)
def test_packing_is_the_transposed_map(rows: torch.Tensor, turn: Rotary | None) -> None:
    """<unpack(y), g> = <y, pack(g)> for every y and g: for one of each, in fp64's head room."""
    y = received()
    parts = unpacked(y, None, rows, turn)
    gradients = tuple(torch.randn_like(part) for part in parts)
    sent = pack(gradients, rows, turn)  # type: ignore[arg-type]
    left = sum(float((a.double() * b.double()).sum()) for a, b in zip(parts, gradients, strict=True))
    assert float((y.double() * sent.double()).sum()) == pytest.approx(left, rel=1e-5, abs=1e-4)
    assert sent.is_contiguous()


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_rounds_once(interleaved: bool) -> None:
    turn, y, rows = rotary(8, interleaved), received(torch.bfloat16), torch.arange(S)
    exact, rounded = unpacked(y.float(), None, rows, turn), unpacked(y, None, rows, turn)
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(rounded, exact, strict=True))
    back = pack(tuple(part.bfloat16() for part in exact), rows, turn)  # type: ignore[arg-type]
    once = pack(tuple(part.bfloat16().float() for part in exact), rows, turn).bfloat16()  # type: ignore[arg-type]
    assert back.dtype == torch.bfloat16 and torch.equal(back, once)
