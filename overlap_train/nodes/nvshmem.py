"""NVSHMEM between the GPUs of different nodes: a rank puts data and their signal into the memory of any other.

No SM takes part: network cards read and write, symmetric memory only. So data are copied there first. A card carries 50 GB/s,
the copy 3700.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from ..gpu.driver import CudaDriver
from .engines import Exchange
from .slots import Place

_WORD = 1 << 64  # NVSHMEM takes signals as unsigned numbers


class NvshmemPuts:
    """Carries pieces between the ranks of NVSHMEM's world, which are those of the group."""

    needs_buffers = False

    def __init__(self, driver: CudaDriver, bindings: Any = None) -> None:
        """bindings: the module nvshmem.bindings; None: it is imported when there is memory."""
        self._driver, self._bindings = driver, bindings

    def attach(self, memory: torch.Tensor, staging: int) -> None:
        """Take a new heap, as this rank has it (uint8), while nothing is under way. From byte `staging` on it may be used to send
        from. Addresses in the own memory stand for those of all ranks."""
        self._bindings = self._bindings or importlib.import_module("nvshmem.bindings")
        self._set = int(self._bindings.Signal_op.SIGNAL_SET)
        self._start, self._staging, self._room = memory.data_ptr(), staging, memory.numel() - staging

    def start(self, exchange: Exchange) -> None:
        self.put(exchange.source, exchange.call.place(exchange.exchanged.sent), exchange.call.word)

    def put(self, source: torch.Tensor, place: Place, word: int) -> None:
        """Enqueue a put of `source`, contiguous and perhaps empty, then of the signal `word`. The source is copied first, when
        the put before has read the staging memory."""
        stream = self._driver.current_stream()
        signal, nbytes = self._start + place.signal, source.numel() * source.element_size()
        told = (signal, word % _WORD, self._set, place.rank, stream)
        if not nbytes:
            self._bindings.signal_op_on_stream(*told)
            return
        assert nbytes <= self._room and source.is_contiguous()
        staged = self._start + self._staging
        self._driver.check(self._driver.copy(staged, source.data_ptr(), nbytes, stream))
        self._bindings.putmem_signal_on_stream(self._start + place.data, staged, nbytes, *told)

    def close(self, orderly: bool) -> None:
        """Do nothing: NVSHMEM's world ends when all domains have ended (symmetric/nvshmem.py: finalize)."""
