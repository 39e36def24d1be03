"""Where a kernel's parameters lie, against Triton's own PTX; a launch itself needs a GPU (tests/gpu)."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from overlap_train.packed_launch import Launch, LaunchCache, _Parameters, entry_of, layout_of
from tests.unit import hopper_ptx

KERNELS = [("hopper_all_gather_gemm", {"WHOLE_TILES": True}), ("hopper_gemm_reduce_scatter", {"DIRECT": True})]


def _signature_and_ptx(kernel: str, switches: dict[str, bool]) -> tuple[dict[str, str], str, int]:
    binary = hopper_ptx.compiled_kernel(kernel, True, **switches)
    return dict(binary.src.signature), binary.asm["ptx"], binary.metadata.num_warps


@pytest.mark.parametrize(("kernel", "switches"), KERNELS)
def test_the_layout_is_that_of_the_compiled_kernel(kernel: str, switches: dict[str, bool]) -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=hopper_ptx.leave_the_interpreter) as process:
        signature, ptx, warps = process.submit(_signature_and_ptx, kernel, switches).result(timeout=120)
    sizes, threads = entry_of(ptx)
    assert [size for _, size in layout_of(signature)] + [8, 8] == sizes
    assert threads == 32 * warps, "the loading warps, too"


def test_a_layout_that_differs_is_noticed() -> None:
    ptx = ".visible .entry k(\n\t.param .u64 .ptr .global .align 1 k_param_0,\n\t.param .u32 k_param_1\n)\n.reqntid 128\n{"
    assert entry_of(ptx) == ([8, 4], 128)
    assert layout_of({"x_ptr": "*fp32", "n": "i64", "BLOCK": "constexpr"}) == [("x_ptr", 8), ("n", 8)]


def test_parameters_lie_on_64_bytes_and_keep_their_values() -> None:
    parameters = _Parameters([128, 4, 8])
    assert all(address % 64 == 0 for address in parameters.table)
    words = [parameters.set(1, -2), parameters.set(2, 1 << 40)]
    assert [parameters.words[word] for word in words] == [2**64 - 2, 1 << 40]
    assert parameters.address(2) - parameters.address(0) == 192


def test_a_kernel_that_cannot_be_packed_runs_through_triton_and_says_so_once() -> None:
    launches: list[str] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., object]:
            return lambda **arguments: launches.append("triton")

        def warmup(self, grid: tuple[int]) -> SimpleNamespace:
            return SimpleNamespace(metadata=SimpleNamespace(name="reduce_partials_kernel"), asm={"ptx": ""})

    described: list[Launch] = []

    def describe() -> Launch:
        described.append(Launch(Kernel(), (1,), {}, {}))
        return described[-1]

    cache = LaunchCache(driver=object())  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="host time"):
        cache.run("kernel", (), describe)  # what Triton returned has no metadata: another version, say
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.run("kernel", (), describe)
    assert launches == ["triton"] * 2
