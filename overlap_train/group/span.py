"""How the ranks of a group reach each other: inside one node here, across several in nodes/.

Nothing else in the group's state asks how many nodes there are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..symmetric import SymmetricHeap, heap_by, resolve_provider
from ..symmetric.host import Offer
from .slots import Layout
from .waits import BoundedWaits
from .workspace import Workspace

if TYPE_CHECKING:
    from .domain import OverlapDomain

_NOTHING: AbstractContextManager[None] = nullcontext()


class OneNode:
    """A group whose ranks map each other's memory.

    staged_blocks: blocks of symmetric memory that a rank holds beside its slots, to send from. graphs: whether CUDA graphs may
    hold its slots.
    """

    reach = "node"  # of TABLE in ops/table.py
    staged_blocks = 0
    graphs = True

    def __init__(self, domain: OverlapDomain) -> None:
        self.domain = domain

    def provider(self) -> str:
        """The name of the provider of the group's symmetric memory.

        Raises:
            ValueError: it cannot serve the group.
        """
        domain = self.domain
        return resolve_provider(domain.group, domain.config.provider, domain.device)

    def offer(self, layout: Layout) -> Offer | None:
        """Memory that peers may map, told in the agreement on a first call; None: the provider has its own way."""
        return Offer(layout.nbytes) if self.domain.device.type == "cpu" else None

    def new_memory(self, layout: Layout, offer: Offer | None) -> tuple[SymmetricHeap, Workspace]:
        """A new heap and its slots. Peers may send into it as soon as this returns. Collective."""
        domain = self.domain
        heap = heap_by(self.provider(), domain.agreement, layout.nbytes, domain.device, offer=offer)
        waits = BoundedWaits(domain.rank, domain.world_size, domain.config.timeout_s, domain.fault, domain.launcher)
        return heap, Workspace(heap, layout, domain.device, waits)

    def meet_before_growth(self) -> None:
        """What an operator that raised has sent comes before the heap is replaced: inside a node it has."""

    def products_beside(self, started: Any) -> AbstractContextManager[None]:
        """Bracket of library products that leave SMs to what a pass of the plan `started` sends and adds meanwhile; None: nothing
        is under way. Engines bracket their own products."""
        return _NOTHING


def span_of(domain: OverlapDomain) -> OneNode:
    """How a domain's ranks reach each other. Collective: it finds the nodes."""
    if domain.topology.nodes == 1:
        return OneNode(domain)
    make: Callable[[OverlapDomain], OneNode] = import_module("...nodes", __name__).SeveralNodes
    return make(domain)
