"""A GPU that does nothing, so that a machine without one shows how long our Python takes around the driver's calls.

One rank of a group: collectives and driver calls return at once, and kernels are packed but never run. Tensors lie in host
memory, and the library multiplies them, in the least time that torch has for a product. What it leaves out is the time in CUDA
and NCCL.
"""

from __future__ import annotations

import ctypes
import itertools
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import overlap_train
from overlap_train.gpu.driver import _SIGNATURES, CudaDriver
from overlap_train.gpu.launch import Launcher, layout_of
from overlap_train.group import domain
from overlap_train.group.copy_engine import StreamCopyEngine
from overlap_train.group.topology import Nodes
from overlap_train.ops import plan_cache as settled
from overlap_train.schedule.order import Topology
from overlap_train.select.system import H200
from overlap_train.select.table import UNTUNED
from overlap_train.symmetric.peers import Peers


class IdleDriver(CudaDriver):
    """The real signatures, so that ctypes converts as many arguments; behind each a C function that returns 0."""

    def __init__(self) -> None:
        for name, (_, arguments) in _SIGNATURES.items():
            function = ctypes.CDLL(None)["pthread_condattr_destroy"]  # returns 0 whatever it is given
            function.argtypes, function.restype = arguments, ctypes.c_int
            setattr(self, name, function)
        self.replace_address = _replace_address
        self._context = 1
        self.current_stream, self.is_capturing, self.new_event = int, bool, itertools.count(1).__next__  # type: ignore

    def in_stream(self, stream: Any) -> AbstractContextManager[None]:
        return nullcontext()


def _replace_address(place: int, address: int) -> int:
    """As we expect of the driver, which no GPU has been asked yet: the address is a map's first word."""
    ctypes.c_uint64.from_address(place).value = address
    return 0


class Unchecked:
    """Takes the place of Verifier: a kernel that was never compiled, with the parameters that its arguments would have."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher

    def verify(self, kernel: Any, grid: tuple[int], arguments: dict[str, Any], constants: dict[str, Any]) -> Any:
        signature = {name: _kind(value) for name, value in arguments.items()}
        described = [value for value in arguments.values() if hasattr(value, "block_shape")]
        maps = [dict(elem_size=2, elem_type=10, block_size=one.block_shape, swizzle=3) for one in described]
        sizes = [*(size for _, size in layout_of(signature)), 8, 8]
        entry: Any = SimpleNamespace(signature=signature, sizes=sizes, maps=maps, function=1, threads=128, shared=0)
        name = str(len(self._launcher.entries))
        self._launcher.entries[name] = entry
        return SimpleNamespace(hash=name)


def _kind(value: Any) -> str:
    if hasattr(value, "block_shape"):
        return f"tensordesc<bf16{list(value.block_shape)}>"
    return "*bf16" if isinstance(value, torch.Tensor) else "i64"


class Echo:
    """Takes the place of Agreement: every rank says what this one does."""

    called = "the group"

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self.group, self.rank, self.world_size = group, dist.get_rank(group), dist.get_world_size(group)
        self.peers = Peers(dist.HashStore(), self.rank, self.world_size)

    def exchange(self, value: Any, what: str, kind: str = "") -> list[Any]:
        return [value] * self.world_size

    def barrier(self, what: str, closing: bool = False) -> None: ...

    def all_succeed(self, error: str | None, what: str) -> None:
        assert error is None, error

    def forget(self) -> None: ...


class IdleDomain(domain.OverlapDomain):
    """Of host tensors, which go the way of a GPU's."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.engine.close()
        self.on_gpu, self.launcher = True, Launcher(IdleDriver())
        self.launcher.verifier = Unchecked(self.launcher)  # type: ignore[assignment]
        self.engine = StreamCopyEngine(self.device, self.launcher.driver)
        self.nodes = Nodes(Topology(1, self.world_size, self.rank))


def stand_in(world: int = 2) -> ExitStack:
    """Bracket in which this process is rank 0 of a group, and host tensors are taken for a GPU's."""
    stack = ExitStack()
    make_plan = settled.make_plan

    def planned(
        spec: Any, config: Any, table: Any, topology: Any, x: torch.Tensor, w: torch.Tensor, **network: Any
    ) -> Any:
        return make_plan(spec, config, table, topology, _OnHopper(x), _OnHopper(w), **network)  # type: ignore[arg-type]

    stream = SimpleNamespace(cuda_stream=1, synchronize=lambda: None)
    for name, instead in {
        "overlap_train.group.registry.OverlapDomain": IdleDomain,
        "overlap_train.group.domain.Agreement": Echo,
        "overlap_train.ops.plan_cache.make_plan": planned,
        "overlap_train.ops.plan_cache.error_on_device": lambda *arguments: None,
        "overlap_train.select.table.read": lambda folder, key: UNTUNED,  # only rank 0 would have one
        "overlap_train.ops.launch.multiprocessors": lambda device: H200.sms,
        # kernels must be told what they are told on a GPU: told anything else, Triton compiles another, which no GPU asks for
        "overlap_train.ops.launch.on_a_gpu": lambda domain: True,
        "overlap_train.ops.low_latency.on_a_gpu": lambda domain: True,
        "torch.cuda.Stream": lambda *arguments, **options: stream,
        "torch.cuda.synchronize": lambda device=None: None,
        "overlap_train.group.domain._is_capturing": bool,
        "torch.cuda.is_current_stream_capturing": bool,
    }.items():
        stack.enter_context(mock.patch(name, instead))
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    stack.callback(dist.destroy_process_group)
    stack.callback(overlap_train.shutdown)
    return stack


class _OnHopper:
    """A tensor as planning sees it."""

    device = H200

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)
