"""Symmetric memory between processes on the CPU, where the protocol is tested, and tables that ranks of one machine share.

Unnamed POSIX shared memory: each rank makes a memfd and the others map it through /proc/<pid>/fd. There is never a name under
/dev/shm: a rank killed at any moment leaves nothing behind, and the kernel frees the pages with the last mapping.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence

import torch

from ..ranks.agreement import Agreement, on_all_ranks
from ..ranks.peers import machine
from .heap import SymmetricHeap

_OPEN = "overlap_train: open shared memory"


def open_host_heap(agreement: Agreement, nbytes: int, ranks: range) -> SymmetricHeap:
    """A heap of CPU processes of one machine, which map each other's memfd. ranks: those of this node, which are mapped."""

    def of_node(machines: list[str]) -> range:
        if len({machines[rank] for rank in ranks}) > 1:
            raise RuntimeError(
                "group has CPU ranks on several machines; provider='host' shares the memory of one: use one"
            )
        return ranks

    return SymmetricHeap("host", _shared(agreement, nbytes, of_node), ranks.start)


def share_on_machine(agreement: Agreement, nbytes: int) -> torch.Tensor:
    """Zeros, uint8 [nbytes], that the ranks of one machine share; ranks may be on several. Collective. RuntimeError: on every
    rank, if one of them could not have them."""
    return _shared(agreement, nbytes, lambda machines: [machines.index(machines[agreement.rank])])[0]


def _shared(agreement: Agreement, nbytes: int, ranks_of: Callable[[list[str]], Sequence[int]]) -> list[torch.Tensor]:
    """Zeros of the ranks that `ranks_of` names, which is told the machine of each rank. Each rank makes its own; their pages cost
    memory once touched."""
    descriptor = -1
    try:
        try:
            if not machine():
                raise OSError("/proc does not tell which machine this is")
            descriptor = os.memfd_create("overlap_train")
            os.ftruncate(descriptor, nbytes)
            told: object = (os.getpid(), descriptor, machine())
        except OSError as failure:
            told = str(failure)
        places = agreement.exchange(told, _OPEN)
        errors = [f"rank {rank}: {error}" for rank, error in enumerate(places) if isinstance(error, str)]
        if errors:
            raise RuntimeError(f"{_OPEN}: {'; '.join(errors)}")

        def map_all() -> list[torch.Tensor]:
            chosen = [places[rank] for rank in ranks_of([machine for *_, machine in places])]
            return [_map(pid, number, nbytes) for pid, number, _ in chosen]

        return on_all_ranks(map_all, agreement, _OPEN)  # and every peer has mapped this descriptor before it goes away
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _map(pid: int, number: int, nbytes: int) -> torch.Tensor:
    with open(f"/proc/{pid}/fd/{number}", "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)
