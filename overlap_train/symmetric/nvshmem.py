"""Symmetric memory from NVSHMEM through nvshmem4py: the default on GPUs, and the one that reaches across nodes.

NVSHMEM has one world a process. It is initialised over the overlap domain, not over the job, by a unique id sent through
torch.distributed: no MPI, no launcher, and other domains of the job cannot disturb it (docs/design.md, rule 7).

Its collective calls wait without end for a rank that does not come. Ranks agree before each of them, and `bounded` is around it.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.distributed as dist

from ..ranks.agreement import Agreement, OverlapMismatchError, OverlapTimeoutError, allocated, on_all_ranks
from ..ranks.bounded import Callers, bounded
from .heap import SymmetricHeap

_START, _ALLOCATE = "overlap_train: start NVSHMEM", "overlap_train: allocate NVSHMEM memory"
_OPEN = "overlap_train: open NVSHMEM memory"
_worlds: list[Callers] = []  # the ranks of this process's NVSHMEM world; empty before it is initialised


def is_installed() -> bool:
    """Whether nvshmem4py is there to be imported."""
    return importlib.util.find_spec("nvshmem") is not None


def can_serve(group: dist.ProcessGroup, ranks: range | None = None) -> bool:
    """Whether nvshmem4py is installed and its one world is free or over this group's ranks, or over these of them."""
    if not is_installed():
        return False
    return not _worlds or _worlds[0].ranks == _ranks(group, ranks)


def open_nvshmem_heap(
    agreement: Agreement, nbytes: int, device: torch.device, ranks: range | None = None, carries: bool = False
) -> SymmetricHeap:
    """A heap that NVSHMEM allocates and maps. The first one of a process initialises NVSHMEM (about 0.8 s). ranks, carries: see
    heap_by."""
    everyone = range(agreement.world_size)
    ranks, world = ranks or everyone, everyone if carries else ranks or everyone
    core, callers = _world(agreement, device, world), agreement.callers(world)

    def new() -> torch.Tensor:
        with bounded(_ALLOCATE, callers):
            memory: torch.Tensor = core.bytetensor((nbytes,), dtype=torch.uint8)
        return memory.zero_()

    agreement.barrier(_ALLOCATE)
    memory = allocated(new, nbytes, agreement, _ALLOCATE)

    def free() -> None:
        with bounded("overlap_train: free NVSHMEM memory", callers):
            core.free_tensor(memory)

    def view_of(rank: int) -> torch.Tensor:
        try:
            return memory if rank == agreement.rank else core.get_peer_tensor(memory, rank - world.start)
        except Exception as error:  # nvshmem4py raises its own class for a peer that is not mapped
            raise ValueError(
                f"group: rank {rank} has no peer access (NVLink or PCIe P2P) from this GPU, which overlapped "
                f"operators need; put the tensor-parallel group on GPUs of one node, or say how many of its ranks a node has "
                f"(--overlap-train-node-ranks)"
            ) from error

    def views_of_all() -> list[torch.Tensor]:
        views = [view_of(rank) for rank in ranks]
        torch.cuda.synchronize(device)
        return views

    try:
        views = on_all_ranks(views_of_all, agreement, _OPEN)
    except (OverlapTimeoutError, OverlapMismatchError):  # NVSHMEM would wait for the others while it frees
        raise
    except RuntimeError:
        free()
        raise
    return SymmetricHeap("nvshmem", views, ranks.start, free=free)


def finalize() -> None:
    """End this process's NVSHMEM world, if it has one. Collective over its ranks; every heap must be closed."""
    if _worlds:
        import nvshmem.core

        with bounded("overlap_train: end NVSHMEM", _worlds[0]):
            nvshmem.core.finalize()
        _worlds.clear()


def _ranks(group: dist.ProcessGroup, members: range | None) -> tuple[int, ...]:
    """The ranks within the job of a group's members. members: ranks of the group, None for all."""
    ranks = dist.get_process_group_ranks(group)
    return tuple(ranks if members is None else (ranks[member] for member in members))


def _world(agreement: Agreement, device: torch.device, members: range) -> Any:
    """nvshmem.core, initialised over these ranks of the agreement's group. Collective over the group."""
    rank = agreement.rank - members.start

    def prepare() -> tuple[Any, Any, Any]:
        """(nvshmem.core, the GPU of cuda.core, the id of a new world on its first rank)."""
        import nvshmem.core
        from cuda.core import Device

        ranks = _ranks(agreement.group, members)
        if _worlds and _worlds[0].ranks != ranks:
            raise ValueError(
                f"group has ranks {list(ranks)}, but this process's NVSHMEM world has ranks {list(_worlds[0].ranks)}, and "
                f"NVSHMEM allows one world a process; use provider='torch' for the other group (--overlap-train-provider)"
            )
        uid = nvshmem.core.get_unique_id() if rank == 0 and not _worlds else None
        return nvshmem.core, Device(device.index), uid

    core, gpu, uid = on_all_ranks(prepare, agreement, _START)
    uid = agreement.exchange(uid, _START)[members.start]  # by all: another node may have its world already

    def start() -> None:
        if _worlds:
            return
        gpu.set_current()
        callers = agreement.callers(members)
        with bounded(_START, callers):
            core.init(device=gpu, uid=uid, rank=rank, nranks=len(members), initializer_method="uid")
        _worlds.append(callers)  # also where a peer could not join: this process can have no other

    on_all_ranks(start, agreement, _START)
    return core
