"""Launching a kernel again: its arguments packed once as the driver takes them, a few of them replaced in place.

Triton's launcher looks up, checks and packs every argument at every call, 50 to 80 microseconds of host time with tensor
descriptors. From call to call only the addresses of the caller's tensors and the tag of the call change. Therefore the first
launch goes through Triton, which compiles (ptx_check.py looks at the result before it runs); later ones replace those values and
make one driver call.

The layout is taken from Triton's signature and checked against the parameters in the PTX. Where they disagree (another Triton
version, perhaps), one warning says so and every launch of that kernel goes through Triton.
"""

from __future__ import annotations

import ctypes
import re
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from ..planning.cache import BoundedCache
from .driver import CudaDriver
from .ptx_check import Verifier

_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_NBYTES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "u32": 4, "fp32": 4, "i64": 8, "u64": 8}
# As Triton counts element types on the device -> as the driver counts them: the same but for three floating-point types.
_DRIVER_TYPE = {8: 10, 9: 8, 10: 9}
_L2_PROMOTION_128B = 2
_MOST_LAUNCHES = 256  # that a call remembers; across nodes it waits for chunk after chunk of each rank


@dataclass(frozen=True)
class Launch:
    """A kernel and everything that it is told.

    arguments: tensors, numbers and tensor descriptors by name. constants: constexprs and launch options.
    replaced: of each value that changes from launch to launch the names of the arguments that take it: addresses of tensors and
        tensor descriptors, and 64-bit integers.
    """

    kernel: Any
    grid: tuple[int]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    replaced: tuple[tuple[str, ...], ...] = ()


class Launcher:
    """What all launches of a device share: the driver, and which compiled kernels have been checked."""

    def __init__(self, driver: CudaDriver) -> None:
        self.driver = driver
        self.verifier = Verifier()


class LaunchCache:
    """The launches of one call's kernels, by what distinguishes them."""

    def __init__(self, launcher: Launcher | None) -> None:
        """launcher: None where there is no driver to launch with (the interpreter): every launch goes through Triton."""
        self._launcher = launcher
        self._packed: BoundedCache[Hashable, PackedLaunch] = BoundedCache(_MOST_LAUNCHES)
        self._refused: set[Hashable] = set()

    def run(self, key: Hashable, values: tuple[int, ...], describe: Callable[[], Launch]) -> None:
        """Launch on the current stream.

        Args:
            values: addresses and integers for Launch.replaced, in that order.
            describe: the launch, asked for the first time only; for equal keys it differs in these values alone.

        Raises:
            RuntimeError: the compiled kernel lacks a wait or a signal; it does not run.
        """
        packed = self._packed.get(key)
        if packed is not None:
            packed(values)
            return
        launch = describe()
        if self._launcher is None or key in self._refused:
            launch.kernel[launch.grid](**launch.arguments, **launch.constants)
            return
        self._launcher.verifier.verify(launch.kernel, launch.grid, launch.arguments, launch.constants)
        compiled = launch.kernel[launch.grid](**launch.arguments, **launch.constants)
        try:
            self._packed.put(key, PackedLaunch(self._launcher.driver, compiled, launch))
        except Exception as error:
            # Whatever another Triton does differently: the kernel is running, and its pushes must follow.
            self._refused.add(key)
            warnings.warn(f"{error}; launches of this kernel take 50 to 80 microseconds of host time", stacklevel=2)


class LayoutError(RuntimeError):
    """A kernel's parameters are not where this file expects them."""


