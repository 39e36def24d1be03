"""Which ranks of a group form a node: those that can map each other's memory, or as many as node_ranks says.

They find that by trying, before any memory is shared; never by host name: containers share them. CPU processes open what every
other has put into a memfd. GPUs map each other's memory within one operating system, and across hosts by CUDA's fabric handles,
where NVLink reaches so far (GB200 NVL72). If GPUs of one host have no peer access, their provider of memory says so.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import torch

from ..config import flag_name
from ..schedule.order import Topology
from ..symmetric.agreement import Agreement, say_on_rank_0

_PINNED, _DEVICE, _FABRIC = 1, 1, 8  # of CUmemAllocationType, CUmemLocationType and CUmemAllocationHandleType
_HANDLE_BYTES = 64


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class FabricMemory:
    """The smallest piece of this GPU's memory that has a fabric handle, for others to try to map.

    handle: 64 bytes, which mean the same on every host; None where this GPU has no such memory.
    """

    def __init__(self, device: torch.device, library: Any = None) -> None:
        self._library = ctypes.CDLL("libcuda.so.1") if library is None else library
        self._memory = self._create(_Properties(_PINNED, _FABRIC, _Location(_DEVICE, device.index)))
        self.handle = None if self._memory is None else self._export(self._memory)

    def _create(self, properties: _Properties) -> ctypes.c_uint64 | None:
        size, memory = ctypes.c_size_t(), ctypes.c_uint64()
        by_reference = ctypes.byref(properties)
        if self._library.cuMemGetAllocationGranularity(ctypes.byref(size), by_reference, 0):
            return None
        failed = self._library.cuMemCreate(ctypes.byref(memory), size, by_reference, ctypes.c_uint64(0))
        return None if failed else memory

    def _export(self, memory: ctypes.c_uint64) -> bytes | None:
        handle = (ctypes.c_ubyte * _HANDLE_BYTES)()
        failed = self._library.cuMemExportToShareableHandle(ctypes.byref(handle), memory, _FABRIC, ctypes.c_uint64(0))
        return None if failed else bytes(handle)

    def reaches(self, handle: bytes) -> bool:
        """Whether this process can import the memory that a handle of another one names."""
        if self.handle is None:
            return False
        memory, theirs = ctypes.c_uint64(), (ctypes.c_ubyte * _HANDLE_BYTES).from_buffer_copy(handle)
        if self._library.cuMemImportFromShareableHandle(ctypes.byref(memory), ctypes.byref(theirs), _FABRIC):
            return False
        self._library.cuMemRelease(memory)
        return True

    def close(self) -> None:
        """Give the memory back, after peers have tried."""
        if self._memory is not None:
            self._library.cuMemRelease(self._memory)
            self._memory = None


_NAME = "overlap_train node"
_BOOT = "/proc/sys/kernel/random/boot_id"  # drawn by the kernel when it starts: the same in all of its containers


class HostSample:
    """Memory of a CPU process that its peers may try to map: a file in memory with a random token. told: what they need to try,
    process, descriptor and token."""

    def __init__(self) -> None:
        self._descriptor, token = os.memfd_create(_NAME), os.urandom(16)
        os.write(self._descriptor, token)
        self.told = (os.getpid(), self._descriptor, token)

    def reaches(self, told: tuple[int, int, bytes]) -> bool:
        """Whether this rank can map the sample of a peer. told: the peer's."""
        process, descriptor, token = told
        return read_token(process, descriptor) == token

    def close(self) -> None:
        """Give the memory back, after all peers have tried."""
        os.close(self._descriptor)


def read_token(process: int, descriptor: int) -> bytes | None:
    """The token in a descriptor of a process, or None. In another PID namespace the number is another process's. Its file is not
    opened: that might never return."""
    path = f"/proc/{process}/fd/{descriptor}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            return None
        with open(path, "rb") as file:
            return file.read(16)
    except OSError:
        return None


class GpuPlace(NamedTuple):
    """Where a GPU is. boot: the id of its operating system, "" if it does not tell. fabric: a handle that other hosts may try, or
    None."""

    boot: str
    fabric: bytes | None


class GpuSample:
    """The same of a GPU; told: a GpuPlace. If no operating system tells its id, all ranks are taken for one node, as on one
    host."""

    def __init__(self, device: torch.device) -> None:
        self._memory = FabricMemory(device)
        self.told = GpuPlace(_boot(), self._memory.handle)

    def reaches(self, told: GpuPlace) -> bool:
        if told.boot == self.told.boot:
            return True
        return told.fabric is not None and self._memory.reaches(told.fabric)

    def close(self) -> None:
        self._memory.close()


def new_sample(device: torch.device) -> Any:
    return HostSample() if device.type == "cpu" else GpuSample(device)


def _boot() -> str:
    with contextlib.suppress(OSError), open(_BOOT) as file:
        return file.read().strip()
    return ""


# What to do where ranks do not map each other: CPU processes see each other's files, GPUs of several hosts share a fabric.
_REMEDIES = {
    "cpu": "let them share one PID namespace and one user",
    "cuda": (
        f"NVLink's fabric joins some of their hosts only, or one way; look at its state and at IMEX on these hosts "
        f"(nvidia-smi -q, Fabric; nvidia-imex-ctl -N), say how many ranks a host has ({flag_name('node_ranks')})"
    ),
}
_COMPARE = "overlap_train: compare the nodes of the group"
T = TypeVar("T")


