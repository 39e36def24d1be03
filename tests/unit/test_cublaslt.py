"""A product in fp8 that is added within cuBLASLt: the library is a stand-in that multiplies what it is told, on the CPU."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from overlap_train.gpu import cublaslt

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = {28: E4M3, 29: E5M2, 0: torch.float32}


class Library:
    """cuBLASLt as ctypes has it. made: layouts as (dtype, rows, columns, pitch), descriptors as their attributes, by handle."""

    def __init__(self) -> None:
        self.made: dict[int, Any] = {}
        self.advice = 0  # how often it was asked for
        self.answers = (0, 1, 0)  # status, count of algorithms, status of the first
        self.destroyed: list[int] = []
        for name in ("cublasLtMatmul", "cublasLtMatmulDescSetAttribute"):  # methods take no argtypes
            call = getattr(self, name)
            setattr(self, name, type("Function", (), {"__call__": lambda _, *told, call=call: call(*told)})())

    def _make(self, handle: Any, what: Any) -> int:
        handle._obj.value = len(self.made) + 1
        self.made[len(self.made) + 1] = what
        return 0

    def cublasLtMatmulDescCreate(self, handle: Any, compute: int, scales: int) -> int:
        return self._make(handle, {}) if (compute, scales) == (68, 0) else 7

    def cublasLtMatmulPreferenceCreate(self, handle: Any) -> int:
        return self._make(handle, {})

    def cublasLtMatmulPreferenceDestroy(self, handle: Any) -> int:
        self.destroyed.append(handle.value)
        return 0

    cublasLtMatmulDescDestroy = cublasLtMatrixLayoutDestroy = cublasLtMatmulPreferenceDestroy

    def cublasLtMatrixLayoutCreate(self, handle: Any, of: int, *sizes: ctypes.c_uint64) -> int:
        return self._make(handle, (DTYPES[of], *(size.value for size in sizes)))

    def cublasLtMatmulDescSetAttribute(self, handle: Any, attribute: int, value: Any, size: Any) -> int:
        self.made[handle.value][attribute] = value._obj.value
        return 0 if size.value == ctypes.sizeof(value._obj) else 7

    cublasLtMatmulPreferenceSetAttribute = cublasLtMatmulDescSetAttribute

    def cublasLtMatmulAlgoGetHeuristic(self, library: Any, product: Any, *told: Any) -> int:
        *_, preference, wanted, found, count = told
        self.advice += 1
        described = self.made[product.value]
        if 17 not in described or 18 not in described:
            return 7  # so it says where scales of blocks have no addresses
        assert self.made[preference.value][1] == 32 << 20 and (library.value, wanted) == (5, 1)
        found._obj.workspace, found._obj.algorithm[0] = 64, 9
        status, count._obj.value, found._obj.status = self.answers
        return status

    def cublasLtMatmul(self, library: Any, product: Any, *told: Any) -> int:
        alpha, a_at, a, b_at, b, beta, c_at, c, d_at, d, algorithm, workspace, size, stream = told
        assert (library, algorithm[0], size, stream, c_at, c.value) == (5, 9, 64, 77, d_at, d.value) and workspace
        described = self.made[product.value]
        assert described[3] == 1, "a is transposed"
        scales_of_a, scales_of_b = (
            _scales(described[at], described.get(mode, 0), self.made[of.value])
            for at, mode, of in ((17, 31, a), (18, 32, b))
        )
        factors = [_matrix(at, self.made[of.value]).double() for at, of in ((a_at, a), (b_at, b))]
        sum_ = (factors[0] * scales_of_a).t() @ (factors[1] * scales_of_b)
        out = _matrix(d_at, self.made[d.value])
        out.copy_(alpha._obj.value * sum_ + beta._obj.value * out)
        return 0


def _matrix(at: int, layout: tuple[Any, ...]) -> torch.Tensor:
    """The matrix [rows, columns] that lies there, column by column."""
    dtype, rows, columns, pitch = layout
    memory = (ctypes.c_uint8 * (((columns - 1) * pitch + rows) * dtype.itemsize)).from_address(at)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).as_strided((rows, columns), (1, pitch))


def _scales(at: int, mode: int, layout: tuple[Any, ...]) -> Any:
    """Of an operand [depth, columns]: one, or one for each 128 of a column."""
    _, depth, columns, _ = layout
    if mode == 0:
        return float(_matrix(at, (torch.float32, 1, 1, 1)))
    assert mode == 4
    return _matrix(at, (torch.float32, columns, depth // 128, columns)).t().double().repeat_interleave(128, 0)


class Gpu(torch.Tensor):
    """A matrix that says it is on a GPU."""

    is_cuda = True


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    found = Library()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: found)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 5)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 77, raising=False)
    _forget()
    yield found
    _forget()


def _forget() -> None:
    cublaslt._product.cache_clear()
    cublaslt._library.cache_clear()


def _matrices(m: int, n: int, k: int, dtype: torch.dtype = E4M3) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(m, k).to(dtype), torch.randn(n, k).to(E4M3)


@pytest.mark.parametrize("by_blocks", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_the_product_is_added_by_its_scales(library: Library, dtype: torch.dtype, by_blocks: bool) -> None:
    m, n, k = 8, 16, 256
    memory = torch.randn(m, n + 4)
    out, whole = memory[:, :n].as_subclass(Gpu), memory.clone()
    for _ in range(2):  # other matrices of the same shapes, in another place
        a, b = _matrices(m, n, k, dtype)
        shapes = ((k // 128, m), (k // 128, n)) if by_blocks else ((1,), (1,))
        a_inverse, b_inverse = (torch.rand(shape) + 0.5 for shape in shapes)
        x, y = (
            t.double() * (s.t().repeat_interleave(128, 1) if by_blocks else s)
            for t, s in ((a, a_inverse), (b, b_inverse))
        )
        whole[:, :n] += x @ y.t()
        assert cublaslt.add_product(out, a, b, a_inverse, b_inverse, by_blocks)
    torch.testing.assert_close(memory, whole)
    assert library.advice == 1
    _forget()
    gc.collect()
    assert sorted(library.destroyed) == sorted(library.made), "each handle once"


def _add(out: torch.Tensor) -> bool:
    one, (a, b) = torch.ones(1), _matrices(*out.shape, 256)
    return cublaslt.add_product(out.as_subclass(Gpu), a, b, one, one)


def test_a_refusal_names_the_call_and_the_status_each_time(library: Library) -> None:
    library.answers = (7, 0, 0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"MatmulAlgoGetHeuristic: status 7"):
            _add(torch.zeros(16, 16))


@pytest.mark.parametrize("answers", [(15, 0, 0), (0, 0, 0), (0, 1, 15)])
def test_without_an_algorithm_nothing_is_added(library: Library, answers: tuple[int, int, int]) -> None:
    library.answers, out = answers, torch.zeros(16, 16)
    assert not _add(out) and not _add(out)
    assert library.advice == 1 and not out.any()


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(16, 16, dtype=torch.bfloat16), torch.zeros(257)[1:].view(16, 16), torch.zeros(16, 17)[:, :16],
        torch.zeros(16, 16).t(),
    ],
    ids=["bf16", "an odd address", "an odd pitch", "columns"],
)  # fmt: skip
def test_what_it_cannot_add_to(library: Library, out: torch.Tensor) -> None:
    assert not _add(out) and not library.made


def test_on_cpus_and_without_the_library_it_adds_nothing(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: no such file")

    one, (a, b), out = torch.ones(1), _matrices(16, 16, 256), torch.zeros(16, 16)
    assert not cublaslt.add_product(out, a, b, one, one)
    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.warns(UserWarning, match=r"cuBLASLt cannot be called \(libcublasLt"):
        assert not _add(out)
