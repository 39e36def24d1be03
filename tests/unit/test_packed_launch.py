"""Where a kernel's parameters lie, against Triton's own PTX; a launch itself needs a GPU (tests/gpu)."""

from __future__ import annotations

import ctypes
import multiprocessing
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from overlap_train.gpu.launch import Launch, LaunchCache, PackedLaunch, _Parameters, entry_of, layout_of
from overlap_train.gpu.ptx_check import Verifier
from tests.unit import hopper_ptx

KERNELS = [("hopper_all_gather_gemm", {}), ("hopper_gemm_reduce_scatter", {"DIRECT": True})]


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
            return SimpleNamespace(metadata=SimpleNamespace(name="reduce_partials_kernel"), asm={"ptx": ""}, hash="")

    described: list[Launch] = []

    def describe() -> Launch:
        described.append(Launch(Kernel(), (1,), {}, {}))
        return described[-1]

    cache = LaunchCache(SimpleNamespace(driver=object(), verifier=Verifier()))  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="host time"):
        cache.run("kernel", (), describe)  # what Triton returned has no metadata: another version, say
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.run("kernel", (), describe)
    assert launches == ["triton"] * 2


class Driver:
    """Remembers what it was told; refuses the tensor map's address REFUSED."""

    REFUSED = 13

    def __init__(self) -> None:
        self.replaced: list[int] = []
        self.launches: list[tuple[int, int]] = []  # the addresses in the map and in the pointer
        self.map_address = 0

    def encode_tensor_map(self, *arguments: object) -> int:
        return 0

    def replace_address(self, place: int, address: int) -> int:
        self.replaced.append(address)
        if address == self.REFUSED:
            return 1
        self.map_address = address
        return 0

    def launch(self, *arguments: Any) -> int:
        place = arguments[-2][-3]  # in the table of parameters; behind it two pointers to scratch
        self.launches.append((self.map_address, ctypes.c_uint64.from_address(place).value))
        return 0

    def current_stream(self) -> int:
        return 0

    def check(self, status: int) -> None:
        if status:
            raise RuntimeError("refused")


def packed(driver: Driver) -> PackedLaunch:
    """A kernel of one tensor descriptor and one pointer."""
    sizes = [".align 64 .b8 k_param_0[128]", ".u32 k_param_1", ".u32 k_param_2", ".u64 k_param_3", ".u64 k_param_4"]
    head = ",\n\t.param ".join([*sizes, ".u64 k_param_5", ".u64 k_param_6", ".u64 k_param_7"])
    signature = {"a_desc": "tensordesc<bf16[128, 64]>", "y_ptr": "*bf16"}
    meta = dict(elem_size=2, elem_type=10, block_size=[128, 64], swizzle=3)
    compiled = SimpleNamespace(
        asm={"ptx": f".visible .entry k(\n\t.param {head}\n)\n.reqntid 128\n{{"},
        src=SimpleNamespace(signature=signature),
        metadata=SimpleNamespace(
            name="k", global_scratch_size=0, profile_scratch_size=0, num_ctas=1, tensordesc_meta=[meta], shared=0
        ),
        function=1,
    )
    base = SimpleNamespace(data_ptr=lambda: 1)
    arguments = {"a_desc": SimpleNamespace(shape=[128, 64], strides=[64, 1], base=base), "y_ptr": base}
    return PackedLaunch(driver, compiled, Launch(None, (1,), arguments, {}, (("a_desc",), ("y_ptr",))))  # type: ignore[arg-type]


def test_addresses_are_replaced_where_they_have_changed() -> None:
    driver = Driver()
    launch = packed(driver)
    for addresses in ((2, 3), (2, 4), (5, 4), (2, 3)):
        launch(addresses)
    assert driver.launches == [(2, 3), (2, 4), (5, 4), (2, 3)]
    assert driver.replaced == [2, 5, 2]


def test_behind_a_launch_that_failed_all_addresses_are_replaced() -> None:
    driver = Driver()
    launch = packed(driver)
    launch((2, 3))
    with pytest.raises(RuntimeError, match="refused"):
        launch((Driver.REFUSED, 4))
    driver.map_address = 7  # whatever the driver has left there
    launch((2, 3))
    assert driver.launches[-1] == (2, 3)
