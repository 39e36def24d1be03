"""Where a kernel's parameters lie, by Triton's own PTX, and what a launch tells the driver. A launch needs a GPU (tests/gpu)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from overlap_train.gpu.launch import (
    Entry,
    Launch,
    LaunchCache,
    LayoutError,
    PackedLaunch,
    _Configuration,
    entry_of,
    layout_of,
)
from overlap_train.gpu.ptx_check import Verifier
from tests.unit import hopper_ptx

KERNELS = [("hopper_all_gather_gemm", {"bias": True}), ("hopper_gemm_reduce_scatter", {"DIRECT": True})]


def _signature_and_ptx(kernel: str, switches: dict[str, bool]) -> tuple[dict[str, str], str, int]:
    binary = hopper_ptx.compiled_kernel(kernel, True, **switches)
    return dict(binary.src.signature), binary.asm["ptx"], binary.metadata.num_warps


@pytest.mark.parametrize(("kernel", "switches"), KERNELS)
def test_the_layout_is_that_of_the_compiled_kernel(
    compiling: ProcessPoolExecutor, kernel: str, switches: dict[str, bool]
) -> None:
    signature, ptx, warps = compiling.submit(_signature_and_ptx, kernel, switches).result(timeout=120)
    sizes, threads = entry_of(ptx)
    assert [size for _, size in layout_of(signature)] + [8, 8] == sizes
    assert threads == 32 * warps, "the loading warps, too"


def _takes_any_rows(kernel: str) -> bool:
    module = __import__(f"overlap_train.kernels.{kernel}", fromlist=["kernel"])
    rows = next(one for one in getattr(module, f"{kernel}_kernel").params if one.name == "m_shard")
    return rows.do_not_specialize


def test_no_kernel_is_compiled_for_a_number_of_rows(compiling: ProcessPoolExecutor) -> None:
    """Else one row, 16 rows and 17 took a compilation each, in the middle of training."""
    kernels = ("all_gather_gemm", "all_to_all_gemm", "gemm_reduce_scatter")
    named = [f"{family}{kernel}" for kernel in kernels for family in ("", "hopper_")]
    assert all(compiling.map(_takes_any_rows, named, timeout=120))


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading a kernel needs a GPU."""
    monkeypatch.setattr("overlap_train.gpu.launch._loaded", lambda compiled: 1)


class Driver:
    """Remembers what it was told. Its tensor maps begin with their address; it refuses REFUSED."""

    REFUSED = 1 << 20

    def __init__(self) -> None:
        self.launches: list[tuple[int, int]] = []  # the addresses in the map and in the pointer
        self.grids: list[int] = []
        self.streams: list[int | None] = []
        self.stream = 0

    def encode_tensor_map(self, *arguments: object) -> int:
        return 0

    def replace_address(self, place: int, address: int) -> int:
        if address == self.REFUSED:
            return 1
        words_at(place)[0] = address
        return 0

    def launch(self, configuration: Any, function: Any, table: Any, nothing: None) -> int:
        told = _Configuration.from_address(configuration.value)
        self.grids.append(told.grid)
        self.streams.append(told.stream)
        places = (ctypes.c_void_p * 8).from_address(table.value)
        self.launches.append((words_at(places[0])[0], words_at(places[5])[0]))
        return int(self.launches[-1][1] == self.REFUSED)

    def current_stream(self) -> int:
        return self.stream

    def check(self, status: int) -> None:
        if status:
            raise RuntimeError("refused")


class PickyDriver(Driver):
    """Its tensor maps have their address elsewhere."""

    def replace_address(self, place: int, address: int) -> int:
        words_at(place)[1] = address
        return 0


def words_at(address: int) -> Any:
    """The words of a parameter of `compiled`."""
    return (ctypes.c_uint64 * 16).from_address(address)


def compiled() -> SimpleNamespace:
    """A kernel of one tensor descriptor and one pointer, as Triton returns it."""
    sizes = [".align 64 .b8 k_param_0[128]", ".u32 k_param_1", ".u32 k_param_2", ".u64 k_param_3", ".u64 k_param_4"]
    head = ",\n\t.param ".join([*sizes, ".u64 k_param_5", ".u64 k_param_6", ".u64 k_param_7"])
    meta = dict(elem_size=2, elem_type=10, block_size=[128, 64], swizzle=3)
    return SimpleNamespace(
        asm={"ptx": f".visible .entry k(\n\t.param {head}\n)\n.reqntid 128\n{{"},
        src=SimpleNamespace(signature={"a_desc": "tensordesc<bf16[128, 64]>", "y_ptr": "*bf16"}),
        metadata=SimpleNamespace(
            name="reduce_partials_kernel", global_scratch_size=0, profile_scratch_size=0, num_ctas=1, tensordesc_meta=[meta],
            shared=0,
        ),
        hash="of these constants",
    )  # fmt: skip


