"""Bounded polling and the error that a fault record turns into."""

from __future__ import annotations

import pytest
import torch

from overlap_train import OverlapTimeoutError
from overlap_train.kernels import signal_words as words
from overlap_train.protocol.watchdog import FaultRecord, Waiting, poll


def test_poll_returns_as_soon_as_it_is_ready() -> None:
    answers = iter([False, False, True])
    assert poll(lambda: next(answers), timeout_s=10.0, pause=lambda seconds: None)
    assert list(answers) == []


def test_poll_gives_up() -> None:
    assert not poll(lambda: False, timeout_s=0.0)


def test_a_record_without_a_fault_raises_nothing() -> None:
    FaultRecord(torch.device("cpu")).check()


def test_a_kernel_report_names_operator_ranks_and_epochs() -> None:
    fault = FaultRecord(torch.device("cpu"))
    other = fault.tag(Waiting("fc1/fprop", 3, 3, 0, 1.5))
    tag = fault.tag(Waiting("fc2/dgrad", 3, 3, 0, 1.5))
    assert tag != other and fault.tag(Waiting("fc2/dgrad", 3, 3, 0, 1.5)) == tag
    for word, value in (
        (words.FAULT_TAG, tag),
        (words.FAULT_WORD, 2 * words.MAX_CHUNKS + 1),
        (words.FAULT_EXPECTED, 7),
        (words.FAULT_SEEN, 6),
    ):
        fault.record[word] = value
    fault.check()  # not before the set word
    fault.record[words.FAULT_SET] = 1
    for _ in range(2):
        with pytest.raises(
            OverlapTimeoutError, match=r"fc2/dgrad: rank 3 waited 1.5 s for chunk 1 of rank 2: expected epoch 7, seen 6"
        ):
            fault.check()
