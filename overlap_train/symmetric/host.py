"""Symmetric memory between CPU processes of one machine, or of each of several.

Unnamed POSIX shared memory: each rank makes a memfd and the others map it through /proc/<pid>/fd. There is never a name under
/dev/shm: a rank killed at any moment leaves nothing behind, and the kernel frees the pages with the last mapping.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch

from .agreement import Agreement

_OPEN = "overlap_train: open shared memory"


class HostHeap:
    """The SymmetricHeap of CPU processes of one machine, which map each other's memfd. Pages cost memory only once touched.
    ranks: those of this node; the others have no view."""

    provider = "host"

    def __init__(self, agreement: Agreement, nbytes: int, ranks: range | None = None) -> None:
        self._ranks = ranks or range(agreement.world_size)
        descriptor, machine, error = _make(nbytes)
        try:
            places = agreement.exchange((os.getpid(), descriptor, machine), _OPEN)
            agreement.all_succeed(error, _OPEN)
            self._views, error = _map_all([places[rank] for rank in self._ranks], nbytes)
            agreement.all_succeed(error, _OPEN)  # and every peer has mapped this descriptor before it goes away
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def view(self, rank: int) -> torch.Tensor:
        return self._views[rank - self._ranks.start]

    def close(self) -> None:
        self._views = []


def _make(nbytes: int) -> tuple[int, str, str | None]:
    """(descriptor, machine, why not)."""
    descriptor = -1
    try:
        descriptor = os.memfd_create("overlap_train")
        os.ftruncate(descriptor, nbytes)
        return descriptor, _machine(), None
    except OSError as error:
        return descriptor, "", f"memfd of {nbytes} bytes: {error}"


def _map_all(places: list[tuple[int, int, str]], nbytes: int) -> tuple[list[torch.Tensor], str | None]:
    """(the memory of each (pid, descriptor, machine), why not)."""
    if len({machine for *_, machine in places}) > 1:
        error = "group has CPU ranks on several machines; provider='host' shares the memory of one: use one"
        return [], error
    try:
        return [_map(pid, number, nbytes) for pid, number, _ in places], None
    except (OSError, ValueError, MemoryError) as error:
        return [], f"map {nbytes} bytes of each of {len(places)} ranks: {error}"


def _machine() -> str:
    """Which system these processes see each other in."""
    return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")


def _map(pid: int, number: int, nbytes: int) -> torch.Tensor:
    with open(f"/proc/{pid}/fd/{number}", "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)
