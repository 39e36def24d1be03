"""cuBLAS is told how many SMs to count on, and told again afterwards. The library is a stand-in."""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_train.gpu.blas import Blas

GPU = torch.device("cuda", 0)


class Setter:
    """cublasSetSmCountTarget, as ctypes has it."""

    argtypes: Any = None
    restype: Any = None

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []

    def __call__(self, handle: int, count: int) -> int:
        self.told.append((handle, count))
        return 7 if count < 0 else 0


@pytest.fixture
def setter(monkeypatch: pytest.MonkeyPatch) -> Setter:
    found = Setter()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 5)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cublasSetSmCountTarget=found))
    return found


def test_products_spare_sms_inside_the_bracket_only(setter: Setter) -> None:
    with contextlib.suppress(ZeroDivisionError), Blas(GPU).sparing(8):
        assert setter.told == [(5, 124)]
        _ = 1 // 0
    assert setter.told == [(5, 124), (5, 0)]


def test_a_refusal_is_an_error(setter: Setter) -> None:
    with pytest.raises(RuntimeError, match="cuBLAS refused to spare SMs"), Blas(GPU).sparing(140):
        pass


def test_without_the_function_products_run_all_the_same(setter: Setter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    with pytest.warns(UserWarning, match="cuBLAS cannot spare SMs"):
        blas = Blas(GPU)
    with blas.sparing(8):
        pass
    assert setter.told == []