class PackedLaunch:
    """A compiled kernel, its grid and its packed parameters."""

    def __init__(self, driver: CudaDriver, compiled: Any, launch: Launch) -> None:
        metadata = compiled.metadata
        sizes, threads = entry_of(compiled.asm["ptx"])
        layout = layout_of(compiled.src.signature)
        expected = [*(size for _, size in layout), 8, 8]  # at the end two pointers to scratch memory
        if expected != sizes or threads is None:
            raise LayoutError(f"the parameters of {metadata.name} are {sizes}, expected {layout} and two pointers")
        if metadata.global_scratch_size or metadata.profile_scratch_size or metadata.num_ctas > 1:
            raise LayoutError(f"{metadata.name} asks for scratch memory or clusters")
        self._driver, self._launch = driver, driver.launch
        self._parameters = _Parameters(sizes)
        self._maps: dict[str, int] = {}
        self._words: dict[str, int] = {}
        self._fill(compiled.src.signature, launch.arguments, iter(metadata.tensordesc_meta or ()))
        self._replaced = [[(name in self._maps, self._slot_of(name)) for name in names] for names in launch.replaced]
        self._unknown: tuple[int | None, ...] = (None,) * len(self._replaced)
        self._last: tuple[int | None, ...] = self._unknown  # their values at the last launch
        self._configuration = (compiled.function, launch.grid[0], 1, 1, threads, 1, 1, metadata.shared)

    def __call__(self, values: tuple[int, ...]) -> None:
        there, self._last = self._last, self._unknown  # until all are replaced
        for slots, value, last in zip(self._replaced, values, there, strict=True):
            if value == last:  # a weight's address never changes; each call of the driver costs a microsecond
                continue
            for is_map, slot in slots:
                if is_map:
                    self._driver.check(self._driver.replace_address(slot, value))
                else:
                    self._parameters.words[slot] = value
        self._last = values
        self._driver.check(
            self._launch(*self._configuration, self._driver.current_stream(), self._parameters.table, None)
        )

    def _slot_of(self, name: str) -> int:
        """Of a tensor map its address, of another parameter the index of its word."""
        return self._maps[name] if name in self._maps else self._words[name]

    def _fill(self, signature: dict[str, str], arguments: dict[str, Any], maps: Any) -> None:
        index = 0
        for name, kind in signature.items():
            if kind.startswith("tensordesc"):
                self._maps[name] = self._parameters.address(index)
                _encode(self._driver, self._maps[name], arguments[name], next(maps))
                for number in (*arguments[name].shape, *arguments[name].strides):
                    index += 1
                    self._parameters.set(index, number)
            elif kind == "constexpr":
                continue
            elif kind.startswith("*"):
                self._words[name] = self._parameters.set(index, arguments[name].data_ptr())
            else:
                self._words[name] = self._parameters.set(index, arguments[name])
            index += 1


class _Parameters:
    """Memory for a kernel's parameters, each on 64 bytes as tensor maps want it, and the table of their addresses."""

    def __init__(self, sizes: list[int]) -> None:
        offsets, end = [], 0
        for size in sizes:
            offsets.append(end)
            end += -(-size // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
        self._memory = ctypes.create_string_buffer(end + _MAP_ALIGNMENT)
        start = -(-ctypes.addressof(self._memory) // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
        self._offsets = offsets
        self._start = start
        self.words = (ctypes.c_uint64 * (end // 8)).from_address(start)
        self.table = (ctypes.c_void_p * len(sizes))(*[start + offset for offset in offsets])

    def address(self, index: int) -> int:
        return self._start + self._offsets[index]

    def set(self, index: int, number: int) -> int:
        """Returns the index of the parameter's word. The machine is little-endian: a smaller integer lies at its beginning."""
        word = self._offsets[index] // 8
        self.words[word] = number & (2**64 - 1)
        return word


def layout_of(signature: dict[str, str]) -> list[tuple[str, int]]:
    """(name, bytes) of each parameter: a tensor descriptor becomes its map, its shape (int32) and its strides (int64)."""
    layout: list[tuple[str, int]] = []
    for name, kind in signature.items():
        if kind.startswith("tensordesc"):
            rank = kind[kind.index("[") : kind.index("]")].count(",") + 1
            layout += [(name, _MAP_BYTES), *[(name, 4)] * rank, *[(name, 8)] * rank]
        elif kind != "constexpr":
            layout.append((name, 8 if kind.startswith("*") else _NBYTES[kind]))
    return layout


def entry_of(ptx: str) -> tuple[list[int], int | None]:
    """(bytes of each parameter, threads of a CTA) of the kernel in `ptx`."""
    entry = ptx[ptx.index(".entry") :]
    head = entry[: entry.index("{")]
    sizes = [
        int(count or 1) * int(bits) // 8
        for bits, count in re.findall(r"\.param (?:\.align \d+ )?\.[busf](\d+)[^,\n]*?(?:\[(\d+)\])?\s*(?:,|\n)", head)
    ]
    threads = re.search(r"\.reqntid (\d+)", head)
    return sizes, int(threads.group(1)) if threads else None


def _encode(driver: CudaDriver, place: int, descriptor: Any, how: dict[str, Any]) -> None:
    """Write the tensor map of a row-major descriptor to `place`; the driver counts dimensions from the innermost."""
    rank, nbytes = len(descriptor.shape), how["elem_size"]
    sizes = (ctypes.c_uint64 * rank)(*reversed(descriptor.shape))
    strides = (ctypes.c_uint64 * (rank - 1))(*[stride * nbytes for stride in reversed(descriptor.strides[:-1])])
    box = (ctypes.c_uint32 * rank)(*reversed(how["block_size"]))
    steps = (ctypes.c_uint32 * rank)(*[1] * rank)
    kind = _DRIVER_TYPE.get(how["elem_type"], how["elem_type"])
    layout = (sizes, strides, box, steps, 0, how["swizzle"], _L2_PROMOTION_128B, 0)
    driver.check(driver.encode_tensor_map(place, kind, rank, descriptor.base.data_ptr(), *layout))
