"""What a rank's streams share besides links: one hardware queue, if CUDA_DEVICE_MAX_CONNECTIONS is 1, and the SMs.

Both say when things start, or how long a product takes. Orders in which they are enqueued are enqueued.py's.
"""

from __future__ import annotations

from collections.abc import Callable

from ....schedule.transfers import NETWORK
from .timeline import GEMM, Arrival, Kernel, Send

Action = Callable[[], None]


class HardwareQueue:
    """Nothing that has a place in it starts before all that was enqueued earlier has started."""

    def __init__(self) -> None:
        self._next = 0
        self._ready: dict[int, Action] = {}

    def start(self, what: Kernel | Send | Arrival, action: Action) -> None:
        """Run `action`, which starts it, at its turn."""
        if what.place is None:
            action()
            return
        self._ready[what.place] = action
        while (due := self._ready.pop(self._next, None)) is not None:
            self._next += 1
            due()


class SharedSms:
    """Whether a library product finds the SMs that it was launched for.

    From Hopper on its CTAs run in clusters of two, each on a pair of SMs, as many as SMs are left beside those of the network
    (EnginePlan.send_sms). A product that comes first leaves whole pairs to the network's kernel. If that kernel comes first, the
    GPU spreads its CTAs over different pairs. A product behind it then has too few whole pairs: its last clusters start when
    others have ended, one wave of tiles later (Kernel.late_us). The wave was counted in a profile (docs/planner-model.md); which
    SMs CTAs were on is inferred.
    """

    def __init__(self) -> None:
        self._running = self._next = 0  # products; which start as soon as their stream lets them
        self._are_pairs_broken = False

    def comes(self, kernel: Kernel) -> None:
        """The kernel before it in its stream has ended."""
        self._next += _is_next(kernel)

    def starts(self, kernel: Kernel) -> float:
        """Microseconds that it takes longer."""
        self._next -= _is_next(kernel)
        self._running += kernel.kind == GEMM
        return kernel.late_us if self._are_pairs_broken else 0.0

    def ends(self, kernel: Kernel) -> None:
        self._running -= kernel.kind == GEMM

    def exchange_starts(self, send: Send) -> None:
        """With a queue for each stream, a product that only waits for the end of the one before it is there first: an exchange
        behind that one waits by an event. In one queue whichever was enqueued first is."""
        if send.leg.link == NETWORK:
            self._are_pairs_broken = not self._running and (send.place is not None or not self._next)

    def exchange_ends(self, send: Send) -> None:
        if send.leg.link == NETWORK:
            self._are_pairs_broken = False


def _is_next(kernel: Kernel) -> bool:
    return kernel.kind == GEMM and not kernel.needs
