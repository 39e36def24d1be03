"""The CUDA driver calls of the hot path, through ctypes; and cuBLAS, told to leave SMs to others.

A call of the general bindings costs 5 microseconds of host time, of which the driver needs two or three; an operator makes a
dozen. Handles and addresses are plain integers here, or a Word where they stay the same: ctypes converts an integer in 0.1
microseconds.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ..warn import warn_user

Word = ctypes.c_uint64  # a handle, an address or a size, converted once
_POINTER, _FLAGS = ctypes.c_void_p, ctypes.c_uint32
_SIGNATURES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "copy": ("cuMemcpyDtoDAsync_v2", (Word,) * 4),
    "wait_value": ("cuStreamWaitValue64_v2", (Word, Word, Word, _FLAGS)),
    "current_context": ("cuCtxGetCurrent", (ctypes.POINTER(Word),)),
    "set_context": ("cuCtxSetCurrent", (Word,)),
    "create_event": ("cuEventCreate", (ctypes.POINTER(Word), _FLAGS)),
    "record_event": ("cuEventRecord", (Word, Word)),
    "wait_event": ("cuStreamWaitEvent", (Word, Word, _FLAGS)),
    "launch": ("cuLaunchKernelEx", (Word,) * 4),
    "encode_tensor_map": ("cuTensorMapEncodeTiled", (_POINTER, _FLAGS, _FLAGS, *[_POINTER] * 5, *[_FLAGS] * 4)),
    "replace_address": ("cuTensorMapReplaceAddress", (_POINTER, _POINTER)),
}
_NO_TIMING = 2
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def leave_captures_alone() -> None:
    """Let this thread ask how far streams are, whatever graph another thread captures meanwhile. Else CUDA would refuse the
    question, and end the capture: torch's mode is the global one."""
    mode = ctypes.c_int(_RELAXED)
    ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


class CudaDriver:
    """The driver for one device. Each call of _SIGNATURES returns a status, 0 if all went well, for `check`.

    copy(target, source, nbytes, stream), wait_value(stream, address, least, flags), record_event(event, stream),
    wait_event(stream, event, flags), launch(configuration, function, parameters, 0).

    current_stream: the handle of torch's current stream; Triton asks the same way. torch.cuda.current_stream takes ten times
    longer.
    """

    current_stream: Callable[[], int]
    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, device: torch.device) -> None:
        self.current_stream = partial(torch._C._cuda_getCurrentRawStream, device.index)
        self._library = ctypes.CDLL("libcuda.so.1")
        for name, (symbol, arguments) in _SIGNATURES.items():
            function = getattr(self._library, symbol)
            function.argtypes, function.restype = arguments, ctypes.c_int
            setattr(self, name, function)
        self._context = Word()
        torch.cuda.synchronize(device)  # makes its context current in this thread, which may not have used CUDA yet
        self.check(self.current_context(ctypes.byref(self._context)))
        assert self._context.value

    def enter(self) -> None:
        """Make the device's context current in this thread: a thread of autograd may come here before its first CUDA call."""
        failed = self.set_context(self._context)
        if failed:
            self.check(failed)

    def is_capturing(self) -> bool:
        """Whether what is enqueued in the current stream goes into a CUDA graph."""
        return torch.cuda.is_current_stream_capturing()

    def in_stream(self, stream: torch.cuda.Stream) -> AbstractContextManager[None]:
        """Scope in which `stream` is the current one."""
        return torch.cuda.stream(stream)

    def new_event(self) -> Word:
        """An event that orders streams and takes no time stamp."""
        event = Word()
        self.check(self.create_event(ctypes.byref(event), _NO_TIMING))
        return event

    def check(self, status: int) -> None:
        """Raise RuntimeError with the driver's own name of what went wrong, if something did. Some calls report what an earlier
        kernel or copy did."""
        if status:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(name))
            raise RuntimeError(f"the CUDA driver refused: {(name.value or b'an unknown error').decode()} ({status})")


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
        self._check(self._get(handle, ctypes.byref(before)))
        self._check(self._set(handle, min(before.value or self._count, self._count - sms)))  # 0: all SMs
        try:
            yield
        finally:
            self._check(self._set(handle, before.value))

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"cuBLAS refused to spare SMs for the network: status {status}")
