"""QK-norm between bias and rotation: results and gradients against fp64 autograd, and torch.nn.RMSNorm's rounding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from overlap_train import AttentionHeads, QkNorm, Rotary
from overlap_train.ulysses.attention_layout import HeadNorm, Heads, pack, unpack
from tests.unit.test_attention_layout import as_complex, rotary

HEADS, S, B = AttentionHeads(6, 2, 8), 5, 3
ROWS = torch.tensor([3, 0, 4, 1, 2])


def qk_norm(zero_centered: bool = False, dtype: torch.dtype = torch.float32) -> QkNorm:
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(HEADS.dim, generator=generator).to(dtype) for _ in range(2))
    return QkNorm(q, k, 0.1, zero_centered)


def random_heads(dtype: torch.dtype = torch.float32) -> Heads:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (
        torch.randn(S, B, n, HEADS.dim, generator=generator).to(dtype) for n in (HEADS.query, HEADS.kv, HEADS.kv)
    )
    return q, k, v


def received(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(S, B, HEADS.features, generator=torch.Generator().manual_seed(4)).to(dtype)


def kept(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((S, B, HEADS.kv, HEADS.per_group + 1, HEADS.dim), torch.nan, dtype=dtype)


def unpacked(
    y: torch.Tensor, bias: torch.Tensor | None, rows: torch.Tensor, turn: Rotary | None, norm: HeadNorm | None
) -> Heads:
    """In memory that is NaN before."""
    into = tuple(torch.full_like(part, torch.nan) for part in random_heads(y.dtype))
    unpack(y, bias, rows, into, turn, norm)  # type: ignore[arg-type]
    return into  # type: ignore[return-value]


def expected_heads(y: torch.Tensor, norm: QkNorm, turn: Rotary | None) -> Heads:
    """By torch, in y's dtype, of rows in the order of the sequence."""
    heads = y.view(S, B, 10, 8)  # q q q k v q q q k v
    parts = []
    for which, weight in (([0, 1, 2, 5, 6, 7], norm.q_weight), ([3, 8], norm.k_weight)):
        scale = weight.to(y.dtype) + float(norm.zero_centered)
        part = F.rms_norm(heads[:, :, which], (HEADS.dim,), scale, norm.eps)
        parts.append(part if turn is None else as_complex(part, turn))
    return parts[0], parts[1], heads[:, :, [4, 9]]


def in_fp64(turn: Rotary | None) -> Rotary | None:
    return None if turn is None else Rotary(turn.cos.double(), turn.sin.double(), turn.interleaved)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("turn", [None, rotary(8, False), rotary(4, True)], ids=["not rotated", "rotated", "in part"])
def test_results_and_gradients_are_those_of_fp64_autograd(turn: Rotary | None, zero_centered: bool) -> None:
    norm, y, bias, grads = qk_norm(zero_centered), received(), torch.arange(float(HEADS.features)) / 40, random_heads()
    ours = HeadNorm(norm, kept())
    actual = unpacked(y, bias, ROWS, turn, ours)
    sent = pack(grads, ROWS, turn, ours)

    exact = QkNorm(norm.q_weight.double().requires_grad_(), norm.k_weight.double().requires_grad_(), 0.1, zero_centered)
    leaf = y.double().requires_grad_()
    expected = expected_heads(leaf[ROWS.argsort()] + bias, exact, in_fp64(turn))
    gradients = torch.autograd.grad(
        expected, (leaf, exact.q_weight, exact.k_weight), tuple(grad.double() for grad in grads)
    )
    for part, right in zip((*actual, sent, *ours.of_weights()), (*expected, *gradients), strict=True):
        torch.testing.assert_close(part.double(), right, rtol=1e-5, atol=1e-5)


