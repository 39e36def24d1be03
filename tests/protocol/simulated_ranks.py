"""W ranks of the real core in one process, under the scheduler: real slots, operators, kernels and push execution.

    host of rank r    an actor that runs the operator calls; like a stream it goes on when its kernel has ended
    engine of rank r  an actor that executes the rank's pushes in order with the real `run_push`, one step for each half
                      of the copied rows and one for the signal

Replaced: the heap (plain tensors, blocks poisoned with NaN), the process group, the engine's thread, tile sizes and the
number of CTAs. Modules are looked up when a problem is built, so that `planted` faults take effect.
"""

from __future__ import annotations

import dataclasses
import importlib
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.protocol.interleaving import Scheduler

# What is imported for the first time under a planted fault would keep it for the tests that follow.
for _module in ("linear", "ulysses.exchange", "ulysses.two_groups"):
    importlib.import_module(f"overlap_train.{_module}")

TILE = 16
POLLS_PER_SECOND = 10_000  # of a simulated host wait, as the operators assume of the interpreter's
SLOT_BYTES = 8192
WORDS_AT_ONCE = 64  # of the low-latency protocol: a block of TILE x TILE numbers in fp32 comes in four parts


def core(name: str) -> ModuleType:
    """A module of the package as it is now, planted faults included."""
    return importlib.import_module(f"overlap_train.{name}")


@dataclasses.dataclass(frozen=True)
class Simulation:
    """What a simulated machine looks like.

    ctas            of a persistent launch
    device_waits    chunks are awaited by kernels, as on GPUs, not by the host
    stopped         ranks whose engine drops its pushes
    """

    world_size: int
    ctas: int = 2
    timeout_s: float = 60.0
    device_waits: bool = False
    stopped: tuple[int, ...] = ()
    memory: dict[int, Memory] = dataclasses.field(default_factory=dict)

    def ranks(self, scheduler: Scheduler) -> list[SimulatedDomain]:
        """The domains of all ranks, with an engine actor each; patches the core for the duration of the run."""
        self.memory.update({rank: Memory() for rank in range(self.world_size)})
        layout = core("group.slots").Layout(self.world_size, SLOT_BYTES, 2 * SLOT_BYTES)
        heap = SimulatedHeap(self.world_size, layout)
        self.patch(scheduler)
        domains = [self.domain(scheduler, heap, layout, rank) for rank in range(self.world_size)]
        for domain in domains:
            _name_words(scheduler, heap, domain)
        return domains

    def domain(self, scheduler: Scheduler, heap: SimulatedHeap, layout: Any, rank: int) -> SimulatedDomain:
        """Of one rank."""
        return SimulatedDomain(self, scheduler, heap, layout, rank)

    def engine(self, scheduler: Scheduler, rank: int) -> Any:
        """The `CopyEngine` of a rank."""
        return SimulatedEngine(scheduler, rank, self.timeout_s, rank in self.stopped)

    def spawn_hosts(self, scheduler: Scheduler, body: Callable[[SimulatedDomain], None]) -> None:
        """One host actor per rank that runs `body(domain)` and then ends the rank's engine."""

        def host(domain: SimulatedDomain) -> None:
            try:
                body(domain)
            finally:
                domain.engine.close()

        for domain in self.ranks(scheduler):
            scheduler.spawn(f"host{domain.rank}", partial(host, domain), rank=domain.rank)

    def patch(self, scheduler: Scheduler) -> None:
        """Put the simulated machine under the core for the duration of the run."""
        tiling = core("select.tiles")
        scheduler.patch(tiling, "_INTERPRETED", tiling.TileConfig(TILE, TILE, TILE))
        scheduler.patch(core("ops.launch"), "grid_size", lambda *args: (self.ctas,))
        scheduler.patch(core("ops.low_latency"), "grid_size", lambda *args: (self.ctas,))
        scheduler.patch(core("ops.low_latency"), "_PART", WORDS_AT_ONCE)
        scheduler.patch(core("group.copy_engine"), "poll", _poll_under(scheduler))
        scheduler.patch(core("group.waits"), "poll", _poll_under(scheduler))
        # The interpreter has no device clock.
        scheduler.patch(core("kernels.signal"), "clock", lambda spins, TIMED: spins)
        if scheduler.host_fault is not None:
            scheduler.during_run(_FaultyOperations(scheduler))
        scheduler.patch(torch.Tensor, "new_empty", _allocating(scheduler, self.memory))


