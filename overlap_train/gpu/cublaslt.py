"""A product of fp8 operands that is added to a matrix in fp32, by cuBLASLt through ctypes.

    out [M, N] += (a [M, K] @ b [N, K].T) * a_inverse * b_inverse

torch's scaled products write what they get. To add it to a weight's main_grad is a kernel of its own: without this a step of 8B
takes 3.8 of 277 ms longer (2 x H200, reckoned from single products).
"""

from __future__ import annotations

import ctypes
import weakref
from functools import cache, lru_cache
from typing import Any

import torch

from ..warn import warn_user

_COMPUTE_32F, _R_32F, _TRANSPOSED, _SCALES_OF_128 = 68, 0, 1, 4
_TYPES = {torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_TRANSA, _A_SCALE, _B_SCALE, _A_SCALE_MODE, _B_SCALE_MODE = 3, 17, 18, 31, 32  # cublasLtMatmulDescAttributes_t
_WORKSPACE, _ALIGNMENTS = 1, (5, 6, 7, 8)  # cublasLtMatmulPreferenceAttributes_t
_WORKSPACE_BYTES = 32 << 20  # what NVIDIA recommends for Hopper
_ALIGNMENT = 16  # of all addresses, in bytes
_NOT_SUPPORTED = 15
_ONE = ctypes.c_float(1.0)
_MOST_SHAPES = 512  # that are known; where lengths vary, each is a shape of its own


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).partition('.')[0]}")  # torch has loaded it
    except OSError as error:
        warn_user(f"cuBLASLt cannot be called ({error}); weight gradients in fp8 are added by kernels of their own")
        return None
    library.cublasLtMatmul.argtypes = (*[ctypes.c_void_p] * 14, ctypes.c_size_t, ctypes.c_void_p)
    library.cublasLtMatmulDescSetAttribute.argtypes = ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t
    return library


def _call(name: str, *arguments: Any, bears: int = 0) -> int:
    """The status of a call: 0, or `bears`."""
    status: int = getattr(_library(), f"cublasLt{name}")(*arguments)
    if status not in (0, bears):
        raise RuntimeError(f"cuBLASLt refused {name}: status {status}")
    return status


def _made(name: str, *arguments: Any) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _call(f"{name}Create", ctypes.byref(handle), *arguments)
    return handle


def _set(of: str, handle: ctypes.c_void_p, attribute: int, value: Any) -> None:
    _call(f"{of}SetAttribute", handle, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))


class _Product:
    """The descriptors of one shape, and the algorithm that cuBLASLt advises for it. Its matrices lie in columns: it multiplies b
    by a, and writes out transposed. handle: that of one thread and device, so that calls which share the descriptor, and with it
    the scales' addresses, follow each other."""

    def __init__(
        self,
        handle: int,
        shape: tuple[int, int, int],
        pitch: int,
        types: tuple[torch.dtype, torch.dtype],
        by_blocks: bool,
    ) -> None:
        self.handle, (m, n, k), (a, b) = handle, shape, types
        self.descriptor = _made("MatmulDesc", _COMPUTE_32F, _R_32F)
        _set("MatmulDesc", self.descriptor, _TRANSA, ctypes.c_int32(_TRANSPOSED))
        for mode in (_A_SCALE_MODE, _B_SCALE_MODE) if by_blocks else ():  # unknown before CUDA 12.8
            _set("MatmulDesc", self.descriptor, mode, ctypes.c_int32(_SCALES_OF_128))
        layouts = (_TYPES[b], k, n, k), (_TYPES[a], k, m, k), (_R_32F, n, m, pitch)
        self.b, self.a, self.out = (_made("MatrixLayout", of, *map(ctypes.c_uint64, shape)) for of, *shape in layouts)
        self._is_advised = False
        self._advised: _Found | None = None
        weakref.finalize(self, _destroy, self.descriptor, self.b, self.a, self.out).atexit = False

    def set_scales(self, a_inverse: torch.Tensor, b_inverse: torch.Tensor) -> None:
        for attribute, scales in ((_A_SCALE, b_inverse), (_B_SCALE, a_inverse)):
            _set("MatmulDesc", self.descriptor, attribute, ctypes.c_void_p(scales.data_ptr()))

    def advised(self) -> _Found | None:
        """None: there is no algorithm. Asked when scales have addresses: without them cuBLASLt refuses those of blocks."""
        if not self._is_advised:
            found, count, preference = _Found(), ctypes.c_int(), _made("MatmulPreference")
            _set("MatmulPreference", preference, _WORKSPACE, ctypes.c_uint64(_WORKSPACE_BYTES))
            for alignment in _ALIGNMENTS:
                _set("MatmulPreference", preference, alignment, ctypes.c_uint32(_ALIGNMENT))
            told = ctypes.c_void_p(self.handle), self.descriptor, self.b, self.a, self.out, self.out, preference, 1
            try:
                answer = ctypes.byref(found), ctypes.byref(count)
                _call("MatmulAlgoGetHeuristic", *told, *answer, bears=_NOT_SUPPORTED)
            finally:
                _call("MatmulPreferenceDestroy", preference)
            self._is_advised, self._advised = True, found if count.value and found.status == 0 else None
        return self._advised


def _destroy(descriptor: ctypes.c_void_p, *layouts: ctypes.c_void_p) -> None:
    for layout in layouts:
        _call("MatrixLayoutDestroy", layout)
    _call("MatmulDescDestroy", descriptor)


_product = lru_cache(_MOST_SHAPES)(_Product)


def add_product(
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_inverse: torch.Tensor,
    b_inverse: torch.Tensor,
    by_blocks: bool = False,
) -> bool:
    """out [M, N] += a [M, K] @ b [N, K].T, in the current stream. out: its rows may lie apart. a, b: e4m3, or one of them e5m2.
    a_inverse, b_inverse: fp32 [1], or by_blocks [K/128, M] and [K/128, N]. Sums are in fp32.

    Returns:
        False: cuBLASLt cannot do this, and nothing has happened.

    Raises:
        RuntimeError: with cuBLASLt's status, if it refuses anything else.
    """
    if not out.is_cuda or out.dtype != torch.float32 or out.stride(1) != 1 or 4 * out.stride(0) % _ALIGNMENT:
        return False
    if (out.data_ptr() | a.data_ptr() | b.data_ptr()) % _ALIGNMENT or _library() is None:
        return False
    assert all(t.is_contiguous() for t in (a, b, a_inverse, b_inverse)), "cuBLASLt is told no strides"
    shape, types = (len(a), len(b), a.shape[1]), (a.dtype, b.dtype)
    with torch.cuda.device(out.device):
        # cuBLAS's handle, which has one of cuBLASLt in it
        of = _product(torch.cuda.current_blas_handle(), shape, out.stride(0), types, by_blocks)
        of.set_scales(a_inverse, b_inverse)
        if (advised := of.advised()) is None:
            return False
        workspace = out.new_empty(advised.workspace, dtype=torch.uint8)
        stream, at = torch._C._cuda_getCurrentRawStream(out.device.index), out.data_ptr()
        _call(
            "Matmul", of.handle, of.descriptor, ctypes.byref(_ONE), b.data_ptr(), of.b, a.data_ptr(), of.a,
            ctypes.byref(_ONE), at, of.out, at, of.out, advised.algorithm, workspace.data_ptr(), advised.workspace, stream,
        )  # fmt: skip
    return True