def test_parts_add_up_and_leave_other_rows_alone() -> None:
    turn, norm, grads = rotary(8, False), qk_norm(), random_heads()
    whole, parts = HeadNorm(norm, kept()), HeadNorm(norm, kept())
    expected, sent = unpacked(received(), None, ROWS, turn, whole), pack(grads, ROWS, turn, whole)
    for part in (slice(0, 2), slice(2, 5)):
        some = unpacked(received()[part], None, ROWS[part], turn, parts)
        for ours, right in zip(some, expected, strict=True):
            torch.testing.assert_close(ours[ROWS[part]], right[ROWS[part]])
        torch.testing.assert_close(pack(grads, ROWS[part], turn, parts), sent[part])
    torch.testing.assert_close(parts.weight_gradients, whole.weight_gradients)


def test_padding_adds_nothing_to_the_gradients_of_weights() -> None:
    turn, grads, y = rotary(8, False), random_heads(), received()
    rows = torch.tensor([3, -1, 4, -1, 2])
    there, padded, alone = rows >= 0, HeadNorm(qk_norm(), kept()), HeadNorm(qk_norm(), kept())
    unpacked(y, None, rows, turn, padded)
    unpacked(y[there], None, rows[there], turn, alone)
    torch.testing.assert_close(padded.before, alone.before, equal_nan=True)
    sent = pack(grads, rows, turn, padded)
    assert torch.equal(sent[there], pack(grads, rows[there], turn, alone)) and bool((sent[~there] == 0).all())
    assert torch.equal(padded.weight_gradients, alone.weight_gradients)


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
def test_norm_and_rotation_round_where_separate_passes_do(weights: torch.dtype) -> None:
    """bf16 in and out. Statistics and products are fp32, and sums of gradients, too."""
    turn, norm, y, grads = (
        rotary(8, False),
        qk_norm(dtype=weights),
        received(torch.bfloat16),
        random_heads(torch.bfloat16),
    )
    ours = HeadNorm(norm, kept(torch.bfloat16))
    q, k, v = unpacked(y, None, ROWS, turn, ours)
    in_order = QkNorm(norm.q_weight.float(), norm.k_weight.float(), norm.eps)
    normalised = [part.bfloat16() for part in expected_heads(y[ROWS.argsort()].float(), in_order, None)]
    together = torch.cat([part.unflatten(2, (HEADS.kv, -1)) for part in normalised], dim=3).flatten(2)
    for part, right in zip((q, k, v), unpacked(together[ROWS], None, ROWS, turn, None), strict=True):
        assert part.dtype == torch.bfloat16 and torch.equal(part, right)
    sent = pack(grads, ROWS, turn, ours)
    back = pack(grads, ROWS, turn)  # the rotation's transpose, rounded
    once = HeadNorm(in_order, ours.before.float())  # type: ignore[union-attr]
    parts = back.float().view(S, B, HEADS.kv, -1, HEADS.dim).split([4, 1], dim=3)
    exact = torch.cat([once.gradient(parts[0], ROWS), parts[1]], dim=3).flatten(2)
    assert sent.dtype == torch.bfloat16 and torch.equal(sent, exact.bfloat16())
    assert torch.equal(ours.weight_gradients, once.weight_gradients)
    assert all(grad.dtype == weights for grad in ours.of_weights())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"eps": None}, "linear_qkv: qk_norm.eps=None must be a number above 0, such as 1e-6"),
        ({"eps": 0.0}, "linear_qkv: qk_norm.eps=0.0 must be a number above 0"),
        ({"k_weight": torch.ones(4)}, r"linear_qkv: qk_norm has weights (8,) and (4,); both must be [8], a head's features"),
        ({"q_weight": torch.ones(8, device="meta")}, "qk_norm has weights on meta and cpu, the input is on cpu"),
    ],
)  # fmt: skip
def test_a_norm_that_does_not_fit_says_why(changes: dict, said: str) -> None:
    norm = QkNorm(**{"q_weight": torch.ones(8), "k_weight": torch.ones(8), "eps": 1e-6, **changes})
    assert said in (norm.error(8, torch.device("cpu"), "linear_qkv") or "")
    assert qk_norm().error(8, torch.device("cpu"), "linear_qkv") is None
