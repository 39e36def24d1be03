"""Symmetric memory: every rank of a group allocates the same bytes and sees every peer's. Three providers of one kind of heap."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from ..ranks.agreement import Agreement, on_all_ranks


class SymmetricHeap:
    """Zeroed bytes on every rank of a group, each mapped into every rank; of a group of several nodes, into those of its node.

    provider: its name. views: uint8 [nbytes] of each mapped rank, the first of which is `first`. keeps: what keeps them mapped.
    free: gives back what the provider does not by itself.
    """

    def __init__(
        self, provider: str, views: list[torch.Tensor], first: int, keeps: object = None,
        free: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self.provider, self._views, self._first, self._keeps, self._free = provider, views, first, keeps, free

    def view(self, rank: int) -> torch.Tensor:
        """uint8 [nbytes]: the memory of group rank `rank`, as seen from this process."""
        return self._views[rank - self._first]

    def close(self) -> None:
        """Give the memory back. Collective over the group for nvshmem. Views must not be used afterwards."""
        free, self._free = self._free, lambda: None  # it holds memory, too
        self._views, self._keeps = [], None
        free()


def open_heap(agreement: Agreement, nbytes: int, provider: str, device: torch.device) -> SymmetricHeap:
    """Allocate a heap collectively over the agreement's group. provider: a name, or "auto": host on CPU; on GPUs nvshmem where
    nvshmem4py is installed and its one world is not taken by another group, else torch.

    Raises:
        RuntimeError: the provider cannot serve the device of a rank, is not installed there, or does not start, or the rank
            could not allocate or map; on every rank that does not wait inside a library, naming it.
        OverlapTimeoutError: a rank did not come.
        OverlapMismatchError: ranks came to different providers, or are in different calls.
    """
    choose = partial(resolve_provider, agreement.group, provider, device)
    chosen = on_all_ranks(choose, agreement, "overlap_train: choose the provider of symmetric memory")
    return heap_by(chosen, agreement, nbytes, device)


def heap_by(
    provider: str, agreement: Agreement, nbytes: int, device: torch.device, ranks: range | None = None,
    carries: bool = False,
) -> SymmetricHeap:  # fmt: skip
    """`open_heap` by a provider that all ranks have agreed on.

    ranks: of this rank's node, where the group has several: only their memory is mapped. carries: whether NVSHMEM also carries
    data between nodes. Its world then is the whole group.
    """
    if provider == "host":
        from .host import open_host_heap

        return open_host_heap(agreement, nbytes, ranks or range(agreement.world_size))
    if provider == "nvshmem" and (carries or ranks is None or len(ranks) > 1):
        from .nvshmem import open_nvshmem_heap

        return open_nvshmem_heap(agreement, nbytes, device, ranks, carries)
    from .torch_symm import open_torch_heap

    return open_torch_heap(agreement, nbytes, device, ranks)


def resolve_provider(group: dist.ProcessGroup, provider: str, device: torch.device, ranks: range | None = None) -> str:
    """The provider that `auto` stands for here; a named one is checked against device and installation. ranks: see heap_by.

    Raises:
        ValueError: the provider cannot serve this device, or is not installed.
    """
    on_gpu = device.type == "cuda"
    if provider == "auto" and not on_gpu:
        return "host"
    from .nvshmem import can_serve, is_installed

    if provider == "auto":
        return "nvshmem" if can_serve(group, ranks) else "torch"
    if on_gpu == (provider == "host"):
        rule = "host serves CPU tensors only" if on_gpu else "nvshmem and torch serve CUDA tensors only"
        raise ValueError(f"provider={provider!r} with tensors on {device}: {rule}; use provider='auto'")
    if provider == "nvshmem" and not is_installed():
        raise ValueError(
            "provider='nvshmem': nvshmem4py is not installed; pip install nvshmem4py-cu13 cuda-core, or use provider='auto'"
        )
    return provider
