"""Slots of a group that spans nodes. Each block has one writer in every call (`Topology.sender`): its own rank, or the rail
peer in this node that passes on what came over the network (gather) or adds its own part of the sum for it (scatter).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..group.copy_engine import Route
from ..group.signals import next_word
from ..group.slots import BARRIER, Call, Layout, Slot
from ..group.waits import BoundedWaits
from ..kernels.signal_words import MAX_CHUNKS
from ..schedule.order import ARRIVED, LANDED, Topology, Transfer
from ..symmetric import SymmetricHeap


@dataclass(frozen=True)
class Place:
    """Where a piece goes: the sender's rail peer `receiver` writes it into the heap of `rank`, of its node, at byte `data`, and
    then its signal at byte `signal`."""

    receiver: int
    rank: int
    data: int
    signal: int


class NodeSlot(Slot):
    """A slot as this rank sees it, and as it sees those of its node. Of others it knows where things lie, as everywhere."""

    def __init__(
        self, heap: SymmetricHeap, layout: Layout, index: int, topology: Topology, device: torch.device
    ) -> None:
        self.topology = topology
        self.start, self.words_start = layout.offset(index), index * layout.signals_bytes
        size, end = layout.slot_bytes * (index != BARRIER), self.words_start + layout.signals_bytes
        views = {peer: heap.view(peer) for peer in topology.ranks_of(topology.node)}
        self.node_memory = {peer: view[self.start : self.start + size] for peer, view in views.items()}
        self.words = {
            peer: view[self.words_start : end].view(torch.int64).view(layout.world_size, MAX_CHUNKS)
            for peer, view in views.items()
        }
        own = self.node_memory[topology.rank]
        self.memory = [self.node_memory.get(rank, own[:0]) for rank in range(layout.world_size)]
        self.signals = self.words[topology.rank]
        # What came over the network beside the data, where it has to become a signal only after them. By sender and chunk: all
        # that one sends in a call, for whomever, has the same word.
        self.crossed = torch.zeros_like(self.signals)
        self._count(layout.world_size, device)
        # Kernels that send by themselves stay inside a node: of these addresses nothing is read.
        self.outgoing_at = self.memory_at = torch.zeros(layout.world_size, dtype=torch.int64, device=device)
        self.word = 0  # as `epoch` on the device. No graph is replayed across nodes, so the host can count


class NodeCall(Call):
    """A call on a slot of a group that spans nodes."""

    slot: NodeSlot

    def __init__(self, waits: BoundedWaits, slot: NodeSlot, shape: torch.Size, dtype: torch.dtype, chunks: int) -> None:
        super().__init__(waits, slot, shape, dtype, chunks)
        self._advance, self.next_epoch = self.next_epoch, self._next_epoch  # type: ignore[assignment]
        self._orders: dict[tuple[int, ...], torch.Tensor] = {}

    def order(self, blocks: tuple[int, ...]) -> torch.Tensor:
        """The numbers of these blocks, int64. Made on the device: a copy from the host would wait for the stream."""
        if blocks not in self._orders:
            numbers = [torch.arange(block, block + 1, device=self.blocks.device) for block in blocks]
            self._orders[blocks] = torch.cat(numbers)
        return self._orders[blocks]

    def _route(self, transfer: Transfer, tiles: int, pitch: int) -> Route:
        """The copy engine's way for a transfer inside the node. What is passed on carries the word that came with it."""
        chunk = self._blocks(self.slot.node_memory[transfer.target])[transfer.fills].chunk(self.chunks)[transfer.chunk]
        signal = self.slot.words[transfer.target][transfer.fills, transfer.chunk : transfer.chunk + 1]
        if transfer.carries == LANDED:
            return Route(0, chunk, signal, self.crossed(transfer), None)
        first = transfer.block * pitch + transfer.chunk * chunk.numel()
        word = self.signal_of(transfer.block, transfer.chunk) if transfer.carries == ARRIVED else self.slot.epoch
        after = (self.stored_tiles(transfer.block, transfer.chunk), tiles) if transfer.after_tiles else None
        return Route(first, chunk, signal, word, after)

    def stored_tiles(self, block: int, chunk: int) -> torch.Tensor:
        """int64 [1]: how many tiles, or strips, a kernel has stored of a chunk of a block."""
        word = block * MAX_CHUNKS + chunk
        return self.slot.counters.complete[word : word + 1]

    def signal_of(self, block: int, chunk: int) -> torch.Tensor:
        """The signal, int64 [1], of a chunk of the own slot."""
        return self.slot.signals[block, chunk : chunk + 1]

    def crossed(self, transfer: Transfer) -> torch.Tensor:
        """int64 [1]: the word that comes over the network with a transfer."""
        return self.slot.crossed[transfer.fills, transfer.chunk : transfer.chunk + 1]

    def chunk_rows(self, chunk: int) -> slice:
        """The rows of a chunk within its block."""
        rows = self._shape[0] // self.chunks
        return slice(chunk * rows, (chunk + 1) * rows)

    def place(self, sent: Transfer) -> Place:
        """The place of the chunk that crosses the network: where it lies in the heap of any rank, with its signal."""
        nbytes, slot = self._shape.numel() * self._dtype.itemsize, self.slot
        data = slot.start + sent.fills * nbytes + sent.chunk * (nbytes // self.chunks)
        signal = slot.words_start + 8 * (sent.fills * MAX_CHUNKS + sent.chunk)
        return Place(slot.topology.receiver(sent.target), sent.target, data, signal)

    def _next_epoch(self) -> None:
        self.slot.word = next_word(self.slot.word, self.tag)
        self._advance()

    @property
    def word(self) -> int:
        """The word of this call's signals: the epoch, as the host counts it for transports that it tells what to signal."""
        return self.slot.word
