"""Calls of collectives that ranks note in a table which those of one machine share: who comes later finds what differs, and who
came first learns it from a thread."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from overlap_train import OverlapMismatchError
from overlap_train.group import collective_calls
from overlap_train.group.collective_calls import _NOTED, NotedCalls
from overlap_train.group.signals import FaultRecord, Tag
from overlap_train.ranks.agreement import Agreement
from overlap_train.symmetric import host
from tests.processes import run_ranks, values

GATHER, SCATTER = Tag("fc1/fprop", "all_gather_linear, [4, 8]"), Tag("fc2/fprop", "linear_reduce_scatter, [8, 8]")


def two_ranks() -> tuple[list[NotedCalls], list[FaultRecord]]:
    """The calls of each rank on one table, and its faults; each knows GATHER and SCATTER."""
    table = torch.zeros(_NOTED * 2 * 8, dtype=torch.uint8)
    faults = [FaultRecord(torch.device("cpu"), rank, timeout_s=1.0) for rank in range(2)]
    for fault in faults:
        fault.register(GATHER), fault.register(SCATTER)
    return [NotedCalls(table, rank, 2, fault) for rank, fault in enumerate(faults)], faults


def test_a_rank_that_is_calls_behind_or_ahead_is_in_no_other_call() -> None:
    ranks, faults = two_ranks()
    for number in range(_NOTED + 2):  # further ahead than any host comes: the oldest calls are written over
        ranks[0].enter(GATHER if number % 2 else SCATTER)
    for number in range(5):
        ranks[1].enter(GATHER if number % 2 else SCATTER)
        ranks[0].look(), ranks[1].look()
    for fault in faults:
        fault.check()


def test_who_came_first_learns_it_once_of_the_earliest_call_that_differs() -> None:
    ranks, faults = two_ranks()
    ranks[0].enter(GATHER), ranks[1].enter(GATHER)
    for tag in (GATHER, SCATTER):
        ranks[0].enter(tag)
    with pytest.raises(OverlapMismatchError):
        ranks[1].enter(SCATTER)
    ranks[1]._words[3 * 2 + 1] = (3 << 32) + GATHER.fingerprint  # it went on all the same
    with pytest.warns(UserWarning, match=r"rank 0 is in fc1/fprop.*rank 1 is in fc2/fprop"):
        ranks[0].look()
    ranks[0].look()
    with pytest.raises(OverlapMismatchError, match=r"rank 0 is in fc1/fprop.*rank 1 is in fc2/fprop"):
        faults[0].check()


def _notes(rank: int, world: int) -> tuple[str, str]:
    """Two machines of two ranks. The last rank of the first one calls something else, and then so does that of the second."""
    host.machine = lambda: f"machine {rank // 2}"  # type: ignore[assignment] # of this process
    agreement, fault = Agreement(dist.group.WORLD, 20.0), FaultRecord(torch.device("cpu"), rank, 20.0)
    table = collective_calls.share_on_machine(agreement, _NOTED * world * 8)
    calls = NotedCalls(table, rank, world, fault)
    fault.register(GATHER), fault.register(SCATTER)
    found = []
    for wrong in (1, 3):
        if rank != wrong:
            calls.enter(GATHER)
        agreement.barrier("the others have come")
        try:
            if rank == wrong:
                calls.enter(SCATTER)
            found.append("")
        except OverlapMismatchError as error:
            found.append(str(error))
        agreement.barrier("all have come")
    return found[0], found[1]


def test_ranks_of_one_machine_find_each_other() -> None:
    outcomes = values(run_ranks(4, _notes, limit_s=60))
    assert [bool(first) for first, _ in outcomes] == [False, True, False, False], outcomes
    assert [bool(second) for _, second in outcomes] == [False, False, False, True], outcomes
    assert "rank 0 is in fc1/fprop" in outcomes[1][0] and "rank 2 is in fc1/fprop" in outcomes[3][1]


def _has_none(rank: int, world: int) -> tuple[str, int]:
    """Rank 1 cannot have the memory; rank 0 says so, and calls go on. Also how many looks the thread of faults has."""
    if rank == 1:
        host.os.memfd_create = mock.Mock(side_effect=OSError("no memory is left"))  # of this process
    said: list[str] = []
    collective_calls.say_on_rank_0 = lambda rank, text: said.append(text)  # type: ignore[assignment] # of this process
    fault = FaultRecord(torch.device("cpu"), rank, 20.0)
    calls = collective_calls.collective_calls(Agreement(dist.group.WORLD, 20.0), fault, torch.device("meta"))
    calls.enter(GATHER if rank else SCATTER)
    return said[0], len(fault.looks)


def test_without_shared_memory_it_is_said_and_calls_go_on() -> None:
    for said, looks in values(run_ranks(2, _has_none, limit_s=60)):
        assert (
            looks == 1
            and "mismatched calls of the method collective will not be named" in said
            and "no memory is left" in said
        )
