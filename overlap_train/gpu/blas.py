"""cuBLAS, told to leave SMs to others."""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Blas:
    """cuBLAS as torch calls it. A product that counts on all SMs may take twice as long if others hold a few of them: its last
    CTAs find room only when the first have ended."""

    def __init__(self, device: torch.device) -> None:
        self._count = torch.cuda.get_device_properties(device).multi_processor_count
        self._set: Any = None
        try:
            library = ctypes.CDLL(f"libcublas.so.{str(torch.version.cuda).partition('.')[0]}")  # torch has loaded it
            self._set = library.cublasSetSmCountTarget
        except (OSError, AttributeError) as error:
            warnings.warn(
                f"cuBLAS cannot spare SMs for the network ({error}); products beside it may take longer", stacklevel=2
            )
            return
        self._set.argtypes, self._set.restype = (ctypes.c_void_p, ctypes.c_int), ctypes.c_int

    @contextmanager
    def sparing(self, sms: int) -> Iterator[None]:
        """A bracket in which products of this thread leave so many SMs to others."""
        if self._set is None:
            yield
            return
        handle = torch.cuda.current_blas_handle()
        self._check(self._set(handle, self._count - sms))
        try:
            yield
        finally:
            self._check(self._set(handle, 0))  # 0: all SMs, as before

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(
                f"cuBLAS refused to spare SMs for the network: status {status} of cublasSetSmCountTarget"
            )
