"""Launching a kernel again: its arguments packed once as the driver takes them, a few of them replaced in place.

Triton's launcher looks up, checks and packs every argument at every call, 50 to 80 microseconds of host time with tensor
descriptors. From call to call only the addresses of the caller's tensors and the tag of the call change. Therefore the first
launch goes through Triton, which compiles (ptx_check.py looks at the result before it runs); later ones replace those values and
make one driver call.

Where a kernel's parameters are not where they are expected (entry.py: another Triton version, perhaps), one warning says so and
every launch of that kernel goes through Triton.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from ..planning.cache import BoundedCache
from .driver import CudaDriver
from .entry import MAP_BYTES, Entry
from .ptx_check import Verifier

_MAP_ALIGNMENT = 64
# As Triton counts element types on the device -> as the driver counts them: the same but for three floating-point types.
_DRIVER_TYPE = {8: 10, 9: 8, 10: 9}
_L2_PROMOTION_128B = 2
_ELSEWHERE = 0x5A5A_5A5A_5A50  # some address on 16 bytes
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

    def through_triton(self) -> Any:
        """Launch the kernel through Triton, which compiles it where it has not been. Returns what Triton has compiled."""
        return self.kernel[self.grid](**self.arguments, **self.constants)


class Launcher:
    """What all launches of a device share: the driver, which compiled kernels have been checked, and how those that have run are
    packed."""

    def __init__(self, driver: CudaDriver) -> None:
        self.driver = driver
        self.verifier = Verifier()
        self.entries: dict[str, Entry] = {}  # by Triton's hash of source, constants and target


class LaunchCache:
    """The launches of one call's kernels, by what distinguishes them."""

    def __init__(self, launcher: Launcher | None) -> None:
        """Start without launches. launcher None: there is no driver to launch with (the interpreter), and every launch goes
        through Triton."""
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
        assert len(values) == len(launch.replaced), "each value has its arguments, or none"
        if self._launcher is None or key in self._refused:
            launch.through_triton()
            return
        compiled = self._launcher.verifier.verify(launch.kernel, launch.grid, launch.arguments, launch.constants)
        entry = self._launcher.entries.get(compiled.hash)  # it has run, with other sizes or in another slot
        if entry is None:
            compiled = launch.through_triton()
        try:
            known = entry or self._launcher.entries.setdefault(compiled.hash, Entry(compiled))
            packed = self._packed.put(key, PackedLaunch(self._launcher.driver, known, launch))
        except Exception as error:
            # Whatever another Triton does differently: the kernel is running, and its pushes must follow.
            self._refused.add(key)
            warnings.warn(f"{error}; launches of this kernel take 50 to 80 microseconds of host time", stacklevel=2)
            if entry is not None:
                launch.through_triton()
            return
        if entry is not None:
            packed(values)


class _Configuration(ctypes.Structure):
    """CUlaunchConfig of the driver. As one object it costs a launch 0.4 microseconds less than as eight arguments."""

    _fields_ = (
        *(
            (name, ctypes.c_uint32)
            for name in ("grid", "grid_y", "grid_z", "threads", "threads_y", "threads_z", "shared")
        ),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint32),
    )


