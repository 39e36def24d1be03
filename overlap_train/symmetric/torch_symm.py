"""Symmetric memory from torch, for the GPUs of one node: the provider when nvshmem4py is missing.

`torch.distributed._symmetric_memory` is private, so this file is the only one that touches it.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


class TorchHeap:
    """See SymmetricHeap. Needs no environment; several groups of one process may each have one."""

    provider = "torch"

    def __init__(self, group: dist.ProcessGroup, nbytes: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric_memory

        memory = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
        handle = symmetric_memory.rendezvous(memory, group=group)
        memory.zero_()
        self._handle = handle
        ranks = range(dist.get_world_size(group))
        self._views = [handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in ranks]
        self._views[dist.get_rank(group)] = memory
        torch.cuda.synchronize(device)
        dist.barrier(group)

    def view(self, rank: int) -> torch.Tensor:
        return self._views[rank]

    def close(self) -> None:
        self._views = []
        self._handle = None
