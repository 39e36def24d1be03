"""GEMM + AllToAll of a part of a long sequence that another part follows: blocks travel beside the product of that one.

The product leaves the peers' blocks in the own slot, block d for rank d. When all ranks have come so far, each one's copy
engine pulls its blocks out of the peers' slots, straight to where they belong. So nobody's SMs move a block. What is pushed
into a slot has to be copied out of it, and the driver makes copies inside a GPU by a kernel, which finds no SM while a product
runs. A part of 491520 x 2048 x 2048 took 550 us when it was pushed and takes 510 when it is pulled (2 x H200, two hosts). The
last part is pushed: its blocks have no other product to travel beside.

Rule 3 holds as for blocks that are sent ahead (slot_use.py): a rank meets its peers in part n after it has pulled part n - 2.
The barrier advances the slot's epoch, as `next_epoch` does in other calls: once a use. Or a peer in another call would take the
signal for that of a later one (rule 9).
"""

from __future__ import annotations

import torch

from . import persistent
from .gemm_all_to_all import ChunkedGemmAllToAll, FusedGemmAllToAll


class PulledChunkedGemmAllToAll(ChunkedGemmAllToAll):
    """A library GEMM for each destination's columns."""

    _into: torch.Tensor

    def start(self) -> None:
        self._open()
        self._leave_blocks()
        self._call.barrier()
        self._domain.workspace.use.receive()
        self._domain.engine.pull(self._call.incoming, [self._into[peer] for peer in self._call.peers])

    def _leave_blocks(self) -> None:
        self._multiply(self._call.blocks, lambda legs: None)

    def received(self) -> torch.Tensor:
        """`into`. It is complete only when the operator ends."""
        return self._into


class PulledFusedGemmAllToAll(PulledChunkedGemmAllToAll, FusedGemmAllToAll):
    """One persistent kernel. No copy waits for its counters of stored tiles."""

    def _leave_blocks(self) -> None:
        self._call.reset_counters()
        operands = self._operands(self._call.blocks)
        persistent.multiply_and_send(self._domain, self._call, self._plan, operands)
