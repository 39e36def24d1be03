"""What a request that is new to its group needs: that all ranks ask for the same, and symmetric memory that holds it.

The memory belongs to the domain (domain.py). Here it is replaced by a larger one.
"""

from __future__ import annotations

import torch

from ..planning.arguments import Request
from ..protocol.layout import Layout
from ..protocol.tags import Tag
from ..protocol.waits import BoundedWaits
from ..protocol.workspace import Workspace
from ..symmetric import SymmetricHeap, open_heap
from .domain import OverlapDomain, barrier
from .first_call import FirstCall, ask
from .room import Room


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
    mine = FirstCall(problem or unmet, request, f"{terms}; {trains}", name)
    what = f"{name}: agree on its first call with {request.what}"
    ask(domain.agreement, mine, what)
    room = room_of(domain)
    if request.shares_memory and not room.holds(request):
        _reallocate(domain, room.grown(request, name))


def may_hold(domain: OverlapDomain, request: Request) -> bool:
    """Whether the heap holds what a request needs, or may grow until it does."""
    return not request.shares_memory or room_of(domain).may_hold(request)


def room_of(domain: OverlapDomain) -> Room:
    """The symmetric memory that a domain has, and may have."""
    layout = None if domain.heap is None else domain.layout
    limits = domain.config.symmetric_mib, domain.config.exchange_limit_mib
    return Room(layout, domain.world_size, *limits, domain.captured, domain.across_nodes.staged_blocks)


def _terms(domain: OverlapDomain, request: Request) -> tuple[str, str | None]:
    """(the settings in which all ranks must agree, in words; why this rank cannot have symmetric memory, or None)."""
    config = domain.config  # exchange_mib: of all calls, because room for longer rows depends on it (room.py)
    limits = f"symmetric_mib={config.symmetric_mib}, exchange_mib={config.exchange_mib}, timeout_s={config.timeout_s:g}"
    limits += ", a captured CUDA graph" * domain.captured
    if not request.shares_memory:
        return limits, None
    try:
        return f"provider={domain.across_nodes.provider()}, {limits}", None
    except ValueError as error:
        return limits, str(error)


@torch.inference_mode(False)  # as the domain's other state, calls outside of it write to it, too
def _reallocate(domain: OverlapDomain, layout: Layout) -> None:
    """Replace the heap by a larger one, once for each larger shape. Collective.

    The new heap is opened first. If that fails, it fails on all ranks alike, and calls that fit the old heap go on.
    """
    if domain.heap is not None and domain.topology.nodes > 1:
        # Nobody has waited for what an operator that raised has sent. It comes before the words of this barrier; else it
        # could come into the new heap, as if a call there had sent it.
        barrier(domain, Tag("overlap_train/grow", "barrier"))
    if domain.on_gpu:
        torch.cuda.synchronize(domain.device)
    domain.agreement.barrier("overlap_train: grow symmetric memory")  # nobody is still pushing into the old heap
    domain.take_memory(*_new_memory(domain, layout), layout)
    barrier(domain, Tag("overlap_train/open", "barrier"))  # loads its kernel, which a capture of a graph could not


def _new_memory(domain: OverlapDomain, layout: Layout) -> tuple[SymmetricHeap, Workspace]:
    """A new heap and its slots. Collective."""
    if domain.topology.nodes > 1:
        return domain.across_nodes.new_memory(layout, domain.engine_across_nodes())
    heap = open_heap(domain.agreement, layout.nbytes, domain.config.provider, domain.device)
    waits = BoundedWaits(domain.rank, domain.world_size, domain.config.timeout_s, domain.fault, domain.launcher)
    return heap, Workspace(heap, layout, domain.device, waits)