class PackedLaunch:
    """A compiled kernel, its grid and its packed parameters."""

    def __init__(self, driver: CudaDriver, entry: Entry, launch: Launch) -> None:
        self._launch, self._check, self._current_stream = driver.launch, driver.check, driver.current_stream
        self._parameters = _Parameters(entry.sizes)
        self._words = self._parameters.words
        self._replace = driver.replace_address
        self._maps: dict[str, int] = {}
        self._indices: dict[str, int] = {}
        self._fill(driver, entry, launch.arguments)
        # (which value, where it goes): an index of words, or the address of a tensor map that only the driver can change
        replaced = [(which, name) for which, names in enumerate(launch.replaced) for name in names]
        sealed = {name for name, place in self._maps.items() if not _address_is_first_word(driver, place)}
        self._places = tuple((which, self._indices[name]) for which, name in replaced if name not in sealed)
        self._sealed = tuple((which, self._maps[name]) for which, name in replaced if name in sealed)
        self._configuration = _Configuration(launch.grid[0], 1, 1, entry.threads, 1, 1, entry.shared)
        # ctypes converts numbers at each call; these stay as they are.
        pointers = (ctypes.addressof(self._configuration), entry.function, ctypes.addressof(self._parameters.table))
        self._pointers = tuple(map(ctypes.c_void_p, pointers))

    def __call__(self, values: tuple[int, ...]) -> None:
        words = self._words
        for which, index in self._places:
            words[index] = values[which]
        for which, place in self._sealed:
            self._check(self._replace(place, values[which]))
        self._configuration.stream = self._current_stream()
        failed = self._launch(*self._pointers, None)
        if failed:
            self._check(failed)

    def _fill(self, driver: CudaDriver, entry: Entry, arguments: dict[str, Any]) -> None:
        parameters, maps, index = self._parameters, iter(entry.maps), 0
        encoded: dict[int, int] = {}  # what a kernel does not use on so few ranks is one descriptor, many times
        for name, kind in entry.signature.items():
            if kind.startswith("tensordesc"):
                place, how, descriptor = parameters.address(index), next(maps), arguments[name]
                self._maps[name], self._indices[name] = place, parameters.word(index)
                if id(descriptor) in encoded:
                    ctypes.memmove(place, encoded[id(descriptor)], MAP_BYTES)
                else:
                    _encode(driver, place, descriptor, how)
                    encoded[id(descriptor)] = place
                for number in (*descriptor.shape, *descriptor.strides):
                    index += 1
                    parameters.set(index, number)
            elif kind == "constexpr":
                continue
            elif kind.startswith("*"):
                self._indices[name] = parameters.set(index, arguments[name].data_ptr())
            else:
                self._indices[name] = parameters.set(index, arguments[name])
            index += 1


class _Parameters:
    """Memory for a kernel's parameters, each on 64 bytes as tensor maps want it, and the table of their addresses."""

    def __init__(self, sizes: list[int]) -> None:
        offsets, end = [], 0
        for size in sizes:
            offsets.append(end)
            end += -(-size // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
        self._memory = ctypes.create_string_buffer(end + _MAP_ALIGNMENT)
        start = _aligned(ctypes.addressof(self._memory))
        self._offsets = offsets
        self._start = start
        self.words = (ctypes.c_uint64 * (end // 8)).from_address(start)
        self.table = (ctypes.c_void_p * len(sizes))(*[start + offset for offset in offsets])

    def address(self, index: int) -> int:
        return self._start + self._offsets[index]

    def word(self, index: int) -> int:
        """The index of the parameter's first word."""
        return self._offsets[index] // 8

    def set(self, index: int, number: int) -> int:
        """Write a parameter; returns the index of its word. The machine is little-endian: a smaller integer lies at its
        beginning."""
        word = self.word(index)
        self.words[word] = number & (2**64 - 1)
        return word


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


def _address_is_first_word(driver: CudaDriver, place: int) -> bool:
    """Whether the driver, told to replace the address of the map at `place`, changes its first word and nothing else.

    Then a launch stores it there itself: calling the driver costs 0.2 microseconds and more for each map.
    """
    memory = ctypes.create_string_buffer(MAP_BYTES + _MAP_ALIGNMENT)
    copied = _aligned(ctypes.addressof(memory))
    ctypes.memmove(copied, place, MAP_BYTES)
    if driver.replace_address(copied, _ELSEWHERE):
        return False
    expected = _ELSEWHERE.to_bytes(8, "little") + ctypes.string_at(place + 8, MAP_BYTES - 8)
    return ctypes.string_at(copied, MAP_BYTES) == expected


def _aligned(address: int) -> int:
    """The next address that may hold a tensor map."""
    return -(-address // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
