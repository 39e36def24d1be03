"""FabricMemory on a stand-in for the CUDA driver, whose hosts are joined by NVLink."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_train.group.topology import FabricMemory, _Properties

GPU = torch.device("cuda", 3)
GRANULARITY = 2 << 20


class Driver:
    """refuses: the call that does not work here."""

    def __init__(self, refuses: str = "") -> None:
        self._refuses, self.made, self.freed = refuses, [], []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuMem"):
            raise AttributeError(name)
        return lambda *arguments: 801 if name == self._refuses else getattr(self, f"_{name}")(*arguments)

    def _cuMemGetAllocationGranularity(self, size: Any, properties: Any, option: int) -> int:
        size._obj.value = GRANULARITY
        return option

    def _cuMemCreate(self, memory: Any, size: Any, properties: Any, flags: Any) -> int:
        asked = properties._obj
        self.made.append((size.value, asked.type, asked.handle_types, asked.location.type, asked.location.id))
        memory._obj.value = 70 + len(self.made)
        return int(flags.value)

    def _cuMemExportToShareableHandle(self, handle: Any, memory: Any, kind: int, flags: Any) -> int:
        handle._obj[:] = bytes([memory.value, kind]) + bytes(62)
        return int(flags.value)

    def _cuMemImportFromShareableHandle(self, memory: Any, handle: Any, kind: int) -> int:
        memory._obj.value = 1000 + handle._obj[0]
        return 0 if handle._obj[1] == kind else 1

    def _cuMemRelease(self, memory: Any) -> int:
        self.freed.append(memory.value)
        return 0


def test_the_smallest_piece_is_made_offered_taken_in_and_given_back() -> None:
    driver = Driver()
    memory = FabricMemory(GPU, driver)
    assert driver.made == [(GRANULARITY, 1, 8, 1, 3)]  # pinned, with a fabric handle, on device 3
    assert memory.handle == bytes([71, 8]) + bytes(62)
    assert memory.reaches(bytes([5, 8]) + bytes(62)) and driver.freed == [1005]
    assert not memory.reaches(bytes(64)) and driver.freed == [1005]
    memory.close()
    memory.close()
    assert driver.freed == [1005, 71]


@pytest.mark.parametrize("refused", ["cuMemGetAllocationGranularity", "cuMemCreate", "cuMemExportToShareableHandle"])
def test_a_gpu_without_a_fabric_has_no_handle_and_reaches_nobody(refused: str) -> None:
    driver = Driver(refused)
    memory = FabricMemory(GPU, driver)
    assert memory.handle is None and not memory.reaches(bytes([5, 8]) + bytes(62))
    memory.close()
    assert driver.freed == ([71] if refused == "cuMemExportToShareableHandle" else [])


def test_the_properties_lie_as_the_driver_reads_them() -> None:
    """CUmemAllocationProp in cuda.h: two enums, {type, id}, a pointer, eight bytes of flags."""
    offsets = SimpleNamespace(**{name: getattr(_Properties, name).offset for name, _ in _Properties._fields_})
    assert (offsets.type, offsets.handle_types, offsets.location, offsets.windows, offsets.flags) == (0, 4, 8, 16, 24)
    assert ctypes.sizeof(_Properties) == 32
