"""Symmetric memory between CPU processes of one machine.

Unnamed POSIX shared memory: each rank makes a memfd and the others map it through /proc/<pid>/fd. There is never a name under
/dev/shm, so a rank killed at any moment leaves nothing behind; the kernel frees the pages with the last mapping.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch
import torch.distributed as dist


class HostHeap:
    """See SymmetricHeap. Pages cost memory only once touched."""

    provider = "host"

    def __init__(self, group: dist.ProcessGroup, nbytes: int) -> None:
        descriptor = os.memfd_create("overlap_train")
        os.ftruncate(descriptor, nbytes)
        places: list[tuple[str, int, int]] = [("", 0, 0)] * dist.get_world_size(group)
        dist.all_gather_object(places, (_machine(), os.getpid(), descriptor), group=group)
        if len({machine for machine, _, _ in places}) > 1:
            os.close(descriptor)
            raise ValueError(
                "group has CPU ranks on several machines; provider='host' shares the memory of one: use one"
            )
        self._views = [_map(pid, number, nbytes) for _, pid, number in places]
        dist.barrier(group)  # every peer has mapped this descriptor before it goes away
        os.close(descriptor)

    def view(self, rank: int) -> torch.Tensor:
        return self._views[rank]

    def close(self) -> None:
        self._views = []


def _machine() -> str:
    """Which system these processes see each other in."""
    return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")


def _map(pid: int, number: int, nbytes: int) -> torch.Tensor:
    with open(f"/proc/{pid}/fd/{number}", "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)
