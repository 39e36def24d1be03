"""What ranks tell each other at their first call with some shapes, and what each of them raises where they differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..planning.arguments import Request
from ..symmetric.agreement import Agreement, OverlapMismatchError, OverlapTimeoutError


@dataclass(frozen=True)
class FirstCall:
    """What one rank says about the first call.

    problem: what is wrong with its arguments or its machine, or None. terms: what must be equal on all ranks besides the request,
    in words. name: what its errors call the operator.
    """

    problem: str | None
    request: Request
    terms: str
    name: str


def ask(agreement: Agreement, mine: FirstCall, what: str) -> None:
    """Hear what all ranks say about the first call, and check it. Collective. what: what they do here, for errors.

    Raises:
        ValueError: they differ, or one has a problem; on every rank that came.
        OverlapTimeoutError, OverlapMismatchError: a rank did not come. Where this rank has a problem, it is a ValueError.
    """
    try:
        said = agreement.exchange(mine, what, kind="first call")
    except (OverlapTimeoutError, OverlapMismatchError) as unheard:
        if mine.problem is None:
            raise
        raise ValueError(mine.problem) from unheard  # peers that are in a call that they know do not ask
    compare(agreement.rank, said)


def compare(rank: int, all_ranks: Sequence[FirstCall]) -> None:
    """Check that all ranks say the same and none has a problem. rank: this one.

    Raises:
        ValueError: they do not; on every rank.
    """
    for number, said in enumerate(all_ranks):
        if said.problem is not None:
            raise ValueError(said.problem if number == rank else f"{said.problem} (on rank {number} of the group)")
    mine = all_ranks[rank]
    for number, theirs in enumerate(all_ranks):
        difference = _difference(mine, theirs, number)
        if difference is not None:
            raise ValueError(f"{mine.name}: {difference}")


def _difference(mine: FirstCall, theirs: FirstCall, rank: int) -> str | None:
    """Where this rank and rank `rank` differ, in words with a way out, or None."""
    if theirs.request != mine.request:
        return (
            f"this rank has {mine.request.operator} of {mine.request.what}, rank {rank} of the group has {theirs.name}: "
            f"{theirs.request.operator} of {theirs.request.what}; all ranks of a group must call the same operator with the same "
            f"shapes and dtype; where they have different numbers of rows, pad them to the largest"
        )
    if theirs.terms != mine.terms:
        return (
            f"this rank has {mine.terms}, rank {rank} of the group has {theirs.terms}; all ranks of a group need the same "
            f"OverlapConfig, the same trained operands, and nvshmem4py installed on all or none"
        )
    if theirs.name != mine.name:
        return (
            f"rank {rank} of the group calls it {theirs.name!r}; a call has the same name= on all ranks, which recognise each "
            f"other's calls by it"
        )
    return None