class _FaultyOperations(TorchDispatchMode):
    """Leaves out the torch operations of hosts that a planted fault says."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        named = isinstance(args[0] if args else None, torch.Tensor) and self._scheduler.running_actor() is not None
        if named and self._scheduler.host_fault(str(func), self._scheduler.name_of(args[0].data_ptr())):
            return args[0]
        return func(*args, **(kwargs or {}))


class SimulatedHeap:
    """A `SymmetricHeap` of plain tensors: signals and flagged words zero, blocks NaN."""

    provider = "simulated"

    def __init__(self, world_size: int, layout: Any) -> None:
        self.words = layout.offset(0)
        room = layout.nbytes + SLOT_BYTES  # what NVSHMEM sends from comes last (simulated_nodes.py)
        self._views = [torch.full((room,), 255, dtype=torch.uint8) for _ in range(world_size)]
        for view in self._views:
            view[: self.words] = 0
            view[layout.flagged_offset(0) :] = 0

    def view(self, rank: int) -> torch.Tensor:
        return self._views[rank]

    def close(self) -> None:
        self._views = []


class SimulatedDomain:
    """What operators need of an `OverlapDomain`, without a process group."""

    def __init__(
        self, simulation: Simulation, scheduler: Scheduler, heap: SimulatedHeap, layout: Any, rank: int
    ) -> None:
        self.call = 0  # of the program that runs
        self.rank, self.world_size, self.device = rank, simulation.world_size, torch.device("cpu")
        self.topology = core("schedule.order").Topology(1, self.world_size, rank)
        self.memory = simulation.memory[rank]
        self.graphed = self.captured = self.closed = self.on_gpu = False
        self.in_use = threading.RLock()
        self.config = SimpleNamespace(timeout_s=simulation.timeout_s)
        self.agreement = SimpleNamespace(peers=SimpleNamespace(takes_back=False))
        self.tags: list[Any] = []
        self.fault = core("group.signals").FaultRecord(self.device, rank, simulation.timeout_s)
        self.fault.held = self.tags
        self.heap, self.layout = heap, layout
        self.engine = simulation.engine(scheduler, rank)
        waits = core("group.waits").BoundedWaits(rank, self.world_size, simulation.timeout_s, self.fault, None)
        if simulation.device_waits:
            waits.wait, waits.barrier = waits.on_stream, waits.barrier_on_stream
            waits.wait_chunk, waits.take = waits.chunk_on_stream, waits.take_on_stream
            waits.next_epoch = core("group.waits").next_epoch_on_stream
        self.workspace = core("group.workspace").Workspace(heap, layout, self.device, waits)
        self.span = core("group.domain").OneNode(self)

    def operator(
        self, tag: Any, slots: int, barrier_first: bool = False, shown_as: str = ""
    ) -> AbstractContextManager[None]:
        self.tags.append(tag)  # as plans hold theirs: errors name what is still there
        return core("group.domain").OverlapDomain.operator(self, tag, slots, barrier_first, shown_as)

    def check_usable(self, tag: Any, slots: int) -> None:
        core("group.domain").OverlapDomain.check_usable(self, tag, slots)

    def begin_ahead(self) -> None:
        core("group.domain").OverlapDomain.begin_ahead(self)

    def plan(
        self,
        method: str,
        x: torch.Tensor,
        w: torch.Tensor,
        spec: str = "ALL_GATHER_LINEAR",
        variant: Any = None,
        **settings: Any,
    ) -> Any:
        """The plan of an operator for operands like these. variant: how every pass runs, instead of what the choice says."""
        planning, config = core("ops.plan"), core("config").OverlapConfig(method=method, **settings)
        topology = self.topology
        plan = planning.make_plan(getattr(core("ops.spec"), spec), config, core("select.table").UNTUNED, topology, x, w)
        if variant is None:
            return plan
        return dataclasses.replace(
            plan,
            **{part: _varied(getattr(plan, part), topology, variant) for part in ("fprop", "dgrad", "dgrad_alone")},
        )

    def is_capturing(self) -> bool:
        return False


def _varied(engine: Any, topology: Any, variant: Any) -> Any:
    chunks = 1 if variant.whole else engine.chunks
    transfers = core("schedule.order").transfers_of(engine.kind, topology, chunks, engine.method == "fused")
    return dataclasses.replace(
        engine, variant=dataclasses.replace(variant, name=engine.method), chunks=chunks, transfers=transfers
    )


class SimulatedEngine:
    """A `CopyEngine` whose worker is an actor. `stopped`: it drops its pushes, as a dead rank's would."""

    def __init__(self, scheduler: Scheduler, rank: int, timeout_s: float, stopped: bool) -> None:
        self._stopped = stopped
        self._scheduler, self._timeout_s = scheduler, timeout_s
        self._queue: deque[Any] = deque()
        self._closed = False
        self._name = f"engine{rank}"
        scheduler.spawn(self._name, self._work, rank=rank)

    def begin(self) -> None:
        """The host's kernels have ended before it enqueues."""

    def push(self, source: torch.Tensor, routes: list[Any]) -> None:
        self._queue += [route.push(source) for route in routes]

    def pull(self, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        self._queue += zip(sources, targets, strict=True)

    def launch(self, kernel: Callable[[], None], *pushes: tuple[torch.Tensor, list[Any]]) -> None:
        for source, routes in pushes:
            self.push(source, routes)
        kernel()

    def keep(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.pull([source], [target])

    def wait_kept(self) -> None:
        self.join()

    def begin_ahead(self) -> None:
        """As the thread of a CPU process: join waits for everything."""

    def join(self) -> None:
        self._scheduler.wait_until(lambda: not self._queue, f"{self._name} to finish its pushes")

    def close(self) -> None:
        self._closed = True

    def _work(self) -> None:
        copies = core("group.copy_engine")
        while True:
            self._scheduler.wait_until(lambda: self._queue or self._closed, "a push or the end")
            if not self._queue:
                return
            if isinstance(self._queue[0], tuple):  # a pull
                source, target = self._queue[0]
                _Stepwise(self._scheduler, target, pieces=2).copy_(source)
            elif not self._stopped:
                copies.run_push(self._stepwise(self._queue[0]), lambda seconds: self._scheduler.step(), self._timeout_s)
            self._queue.popleft()

    def _stepwise(self, push: Any) -> Any:
        if push.after is not None:
            address = push.after[0].data_ptr()
            self._scheduler.signals.add(address)
            self._scheduler.polls_for(f"{self._scheduler.name_of(address)} to reach {push.after[1]}")
        return dataclasses.replace(
            push,
            target=_Stepwise(self._scheduler, push.target, pieces=2),
            signal=_Stepwise(self._scheduler, push.signal, pieces=1),
        )


class _Stepwise:
    """Stands for a tensor that is copied into: other actors may run before each piece."""

    def __init__(self, scheduler: Scheduler, target: torch.Tensor, pieces: int) -> None:
        self._scheduler, self._target, self._pieces = scheduler, target, pieces

    def copy_(self, source: torch.Tensor) -> None:
        for to, piece in zip(self._target.chunk(self._pieces), source.chunk(self._pieces), strict=True):
            self._scheduler.step()
            to.copy_(piece)


def _poll_under(scheduler: Scheduler) -> Callable[..., bool]:
    """`signals.poll` with the scheduler's pause, and turns for a clock."""

    def poll(ready: Callable[[], bool], timeout_s: float, pause: object = None, late: object = None) -> bool:
        turns = 0
        while not ready():
            if turns > timeout_s * POLLS_PER_SECOND:
                return False
            scheduler.pause()
            turns += 1
        return True

    return poll


class Memory:
    """What a caching allocator does to a rank's memory: the tensors of an operator that has ended serve the next."""

    def __init__(self) -> None:
        self._in_use: list[torch.Tensor] = []
        self._free: dict[torch.Size, list[torch.Tensor]] = {}

    def new(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """A tensor of NaN, at an address that was used before where possible."""
        free = self._free.get(shape)
        tensor = free.pop().fill_(torch.nan) if free else torch.full(shape, torch.nan, dtype=dtype)
        self._in_use.append(tensor)
        return tensor

    def end_operator(self, keep: torch.Tensor) -> None:
        """Overwrite and free all tensors but `keep`. They stay allocated: simulated copies go by address."""
        for tensor in self._in_use:
            if tensor.data_ptr() != keep.data_ptr():
                self._free.setdefault(tensor.shape, []).append(tensor.fill_(torch.nan))
        self._in_use = [keep]


def _allocating(scheduler: Scheduler, memory: dict[int, Memory]) -> Callable[..., torch.Tensor]:
    """`Tensor.new_empty` for actors of ranks."""
    plain = torch.Tensor.new_empty

    def new_empty(tensor: torch.Tensor, *shape: Any, **options: Any) -> torch.Tensor:
        actor = scheduler.running_actor()
        if actor is None:
            return plain(tensor, *shape, **options)
        return memory[actor.rank].new(torch.Size(shape if isinstance(shape[0], int) else shape[0]), tensor.dtype)

    return new_empty


def _name_words(scheduler: Scheduler, heap: SimulatedHeap, domain: SimulatedDomain) -> None:
    """Names for reports: signals[slot, source, chunk]; claimed[0]; sent[0]; complete[target * MAX_CHUNKS + chunk]."""
    rank, slots, chunks = domain.rank, domain.workspace.slots, core("kernels.signal_words").MAX_CHUNKS
    count = (len(slots) + 1) * domain.world_size * chunks  # one slot more for the barrier
    words = heap.view(rank)[: 8 * count].view(torch.int64).view(-1, domain.world_size, chunks)
    scheduler.watch(**{f"signals{rank}": words, f"abort{rank}": domain.fault.abort})
    for index, slot in enumerate(slots):
        words = {"epoch": slot.epoch}
        for prefix, counters in (("", slot.counters), ("direct.", slot.direct_counters)):
            words |= {prefix + name: getattr(counters, name) for name in ("left", "claimed", "sent", "complete")}
        scheduler.watch(**{f"rank{rank}.slot{index}.{word}": memory for word, memory in words.items()})
