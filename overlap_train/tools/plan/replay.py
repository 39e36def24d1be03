"""What one rank enqueues in a pass of a projection under TP x Ulysses: training's own code runs, on tensors without memory.

Parts, slots and exchanges are ordered by what orders them in training (ulysses/two_groups.py, ahead.py, rows_backward.py,
protocol/workspace.py), in domains that note what a rank would enqueue. A torch operation that makes a tensor is a kernel that
reads as much as it writes; those in ONE_BY_ONE are slower. What training hands to that code is noted, too (noted_parts.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...group.signals import Tag
from ...group.slots import SLOTS
from ...group.workspace import SlotUse, Workspace
from ...ops.plan import EnginePlan
from ...planning import cost
from ...planning.machines import System
from ...schedule.order import A2A_GEMM
from ...schedule.transfers import Legs
from ...select.passes import Pass
from .simulation.backward import own_block
from .simulation.by_library import wait
from .simulation.enqueued import Part
from .simulation.programs import barrier, epoch, host_us
from .simulation.sending import sends
from .simulation.timeline import COMPUTE, EXCHANGES, Group, Kernel, Program, Send
from .simulation.work import Work

# Torch operations that move elements one by one: blocks that lie apart, or rows by an index.
ONE_BY_ONE = ("clone", "index_select", "index_put_")


@dataclass(frozen=True)
class Grid:
    """The two groups of one rank. Tensor-parallel ranks follow each other, as Megatron numbers them."""

    tensor: Group
    ulysses: Group

    @property
    def rank(self) -> int:
        return self.tensor.ranks[self.tensor.topology.rank]

    @property
    def world(self) -> int:
        return self.tensor.topology.world * self.ulysses.topology.world


class Recording(TorchDispatchMode):
    """What one rank has enqueued so far. While it is entered, torch's operations are noted, too."""

    def __init__(self, system: System, grid: Grid) -> None:
        super().__init__()
        self.system, self.grid = system, grid
        self.kernels: list[Kernel] = []
        self.sends: list[Send] = []
        self.operators = 0
        self._calls = 0
        self._groups: dict[str, Group] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name, nbytes = func._schema.name.removeprefix("aten::"), written_bytes(func, args, result)
        if nbytes:
            self.copy(name, nbytes)
        return result

    def copy(self, name: str, nbytes: float) -> None:
        """Note a kernel that reads and writes so many bytes."""
        us = (cost.torch_copy_us if name in ONE_BY_ONE else cost.sum_us)(self.system, 2 * nbytes)
        self.kernels.append(Kernel(f"{name} kernel", COMPUTE, us, self.system.gap_us))

    def add(self, part: Part) -> None:
        """Note what is enqueued inside a node."""
        self.kernels += [item for item in part[0] if isinstance(item, Kernel)]
        self.sends += part[1]

    def numbered(self, work: Work, group: Group) -> Work:
        """The next call of the program, among the ranks of a group."""
        self._calls += 1
        numbered = replace(work, operator=self._calls)
        for what in (numbered, replace(numbered, what="x")):  # a column linear's backward has one of x besides
            self._groups[what.call] = group
        return numbered

    def program(self) -> Program:
        system = self.system
        host = host_us(system, self.kernels, self.sends, self.operators)
        return Program(
            self.grid.rank, self.grid.world, tuple(self.kernels), tuple(self.sends), host,
            store_gbs=system.tile_store_gbs, groups=self._groups,
        )  # fmt: skip


def written_bytes(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """Bytes that a torch operation writes; 0 of views and of new memory."""
    name = func._schema.name
    if not isinstance(result, torch.Tensor) or "empty" in name:
        return 0
    if name == "aten::index_put_":  # into some of the rows
        return int(args[2].nbytes)
    held = {arg.untyped_storage()._cdata for arg in args if isinstance(arg, torch.Tensor)}
    is_view = result.untyped_storage()._cdata in held and not func._schema.is_mutable
    return 0 if is_view else result.nbytes


class Domain:
    """A group's domain as operators see it. exchanges: how its all-to-alls run; None in a tensor-parallel group."""

    def __init__(self, recording: Recording, group: Group, exchanges: EnginePlan | None = None) -> None:
        self.recording, self.group, self.exchanges = recording, group, exchanges
        self.rank, self.world_size = group.topology.rank, group.topology.world
        self.workspace, self.engine = NotedWorkspace(self), self

    def operator(self, tag: Tag, slots: int, barrier_first: bool = False, shown_as: str = "") -> Bracket:
        return Bracket(self, tag, slots, barrier_first)

    def begin_ahead(self) -> None:
        self.workspace.begin_ahead()

    def push(self, source: torch.Tensor, routes: list[Send]) -> None:
        self.recording.sends += routes


@dataclass
class Bracket:
    """The bracket of an operator (runtime/bracket.py), which may be entered again."""

    domain: Domain
    tag: Tag
    slots: int
    barrier_first: bool

    def __enter__(self) -> None:
        self.domain.recording.operators += 1
        if self.slots:
            self.domain.workspace.begin(self.tag, self.slots, self.barrier_first)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """What was pushed has arrived where the operator ends: at the peers, who push alike."""


class NotedWorkspace(Workspace):
    """The workspace of a Domain: which slots are free is worked out as ever, and calls note what they do."""

    def __init__(self, domain: Domain) -> None:
        self._domain, self.use = domain, SlotUse()
        self.slots, self._barrier = [None] * SLOTS, None  # type: ignore[list-item, assignment]

    def _call(self, slot: Any, block_shape: torch.Size, dtype: torch.dtype, tag: Tag, chunks: int) -> Any:
        return NotedCall(self._domain, block_shape, dtype)


class NotedCall:
    """One all-to-all, or a barrier, by copies (protocol/slot.py)."""

    def __init__(self, domain: Domain, block_shape: torch.Size, dtype: torch.dtype) -> None:
        self._domain, self._recording = domain, domain.recording
        self._shape, self._dtype = block_shape, dtype

    def next_epoch(self) -> None:
        (rows, features), plan, world = self._shape, self._domain.exchanges, self._domain.world_size
        assert plan is not None and plan.chunks == 1
        pass_ = Pass(A2A_GEMM, rows * world, features, features * world, self._dtype, world)
        work = Work(self._recording.system, plan, pass_, self._domain.group.topology, what="exchange")
        self._work = self._recording.numbered(work, self._domain.group)
        self._recording.add((list(epoch(self._work, True)), []))

    def routes(self, legs: Legs, pitch: int) -> list[Send]:
        return [replace(send, lane=EXCHANGES) for send in sends(self._work)]

    def wait_for_start(self) -> None:
        self._recording.add(([wait(self._work, self._work.arrivals(0))], []))

    def receive(self, own: torch.Tensor) -> None:
        self._recording.add(([own_block(self._work), wait(self._work, self._work.all_arrivals())], []))

    @property
    def blocks(self) -> torch.Tensor:
        return torch.empty(self._domain.world_size, *self._shape, dtype=self._dtype, device="meta")

    def barrier(self) -> None:
        self._recording.add(([barrier(self._recording.system)], []))