@dataclass(frozen=True)
class Nodes:
    """The nodes of a group, as this rank sees them. problem: why symmetric memory cannot serve the group, on all ranks alike, or
    None; topology then is that of one node."""

    topology: Topology
    problem: str | None = None


class NodeSettings(NamedTuple):
    """The settings of a rank that all ranks must share: see OverlapConfig."""

    node_ranks: int
    network: str
    network_sms: int
    reduce_sms: int


def find_nodes(
    agreement: Agreement, device: torch.device, settings: NodeSettings, what: str, read: Callable[[int], T]
) -> tuple[Nodes, T]:
    """The nodes of the agreement's group, and what rank 0 reads for a group of so many nodes. Collective. Rank 0 prints the nodes
    if there are several. what: what the ranks do here, for errors.

    Raises:
        OverlapTimeoutError: a rank did not come.
    """
    world, rank, node_ranks = agreement.world_size, agreement.rank, settings.node_ranks
    if world == 1:
        return Nodes(Topology(1, world, rank)), read(1)
    sample = new_sample(device)
    try:
        places = agreement.exchange((settings, sample.told), what, kind="first call of a group")
        mine = tuple([rank for rank, (_, told) in enumerate(places) if sample.reaches(told)])
        found = read(max(1, world // (node_ranks or max(1, len(mine))))) if rank == 0 else None
        answers = agreement.exchange((mine, found), _COMPARE)  # and every peer has looked before it is closed
    finally:
        sample.close()
    reached = [ranks for ranks, _ in answers]
    problem = _setting_error([told for told, _ in places])
    problem = problem or nodes_error(_as_told(world, node_ranks) if node_ranks else reached, device.type)
    if problem is not None:
        return Nodes(Topology(1, world, rank), problem), answers[0][1]
    local = node_ranks or len(reached[0])
    topology = Topology(world // local, local, rank)
    if topology.nodes > 1:
        by_puts = settings.network == "nvshmem"
        transport = "gloo" if device.type == "cpu" else "NVSHMEM" if by_puts else "NCCL"
        say_on_rank_0(rank, _in_words(topology, node_ranks, transport))
    return Nodes(topology), answers[0][1]


def nodes_error(reached: Sequence[tuple[int, ...]], device_type: str) -> str | None:
    """What is wrong with the nodes of a group, or None. reached: of each rank the ranks whose memory it can map, itself too."""
    for rank, ranks in enumerate(reached):
        others = [peer for peer in ranks if reached[peer] != ranks]
        if rank not in ranks or others:
            other = others[0] if others else rank
            return (
                f"rank {rank} of the group can map the memory of ranks {_listed(ranks)}, but rank "
                f"{other} that of {_listed(reached[other])}; in a node "
                f"every rank maps every other: {_REMEDIES[device_type]}, or use method='collective'"
            )
    nodes = list(dict.fromkeys(reached))
    if len({len(ranks) for ranks in nodes}) > 1:
        return (
            f"the group's nodes have unequal numbers of its ranks: {_all_listed(nodes)}; start as many on each node "
            f"(--nproc-per-node, --ntasks-per-node), choose a tensor-parallel size that fills nodes evenly, or use "
            f"method='collective'"
        )
    if [rank for ranks in nodes for rank in ranks] != list(range(len(reached))):
        return (
            f"the group's ranks are not numbered node by node: {_all_listed(nodes)}; make the group of ranks that follow each "
            f"other in their node, or use method='collective'"
        )
    return None


def _setting_error(told: Sequence[NodeSettings]) -> str | None:
    world, node_ranks = len(told), told[0].node_ranks
    for name, values in zip(NodeSettings._fields, zip(*told, strict=True), strict=True):
        if len(set(values)) > 1:
            return f"{name} is {', '.join(map(str, values))} on the ranks of the group; it must be the same on all"
    if node_ranks and world % node_ranks:
        return (
            f"node_ranks={node_ranks} does not divide the group's {world} ranks; use a divisor, or 0 to find the nodes "
            f"({flag_name('node_ranks')})"
        )
    return None


def _as_told(world: int, node_ranks: int) -> list[tuple[int, ...]]:
    ranks = [range(world)[first : first + node_ranks] for first in range(0, world, node_ranks)]
    return [tuple(node) for node in ranks for _ in node]


def _in_words(topology: Topology, node_ranks: int, transport: str) -> str:
    mapped = "mapping memory" if transport == "gloo" else "operating system and NVLink fabric"
    found = "as node_ranks says" if node_ranks else f"found by {mapped}"
    ranks = ", ".join(_listed(tuple(topology.ranks_of(node))) for node in range(topology.nodes))
    return (
        f"a group of {topology.world} ranks on {topology.nodes} nodes of {topology.local}, {found}: "
        f"ranks {ranks}; {transport} between nodes"
    )


def _all_listed(nodes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(f"ranks {_listed(ranks)}" for ranks in nodes)


def _listed(ranks: Sequence[int]) -> str:
    """(0, 1, 2, 5) -> "0-2 5"."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda item: item[1] - item[0])]
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "none"
