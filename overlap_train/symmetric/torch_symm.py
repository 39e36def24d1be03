"""Symmetric memory from torch, for the GPUs of one node: the provider when nvshmem4py is missing.

`torch.distributed._symmetric_memory` is private, so this file is the only one that touches it.
"""

from __future__ import annotations

import torch

from .agreement import Agreement


class TorchHeap:
    """See SymmetricHeap. Needs no environment; several groups of one process may each have one."""

    provider = "torch"

    def __init__(self, agreement: Agreement, nbytes: int, device: torch.device) -> None:
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
        handle = symmetric_memory.rendezvous(memory, group=agreement.group)
        self._handle = handle
        ranks = range(agreement.world_size)
        self._views = [handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in ranks]
        self._views[agreement.rank] = memory
        torch.cuda.synchronize(device)
        agreement.barrier("overlap_train: open torch symmetric memory")

    def view(self, rank: int) -> torch.Tensor:
        return self._views[rank]

    def close(self) -> None:
        self._views = []
        self._handle = None
