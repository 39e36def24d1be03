"""cuBLAS, told to leave SMs to others."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..warn import warn_user


class Blas:
    """cuBLAS as torch calls it. A product that counts on all SMs may take twice as long if others hold a few of them: its last
    CTAs find room only when the first have ended."""

    def __init__(self, device: torch.device) -> None:
        self._count = torch.cuda.get_device_properties(device).multi_processor_count
        self._get: Any = None
        self._set: Any = None
        try:
            library = ctypes.CDLL(f"libcublas.so.{str(torch.version.cuda).partition('.')[0]}")  # torch has loaded it
            self._get, self._set = library.cublasGetSmCountTarget, library.cublasSetSmCountTarget
        except (OSError, AttributeError) as error:
            warn_user(f"cuBLAS cannot spare SMs for the network ({error}); products beside it may take longer")
            return
        self._get.argtypes, self._get.restype = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)), ctypes.c_int
        self._set.argtypes, self._set.restype = (ctypes.c_void_p, ctypes.c_int), ctypes.c_int

    @contextmanager
    def sparing(self, sms: int) -> Iterator[None]:
        """A bracket in which products of this thread leave so many SMs to others. They leave more if cuBLAS has been told to
        before, by a bracket around this one or by our caller."""
        if self._set is None:
            yield
            return
        handle, before = torch.cuda.current_blas_handle(), ctypes.c_int()
        self._check(self._get(handle, ctypes.byref(before)), "cublasGetSmCountTarget")
        count = min(before.value or self._count, self._count - sms)  # 0: all SMs
        self._count_on(handle, count)
        try:
            yield
        finally:
            self._count_on(handle, before.value)

    def _count_on(self, handle: int, sms: int) -> None:
        self._check(self._set(handle, sms), "cublasSetSmCountTarget")

    def _check(self, status: int, function: str) -> None:
        if status:
            raise RuntimeError(f"cuBLAS refused to spare SMs for the network: status {status} of {function}")
