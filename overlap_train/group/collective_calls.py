"""Whether the ranks are in the same call of a collective, which neither gloo nor NCCL would tell.

CPU processes ask each other before each call. GPUs take 60 microseconds for a small one, so their ranks do not wait: each notes
its calls where the others of its machine can read them, and whoever comes to a call later sees that the other's differs.
"""

from __future__ import annotations

import torch

from ..ranks.agreement import Agreement, say_on_rank_0
from ..ranks.peers import OverlapMismatchError
from ..symmetric.host import share_on_machine
from .signals import FaultRecord, Tag, epoch_of, next_word

_NOTED = 1024  # calls; a host is no further ahead of its GPU than the 1024 launches that a stream queues


def collective_calls(agreement: Agreement, fault: FaultRecord, device: torch.device) -> CollectiveCalls:
    """The calls of one domain. Collective."""
    if device.type == "cpu":
        return CollectiveCalls(agreement)
    try:
        table = share_on_machine(agreement, _NOTED * agreement.world_size * 8)
    except RuntimeError as error:  # on all ranks alike
        say_on_rank_0(agreement.rank, f"mismatched calls of the method collective will not be named: {error}")
        table = torch.zeros(_NOTED * agreement.world_size * 8, dtype=torch.uint8, device="cpu")
    calls = NotedCalls(table, agreement.rank, agreement.world_size, fault)
    fault.looks.append(calls.look)
    return calls


class CollectiveCalls:
    """How a rank enters the calls of collectives of its domain: on the CPU ranks exchange the tag of each call through the
    store of their group, and wait for each other."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement

    def enter(self, tag: Tag) -> None:
        """Begin the call `tag`, before the library is called. OverlapMismatchError: a rank is in another call.
        OverlapTimeoutError: a rank did not come."""
        mine = self._agreement.rank
        for rank, theirs in enumerate(self._agreement.exchange(tag, str(tag), kind="collective call")):
            if theirs != tag:
                raise OverlapMismatchError(
                    f"{tag.op}: rank {mine} is in {tag}, but rank {rank} is in {theirs} here; all ranks of a group must make the "
                    f"same calls, with the same shapes, in the same order"
                )


class NotedCalls(CollectiveCalls):
    """A table of words (signals.py): row n % _NOTED has the n-th call of each rank, in its own column. Nobody waits.

    A rank that comes to a call first sees an older word of the other there. `look`, which a thread of FaultRecord calls, compares
    these calls later. Words of ranks of other machines stay 0, an epoch that no call has. PlannedOp and OperatorScope register
    the tags that errors name.
    """

    def __init__(self, table: torch.Tensor, rank: int, world_size: int, fault: FaultRecord) -> None:
        self._rank, self._world, self._fault, self._word = rank, world_size, fault, 0
        self._table = table.view(torch.int64).view(_NOTED, world_size).numpy()
        self._words = memoryview(table.view(torch.int64).numpy())  # a word in 40 ns; of an array in 100

    def enter(self, tag: Tag) -> None:
        self._word = word = next_word(self._word, tag)
        row = epoch_of(word) % _NOTED * self._world
        self._words[row + self._rank] = word
        seen = self._words[row : row + self._world].tolist()
        if seen.count(word) == self._world:
            return
        for rank, theirs in enumerate(seen):
            if theirs != word and epoch_of(theirs) == epoch_of(word):
                self._fault.fail(rank, 0, word, theirs)

    def look(self) -> None:
        """Compare the calls to which this rank came first. One that differs becomes the fault of this rank."""
        table = self._table.copy()
        mine = table[:, self._rank : self._rank + 1]
        wrong = ((table >> 32) == (mine >> 32)) & (table != mine)
        if wrong.any():
            row, rank = min(zip(*wrong.nonzero(), strict=True), key=lambda at: int(mine[at[0], 0]))
            self._fault.note(int(rank), 0, int(mine[row, 0]), int(table[row, rank]))
