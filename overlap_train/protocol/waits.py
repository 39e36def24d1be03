"""How a rank waits for blocks, or for its peers: on the CPU the caller polls, on GPUs a kernel of one warp holds its stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ..gpu.launch import Launch, Launcher
from .slot import Call
from .tags import has_arrived, is_same_call, next_word
from .watchdog import FaultRecord, poll


class BoundedWaits:
    """Of one domain. launcher: launches kernels; None on the CPU."""

    def __init__(
        self, rank: int, world_size: int, timeout_s: float, fault: FaultRecord, launcher: Launcher | None
    ) -> None:
        self.rank, self.world_size, self.timeout_s, self.launcher = rank, world_size, timeout_s, launcher
        self._fault = fault
        self.know, self.abort = fault.know, fault.abort
        self.wait: Callable[[Call, int, int], None] = self.on_host if launcher is None else self.on_stream
        self.wait_chunk: Callable[[Call, int, int], None] = (
            self._wait_for_word if launcher is None else self.chunk_on_stream
        )
        self.barrier: Callable[[Call], None] = self.barrier_on_host if launcher is None else self.barrier_on_stream
        self.next_epoch: Callable[[Call], None] = next_epoch_on_host if launcher is None else next_epoch_on_stream

    def on_host(self, call: Call, first: int, count: int) -> None:
        for source in range(first, first + count):
            for chunk in range(call.chunks) if source != self.rank else ():
                self._wait_for_word(call, source, chunk)

    def _wait_for_word(self, call: Call, source: int, chunk: int) -> None:
        word, expected = call.slot.signals[source, chunk], int(call.slot.epoch)
        late = partial(self._fault.warn_late, source, chunk, expected)
        in_time = poll(lambda: has_arrived(word.item(), expected) or self._is_over(), self.timeout_s, late=late)
        seen = int(word)
        if not (in_time or has_arrived(seen, expected)) or not is_same_call(seen, expected):
            self._fault.fail(source, chunk, expected, seen)

    def _is_over(self) -> bool:
        """Whether there is nothing to wait for any more."""
        return False

    def barrier_on_host(self, call: Call) -> None:
        next_epoch_on_host(call)
        for peer in call.peers:
            call.slot.outgoing[peer][:1].copy_(call.slot.epoch)
        self.on_host(call, 0, self.world_size)

    def on_stream(self, call: Call, first: int, count: int) -> None:
        call.launches.run(("wait", first, count), (), partial(self._wait_launch, call, first, count))

    def chunk_on_stream(self, call: Call, source: int, chunk: int) -> None:
        call.launches.run(("wait for a chunk", source, chunk), (), partial(self._wait_launch, call, source, 1, chunk))

    def _wait_launch(self, call: Call, first: int, count: int, chunk: int | None = None) -> Launch:
        """chunk: of these blocks; None: all."""
        from ..kernels.signal import wait_kernel  # imports Triton

        victim = first if first != self.rank else (first + 1) % self.world_size  # a block that will be read
        row = call.blocks[victim] if chunk is None else call.chunk_of(victim, chunk)
        arguments = dict(
            signals_ptr=call.slot.signals, epoch_ptr=call.slot.epoch, abort_ptr=self._fault.abort, record_ptr=self._fault.record,
            limit=int(self.timeout_s * 1e9), rank=self.rank, first=first, count=count,
            first_chunk=chunk or 0, row_ptr=row, row_size=row.shape[-1],
        )  # fmt: skip
        chunks = call.chunks if chunk is None else 1
        return Launch(wait_kernel, (1,), arguments, dict(CHUNKS=chunks, TIMED=True, BLOCK=1024, num_warps=1))

    def barrier_on_stream(self, call: Call) -> None:
        call.launches.run("barrier", (call.tag.word,), partial(self._barrier_launch, call))

    def _barrier_launch(self, call: Call) -> Launch:
        from ..kernels.signal import barrier_kernel

        slot = call.slot
        arguments = dict(
            epoch_ptr=slot.epoch, outgoing_at_ptr=slot.outgoing_at, signals_ptr=slot.signals, abort_ptr=self._fault.abort,
            record_ptr=self._fault.record, tag=call.tag.word, limit=int(self.timeout_s * 1e9), rank=self.rank,
        )  # fmt: skip
        constants = dict(WORLD=self.world_size, TIMED=True, num_warps=1)
        return Launch(barrier_kernel, (1,), arguments, constants, (("tag",),))


def next_epoch_on_host(call: Call) -> None:
    """Advance the slot's epoch and reset its counters, before anything is sent."""
    word = next_word(int(call.slot.epoch), call.tag)
    call.slot.control[1:].zero_()
    call.slot.epoch.fill_(word)


def next_epoch_on_stream(call: Call) -> None:
    """The same in the caller's stream."""
    call.launches.run("next epoch", (call.tag.word,), partial(_next_epoch_launch, call))


def _next_epoch_launch(call: Call) -> Launch:
    from ..kernels.signal import next_epoch_kernel

    control: torch.Tensor = call.slot.control
    arguments = dict(epoch_ptr=control, tag=call.tag.word, count=len(control) - 1)
    return Launch(next_epoch_kernel, (1,), arguments, dict(BLOCK=1024, num_warps=1), (("tag",),))
