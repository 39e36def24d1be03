"""cuBLAS is told how many SMs to count on, and told again afterwards. The library is a stand-in."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_train.gpu.driver import Blas

GPU = torch.device("cuda", 0)


class Library:
    """cuBLAS with one handle, as ctypes has it. target: how many SMs its products count on; 0: all. told: all that it was."""

    def __init__(self) -> None:
        self.target, self.told = 0, list[tuple[int, int]]()

    def cublasGetSmCountTarget(self, handle: int, count: Any) -> int:
        count._obj.value = self.target
        return 0 if handle == 5 else 1

    def cublasSetSmCountTarget(self, handle: int, count: int) -> int:
        self.told.append((handle, count))
        self.target = count
        return 7 if count < 0 else 0


class Function:
    """A function of the library. It takes argtypes and restype, which methods do not."""

    def __init__(self, call: Callable[..., int]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> int:
        return self._call(*arguments)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found, names = Library(), ("cublasGetSmCountTarget", "cublasSetSmCountTarget")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 5)
    functions = {name: Function(getattr(found, name)) for name in names}
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(**functions))
    return found


def test_brackets_within_each_other(library: Library) -> None:
    blas = Blas(GPU)
    for outer, inner in ((4, 8), (8, 4)):
        with blas.sparing(outer):
            with blas.sparing(inner):
                assert library.target == 124
            assert library.target == 132 - outer
        assert library.target == 0


@pytest.mark.parametrize(("target", "within"), [(128, 124), (100, 100)])
def test_what_the_caller_has_told_cublas_holds_again(library: Library, target: int, within: int) -> None:
    library.target = target
    with Blas(GPU).sparing(8):
        assert library.target == within
    assert library.target == target


def test_a_refusal_is_an_error(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="status 7"), Blas(GPU).sparing(140):
        pass
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 6)
    with pytest.raises(RuntimeError, match=r"refused to spare SMs.*status 1"), Blas(GPU).sparing(8):
        pass


def test_without_the_function_products_run_all_the_same(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    with pytest.warns(UserWarning, match="cuBLAS cannot spare SMs"):
        blas = Blas(GPU)
    with blas.sparing(8):
        pass
    assert library.told == []
