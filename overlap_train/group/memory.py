"""The first call with some shapes: ranks compare what they ask for, and the group's heap grows until it holds it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ..config import flag_name
from ..select.table import installed
from ..symmetric.agreement import Agreement, OverlapMismatchError, OverlapTimeoutError
from ..symmetric.host import Offer
from .domain import OverlapDomain, barrier
from .signals import Tag
from .slots import SLOTS, Layout, with_room


@dataclass(frozen=True)
class Request:
    """What one operator call, forward and backward, asks of its group. Ranks must agree on it.

    shapes: and dtype, in words. how: methods and settings, too. slot_bytes: symmetric memory that one of its calls receives;
    0 for none. flagged_bytes: the same of a call whose data come as flagged words.
    """

    operator: str
    shapes: str
    slot_bytes: int = 0
    flagged_bytes: int = 0
    how: str = ""

    @property
    def what(self) -> str:
        """All of it in words."""
        return f"{self.shapes}, {self.how}" if self.how else self.shapes

    @property
    def shares_memory(self) -> bool:
        return bool(self.slot_bytes or self.flagged_bytes)

    def covering(self, other: Request) -> Request:
        """This request, of memory that is enough for the other one, too."""
        return replace(
            self,
            slot_bytes=max(self.slot_bytes, other.slot_bytes),
            flagged_bytes=max(self.flagged_bytes, other.flagged_bytes),
        )


_MIB = 1 << 20


@dataclass(frozen=True)
class Capacity:
    """The symmetric memory that a domain has, and may have.

    layout: of what is there; None: nothing. world_size: ranks of the group. most_mib: OverlapConfig.symmetric_mib. exchange_mib:
    OverlapConfig.exchange_limit_mib. is_captured: a CUDA graph holds addresses of it. staged_blocks: blocks that a rank holds
    beside the slots, to send from.
    """

    layout: Layout | None
    world_size: int
    most_mib: int
    exchange_mib: int
    is_captured: bool
    staged_blocks: int = 0

    def holds(self, request: Request) -> bool:
        """Whether what is there is enough."""
        return self.layout is not None and self._needed(request) == self.layout

    def may_hold(self, request: Request) -> bool:
        """Whether what is there is enough, or may grow until it is."""
        return self.holds(request) or (not self.is_captured and self._fits(self._needed(request)))

    def grown(self, request: Request, name: str) -> Layout:
        """The layout to allocate for a request that it does not hold. name: what errors call the operator.

        Raises:
            ValueError: it may not grow so far.
        """
        needed = self._needed(request)
        if self.is_captured:
            raise ValueError(
                f"{name} with {request.what} needs more symmetric memory, but a CUDA graph holds addresses of what is "
                f"there; run the largest shapes before capturing, or free the graph, call overlap_train.forget_graphs(group) on "
                f"all ranks and capture again"
            )
        if not self._fits(needed):
            raise ValueError(
                f"symmetric_mib={self.most_mib} is too small: {name} with {request.what} needs "
                f"{-(-self._nbytes(needed) // _MIB)} MiB of symmetric memory per rank ({SLOTS} slots of "
                f"{(needed.slot_bytes + needed.flagged_bytes) / _MIB:.1f} MiB{self._staging(needed)}); raise "
                f"OverlapConfig.symmetric_mib ({flag_name('symmetric_mib')})"
            )
        # With more room than is needed, longer rows cost no agreement.
        larger = needed.covering(with_room(request.slot_bytes), with_room(request.flagged_bytes))
        return larger if self._fits(larger) and not self._passes_limit(needed, larger) else needed

    def _staging(self, layout: Layout) -> str:
        """What is held beside the slots, in words."""
        return f", and {layout.block_bytes / _MIB:.1f} MiB to send from" if self.staged_blocks else ""

    def _passes_limit(self, needed: Layout, larger: Layout) -> bool:
        """Whether exchanges, whose parts were cut to fit into exchange_mib, would have more than that for the sake of room."""
        limit = self.exchange_mib * _MIB // SLOTS
        return needed.slot_bytes + needed.flagged_bytes <= limit < larger.slot_bytes + larger.flagged_bytes

    def _needed(self, request: Request) -> Layout:
        there = self.layout or Layout(self.world_size, 0)
        return there.covering(request.slot_bytes, request.flagged_bytes)

    def _fits(self, layout: Layout) -> bool:
        return self._nbytes(layout) <= self.most_mib * _MIB

    def _nbytes(self, layout: Layout) -> int:
        return layout.nbytes + self.staged_blocks * layout.block_bytes


@dataclass(frozen=True)
class FirstCall:
    """What one rank says about the first call.

    problem: what is wrong with its arguments or its machine, or None. terms: what must be equal on all ranks besides the request,
    by name. name: what its errors call the operator. offered: memory that peers may map (symmetric/host.py).
    """

    problem: str | None
    request: Request
    terms: dict[str, object]
    name: str
    offered: Any = None


def agree(agreement: Agreement, mine: FirstCall, what: str) -> list[FirstCall]:
    """What all ranks say about the first call: the same, and none has a problem. Collective. what: what they do here, for errors.

    Raises:
        ValueError: they differ, or one has a problem; on every rank that came.
        OverlapTimeoutError, OverlapMismatchError: a rank did not come. Where this rank has a problem, it is a ValueError.
    """
    try:
        all_ranks = agreement.exchange(mine, what, kind="first call")
    except (OverlapTimeoutError, OverlapMismatchError) as unheard:
        if mine.problem is None:
            raise
        raise ValueError(mine.problem) from unheard  # peers that are in a call that they know do not ask
    for number, said in enumerate(all_ranks):
        if said.problem is not None:
            whose = "" if number == agreement.rank else f" (on rank {number} of {agreement.called})"
            raise ValueError(said.problem + whose)
    for number, theirs in enumerate(all_ranks):
        difference = _difference(mine, theirs, f"rank {number} of {agreement.called}")
        if difference is not None:
            raise ValueError(f"{mine.name}: {difference}")
    return all_ranks


def _difference(mine: FirstCall, theirs: FirstCall, whose: str) -> str | None:
    """Where this rank and another one differ, in words with a way out, or None. whose: "rank 1 of the group"."""
    if theirs.request != mine.request:
        return (
            f"this rank has {mine.request.operator} of {mine.request.what}, {whose} has {theirs.name}: "
            f"{theirs.request.operator} of {theirs.request.what}; all ranks of a group must call the same operator with the same "
            f"shapes and dtype; where they have different numbers of rows, pad them to the largest"
        )
    if theirs.terms != mine.terms:
        names = [name for name in mine.terms | theirs.terms if mine.terms.get(name) != theirs.terms.get(name)]
        my, their = (", ".join(f"{name}={terms.get(name)}" for name in names) for terms in (mine.terms, theirs.terms))
        return (
            f"this rank has {my}, {whose} has {their}; all ranks of a group need the same OverlapConfig, trained operands and "
            f"versions, and nvshmem4py installed on all or none"
        )
    if theirs.name != mine.name:
        return (
            f"{whose} calls it {theirs.name!r}; a call has the same name= on all ranks, which recognise each "
            f"other's calls by it"
        )
    return None


def prepare(domain: OverlapDomain, request: Request, problem: str | None, name: str, trains: str = "") -> None:
    """Make sure that every rank asks for the same, and that the heap holds it. Collective, and for new requests only.

    Args:
        problem: what is wrong with this rank's arguments, or None.
        name: what errors call the operator.
        trains: which operands get gradients, in words; ranks must agree on it, too.

    Raises:
        ValueError: on every rank, if any rank has a problem, the ranks ask for different things, or it does not fit.
        OverlapTimeoutError: a rank did not come.
        RuntimeError: a CUDA graph is being captured; or the symmetric memory could not be had, on every rank.
    """
    if domain.is_capturing():
        raise RuntimeError(
            f"{name} with {request.what} is new to its group, and a CUDA graph is being captured, in which ranks can "
            f"neither agree nor compile; run what is captured twice before capturing it"
        )
    terms, unmet = _terms(domain, request)
    problem, layout = problem or unmet, None
    capacity = capacity_of(domain)
    if problem is None and request.shares_memory and not capacity.holds(request):
        try:
            layout = capacity.grown(request, name)
        except ValueError as error:
            problem = str(error)
    offer = None if layout is None else domain.span.offer(layout)
    try:
        offered = None if offer is None else offer.told
        mine = FirstCall(problem, request, terms | {"gradients": trains}, name, offered)
        told = agree(domain.agreement, mine, f"{name}: agree on its first call with {request.what}")
        if offer is not None:
            offer.all_told = [said.offered for said in told]
        if layout is not None:
            _reallocate(domain, layout, offer)
    finally:
        if offer is not None:
            offer.close()


def may_hold(domain: OverlapDomain, request: Request) -> bool:
    """Whether the heap holds what a request needs, or may grow until it does."""
    return not request.shares_memory or capacity_of(domain).may_hold(request)


def capacity_of(domain: OverlapDomain) -> Capacity:
    """The symmetric memory that a domain has, and may have."""
    layout = None if domain.heap is None else domain.layout
    limits = domain.config.symmetric_mib, domain.config.exchange_limit_mib
    return Capacity(layout, domain.world_size, *limits, domain.captured, domain.span.staged_blocks)


def _terms(domain: OverlapDomain, request: Request) -> tuple[dict[str, object], str | None]:
    """(what must be equal on all ranks, by name; why this rank cannot have symmetric memory, or None)."""
    # exchange_mib: of all calls, because room for longer rows depends on it
    terms: dict[str, object] = {
        name: getattr(domain.config, name) for name in ("symmetric_mib", "exchange_mib", "timeout_s")
    }
    terms |= {
        "overlap_train": installed("overlap-train"),
        "torch": torch.__version__,
        "captured in a CUDA graph": domain.captured,
    }
    if not request.shares_memory:
        return terms, None
    try:
        return terms | {"provider": domain.span.provider()}, None
    except ValueError as error:
        return terms, str(error)


@torch.inference_mode(False)  # as the domain's other state, calls outside of it write to it, too
def _reallocate(domain: OverlapDomain, layout: Layout, offer: Offer | None) -> None:
    """Replace the heap by a larger one, once for each larger shape. Collective.

    The new heap is opened first. If that fails, it fails on all ranks alike, and calls that fit the old heap go on.
    """
    if domain.heap is not None:
        domain.span.meet_before_growth()
        if domain.on_gpu:
            torch.cuda.synchronize(domain.device)
        domain.agreement.barrier("overlap_train: grow symmetric memory")  # nobody is still pushing into the old heap
    domain.take_memory(*domain.span.new_memory(layout, offer), layout)
    barrier(domain, Tag("overlap_train/open", "barrier"))  # loads its kernel, which a capture of a graph could not
