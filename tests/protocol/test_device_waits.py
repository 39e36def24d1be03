"""The kernels that wait, run alone: what they leave in the record, in the flag and in what they guard."""

from __future__ import annotations

import pytest
import torch

from overlap_train.group import signals as tags
from overlap_train.group.signals import Tag
from overlap_train.kernels import signal_words as words
from overlap_train.kernels.own_block import wait_and_keep_kernel
from overlap_train.kernels.signal import next_epoch_kernel, wait_kernel

WORLD, RANK, POLLS = 4, 1, 30
FC1 = Tag("fc1/fprop", "all_gather_linear, [4, 8]")
EXPECTED = tags.next_word(0, FC1)


class Waiting:
    """What wait_kernel sees on rank 1 of four, of which `arrived` have signalled."""

    def __init__(self, *arrived: int, aborted: int = 0) -> None:
        self.signals = torch.zeros(WORLD, words.MAX_CHUNKS, dtype=torch.int64)
        self.signals[list(arrived), :2] = EXPECTED
        self.epoch, self.abort = torch.tensor([EXPECTED]), torch.tensor([aborted])
        self.record, self.row = torch.zeros(words.FAULT_WORDS, dtype=torch.int64), torch.zeros(20)

    def run(self) -> None:
        """Wait for two chunks of every peer."""
        memory = self.signals, self.epoch, self.abort, self.record
        wait_kernel[(1,)](*memory, POLLS, RANK, 0, WORLD, 0, self.row[:18], 18, CHUNKS=2, TIMED=False, BLOCK=16)

    def run_and_keep(self, own: torch.Tensor, programs: int) -> torch.Tensor:
        """The same for the whole slot, and what became of the own block and of the words behind it."""
        kept = torch.full((len(own) + 16,), -1.0)
        memory = self.signals, self.epoch, self.abort, self.record
        wait_and_keep_kernel[(programs,)](
            *memory, POLLS, RANK, WORLD, self.row[:18], 18, own, kept, len(own), CHUNKS=2, TIMED=False, BLOCK=16
        )
        return kept


@pytest.mark.parametrize(("size", "programs"), [(5, 2), (16, 2), (100, 3), (100, 8), (0, 2)])
def test_the_own_block_is_kept_whole_by_any_number_of_programs(size: int, programs: int) -> None:
    waiting, own = Waiting(0, 2, 3), torch.arange(1.0, size + 1)
    assert torch.equal(waiting.run_and_keep(own, programs), torch.cat([own, torch.full((16,), -1.0)]))
    assert not waiting.row.any() and not waiting.record.any()


def test_a_wait_that_fails_beside_the_copy_poisons_its_row() -> None:
    waiting = Waiting(0)
    waiting.run_and_keep(torch.ones(8), 2)
    assert waiting.record[words.FAULT_WORD] == 2 * words.MAX_CHUNKS and waiting.row[:18].isnan().all()


def test_blocks_that_are_here_are_left_alone() -> None:
    waiting = Waiting(0, 2, 3)
    waiting.run()
    assert not waiting.row.any() and not waiting.abort.any() and not waiting.record.any()


def test_the_first_wait_that_fails_is_recorded_and_the_row_is_poisoned() -> None:
    waiting = Waiting(0)
    waiting.run()
    assert waiting.abort.item() == 1 and waiting.record[words.FAULT_SET] == 1
    assert waiting.record[words.FAULT_WORD] == 2 * words.MAX_CHUNKS, "rank 3 did not come either, but later"
    assert (waiting.record[words.FAULT_EXPECTED], waiting.record[words.FAULT_SEEN]) == (EXPECTED, 0)
    assert waiting.record[words.LATE_WORD] == 2 * words.MAX_CHUNKS, "the others end at once"
    assert waiting.row[:18].isnan().all() and not waiting.row[18:].any()


def test_a_wait_after_one_that_failed_ends_at_once_and_poisons_its_row() -> None:
    waiting = Waiting(aborted=1)
    waiting.run()
    assert waiting.row[:18].isnan().all()
    assert not waiting.record.any(), "neither late, nor the first that failed"


def test_a_signal_of_another_call_is_recorded() -> None:
    waiting, other = Waiting(0, 2, 3), tags.next_word(0, Tag("fc2/fprop", ""))
    waiting.signals[2, 1] = other
    waiting.run()
    assert waiting.record[words.FAULT_WORD] == 2 * words.MAX_CHUNKS + 1 and waiting.record[words.FAULT_SEEN] == other
    assert waiting.record[words.LATE_EXPECTED] == 0 and waiting.row[:18].isnan().all()


def test_a_signal_of_a_later_call_is_as_good() -> None:
    waiting = Waiting(0, 2, 3)
    waiting.signals[2] = tags.next_word(EXPECTED, Tag("fc2/fprop", ""))
    waiting.run()
    assert not waiting.record.any() and not waiting.row.any()


def test_the_next_epoch_resets_the_counters_and_no_other_word() -> None:
    control = torch.full((12,), 7)
    control[0] = EXPECTED
    next_epoch_kernel[(1,)](control, FC1.word, 10, BLOCK=16)
    assert control.tolist() == [tags.next_word(EXPECTED, FC1), *[0] * 10, 7]
