"""Bounded polling, signals that name their call, and the errors that a fault record turns into."""

from __future__ import annotations

import warnings

import pytest
import torch

from overlap_train import OverlapMismatchError, OverlapTimeoutError
from overlap_train.group import signals as tags
from overlap_train.group.signals import _MOST_TAGS, FaultRecord, Tag, poll
from overlap_train.kernels import signal_words as words

FC1, FC2 = Tag("fc1/fprop", "all_gather_linear, [4, 8]"), Tag("fc2/dgrad", "linear_reduce_scatter, [8, 8]")


def record(*known: Tag) -> FaultRecord:
    fault = FaultRecord(torch.device("cpu"), rank=3, timeout_s=1.5)
    for tag in known:
        fault.know(tag)
    return fault


def report(fault: FaultRecord, expected: int, seen: int) -> None:
    """What a kernel writes that waited for chunk 1 of rank 2."""
    fault.record[words.FAULT_WORD] = 2 * words.MAX_CHUNKS + 1
    fault.record[words.FAULT_EXPECTED], fault.record[words.FAULT_SEEN] = expected, seen


def word(epoch: int, tag: Tag) -> int:
    return (epoch << 32) + tag.fingerprint


def test_poll_returns_as_soon_as_it_is_ready() -> None:
    answers = iter([False, False, True])
    assert poll(lambda: next(answers), timeout_s=10.0, pause=lambda seconds: None)
    assert list(answers) == []


def test_poll_gives_up_and_says_once_that_it_is_late() -> None:
    late: list[int] = []
    assert not poll(lambda: False, timeout_s=0.1, late=lambda: late.append(1))
    assert late == [1]
    assert poll(lambda: True, timeout_s=10.0, late=lambda: late.append(2)) and late == [1]


def test_a_record_without_a_fault_raises_nothing() -> None:
    record().check()


def test_a_kernel_report_names_operator_ranks_and_epochs() -> None:
    fault = record(FC1, FC2)
    report(fault, word(7, FC2), word(6, FC1))
    fault.check()  # not before the set word
    fault.record[words.FAULT_SET] = 1
    for _ in range(2):
        with pytest.raises(
            OverlapTimeoutError, match=r"fc2/dgrad: rank 3 waited 1.5 s for chunk 1 of rank 2: expected epoch 7, seen 6"
        ):
            fault.check()


@pytest.mark.parametrize("known", [(FC1, FC2), (FC2,)])
def test_a_peer_in_another_call_is_named_with_both_calls(known: tuple[Tag, ...]) -> None:
    fault = record(*known)
    report(fault, word(7, FC2), word(7, FC1))
    fault.record[words.FAULT_SET] = 1
    theirs = r"fc1/fprop \[all_gather_linear" if FC1 in known else "a call that this rank has not made"
    with pytest.raises(OverlapMismatchError, match=rf"rank 3 is in fc2/dgrad \[linear_.*rank 2 is in {theirs}"):
        fault.check()


def test_a_late_wait_is_known_by_rank_and_call() -> None:
    fault = record(FC1)
    assert fault.late() is None
    fault.record[words.LATE_WORD], fault.record[words.LATE_EXPECTED] = 2 * words.MAX_CHUNKS, word(4, FC1)
    late = fault.late()
    assert late == (2, 0, word(4, FC1))
    with pytest.warns(UserWarning, match=r"fc1/fprop: rank 3 has waited 0.15 s for chunk 0 of rank 2"):
        fault.warn_late(*late)


def test_where_warnings_are_errors_a_late_wait_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """It raised on one rank, in the middle of a call: the peers' next calls met others of this rank, or nobody."""
    with warnings.catch_warnings(action="error"):
        record(FC1).warn_late(2, 0, word(4, FC1))
    assert "overlap_train: fc1/fprop: rank 3 has waited 0.15 s for chunk 0 of rank 2" in capsys.readouterr().err


def test_old_calls_are_forgotten() -> None:
    fault = record(*(Tag(f"call {number}", "") for number in range(_MOST_TAGS + 5)))
    assert len(fault._tags) == _MOST_TAGS


@pytest.mark.parametrize("epoch", [0, 1, 2**31 - 2, 2**31 - 1])
def test_words_grow_by_an_epoch_and_take_the_calls_fingerprint(epoch: int) -> None:
    """Also where the epoch's 32 bits wrap around."""
    before = word(epoch, FC1)
    after = tags.next_word(before, FC2)
    assert -(2**63) <= after < 2**63
    assert tags.fingerprint_of(after) == FC2.fingerprint
    assert not tags.has_arrived(before, after)
    assert tags.has_arrived(after, after) and tags.is_same_call(after, after)
    other = tags.next_word(before, FC1)
    assert tags.has_arrived(other, after) and not tags.is_same_call(other, after)
    ahead = tags.next_word(after, FC1)  # a peer may be one barrier ahead
    assert tags.has_arrived(ahead, after) and tags.is_same_call(ahead, after)


def test_a_calls_name_shapes_and_operator_tell_it_from_others() -> None:
    calls = [FC1, FC2, Tag(FC1.op, FC2.what), Tag(FC2.op, FC1.what), FC1.barrier]
    assert len({tag.fingerprint for tag in calls}) == len(calls)
