"""Where a recorded call shows the time of hosts, and the sentences by which its picture says so.

The device starts later than the host, so that launches do not show. On slow hosts that was not late enough for every call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .lanes import COMMUNICATION, COMPUTATION, Span, length_of, union

NOTICED = 0.1  # of a call. The short kernels of a small layer that was not held up leave up to 0.09 empty
GAPS = "Gaps: the GPU waits for the host."
LONG_WAITS = "Long orange bars: this GPU waits for another one, and that one for its host."


def remarks(calls: Iterable[Sequence[Span]], draws_waits: bool = True) -> tuple[str, ...]:
    """The lines of a header that say where hosts held up any of these calls; none where they did not. draws_waits: whether the
    picture has bars for them."""
    every = list(calls)
    told = [GAPS] * any(map(has_gaps, every)) + [LONG_WAITS] * (draws_waits and any(map(has_long_waits, every)))
    return (" ".join(told),) if told else ()


def has_gaps(spans: Sequence[Span]) -> bool:
    """Whether the GPU had nothing to run for a noticeable part of a call."""
    busy = _time_of(spans, (*COMPUTATION, *COMMUNICATION))
    return length_of(spans) - busy > NOTICED * length_of(spans)


def has_long_waits(spans: Sequence[Span]) -> bool:
    """Whether a kernel waits for a peer noticeably, and for longer than all copies of the call take: then the peer was late."""
    longest = max((end - start for start, end in union(spans, ("waiting",))), default=0.0)
    return longest > max(NOTICED * length_of(spans), _time_of(spans, ("communication",)))


def _time_of(spans: Sequence[Span], kinds: tuple[str, ...]) -> float:
    return sum(end - start for start, end in union(spans, kinds))
