"""How a rank waits for blocks, or for its peers: on the CPU the caller polls, on GPUs a kernel of one warp holds its stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..driver import CudaDriver
from ..packed_launch import Launch
from .slot import Call
from .watchdog import FaultRecord, poll


class BoundedWaits:
    """Of one domain. driver: None on the CPU."""

    def __init__(
        self, rank: int, world_size: int, timeout_s: float, fault: FaultRecord, driver: CudaDriver | None
    ) -> None:
        self.rank, self.world_size, self.timeout_s, self.driver = rank, world_size, timeout_s, driver
        self._fault = fault
        self.wait: Callable[[Call, int, int], None] = self.on_host if driver is None else self.on_stream
        self.meet: Callable[[Call], None] = self.meet_on_host if driver is None else self.meet_on_stream

    def on_host(self, call: Call, first: int, count: int) -> None:
        for source in range(first, first + count):
            for chunk in range(call.chunks) if source != self.rank else ():
                self._wait_for_word(call, source, chunk)

    def _wait_for_word(self, call: Call, source: int, chunk: int) -> None:
        word, expected = call.slot.signals[source, chunk], int(call.slot.epoch)
        if not poll(lambda: word.item() >= expected, self.timeout_s):
            self._fault.raise_timeout(call.waiting(source, chunk), expected, int(word))

    def meet_on_host(self, call: Call) -> None:
        call.slot.next_epoch()
        for peer in call.peers:
            call.slot.outgoing[peer][:1].copy_(call.slot.epoch)
        self.on_host(call, 0, self.world_size)

    def on_stream(self, call: Call, first: int, count: int) -> None:
        call.launches.run(("wait", first, count), (), partial(self._launch, call, first, count))

    def _launch(self, call: Call, first: int, count: int) -> Launch:
        from ..kernels.signal import wait_kernel  # imports Triton

        victim = first if first != self.rank else (first + 1) % self.world_size  # a block that will be read
        row = call.blocks[victim]
        arguments = dict(
            signals_ptr=call.slot.signals, epoch_ptr=call.slot.epoch, abort_ptr=self._fault.abort, record_ptr=self._fault.record,
            tag=self._fault.tag(call.waiting(self.rank)), limit=int(self.timeout_s * 1e9), rank=self.rank, first=first,
            count=count, row_ptr=row, row_size=row.shape[-1],
        )  # fmt: skip
        return Launch(wait_kernel, (1,), arguments, dict(CHUNKS=call.chunks, TIMED=True, BLOCK=1024, num_warps=1))

    def meet_on_stream(self, call: Call) -> None:
        call.launches.run("meet", (), partial(self._meeting, call))

    def _meeting(self, call: Call) -> Launch:
        from ..kernels.signal import meet_kernel

        slot = call.slot
        arguments = dict(
            epoch_ptr=slot.epoch, outgoing_at_ptr=slot.outgoing_at, signals_ptr=slot.signals, abort_ptr=self._fault.abort,
            record_ptr=self._fault.record, tag=self._fault.tag(call.waiting(self.rank)), limit=int(self.timeout_s * 1e9),
            rank=self.rank,
        )  # fmt: skip
        return Launch(meet_kernel, (1,), arguments, dict(WORLD=self.world_size, TIMED=True, num_warps=1))
