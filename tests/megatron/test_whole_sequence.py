"""What the layers of a model share of the whole sequence: worked out once, and not kept for ever."""

from __future__ import annotations

import re
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from overlap_train import AttentionHeads, OverlapTimeoutError, SequenceLayout
from overlap_train.integrations.megatron import whole_sequence as whole
from overlap_train.integrations.megatron.packed import Documents
from overlap_train.integrations.megatron.ulysses_linears import Exchange
from overlap_train.integrations.megatron.whole_sequence import WholeSequence
from tests.processes import run_ranks, values

EXCHANGE = SimpleNamespace(ranks=2, rows=8, group=None, layout="zigzag")


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What was gathered."""
    made: list[torch.Tensor] = []

    def gathered(x: torch.Tensor, dim: int, exchange: object, timeout_s: float) -> torch.Tensor:
        made.append(x)
        return torch.cat((x, x), dim)

    monkeypatch.setattr(whole, "gathered", gathered)
    return made


def test_of_masks_the_last_one_alone_is_kept(gathers: list[torch.Tensor]) -> None:
    """A micro-batch brings a mask, which is as large as the square of the sequence; all layers ask for it."""
    sequence, masks = WholeSequence(), [torch.zeros(1, 1, 4, 8) for _ in range(3)]
    found = [weakref.ref(sequence.mask(mask, EXCHANGE, layer)) for mask in masks for layer in (1, 2)]
    assert len(gathers) == len(masks), "once for all layers"
    assert [ref() is None for ref in found] == [True] * 4 + [False] * 2
    assert sequence.mask(masks[-1], EXCHANGE, 3) is found[-1]()
    masks[-1].data.fill_(1)  # the version stays
    assert sequence.mask(masks[-1], EXCHANGE, 1).sum() == 64, "the next micro-batch, in the same memory"


def test_of_packs_the_last_one_alone_has_its_frequencies_and_angles_kept() -> None:
    """Each micro-batch is another pack. One of 131072 tokens takes 192 MiB."""
    sequence, freqs, kept = WholeSequence(), torch.rand(8, 1, 1, 4), []
    for end in (4, 5, 6, 7):
        documents = Documents((0, end, 8), (end, 8 - end))
        both = [sequence.frequencies(freqs, EXCHANGE, documents, False) for _ in range(2)]
        assert both[0] is both[1]
        kept.append([weakref.ref(both[0]), weakref.ref(sequence.rotary(both[0], 1.0, False).cos)])
        del both
    assert [[ref() is None for ref in pack] for pack in kept] == [[True] * 2] * 2 + [[False] * 2] * 2


def _alone(rank: int, world: int, what: str) -> tuple[str, list[str]] | None:
    """What rank 0 raises and warns of if rank 1 does not come to a gather. what: is gathered."""
    store = dist.PrefixStore("alone", dist.distributed_c10d._get_default_store())
    if rank == 1:
        store.wait(["given up"])
        return None
    sequence = WholeSequence(timeout_s=1.0)
    exchange = Exchange(dist.group.WORLD, AttentionHeads(4, 2, 8), SequenceLayout(), 8, torch.device("cpu"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            if what == "mask":
                sequence.mask(torch.zeros(1, 1, 4, 8), exchange, 1)
            else:
                sequence.frequencies(torch.zeros(4, 1, 1, 2), exchange, None, False)
        except OverlapTimeoutError as error:
            return str(error), [str(one.message) for one in told]
        finally:
            store.set("given up", "")
    raise AssertionError("a gather that one rank alone is in has ended")


@pytest.mark.parametrize("what", ["frequencies", "mask"])
def test_a_rank_that_does_not_bring_its_part_is_a_named_error_in_time(what: str) -> None:
    (error, told), _ = values(run_ranks(2, _alone, what))
    assert "rank 0 waited 1 s for the rotary frequencies or the mask of ranks 0, 1 of the job" in error
    ours = [text for text in told if text.startswith("Ulysses attention: ")]  # torch 2.13 warns of a new name
    assert len(ours) == 1 and re.search(r"rank 0 has waited [\d.]+ s for .* it gives up after timeout_s=1$", ours[0])
