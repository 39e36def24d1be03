"""Memory that GPUs of other hosts can map: CUDA's fabric handles, where NVLink reaches across hosts (as in GB200 NVL72)."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_PINNED, _DEVICE, _FABRIC = 1, 1, 8  # of CUmemAllocationType, CUmemLocationType and CUmemAllocationHandleType
_HANDLE_BYTES = 64


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class FabricMemory:
    """The smallest piece of this GPU's memory that has a fabric handle, for others to try to map.

    handle: 64 bytes, which mean the same on every host; None where this GPU has no such memory.
    """

    def __init__(self, device: torch.device, library: Any = None) -> None:
        self._library = ctypes.CDLL("libcuda.so.1") if library is None else library
        self._memory = self._create(_Properties(_PINNED, _FABRIC, _Location(_DEVICE, device.index)))
        self.handle = None if self._memory is None else self._export(self._memory)

    def _create(self, properties: _Properties) -> ctypes.c_uint64 | None:
        size, memory = ctypes.c_size_t(), ctypes.c_uint64()
        by_reference = ctypes.byref(properties)
        if self._library.cuMemGetAllocationGranularity(ctypes.byref(size), by_reference, 0):
            return None
        failed = self._library.cuMemCreate(ctypes.byref(memory), size, by_reference, ctypes.c_uint64(0))
        return None if failed else memory

    def _export(self, memory: ctypes.c_uint64) -> bytes | None:
        handle = (ctypes.c_ubyte * _HANDLE_BYTES)()
        failed = self._library.cuMemExportToShareableHandle(ctypes.byref(handle), memory, _FABRIC, ctypes.c_uint64(0))
        return None if failed else bytes(handle)

    def reaches(self, handle: bytes) -> bool:
        """Whether this process can import the memory that a handle of another one names."""
        if self.handle is None:
            return False
        memory, theirs = ctypes.c_uint64(), (ctypes.c_ubyte * _HANDLE_BYTES).from_buffer_copy(handle)
        if self._library.cuMemImportFromShareableHandle(ctypes.byref(memory), ctypes.byref(theirs), _FABRIC):
            return False
        self._library.cuMemRelease(memory)
        return True

    def close(self) -> None:
        """Give the memory back, after peers have tried."""
        if self._memory is not None:
            self._library.cuMemRelease(self._memory)
            self._memory = None
