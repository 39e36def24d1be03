"""Symmetric memory from torch, for the GPUs of one node: the provider when nvshmem4py is missing.

`torch.distributed._symmetric_memory` is private, so this file is the only one that touches it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..ranks.agreement import Agreement, allocated, on_all_ranks
from ..ranks.bounded import Callers, bounded
from .heap import SymmetricHeap

_ALLOCATE = "overlap_train: allocate torch symmetric memory"
_OPEN = "overlap_train: open torch symmetric memory"


def open_torch_heap(
    agreement: Agreement, nbytes: int, device: torch.device, ranks: range | None = None
) -> SymmetricHeap:
    """It needs no environment; several groups of one process may each have one. ranks: those of this node, where the group has
    several; only they are mapped. A rank that is alone in its node takes any memory of torch's."""
    if ranks is not None and len(ranks) == 1:
        memory = allocated(partial(_zeros, torch.empty, nbytes, device), nbytes, agreement, _ALLOCATE)
        return SymmetricHeap("alone", [memory], ranks.start)
    library = on_all_ranks(_library, agreement, _ALLOCATE)
    memory = allocated(partial(_zeros, library.empty, nbytes, device), nbytes, agreement, _ALLOCATE)
    group = agreement.group
    if ranks is not None:  # nobody waits in the rendezvous for a rank that has no group
        group = on_all_ranks(partial(_group_of, agreement, ranks), agreement, _OPEN)
    mapped = partial(_mapped, memory, group.group_name, agreement.callers(ranks))
    handle, views = on_all_ranks(mapped, agreement, _OPEN)
    keeps = handle, group  # torch's register does not
    return SymmetricHeap("torch", views, 0 if ranks is None else ranks.start, keeps)


def _zeros(empty: Callable[..., torch.Tensor], nbytes: int, device: torch.device) -> torch.Tensor:
    memory = empty(nbytes, dtype=torch.uint8, device=device).zero_()
    torch.cuda.synchronize(device)
    return memory


def _library() -> Any:
    import torch.distributed._symmetric_memory as symmetric_memory

    return symmetric_memory


def _mapped(memory: torch.Tensor, group: str, callers: Callers) -> tuple[Any, list[torch.Tensor]]:
    """(torch's handle of the memory, which keeps it mapped; the memory of each rank of a group)."""
    with bounded(_OPEN, callers):  # peers send descriptors over sockets that nobody gives a limit
        handle = _library().rendezvous(memory, group)
    views = [handle.get_buffer(rank, tuple(memory.shape), torch.uint8) for rank in range(handle.world_size)]
    views[handle.rank] = memory
    torch.cuda.synchronize(memory.device)
    return handle, views


def _group_of(agreement: Agreement, ranks: range) -> dist.ProcessGroup:
    """torch knows ranks that share memory by the name of their process group; those of a node get one of their own.

    Not by dist.new_group: all ranks of the job would have to call it, or, with use_local_synchronization, have made equally many
    groups before, since its names count them.
    """
    from torch._C._distributed_c10d import _register_process_group

    name = agreement.name_of(f"symmetric memory/{ranks.start}")
    store, rank = dist.PrefixStore(name, agreement.store_of("node")), agreement.rank - ranks.start
    group, kind = dist.ProcessGroup(store, rank, len(ranks)), dist.ProcessGroup.BackendType.GLOO
    gloo = dist.ProcessGroupGloo(store, rank, len(ranks), timedelta(seconds=agreement.timeout_s))
    group._register_backend(torch.device("cpu"), kind, gloo)
    group._set_default_backend(kind)
    group._set_group_name(name)
    _register_process_group(name, group)
    return group
