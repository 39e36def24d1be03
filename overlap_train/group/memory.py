"""The first call with some shapes: ranks compare what they ask for, and the group's heap grows until it holds it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..config import flag_name
from ..ranks.agreement import Agreement, OverlapMismatchError, OverlapTimeoutError
from ..select.table import installed
from .domain import OverlapDomain, barrier
from .signals import Tag
from .slots import SLOTS, Layout, with_room

_MIB = 1 << 20


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
        slot_bytes, flagged_bytes = max(self.slot_bytes, other.slot_bytes), max(self.flagged_bytes, other.flagged_bytes)
        return replace(self, slot_bytes=slot_bytes, flagged_bytes=flagged_bytes)


def holds(domain: OverlapDomain, request: Request) -> bool:
    """Whether the heap holds what a request needs."""
    return not request.shares_memory or (domain.heap is not None and _needed(domain, request) == domain.layout)


def may_hold(domain: OverlapDomain, request: Request) -> bool:
    """Whether it does, or may grow until it does."""
    return holds(domain, request) or (not domain.captured and _fits(domain, _needed(domain, request)))


def _needed(domain: OverlapDomain, request: Request) -> Layout:
    return domain.layout.covering(request.slot_bytes, request.flagged_bytes)


def _nbytes(domain: OverlapDomain, layout: Layout) -> int:
    return layout.nbytes + domain.span.staged_blocks * layout.block_bytes


def _fits(domain: OverlapDomain, layout: Layout) -> bool:
    return _nbytes(domain, layout) <= domain.config.symmetric_mib * _MIB


def _grown(domain: OverlapDomain, request: Request, name: str) -> Layout:
    """The layout to allocate for a request that the heap does not hold. ValueError: it may not grow so far. name: what errors
    call the operator."""
    needed, config = _needed(domain, request), domain.config
    if domain.captured:
        raise ValueError(
            f"{name} with {request.what} needs more symmetric memory, but a CUDA graph holds addresses of what is "
            f"there; run the largest shapes before capturing, or free the graph, call overlap_train.forget_graphs(group) on "
            f"all ranks and capture again"
        )
    if not _fits(domain, needed):
        staging = f", and {needed.block_bytes / _MIB:.1f} MiB to send from" if domain.span.staged_blocks else ""
        raise ValueError(
            f"symmetric_mib={config.symmetric_mib} is too small: {name} with {request.what} needs "
            f"{-(-_nbytes(domain, needed) // _MIB)} MiB of symmetric memory per rank ({SLOTS} slots of "
            f"{needed.bytes_of_slot / _MIB:.1f} MiB{staging}); raise "
            f"OverlapConfig.symmetric_mib ({flag_name('symmetric_mib')})"
        )
    # With more room than is needed, longer rows cost no agreement. But exchanges, whose parts were cut to fit into exchange_mib,
    # get no more than that.
    larger = needed.covering(with_room(request.slot_bytes), with_room(request.flagged_bytes))
    limit = config.exchange_limit_mib * _MIB // SLOTS
    passes_limit = needed.bytes_of_slot <= limit < larger.bytes_of_slot
    return larger if _fits(domain, larger) and not passes_limit else needed


@dataclass(frozen=True)
class FirstCall:
    """What one rank says about the first call.

    problem: what is wrong with its arguments or its machine, or None. terms: what must be equal on all ranks besides the request,
    by name. name: what its errors call the operator.
    """

    problem: str | None
    request: Request
    terms: dict[str, object]
    name: str


def prepare(domain: OverlapDomain, request: Request, problem: str | None, name: str, trains: str = "") -> None:
    """Make sure that every rank asks for the same, and that the heap holds it. Collective, and for new requests only.

    problem: what is wrong with this rank's arguments, or None. name: what errors call the operator. trains: which operands get
    gradients, in words; ranks must agree on it, too.

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
    # exchange_mib: of all calls, because room for longer rows depends on it
    terms: dict[str, object] = {
        **{setting: getattr(domain.config, setting) for setting in ("symmetric_mib", "exchange_mib", "timeout_s")},
        "overlap_train": installed("overlap-train"),
        "torch": torch.__version__,
        "captured in a CUDA graph": domain.captured,
        "gradients": trains,
    }
    layout = None
    try:
        if request.shares_memory:
            terms["provider"] = domain.span.provider()
        if problem is None and not holds(domain, request):
            layout = _grown(domain, request, name)
    except ValueError as error:
        problem = problem or str(error)
    _agree(domain.agreement, FirstCall(problem, request, terms, name))
    if layout is not None:
        _reallocate(domain, layout)


def _agree(agreement: Agreement, mine: FirstCall) -> None:
    """Make sure that all ranks say the same about the first call, and none has a problem. Collective.

    Raises:
        ValueError: they differ, or one has a problem; on every rank that came.
        OverlapTimeoutError, OverlapMismatchError: a rank did not come. Where this rank has a problem, it is a ValueError.
    """
    try:
        wrong = "" if mine.problem is None else f", whose arguments are wrong: {mine.problem}"
        what = f"{mine.name}: agree on its first call with {mine.request.what}{wrong}"
        all_ranks: list[FirstCall] = agreement.exchange(mine, what, kind="first call")
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


def _difference(mine: FirstCall, theirs: FirstCall, whose: str) -> str | None:
    """Where this rank and another one differ, in words with a way out, or None. whose: "rank 1 of the group"."""
    same_shapes = (theirs.request.operator, theirs.request.shapes) == (mine.request.operator, mine.request.shapes)
    # what may decide how, and in how much memory
    other_terms = any(theirs.terms.get(term) != mine.terms.get(term) for term in ("symmetric_mib", "gradients"))
    if theirs.request != mine.request and not (same_shapes and other_terms):
        requests = mine.request, theirs.request
        words = [request.what for request in requests]
        if words[0] == words[1]:  # of experts, whose routing says how many rows there are
            words = [f"{request.what} in {request.slot_bytes + request.flagged_bytes} bytes" for request in requests]
        return (
            f"this rank has {mine.request.operator} of {words[0]}, {whose} has {theirs.name}: "
            f"{theirs.request.operator} of {words[1]}; all ranks of a group must call the same operator with the same "
            f"shapes, dtype, bias and settings; where numbers of rows differ, which only experts take, pad them to the largest"
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


@torch.inference_mode(False)  # as the domain's other state, calls outside of it write to it, too
def _reallocate(domain: OverlapDomain, layout: Layout) -> None:
    """Replace the heap by a larger one, once for each larger shape. Collective.

    The new heap is opened first. If that fails, it fails on all ranks alike, and calls that fit the old heap go on.
    """
    if domain.heap is not None:
        domain.span.barrier_before_growth()
        if domain.on_gpu:
            torch.cuda.synchronize(domain.device)
        domain.agreement.barrier("overlap_train: grow symmetric memory")  # nobody is still pushing into the old heap
    domain.take_memory(*domain.span.new_memory(layout), layout)
    barrier(domain, Tag("overlap_train/open", "barrier"))  # loads its kernel, which a capture of a graph could not