def launch_of(kernel: Any, rows: int = 128) -> Launch:
    base = torch.zeros(1, dtype=torch.bfloat16)
    desc = SimpleNamespace(shape=[rows, 64], strides=[64, 1], base=base, block_shape=[128, 64])
    arguments = {"a_desc": desc, "y_ptr": base}
    return Launch(kernel, (rows,), arguments, {}, (("a_desc",), ("y_ptr",)))


def packed(driver: Driver) -> PackedLaunch:
    return PackedLaunch(driver, Entry(compiled()), launch_of(None))  # type: ignore[arg-type]


class Kernel:
    """What Triton compiles once for all numbers of rows."""

    def __init__(self) -> None:
        self.binary, self.launches, self.warmups = compiled(), 0, 0

    def warmup(self, grid: tuple[int], **arguments: Any) -> SimpleNamespace:
        self.warmups += 1
        return self.binary

    def __getitem__(self, grid: tuple[int]) -> Callable[..., SimpleNamespace]:
        def launch(**arguments: Any) -> SimpleNamespace:
            self.launches += 1
            return self.binary

        return launch


def test_a_kernel_is_packed_for_all_sizes_without_triton() -> None:
    """Of other slots, too, whose launches are remembered apart; and the PTX is read once."""
    kernel, driver = Kernel(), Driver()
    launcher: Any = SimpleNamespace(driver=driver, verifier=Verifier(), entries={})
    one, other = LaunchCache(launcher, 1), LaunchCache(launcher, 1)
    one.run(128, (2, 3), lambda: launch_of(kernel))
    assert driver.launches == [(2, 3)], "the first launch, too: Triton would build a launcher for it"
    kernel.binary.asm = {}
    for rows in range(1, 50):
        for cache in (one, other):
            cache.run(rows, (rows + 50, rows), partial(launch_of, kernel, rows))
            assert driver.launches[-1] == (rows + 50, rows), "with the values of this launch"
    one.run(128, (5, 6), lambda: launch_of(kernel))
    assert (kernel.launches, kernel.warmups) == (0, 1) and len(driver.launches) == 2 * 49 + 2
    assert driver.grids == [128] + [rows for rows in range(1, 50) for _ in range(2)] + [128]


def test_sizes_that_cannot_be_packed_run_through_triton() -> None:
    kernel, driver = Kernel(), Driver()
    cache = LaunchCache(SimpleNamespace(driver=driver, verifier=Verifier(), entries={}), 1)  # type: ignore[arg-type]
    cache.run(128, (2, 3), lambda: launch_of(kernel))
    driver.encode_tensor_map = lambda *arguments: 1  # type: ignore[method-assign]
    with pytest.warns(UserWarning, match="refused; launches of this kernel"):
        cache.run(7, (2, 3), lambda: launch_of(kernel, 7))
    cache.run(7, (2, 3), lambda: launch_of(kernel, 7))
    assert (kernel.launches, driver.launches) == (2, [(2, 3)])


def test_addresses_and_the_stream_are_those_of_the_launch() -> None:
    driver = Driver()
    launch = packed(driver)
    assert all(address % 64 == 0 for address in launch._arguments.table)
    for stream, addresses in enumerate(((2, 3), (2, 4), (5, 4), (2, 3)), start=7):
        driver.stream = stream
        launch(addresses)
    assert driver.launches == [(2, 3), (2, 4), (5, 4), (2, 3)] and driver.streams == [7, 8, 9, 10]


def test_a_tensor_map_that_does_not_begin_with_its_address_is_not_packed() -> None:
    with pytest.raises(LayoutError, match="does not begin with its address"):
        packed(PickyDriver())


def test_a_value_for_what_is_no_parameter_is_refused() -> None:
    """Triton leaves out what is 1, or a constant. A launch that did not notice would send the value of the first one for ever."""
    launch = replace(launch_of(None), replaced=(("a_desc",), ("tag",)))
    with pytest.raises(KeyError, match="tag"):
        PackedLaunch(Driver(), Entry(compiled()), launch)  # type: ignore[arg-type]


def test_what_the_driver_refuses_raises_and_does_not_last() -> None:
    driver = Driver()
    launch = packed(driver)
    with pytest.raises(RuntimeError, match="refused"):
        launch((2, Driver.REFUSED))
    launch((2, 3))
    assert driver.launches[-1] == (2, 3)
