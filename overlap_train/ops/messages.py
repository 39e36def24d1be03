"""The messages of a call of experts: rows of any number, and perhaps a number for each, between this rank and every other.

A message is the beginning of a block of a slot: its rows, then their numbers (fp32). This rank's own rows lie in its own block.
Where a kernel stores rows at their places, all rows lie at the slot's beginning, one below the other, then their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..group.domain import OverlapDomain
from ..group.signals import Tag
from ..group.slots import Call

_ALIGN = 16  # bytes: where rows and numbers begin and end, as vector loads want them
_ROWS_AT_ONCE = 8  # rows of any dtype and number of features come to a multiple of that

Message = tuple[torch.Tensor, torch.Tensor]  # rows [rows, features], numbers fp32 [rows]; [0] where there are none


class Messages:
    """Messages of `leaving` rows to each rank, and of `arriving` rows from each, in a slot that they take. like: a tensor of
    their dtype and device. call: by which they are waited for. capacity: rows of a block."""

    def __init__(
        self, domain: OverlapDomain, tag: Tag, leaving: Sequence[int], arriving: Sequence[int], like: torch.Tensor,
        features: int, has_numbers: bool,
    ) -> None:  # fmt: skip
        self._rank, self._engine, self._features, self._has_numbers = domain.rank, domain.engine, features, has_numbers
        self._leaving, self._arriving, dtype = leaving, arriving, like.dtype
        self.call = open_rows(domain, tag, dtype, features)
        self.call.next_epoch()
        self.capacity = self.call.blocks.shape[1]
        sizes = [_bytes(rows, features, dtype, has_numbers) // dtype.itemsize for rows in leaving]
        sizes[domain.rank] = 0
        self._staging = like.new_empty(sum(sizes)).split(sizes)

    def leaving(self, peer: int) -> Message:
        """Where the message to a rank is written before it is sent; the own one where it stays."""
        is_own = peer == self._rank
        return self.arriving(peer) if is_own else self._parts(self._staging[peer], self._leaving[peer])

    def send(self, peer: int) -> None:
        """Push the message to a rank, once the caller's stream has come here."""
        if peer != self._rank:
            message = self._staging[peer]
            self._engine.push(message, [self.call.route(peer, len(message))])

    def arriving(self, source: int) -> Message:
        """The message from a rank, once it has been waited for."""
        return self._parts(self.call.blocks[source].view(-1), self._arriving[source])

    def _parts(self, memory: torch.Tensor, rows: int) -> Message:
        size = rows * self._features
        first = _aligned(size * memory.itemsize) // memory.itemsize
        last = first + _aligned(4 * rows * self._has_numbers) // memory.itemsize
        return memory[:size].view(rows, self._features), memory[first:last].view(torch.float32)[:rows]


def open_rows(domain: OverlapDomain, tag: Tag, dtype: torch.dtype, features: int, chunks: int = 1) -> Call:
    """Start a call on a slot whose blocks are as many rows of so many features as it holds."""
    group = _ROWS_AT_ONCE * features * dtype.itemsize
    capacity = domain.layout.slot_bytes // domain.world_size // group * _ROWS_AT_ONCE
    return domain.workspace.open(torch.Size([capacity, features]), dtype, tag, chunks)


def placed_rows(call: Call, rows: int) -> Message:
    """All rows of a slot, and their numbers, where kernels have stored them."""
    memory = call.gathered
    numbers = memory.view(-1)[rows * memory.shape[1] :].view(torch.float32)
    return memory[:rows], numbers[:rows]


def slot_bytes(rows: int, world_size: int, features: int, dtype: torch.dtype) -> int:
    """Of a slot each of whose blocks holds a message of so many rows, with a number for each."""
    group = _ROWS_AT_ONCE * features * dtype.itemsize
    return world_size * -(-_bytes(rows, features, dtype, True) // group) * group


def _bytes(rows: int, features: int, dtype: torch.dtype, has_numbers: bool) -> int:
    """Of a message. Never none: its signal is a copy behind a copy."""
    return max(_aligned(rows * features * dtype.itemsize) + _aligned(4 * rows * has_numbers), _ALIGN)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
