"""Symmetric memory between CPU processes of one machine, or of each of several.

Unnamed POSIX shared memory: each rank makes a memfd and the others map it through /proc/<pid>/fd. There is never a name under
/dev/shm: a rank killed at any moment leaves nothing behind, and the kernel frees the pages with the last mapping.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from pathlib import Path

import torch

from .agreement import Agreement

_OPEN = "overlap_train: open shared memory"

Place = tuple[int, int, str, str | None]  # pid, descriptor, machine, why it has none


class Offer:
    """Zeros of this rank that others may map: a memfd. told: where peers find it, for an exchange. Pages cost memory only once
    touched."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes, self._descriptor, machine, error = nbytes, -1, "", None
        try:
            machine = _machine()
            self._descriptor = os.memfd_create("overlap_train")
            os.ftruncate(self._descriptor, nbytes)
        except OSError as failure:
            error = f"memfd of {nbytes} bytes: {failure}"
        self.told: Place = (os.getpid(), self._descriptor, machine, error)

    def open(self, agreement: Agreement, all_told: list[Place], ranks: Iterable[int]) -> list[torch.Tensor]:
        """The memory of these ranks. Collective. all_told: of each rank.

        Raises:
            RuntimeError: on every rank, if one of them has none, or cannot map another's.
        """
        errors = [f"rank {rank}: {error}" for rank, (*_, error) in enumerate(all_told) if error]
        if errors:
            raise RuntimeError(f"{_OPEN}: {'; '.join(errors)}")
        views, error = _map_all([all_told[rank] for rank in ranks], self._nbytes)
        agreement.all_succeed(error, _OPEN)  # and every peer has mapped this descriptor before it goes away
        return views

    def close(self) -> None:
        """What peers have mapped stays theirs."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class HostHeap:
    """The SymmetricHeap of CPU processes of one machine, which map each other's memfd. ranks: those of this node; the others have
    no view. offer, all_told: made and exchanged before; None: here."""

    provider = "host"

    def __init__(
        self, agreement: Agreement, nbytes: int, ranks: range | None = None, offer: Offer | None = None,
        all_told: list[Place] | None = None,
    ) -> None:  # fmt: skip
        self._ranks = ranks or range(agreement.world_size)
        mine = offer or Offer(nbytes)
        try:
            told = all_told or agreement.exchange(mine.told, _OPEN)
            self._views = mine.open(agreement, told, self._ranks)
        finally:
            mine.close()

    def view(self, rank: int) -> torch.Tensor:
        return self._views[rank - self._ranks.start]

    def close(self) -> None:
        self._views = []


def share_on_machine(agreement: Agreement, nbytes: int) -> torch.Tensor:
    """Zeros, uint8 [nbytes], that the ranks of one machine share. Collective; ranks may be on several machines.

    Raises:
        RuntimeError: on every rank, if one of them could not have them.
    """
    mine = Offer(nbytes)
    try:
        told = agreement.exchange(mine.told, _OPEN)
        first = next((rank for rank, place in enumerate(told) if place[2] == mine.told[2]), agreement.rank)
        return mine.open(agreement, told, [first])[0]
    finally:
        mine.close()


def _map_all(places: list[Place], nbytes: int) -> tuple[list[torch.Tensor], str | None]:
    """(the memory of each place, why not)."""
    if len({machine for _, _, machine, _ in places}) > 1:
        error = "group has CPU ranks on several machines; provider='host' shares the memory of one: use one"
        return [], error
    try:
        return [_map(pid, number, nbytes) for pid, number, *_ in places], None
    except (OSError, ValueError, MemoryError) as error:
        return [], f"map {nbytes} bytes of each of {len(places)} ranks: {error}"


def _machine() -> str:
    """Which system these processes see each other in."""
    return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")


def _map(pid: int, number: int, nbytes: int) -> torch.Tensor:
    with open(f"/proc/{pid}/fd/{number}", "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)
