"""What the layers of a model share of the whole sequence: worked out once, and not kept for ever."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch

from overlap_train.integrations.megatron.attention import whole
from overlap_train.integrations.megatron.attention.whole import WholeSequence

EXCHANGE = SimpleNamespace(ranks=2, group=None, layout="zigzag")


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What was gathered."""
    made: list[torch.Tensor] = []

    def gathered(x: torch.Tensor, dim: int, exchange: object) -> torch.Tensor:
        made.append(x)
        return torch.cat((x, x), dim)

    monkeypatch.setattr(whole, "_gathered", gathered)
    return made


def test_of_masks_the_last_one_alone_is_kept(gathers: list[torch.Tensor]) -> None:
    """A micro-batch brings a mask, which is as large as the square of the sequence; all layers ask for it."""
    sequence, masks = WholeSequence(), [torch.zeros(1, 1, 4, 8) for _ in range(3)]
    found = [weakref.ref(sequence.mask(mask, 8, EXCHANGE)) for mask in masks for _ in range(2)]
    assert len(gathers) == len(masks), "once for all layers"
    assert [ref() is None for ref in found] == [True] * 4 + [False] * 2
    assert sequence.mask(masks[-1], 8, EXCHANGE) is found[-1]()


def test_masks_do_not_displace_what_stays_the_same(gathers: list[torch.Tensor]) -> None:
    sequence, freqs = WholeSequence(), torch.zeros(4, 1, 1, 2)
    angles = sequence.frequencies(freqs, 8, EXCHANGE, None, False)
    for mask in [torch.zeros(1, 1, 4, 8) for _ in range(9)]:
        sequence.mask(mask, 8, EXCHANGE)
    assert sequence.frequencies(freqs, 8, EXCHANGE, None, False) is angles
    others = [torch.zeros(4, 1, 1, 2) for _ in range(8)]
    for other in others:
        sequence.frequencies(other, 8, EXCHANGE, None, False)
    assert sequence.frequencies(freqs, 8, EXCHANGE, None, False) is not angles, "the last eight of a kind"
