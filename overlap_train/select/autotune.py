"""What one autotune run measures: methods in turn in the first calls of a linear, in training itself, where it counts.

    call of a linear   1         2        3       4           5       6         ...   tune_steps + 1
    method             untuned   direct   fused   chunked     fused   chunked   ...   the fastest, for all linears of these sizes

The first call runs by the untuned plan, whose backward may have another method than its forward. It is not timed. A CUDA graph
that is captured meanwhile gets that plan: it has run by then, and is what the graph would have without a run.

The backward of a call runs by the method of its forward; the two are timed apart. All ranks make the same calls, so all try the
same method at the same time.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from statistics import median
from typing import TypeAlias

import torch

from .choose import fastest, untuned, winner_of
from .cost import Estimate, reach_of
from .method import NAMES, Method, Pass, serving
from .table import SAME, Table, Winner

# Of a pass by a method, the last ones. The first turns of a job meet a cold allocator and a cold GPU.
_MOST_SAMPLES = 64
# Each method, in both directions. Where pipelines have micro-batches in flight, backward comes later than the calls that are
# counted; where it never comes, after this many times tune_steps the forward alone is decided on.
_LEAST_SAMPLES, _PATIENCE = 2, 4
Mark: TypeAlias = float | torch.cuda.Event
Times = Mapping[tuple[str, str], float]  # (kind of a pass, name of a method) -> milliseconds


class Autotune:
    """What was measured so far of linears of about the same sizes.

    fprop: the forward pass of the linear that began. methods: those that take turns. steps: calls of one linear until it ends.
    calls: that were counted, by linear.
    """

    def __init__(self, fprop: Pass, methods: tuple[str, ...], steps: int, device: torch.device) -> None:
        self.fprop, self.methods, self.steps, self.device = fprop, methods, steps, device
        self.is_captured = False  # a CUDA graph has captured such a linear meanwhile
        self.calls = Counter[str]()
        self._seen: set[tuple[str, str, str]] = set()
        self._samples: dict[tuple[str, str], deque[tuple[Mark, Mark, int]]] = defaultdict(
            lambda: deque(maxlen=_MOST_SAMPLES)
        )

    def next_turn(self, name: str) -> int | None:
        """Whose turn it is in this call of a linear, as an index of `methods`; None in its first call: the untuned plan's.

        Each round begins with the next one. Where a forward runs twice, because it is recomputed, backward would otherwise miss
        every second method.
        """
        turns, count = self.calls[name] - 1, len(self.methods)
        self.calls[name] += 1
        return None if turns < 0 else (turns + turns // count) % count

    def is_due(self, name: str) -> bool:
        """Whether the run ends before the next call of this linear. The same on all ranks: it counts calls and samples."""
        calls, kinds = self.calls[name], (self.fprop.kind, self.fprop.dgrad.kind)
        if calls < self.steps:
            return False
        counts = (len(self._samples.get((kind, method), ())) for kind in kinds for method in self.methods)
        return all(count >= _LEAST_SAMPLES for count in counts) or calls >= _PATIENCE * self.steps

    def mark(self) -> Mark | None:
        """The present time; on a GPU an event, recorded when the caller's stream comes to it. None in a CUDA graph, whose
        events have no time."""
        if self.device.type != "cuda":
            return time.perf_counter()
        if torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, name: str, kind: str, method: str, work: int, begin: Mark) -> None:
        """Add the time of a pass that has just ended. That of a linear's first call by a method is left out: it may have
        compiled. work: multiplications of the pass, by which samples of different sizes are compared."""
        end = self.mark()
        if (name, kind, method) not in self._seen:
            self._seen.add((name, kind, method))
        elif end is not None:
            self._samples[kind, method].append((begin, end, work))

    def times(self) -> Times:
        """Median milliseconds of each pass by each method, for the sizes of `fprop`. Waits for the GPU."""
        work = work_of(self.fprop)
        return {
            key: median(_ms(begin, end) / of for begin, end, of in samples) * work
            for key, samples in self._samples.items()
        }


class TimedScope:
    """The scope of a pass, timed (Autotune.add). One that raises is not counted. It is entered again for each call."""

    def __init__(
        self, scope: AbstractContextManager[None], run: Autotune, name: str, kind: str, method: str, work: int
    ) -> None:
        self._scope, self._run, self._of = scope, run, (name, kind, method, work)

    def __enter__(self) -> None:
        self._begin = self._run.mark()
        self._scope.__enter__()

    def __exit__(self, *raised: object) -> None:
        self._scope.__exit__(*raised)  # type: ignore[arg-type]
        if raised[0] is None and self._begin is not None:
            self._run.add(*self._of, self._begin)


def work_of(pass_: Pass) -> int:
    """Multiplications of one rank; the same of a forward and of its dgrad."""
    return pass_.m * pass_.n * pass_.k


def _ms(begin: Mark, end: Mark) -> float:
    if isinstance(begin, float) or isinstance(end, float):
        return 1e3 * (end - begin)  # type: ignore[operator]
    end.synchronize()
    return begin.elapsed_time(end)


def methods_to_try(fprop: Pass, device: torch.device, nodes: int) -> tuple[str, ...]:
    """The methods that may serve a linear in both directions, the forward's default first: they take turns, and it has the
    first."""
    fits = [name for name in serving(serving(NAMES, fprop), fprop.dgrad) if reach_of(nodes).may_choose(name)]
    return tuple(dict.fromkeys([untuned(fprop, device, nodes).method, *fits]))


def winners(fprop: Pass, of_all_ranks: Sequence[Times], table: Table, device: torch.device, nodes: int) -> list[Winner]:
    """The winner of each pass that has none yet, by choose.fastest. The slowest rank counts. A method that some rank has not
    timed is left out. Without the default, or with nothing else, none is found."""
    found = []
    for pass_ in (fprop, fprop.dgrad):
        keys = [key for key in of_all_ranks[0] if key[0] == pass_.kind and all(key in times for times in of_all_ranks)]
        ms = {Method(key[1]): max(times[key] for times in of_all_ranks) for key in keys}
        default = untuned(pass_, device, nodes).method
        if len(ms) < 2 or Method(default) not in ms or winner_of(pass_, device, table) is not None:
            continue
        # Training itself was measured: what a layer does to a method is in its time.
        how = fastest({how: Estimate(1e3 * time) for how, time in ms.items()}, default, SAME)
        found.append(Winner(pass_, how, ms))
    return found
