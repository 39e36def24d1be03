"""GEMM + AllToAll: a_shard_m [M/W, K] @ b_kn [K, N], of which rank d gets the d-th block of columns [M/W, N/W].

What a rank receives is [W, M/W, N/W]: its columns of all rows, block s from rank s. The own block is computed last, straight into
its place among the received ones. Nothing in the GEMM waits: who takes the blocks out of symmetric memory does (`received`).

Of a part of a long sequence that another part follows, blocks travel beside the product of that one. The product leaves the
peers' blocks in the own slot, block d for rank d. When all ranks have come so far, each one's copy engine pulls its blocks out of
the peers' slots, straight to where they belong. So nobody's SMs move a block: what is pushed into a slot has to be copied out of
it by a kernel, which finds no SM while a product runs (510 us a part instead of 550). The last part is pushed.

Rule 3 holds as for blocks that are sent ahead (workspace.py): a rank meets its peers in part n after it has pulled part n - 2.
The barrier advances the slot's epoch, as `next_epoch` does in other calls: once a use. Or a peer in another call would take the
signal for that of a later one (rule 9).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..group.domain import OverlapDomain
from ..group.signals import Tag
from ..schedule.order import Transfers
from . import launch
from .collective import should_run_async

if TYPE_CHECKING:
    from .plan import EnginePlan


class GemmAllToAll(ABC):
    """Blocks [W, M/W, N/W] on their way, block s from rank s.

    into: [W, M/W, N/W], each block contiguous, where the result belongs. The GEMM writes the own block there, which leaves the
    peers' to be copied out of the slot. None: all stay in the slot, for who reads them there.
    """

    def __init__(
        self, domain: OverlapDomain, plan: EnginePlan, tag: Tag, a_shard_m: torch.Tensor, b_kn: torch.Tensor,
        into: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        self._domain, self._plan, self._tag, self._a, self._b, self._into = domain, plan, tag, a_shard_m, b_kn, into
        self._start()

    @abstractmethod
    def _start(self) -> None:
        """Multiply and send."""

    @abstractmethod
    def received(self) -> torch.Tensor:
        """[W, M/W, N/W]: `into`, complete (if it is pulled, when the operator ends); or in the slot, valid until it ends."""


class CollectiveGemmAllToAll(GemmAllToAll):
    """One batched GEMM, whose b-th product is the block for rank b, then NCCL or gloo. A GEMM for each rank, or one and a copy
    that cuts it into blocks, takes longer (benchmarks/notes.md)."""

    def _start(self) -> None:
        self._domain.collective_calls.enter(self._tag)
        self._sent, ranks = new_blocks(self._domain, self._a, self._b), self._domain.world_size
        torch.bmm(self._a.expand(ranks, -1, -1), self._b.unflatten(1, (ranks, -1)).movedim(1, 0), out=self._sent)
        into = self._into if self._into is not None and self._into.is_contiguous() else None
        self._blocks = torch.empty_like(self._sent) if into is None else into
        aside = should_run_async(self._sent)
        self._work = dist.all_to_all_single(
            self._blocks.flatten(0, 1), self._sent.flatten(0, 1), group=self._domain.group, async_op=aside
        )

    def received(self) -> torch.Tensor:
        if self._work is not None:
            self._work.wait()
        if self._into is None or self._blocks is self._into:
            return self._blocks
        return self._into.copy_(self._blocks)


class ChunkedGemmAllToAll(GemmAllToAll):
    """A library GEMM for each destination's columns, pushed as it ends."""

    def _start(self) -> None:
        staging = new_blocks(self._domain, self._a, self._b)
        self._open()
        self._call.next_epoch()
        self._multiply(staging, lambda transfers: self._domain.engine.push(staging, self._call.routes(transfers)))

    def _open(self) -> None:
        shape = torch.Size([self._a.shape[0], self._b.shape[1] // self._domain.world_size])
        self._call = self._domain.workspace.open(shape, self._a.dtype, self._tag, self._plan.chunks)

    def _multiply(self, blocks: torch.Tensor, multiplied: Callable[[Transfers], None]) -> None:
        """The peers' blocks [W, M/W, N/W], with a call after each, then the own one, which goes to its place."""
        domain = self._domain
        columns = self._b.chunk(domain.world_size, dim=1)
        for target, transfers in self._plan.transfers.by_target:
            torch.mm(self._a, columns[target], out=blocks[target])
            multiplied(transfers)
        torch.mm(self._a, columns[domain.rank], out=self._own_place())

    def _own_place(self) -> torch.Tensor:
        """The memory where the own block [M/W, N/W] belongs: in `into`, or else in the slot."""
        return (self._call.blocks if self._into is None else self._into)[self._domain.rank]

    def received(self) -> torch.Tensor:
        self._call.wait_for_all()
        if self._into is None:
            return self._call.blocks
        # Block by block, which the driver does in 23 us where torch's copy of blocks that lie apart took 117 (8192 x 3072).
        for source in self._plan.sources:
            self._into[source].copy_(self._call.blocks[source])
        return self._into


class FusedGemmAllToAll(ChunkedGemmAllToAll):
    """One persistent kernel. A counter per destination and chunk releases its push by the copy engine."""

    def _start(self) -> None:
        self._open()
        staging = new_blocks(self._domain, self._a, self._b)
        own = self._own_place()
        launch.multiply_and_push(self._domain, self._call, self._plan, self._a, self._b, staging, own)


class DirectGemmAllToAll(FusedGemmAllToAll):
    """The epilogue stores tiles at the peers and sends the signals: nothing is staged or pushed, which takes no host time."""

    def _start(self) -> None:
        self._open()
        launch.multiply_and_send(self._domain, self._call, self._plan, self._a, self._b, None, self._own_place())


def new_blocks(domain: OverlapDomain, a_shard_m: torch.Tensor, b_kn: torch.Tensor) -> torch.Tensor:
    """Memory for [W, M/W, N/W], block d for rank d."""
    return a_shard_m.new_empty(domain.world_size, a_shard_m.shape[0], b_kn.shape[1] // domain.world_size)


class PulledChunkedGemmAllToAll(ChunkedGemmAllToAll):
    """A library GEMM for each destination's columns."""

    _into: torch.Tensor

    def _start(self) -> None:
        self._open()
        self._leave_blocks()
        self._call.barrier()
        self._domain.workspace.use.receive()
        self._domain.engine.pull(self._call.incoming, [self._into[peer] for peer in self._call.peers])

    def _leave_blocks(self) -> None:
        self._multiply(self._call.blocks, lambda transfers: None)

    def received(self) -> torch.Tensor:
        """`into`. It is complete only when the operator ends."""
        return self._into


class PulledFusedGemmAllToAll(PulledChunkedGemmAllToAll, FusedGemmAllToAll):
    """One persistent kernel. No copy waits for its counters of stored tiles."""

    def _leave_blocks(self) -> None:
        self._call.slot.counted.zero_()  # the epoch advances after the kernel, in the barrier
        left, own = self._call.blocks, self._own_place()
        launch.multiply_and_send(self._domain, self._call, self._plan, self._a, self._b, left, own)


METHODS: dict[str, Callable[..., GemmAllToAll]] = {
    "collective": CollectiveGemmAllToAll,
    "chunked": ChunkedGemmAllToAll,
    "fused": FusedGemmAllToAll,
    "direct": DirectGemmAllToAll,
}
PULLED: dict[str, type[GemmAllToAll]] = {"chunked": PulledChunkedGemmAllToAll, "fused": PulledFusedGemmAllToAll}
