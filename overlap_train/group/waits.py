"""How a rank waits for blocks, or for its peers: on the CPU the caller polls, on GPUs a kernel holds its stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..gpu.launch import Launch, Launcher
from .signals import FaultRecord, has_arrived, is_same_call, next_word, poll
from .slots import Call

# How the own block is copied: 32 bytes a thread and turn in bf16, by at most eight CTAs on each SM of an H200.
_KEPT_AT_ONCE, _MOST_KEEPERS = 2048, 1056
# How blocks are taken out of a slot: 32 bytes a thread twice, by programs that leave SMs to the driver, which copies between
# ranks of one GPU by kernels.
_TAKEN_AT_ONCE, _TAKERS = 16384, 112


class BoundedWaits:
    """The waits of one domain's calls (slots.py), each bounded by timeout_s. launcher: launches kernels; None on the CPU."""

    def __init__(
        self, rank: int, world_size: int, timeout_s: float, fault: FaultRecord, launcher: Launcher | None
    ) -> None:
        self.rank, self.world_size, self.timeout_s, self.launcher = rank, world_size, timeout_s, launcher
        self._fault, self.abort, self.register = fault, fault.abort, fault.register
        on_host = launcher is None
        self.wait: Callable[..., None] = self.on_host if on_host else self.on_stream
        self.wait_chunk: Callable[..., None] = self.chunk_on_host if on_host else self.chunk_on_stream
        self.receive: Callable[..., None] = self.receive_on_host if on_host else self.receive_on_stream
        self.take: Callable[..., None] = self.take_on_host if on_host else self.take_on_stream
        self.barrier: Callable[..., None] = self.barrier_on_host if on_host else self.barrier_on_stream
        self.next_epoch: Callable[..., None] = next_epoch_on_host if on_host else next_epoch_on_stream

    def on_host(self, call: Call, first: int, count: int = 1) -> None:
        for chunk in range(call.chunks):
            self.chunk_on_host(call, first, chunk, count)

    def chunk_on_host(self, call: Call, first: int, chunk: int, count: int = 1) -> None:
        for source in range(first, first + count):
            if source != self.rank:
                self._wait_for_word(call, source, chunk)

    def _wait_for_word(self, call: Call, source: int, chunk: int) -> None:
        word, expected = call.slot.signals[source, chunk], int(call.slot.epoch)
        late = partial(self._fault.late, source, chunk, expected)
        in_time = poll(lambda: has_arrived(word.item(), expected), self.timeout_s, late=late)
        seen = int(word)
        if seen != expected and (not (in_time or has_arrived(seen, expected)) or not is_same_call(seen, expected)):
            self._fault.fail(source, chunk, expected, seen)

    def receive_on_host(self, call: Call, own: torch.Tensor) -> None:
        call.keep(own)
        self.wait(call, 0, self.world_size)

    def take_on_host(self, call: Call, y: torch.Tensor) -> None:
        self.wait(call, 0, self.world_size)
        for source in call.peers:
            y[source].copy_(call.blocks[source])

    def barrier_on_host(self, call: Call) -> None:
        next_epoch_on_host(call)
        for peer in call.peers:
            call.slot.outgoing[peer][:1].copy_(call.slot.epoch)
        self.chunk_on_host(call, 0, 0, self.world_size)

    def on_stream(self, call: Call, first: int, count: int = 1) -> None:
        call.launches.run(("wait", first, count), (), self._wait_launch, call, first, count)

    def chunk_on_stream(self, call: Call, first: int, chunk: int, count: int = 1) -> None:
        key = ("wait for a chunk", first, chunk, count)
        call.launches.run(key, (), self._wait_launch, call, first, count, chunk)

    def _wait_launch(self, call: Call, first: int, count: int, chunk: int | None = None) -> Launch:
        """The Launch of a wait. chunk: for only that one of each block; None: all."""
        from ..kernels.signal import wait_kernel  # imports Triton

        arguments = self._arguments(call, first, chunk) | dict(first=first, count=count, first_chunk=chunk or 0)
        constants = dict(CHUNKS=call.chunks if chunk is None else 1, TIMED=True, BLOCK=1024, num_warps=1)
        return Launch(wait_kernel, (1,), arguments, constants)

    def receive_on_stream(self, call: Call, own: torch.Tensor) -> None:
        at = own.data_ptr()
        call.launches.run(("receive", at % 16 == 0), (at,), self._receive_launch, call, own)

    def _receive_launch(self, call: Call, own: torch.Tensor) -> Launch:
        from ..kernels.signal import wait_and_keep_kernel

        size, arguments = own.numel(), self._arguments(call, 0) | dict(count=self.world_size)
        arguments |= dict(own_ptr=own, kept_ptr=call.own_block, size=size)
        constants = dict(CHUNKS=call.chunks, TIMED=True, BLOCK=_KEPT_AT_ONCE, num_warps=4)
        grid = (1 + min(-(-size // _KEPT_AT_ONCE), _MOST_KEEPERS),)
        return Launch(wait_and_keep_kernel, grid, arguments, constants, (("own_ptr",),))

    def take_on_stream(self, call: Call, y: torch.Tensor) -> None:
        if call.peers:
            at = y.data_ptr()
            call.launches.run(("take", at % 16 == 0), (at,), self._take_launch, call, y)

    def _take_launch(self, call: Call, y: torch.Tensor) -> Launch:
        from ..kernels.signal import take_blocks_kernel

        chunk_size = call.blocks[0].numel() // call.chunks
        arguments = self._protocol(call) | dict(blocks_ptr=call.blocks, y_ptr=y, chunk_size=chunk_size)
        constants = dict(WORLD=self.world_size, CHUNKS=call.chunks, TIMED=True, BLOCK=_TAKEN_AT_ONCE, num_warps=16)
        pieces = -(-chunk_size // _TAKEN_AT_ONCE) * (self.world_size - 1) * call.chunks
        return Launch(take_blocks_kernel, (min(max(1, pieces), _TAKERS),), arguments, constants, (("y_ptr",),))

    def _arguments(self, call: Call, first: int, chunk: int | None = None) -> dict[str, Any]:
        """Those of a kernel that waits for the blocks of rank `first` and others. row_ptr: where it writes NaN if a wait
        fails."""
        victim = first if first != self.rank else (first + 1) % self.world_size  # a block that will be read
        row = call.blocks[victim] if chunk is None else call.chunk_of(victim, chunk)
        return self._protocol(call) | dict(row_ptr=row, row_size=row.shape[-1])

    def _protocol(self, call: Call) -> dict[str, Any]:
        """What tells a kernel that waits the protocol."""
        slot, fault, limit = call.slot, self._fault, int(self.timeout_s * 1e9)
        words = dict(signals_ptr=slot.signals, epoch_ptr=slot.epoch, abort_ptr=fault.abort, record_ptr=fault.record)
        return dict(**words, limit=limit, rank=self.rank)

    def barrier_on_stream(self, call: Call) -> None:
        call.launches.run("barrier", (call.tag.word,), self._barrier_launch, call)

    def _barrier_launch(self, call: Call) -> Launch:
        from ..kernels.signal import barrier_kernel

        arguments = self._protocol(call) | dict(outgoing_at_ptr=call.slot.outgoing_at, tag=call.tag.word)
        constants = dict(WORLD=self.world_size, TIMED=True, num_warps=1)
        return Launch(barrier_kernel, (1,), arguments, constants, (("tag",),))


def next_epoch_on_host(call: Call) -> None:
    """Advance the slot's epoch and reset its counters, before anything is sent."""
    word = next_word(int(call.slot.epoch), call.tag)
    call.slot.counted.zero_()
    call.slot.epoch.fill_(word)


def next_epoch_on_stream(call: Call) -> None:
    """Advance the slot's epoch and reset its counters, in the caller's stream."""
    call.launches.run("next epoch", (call.tag.word,), _next_epoch_launch, call)


def _next_epoch_launch(call: Call) -> Launch:
    from ..kernels.signal import next_epoch_kernel

    control: torch.Tensor = call.slot.control
    counters = len(control) - 1
    block = max(1024, 1 << (counters - 1).bit_length())  # 1024 serve 127 ranks
    arguments = dict(epoch_ptr=control, tag=call.tag.word, count=counters)
    return Launch(next_epoch_kernel, (1,), arguments, dict(BLOCK=block, num_warps=1), (("tag",),))
