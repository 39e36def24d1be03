"""Symmetric memory between processes on the CPU, where the protocol is tested, and tables that ranks of one machine share.

Unnamed POSIX shared memory: each rank makes a memfd and the others map it through /proc/<pid>/fd. There is never a name under
/dev/shm: a rank killed at any moment leaves nothing behind, and the kernel frees the pages with the last mapping.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence

import torch

from .agreement import Agreement, on_all_ranks
from .heap import SymmetricHeap
from .peers import machine

_OPEN = "overlap_train: open shared memory"

Told = tuple[int, int, str] | str  # process, descriptor, machine; or an error


class Offer:
    """Zeros of this rank that others may map: a memfd. told: where they find it, or why there is none. all_told: of all ranks,
    once they have exchanged it."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes, self._descriptor, self.all_told = nbytes, -1, list[Told]()
        try:
            if not machine():
                raise OSError("/proc does not tell which machine this is")
            self._descriptor = os.memfd_create("overlap_train")
            os.ftruncate(self._descriptor, nbytes)
            self.told: Told = (os.getpid(), self._descriptor, machine())
        except OSError as failure:
            self.told = str(failure)

    def open(self, agreement: Agreement, ranks_of: Callable[[list[str]], Sequence[int]]) -> list[torch.Tensor]:
        """The memory of the ranks that `ranks_of` names, which is told the machine of each rank. Collective."""
        places = [told for told in self.all_told if not isinstance(told, str)]
        errors = [f"rank {rank}: {told}" for rank, told in enumerate(self.all_told) if isinstance(told, str)]
        if errors:
            raise RuntimeError(f"{_OPEN}: {'; '.join(errors)}")

        def map_all() -> list[torch.Tensor]:
            chosen = [places[rank] for rank in ranks_of([machine for *_, machine in places])]
            return [_map(pid, number, self._nbytes) for pid, number, _ in chosen]

        return on_all_ranks(map_all, agreement, _OPEN)  # and every peer has mapped this descriptor before it goes away

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def open_host_heap(agreement: Agreement, nbytes: int, ranks: range, offer: Offer | None = None) -> SymmetricHeap:
    """A heap of CPU processes of one machine, which map each other's memfd. ranks: those of this node, which are mapped. offer:
    made and exchanged before; None: here."""

    def of_node(machines: list[str]) -> range:
        if len({machines[rank] for rank in ranks}) > 1:
            raise RuntimeError(
                "group has CPU ranks on several machines; provider='host' shares the memory of one: use one"
            )
        return ranks

    views = _shared(agreement, nbytes, of_node) if offer is None else offer.open(agreement, of_node)
    return SymmetricHeap("host", views, ranks.start)


def share_on_machine(agreement: Agreement, nbytes: int) -> torch.Tensor:
    """Zeros, uint8 [nbytes], that the ranks of one machine share; ranks may be on several. Collective. RuntimeError: on every
    rank, if one of them could not have them."""
    return _shared(agreement, nbytes, lambda machines: [machines.index(machines[agreement.rank])])[0]


def _shared(agreement: Agreement, nbytes: int, ranks_of: Callable[[list[str]], Sequence[int]]) -> list[torch.Tensor]:
    offer = Offer(nbytes)
    try:
        offer.all_told = agreement.exchange(offer.told, _OPEN)
        return offer.open(agreement, ranks_of)
    finally:
        offer.close()


def _map(pid: int, number: int, nbytes: int) -> torch.Tensor:
    with open(f"/proc/{pid}/fd/{number}", "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)
