"""Which ranks can map each other's memory, found by trying, before any is shared. Never by host name: containers share them.

CPU processes open what every other has put into a memfd. GPUs map each other's memory within one operating system, and across
hosts by NVLink's fabric, where there is one. If GPUs of one host have no peer access, their provider of memory says so.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, NamedTuple, Protocol

import torch

_NAME = "overlap_train node"
_BOOT = "/proc/sys/kernel/random/boot_id"  # drawn by the kernel when it starts: the same in all of its containers


class Sample(Protocol):
    """Memory of this rank that its peers may try to map. told: what peers need to try, a value that can be pickled."""

    told: Any

    def reaches(self, told: Any) -> bool:
        """Whether this rank can map the sample of a peer. told: the peer's."""
        ...

    def close(self) -> None:
        """Give the memory back, after all peers have tried."""
        ...


def new_sample(device: torch.device) -> Sample:
    """A sample of the kind of memory that the group's operands are in."""
    return HostSample() if device.type == "cpu" else GpuSample(device)


class HostSample:
    """A file in memory with a random token; told: process, descriptor and token."""

    def __init__(self) -> None:
        self._descriptor, token = os.memfd_create(_NAME), os.urandom(16)
        os.write(self._descriptor, token)
        self.told = (os.getpid(), self._descriptor, token)

    def reaches(self, told: tuple[int, int, bytes]) -> bool:
        process, descriptor, token = told
        return read_token(process, descriptor) == token

    def close(self) -> None:
        os.close(self._descriptor)


def read_token(process: int, descriptor: int) -> bytes | None:
    """The token in a descriptor of a process, or None. In another PID namespace the number is another process's. Its file is not
    opened: that might never return."""
    path = f"/proc/{process}/fd/{descriptor}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            return None
        with open(path, "rb") as file:
            return file.read(16)
    except OSError:
        return None


class GpuPlace(NamedTuple):
    """Where a GPU is. boot: the id of its operating system, "" if it does not tell. fabric: a handle that other hosts may try, or
    None."""

    boot: str
    fabric: bytes | None


class GpuSample:
    """Memory of a GPU that peers may try to map; told: a GpuPlace. If no operating system tells its id, all ranks are taken for
    one node, as on one host."""

    def __init__(self, device: torch.device) -> None:
        from ..gpu.fabric import FabricMemory

        self._memory = FabricMemory(device)
        self.told = GpuPlace(_boot(), self._memory.handle)

    def reaches(self, told: GpuPlace) -> bool:
        if told.boot == self.told.boot:
            return True
        return told.fabric is not None and self._memory.reaches(told.fabric)

    def close(self) -> None:
        self._memory.close()


def _boot() -> str:
    with contextlib.suppress(OSError), open(_BOOT) as file:
        return file.read().strip()
    return ""
