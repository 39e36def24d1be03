"""The kernels that take heads out of received rows and put them back, interpreted, against torch's indexing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from overlap_train import AttentionHeads, Rotary
from overlap_train.ulysses.attention_layout import Heads, pack, pack_by_kernel, unpack, unpack_by_kernel

S, B = 8, 2
CASES = [  # heads, rotated features, interleaved pairs; more heads than a program moves, dimensions that are no power of two
    (AttentionHeads(6, 2, 16), 16, False),
    (AttentionHeads(6, 2, 16), 16, True),
    (AttentionHeads(3, 3, 12), 8, False),
    (AttentionHeads(4, 1, 8), 0, False),
    (AttentionHeads(12, 2, 6), 4, True),
]
ROWS = [
    torch.arange(S),
    torch.tensor([0, 3, 4, 7, 1, 2, 5, 6]),
    torch.tensor([6, 2, 3]),
    torch.tensor([5, -1, 0, -1, 7]),
]
IDS = ["in order", "zigzag", "some", "padded"]


def rotary(rotated: int, interleaved: bool) -> Rotary | None:
    generator = torch.Generator().manual_seed(rotated)
    cos, sin = (after_nan(torch.randn(S, rotated, generator=generator)) for _ in range(2))
    return Rotary(cos, sin, interleaved) if rotated else None


def nan_heads(heads: AttentionHeads) -> Heads:
    counts = (heads.query, heads.kv, heads.kv)
    q, k, v = (after_nan(torch.full((S, B, count, heads.dim), torch.nan)) for count in counts)
    return q, k, v


def after_nan(x: torch.Tensor) -> torch.Tensor:
    """x with a row of NaN in front of it in memory, which is row -1 for a kernel."""
    return torch.cat((torch.full_like(x[:1], torch.nan), x))[1:]


def nothing_in_front(tensors: Sequence[torch.Tensor]) -> bool:
    return all(x._base is not None and bool(x._base[0].isnan().all()) for x in tensors)


@pytest.mark.parametrize("rows", ROWS[1:], ids=IDS[1:])
@pytest.mark.parametrize(("heads", "rotated", "interleaved"), CASES)
def test_both_kernels_do_what_torch_does(
    heads: AttentionHeads, rotated: int, interleaved: bool, rows: torch.Tensor
) -> None:
    turn, packed = rotary(rotated, interleaved), torch.randn(len(rows), B, heads.features)
    for bias in (None, torch.randn(heads.features)):
        expected, actual = nan_heads(heads), nan_heads(heads)
        unpack(packed, bias, rows, expected, turn)
        unpack_by_kernel(packed, bias, rows, actual, turn)
        for ours, right in zip(actual, expected, strict=True):
            torch.testing.assert_close(ours, right, equal_nan=True)
        assert nothing_in_front(actual)
    # as attention returns them: [b, heads, s, dim] in memory
    q, k, v = (torch.randn(B, count, S, heads.dim).permute(2, 0, 1, 3) for count in (heads.query, heads.kv, heads.kv))
    torch.testing.assert_close(pack_by_kernel((q, k, v), rows, turn), pack((q, k, v), rows, turn))


def test_what_lies_in_front_of_the_gradients_is_not_padding() -> None:
    heads, turn, rows = CASES[2][0], rotary(8, False), ROWS[3]
    q, k, v = (after_nan(torch.randn(S, B, count, heads.dim)) for count in (heads.query, heads.kv, heads.kv))
    sent = pack_by_kernel((q, k, v), rows, turn)
    torch.testing.assert_close(sent, pack((q, k, v), rows, turn))
    assert bool((sent[rows < 0] == 0).all())


def test_gradients_whose_features_do_not_lie_together_are_copied() -> None:
    heads, turn = CASES[0][0], rotary(16, False)
    q, k, v = (torch.randn(S, B, heads.dim, count).transpose(2, 3) for count in (heads.query, heads.kv, heads.kv))
    assert q.stride(-1) != 1
    torch.testing.assert_close(pack_by_kernel((q, k, v), ROWS[1], turn), pack((q, k, v), ROWS[1], turn))


def test_a_bias_whose_elements_do_not_lie_together_is_copied() -> None:
    heads = CASES[3][0]
    packed, bias = torch.randn(S, B, heads.features), torch.randn(2 * heads.features)[::2]
    expected, actual = nan_heads(heads), nan_heads(heads)
    unpack(packed, bias, ROWS[0], expected, None)
    unpack_by_kernel(packed, bias, ROWS[0], actual, None)
    for ours, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, right)
