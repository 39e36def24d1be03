"""CudaDriver without a GPU: what it declares to ctypes, and what it does with a status."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from overlap_train.gpu import driver as module
from overlap_train.gpu.driver import _SIGNATURES, CudaDriver, leave_captures_alone


class Function:
    """A symbol of the library; writes `result` where its first argument points to."""

    def __init__(self, status: int = 0, result: int | None = None) -> None:
        self.status, self.result, self.calls = status, result, 0

    def __call__(self, *arguments: object) -> int:
        self.calls += 1
        if self.result is not None:
            arguments[0]._obj.value = self.result  # type: ignore[attr-defined]
        return self.status


@pytest.fixture
def library() -> SimpleNamespace:
    functions = {symbol: Function() for symbol, _ in _SIGNATURES.values()}
    functions |= {"cuEventCreate": Function(result=77), "cuCtxGetCurrent": Function(result=5)}
    return SimpleNamespace(**functions, cuGetErrorName=_error_name)


def _error_name(status: int, name: object) -> int:
    name._obj.value = b"CUDA_ERROR_INVALID_VALUE"  # type: ignore[attr-defined]
    return 0


@pytest.fixture
def driver(library: SimpleNamespace) -> CudaDriver:
    with (
        mock.patch.object(module.ctypes, "CDLL", return_value=library),
        mock.patch.object(torch.cuda, "synchronize"),
    ):
        return CudaDriver(torch.device("cuda", 0))


def test_every_call_is_declared(driver: CudaDriver, library: SimpleNamespace) -> None:
    for name, (symbol, arguments) in _SIGNATURES.items():
        function = getattr(driver, name)
        assert function is getattr(library, symbol)
        assert function.argtypes == arguments and function.restype is ctypes.c_int
    assert len(_SIGNATURES["launch"][1]) == 4 and len(_SIGNATURES["encode_tensor_map"][1]) == 12


def test_an_event_is_a_plain_number(driver: CudaDriver) -> None:
    assert driver.new_event() == 77


def test_entering_makes_the_context_of_the_beginning_current(driver: CudaDriver, library: SimpleNamespace) -> None:
    driver.enter()
    assert driver._context == 5 and library.cuCtxSetCurrent.calls == 1


def test_a_thread_that_leaves_captures_alone_has_the_relaxed_mode() -> None:
    exchange = mock.Mock()
    with mock.patch.object(
        module.ctypes, "CDLL", return_value=SimpleNamespace(cuThreadExchangeStreamCaptureMode=exchange)
    ):
        leave_captures_alone()
    assert exchange.call_args.args[0]._obj.value == 2, "CU_STREAM_CAPTURE_MODE_RELAXED"


def test_a_refusal_has_the_drivers_own_name(driver: CudaDriver) -> None:
    driver.check(0)
    with pytest.raises(RuntimeError, match=r"CUDA_ERROR_INVALID_VALUE \(1\)"):
        driver.check(1)
