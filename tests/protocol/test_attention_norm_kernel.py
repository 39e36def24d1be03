"""The kernels that normalise heads on their way between received rows and attention, interpreted, against torch."""

from __future__ import annotations

import pytest
import torch

from overlap_train import AttentionHeads, QkNorm
from overlap_train.ulysses import attention_layout
from overlap_train.ulysses.attention_layout import HeadNorm, Heads, pack, pack_by_kernel, unpack, unpack_by_kernel
from tests.protocol.test_attention_layout_kernel import IDS, ROWS, B, S, after_nan, nan_heads, nothing_in_front, rotary

CASES = [  # heads, rotated features, interleaved pairs; more heads than a program moves, dimensions that are no power of two
    (AttentionHeads(6, 2, 16), 16, False),
    (AttentionHeads(3, 3, 12), 8, False),
    (AttentionHeads(4, 1, 8), 0, False),
    (AttentionHeads(12, 2, 6), 4, True),
]


def head_norm(heads: AttentionHeads, dtype: torch.dtype = torch.float32, zero_centered: bool = False) -> HeadNorm:
    """With memory for what is kept, which is NaN; the same weights at every call."""
    generator = torch.Generator().manual_seed(heads.dim)
    q, k = (torch.randn(2 * heads.dim, generator=generator)[::2].to(dtype) for _ in range(2))
    before = torch.full((S, B, heads.kv, heads.per_group + 1, heads.dim), torch.nan, dtype=dtype)
    return HeadNorm(QkNorm(q, k, 0.05, zero_centered), after_nan(before))


def gradients(heads: AttentionHeads, dtype: torch.dtype) -> Heads:
    """As attention returns them: [b, heads, s, dim] in memory."""
    counts = (heads.query, heads.kv, heads.kv)
    q, k, v = (torch.randn(B, count, S, heads.dim).permute(2, 0, 1, 3).to(dtype) for count in counts)
    return q, k, v


@pytest.mark.parametrize("rows", ROWS[1::2], ids=IDS[1::2])
@pytest.mark.parametrize(("heads", "rotated", "interleaved"), CASES)
def test_both_kernels_do_what_torch_does(
    heads: AttentionHeads, rotated: int, interleaved: bool, rows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_layout, "NORM_ROWS", 5)  # several programs, the last one with rows that are not there
    turn, packed = rotary(rotated, interleaved), torch.randn(len(rows), B, heads.features)
    for bias, zero_centered in ((None, True), (torch.randn(heads.features), False)):
        right, ours = (head_norm(heads, zero_centered=zero_centered) for _ in range(2))
        expected, actual = nan_heads(heads), nan_heads(heads)
        unpack(packed, bias, rows, expected, turn, right)
        unpack_by_kernel(packed, bias, rows, actual, turn, ours)
        for part, whole in zip((*actual, ours.before), (*expected, right.before), strict=True):
            torch.testing.assert_close(part, whole, equal_nan=True)
        assert nothing_in_front((*actual, ours.before))
        grads = gradients(heads, torch.float32)
        torch.testing.assert_close(pack_by_kernel(grads, rows, turn, ours), pack(grads, rows, turn, right))
        torch.testing.assert_close(ours.weight_gradients, right.weight_gradients)
        pack_by_kernel(grads, rows, turn, ours)  # another part adds to the same sums
        torch.testing.assert_close(ours.weight_gradients, 2 * right.weight_gradients)


def test_nothing_is_kept_without_backward() -> None:
    heads, packed = CASES[0][0], torch.randn(S, B, CASES[0][0].features)
    with_memory, without = head_norm(heads), HeadNorm(head_norm(heads).norm, None)
    expected, actual = nan_heads(heads), nan_heads(heads)
    unpack_by_kernel(packed, None, ROWS[0], expected, None, with_memory)
    unpack_by_kernel(packed, None, ROWS[0], actual, None, without)
    assert all(torch.equal(ours, right) for ours, right in zip(actual, expected, strict=True))
