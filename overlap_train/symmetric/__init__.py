"""Symmetric memory: every rank of a group allocates the same bytes and sees every peer's.

One small protocol, three providers. Allocation is collective over the group; freeing is too where the provider needs it.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist

from .agreement import Agreement, on_all_ranks
from .host import HostHeap, Offer, Place


class SymmetricHeap(Protocol):
    """`nbytes` bytes on every rank of a group, zeroed, each mapped into every rank."""

    provider: str

    def view(self, rank: int) -> torch.Tensor:
        """uint8 [nbytes]: the memory of group rank `rank`, as seen from this process."""
        ...

    def close(self) -> None:
        """Give the memory back. Collective over the group for nvshmem. Views must not be used afterwards."""
        ...


def open_heap(
    agreement: Agreement,
    nbytes: int,
    provider: str,
    device: torch.device,
    ranks: range | None = None,
    carries: bool = False,
) -> SymmetricHeap:
    """Allocate a heap collectively over the agreement's group.

    Args:
        ranks: of this rank's node, where the group has several: only their memory is mapped.
        carries: whether NVSHMEM also carries data between nodes. Its world then is the whole group.
        provider: "nvshmem", "torch", "host", or "auto": host on CPU; on GPUs nvshmem where nvshmem4py is installed and its one
            world is not taken by another group, else torch.

    Raises:
        RuntimeError: the provider cannot serve the device of a rank, is not installed there, or does not start, or the rank
            could not allocate or map; on every rank that does not wait inside a library, naming it.
        OverlapTimeoutError: a rank did not come.
        OverlapMismatchError: ranks came to different providers, or are in different calls.
    """
    choose = partial(resolve_provider, agreement.group, provider, device, None if carries else ranks)
    chosen = on_all_ranks(choose, agreement, "overlap_train: choose the provider of symmetric memory")
    return heap_by(chosen, agreement, nbytes, device, ranks, carries)


def heap_by(
    provider: str, agreement: Agreement, nbytes: int, device: torch.device, ranks: range | None = None, carries: bool = False,
    offer: Offer | None = None, all_told: list[Place] | None = None,
) -> SymmetricHeap:  # fmt: skip
    """`open_heap` by a provider that all ranks have agreed on. offer, all_told: see HostHeap."""
    if ranks is not None and len(ranks) == 1 and provider != "host" and not carries:
        from .alone import AloneHeap

        return AloneHeap(agreement, nbytes, device)
    if provider == "host":
        return HostHeap(agreement, nbytes, ranks, offer, all_told)
    if provider == "nvshmem":
        from .nvshmem import NvshmemHeap

        return NvshmemHeap(agreement, nbytes, device, ranks, carries)
    from .torch_symm import TorchHeap

    return TorchHeap(agreement, nbytes, device, ranks)


def resolve_provider(group: dist.ProcessGroup, provider: str, device: torch.device, ranks: range | None = None) -> str:
    """The provider that `auto` stands for here; a named one is checked against the device and what is installed.

    Args:
        ranks: see open_heap.

    Raises:
        ValueError: the provider cannot serve this device, or is not installed.
    """
    on_gpu = device.type == "cuda"
    if provider == "auto":
        if not on_gpu:
            return "host"
        from .nvshmem import can_serve

        return "nvshmem" if can_serve(group, ranks) else "torch"
    if on_gpu == (provider == "host"):
        rule = "host serves CPU tensors only" if on_gpu else "nvshmem and torch serve CUDA tensors only"
        raise ValueError(f"provider={provider!r} with tensors on {device}: {rule}; use provider='auto'")
    if provider == "nvshmem":
        from .nvshmem import is_installed

        if not is_installed():
            raise ValueError(
                "provider='nvshmem': nvshmem4py is not installed; pip install nvshmem4py-cu13 cuda-core, or use provider='auto'"
            )
    return provider
