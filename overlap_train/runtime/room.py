"""Whether a domain's symmetric memory has room for a request, and how far it may grow. Nothing is allocated here."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import flag_name
from ..planning.arguments import Request
from ..protocol.layout import SLOTS, Layout, with_room

_MIB = 1 << 20


@dataclass(frozen=True)
class Room:
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
        roomy = needed.covering(with_room(request.slot_bytes), with_room(request.flagged_bytes))
        return roomy if self._fits(roomy) and not self._passes_limit(needed, roomy) else needed

    def _staging(self, layout: Layout) -> str:
        """What is held beside the slots, in words."""
        return f", and {layout.block_bytes / _MIB:.1f} MiB to send from" if self.staged_blocks else ""

    def _passes_limit(self, needed: Layout, roomy: Layout) -> bool:
        """Whether exchanges, whose parts were cut to fit into exchange_mib, would have more than that for the sake of room."""
        slots, roomy_slots = (SLOTS * (one.slot_bytes + one.flagged_bytes) for one in (needed, roomy))
        return slots <= self.exchange_mib * _MIB < roomy_slots

    def _needed(self, request: Request) -> Layout:
        there = self.layout or Layout(self.world_size, 0)
        return there.covering(request.slot_bytes, request.flagged_bytes)

    def _fits(self, layout: Layout) -> bool:
        return self._nbytes(layout) <= self.most_mib * _MIB

    def _nbytes(self, layout: Layout) -> int:
        return layout.nbytes + self.staged_blocks * layout.block_bytes
