"""Symmetric memory between CPU processes of one machine, or of each of several.

Unnamed POSIX shared memory: each rank makes a memfd and the others map it through /proc/<pid>/fd. There is never a name under
/dev/shm: a rank killed at any moment leaves nothing behind, and the kernel frees the pages with the last mapping.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import torch

from .agreement import Agreement

_OPEN = "overlap_train: open shared memory"

_Place = tuple[int, int, str]  # pid, descriptor, machine


class HostHeap:
    """The SymmetricHeap of CPU processes of one machine, which map each other's memfd. Pages cost memory only once touched.
    ranks: those of this node; the others have no view."""

    provider = "host"

    def __init__(self, agreement: Agreement, nbytes: int, ranks: range | None = None) -> None:
        self._ranks = ranks or range(agreement.world_size)
        self._views = _share(agreement, nbytes, lambda places: [places[rank] for rank in self._ranks])

    def view(self, rank: int) -> torch.Tensor:
        return self._views[rank - self._ranks.start]

    def close(self) -> None:
        self._views = []


def share_on_machine(agreement: Agreement, nbytes: int) -> torch.Tensor:
    """Zeros, uint8 [nbytes], that the ranks of one machine share. Collective; ranks may be on several machines.

    Raises:
        RuntimeError: on every rank, if one of them could not have them.
    """
    machine = _machine()
    return _share(agreement, nbytes, lambda places: [next(place for place in places if place[-1] == machine)])[0]


def _share(agreement: Agreement, nbytes: int, chosen: Callable[[list[_Place]], list[_Place]]) -> list[torch.Tensor]:
    """Make a memfd on each rank, and map those that this rank has `chosen` of all. Collective."""
    descriptor, machine, error = _make(nbytes)
    try:
        places = agreement.exchange((os.getpid(), descriptor, machine), _OPEN)
        agreement.all_succeed(error, _OPEN)
        views, error = _map_all(chosen(places), nbytes)
        agreement.all_succeed(error, _OPEN)  # and every peer has mapped this descriptor before it goes away
        return views
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _make(nbytes: int) -> tuple[int, str, str | None]:
    """(descriptor, machine, why not)."""
    descriptor = -1
    try:
        descriptor = os.memfd_create("overlap_train")
        os.ftruncate(descriptor, nbytes)
        return descriptor, _machine(), None
    except OSError as error:
        return descriptor, "", f"memfd of {nbytes} bytes: {error}"


def _map_all(places: list[_Place], nbytes: int) -> tuple[list[torch.Tensor], str | None]:
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
