"""Kernels that copy blocks while they wait, run alone: GPUs launch them with several programs."""

from __future__ import annotations

import pytest
import torch

from overlap_train.group import signals as tags
from overlap_train.group.signals import Tag
from overlap_train.kernels import signal_words as words
from overlap_train.kernels.signal import take_blocks_kernel, wait_and_keep_kernel

WORLD, RANK, POLLS = 4, 1, 30
EXPECTED = tags.next_word(0, Tag("fc1/fprop", "all_gather_linear, [4, 8]"))


@pytest.mark.parametrize(("size", "programs"), [(5, 2), (16, 2), (100, 3), (100, 8), (0, 2)])
@pytest.mark.parametrize("has_come", [True, False])
def test_the_own_block_is_kept_whole_by_any_number_of_programs(size: int, programs: int, has_come: bool) -> None:
    """A wait that fails beside the copy poisons its row, and names the signal."""
    signals = torch.zeros(WORLD, words.MAX_CHUNKS, dtype=torch.int64)
    signals[[0, 2, 3] if has_come else [0], :2] = EXPECTED
    record, row = torch.zeros(words.FAULT_WORDS, dtype=torch.int64), torch.zeros(20)
    memory = signals, torch.tensor([EXPECTED]), torch.tensor([0]), record
    own, kept = torch.arange(1.0, size + 1), torch.full((size + 16,), -1.0)
    wait_and_keep_kernel[(programs,)](
        *memory, POLLS, RANK, WORLD, row[:18], 18, own, kept, size, CHUNKS=2, TIMED=False, BLOCK=16
    )
    assert torch.equal(kept, torch.cat([own, torch.full((16,), -1.0)]))
    assert bool(row[:18].isnan().all()) != has_come and not row[18:].any()
    assert record[words.FAULT_WORD] == (0 if has_come else 2 * words.MAX_CHUNKS)


@pytest.mark.parametrize(("size", "programs"), [(5, 1), (16, 5), (100, 3), (100, 100)])
@pytest.mark.parametrize("has_come", [True, False])
def test_the_others_blocks_are_taken_chunk_by_chunk(size: int, programs: int, has_come: bool) -> None:
    """The own block is left alone. Of a chunk that does not come there is NaN, and the signal is named."""
    chunks = 2
    signals = torch.zeros(WORLD, words.MAX_CHUNKS, dtype=torch.int64)
    signals[:, :chunks] = EXPECTED
    signals[RANK], signals[2, 1] = 0, EXPECTED * has_come
    record = torch.zeros(words.FAULT_WORDS, dtype=torch.int64)
    blocks = torch.arange(1.0, WORLD * chunks * size + 1).view(WORLD, chunks, size)
    y = torch.full((WORLD * chunks * size + 16,), -1.0)
    take_blocks_kernel[(programs,)](
        signals, torch.tensor([EXPECTED]), torch.tensor([0]), record, POLLS, RANK, blocks, y, size,
        WORLD=WORLD, CHUNKS=chunks, TIMED=False, BLOCK=16,
    )  # fmt: skip
    taken = y[:-16].view(WORLD, chunks, size)
    assert (y[-16:] == -1).all() and (taken[RANK] == -1).all()
    assert bool(taken[2, 1].isnan().all()) != has_come
    others = [source for source in range(WORLD) if source != RANK]
    assert not has_come or torch.equal(taken[others], blocks[others])
    assert record[words.FAULT_WORD] == (0 if has_come else 2 * words.MAX_CHUNKS + 1)
