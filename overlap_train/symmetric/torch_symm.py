"""Symmetric memory from torch, for the GPUs of one node: the provider when nvshmem4py is missing.

`torch.distributed._symmetric_memory` is private, so this file is the only one that touches it.
"""

from __future__ import annotations

import torch

from .agreement import Agreement

_registered: set[str] = set()  # names that torch knows; it keeps them for ever


class TorchHeap:
    """See SymmetricHeap. Needs no environment; several groups of one process may each have one. ranks: those of this node, where
    the group has several; the others have no view."""

    provider = "torch"

    def __init__(self, agreement: Agreement, nbytes: int, device: torch.device, ranks: range | None = None) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        memory, error = None, None
        try:
            memory = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
            memory.zero_()
            torch.cuda.synchronize(device)
        except RuntimeError as failure:
            error = f"{nbytes} bytes: {failure}"
        agreement.all_succeed(error, "overlap_train: allocate torch symmetric memory")
        assert memory is not None
        self._first = 0 if ranks is None else ranks.start
        handle = symmetric_memory.rendezvous(memory, _group_name(agreement, ranks))
        self._handle = handle
        self._views = [handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(handle.world_size)]
        self._views[handle.rank] = memory
        torch.cuda.synchronize(device)
        agreement.barrier("overlap_train: open torch symmetric memory")

    def view(self, rank: int) -> torch.Tensor:
        return self._views[rank - self._first]

    def close(self) -> None:
        self._views = []
        self._handle = None


def _group_name(agreement: Agreement, ranks: range | None) -> str:
    """By which torch knows the ranks that share memory. Those of a node are no process group: they are registered by name."""
    from torch.distributed._symmetric_memory import _SymmetricMemory

    if ranks is None:
        return agreement.group.group_name
    name = f"overlap_train/{agreement.group.group_name}/{ranks.start}"
    if name not in _registered:
        store = agreement.store_of(f"symmetric memory/{ranks.start}")
        _SymmetricMemory.set_group_info(name, agreement.rank - ranks.start, len(ranks), store)
        _registered.add(name)
    return name
