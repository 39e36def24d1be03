"""Launching a kernel again by one driver call: its arguments are packed once, and a few of them replaced.

Triton's launcher looks up, checks and packs every argument at every call, 50 to 80 microseconds of host time with tensor
descriptors. From call to call only the addresses of the caller's tensors and the tag of the call change. Therefore the first
launch packs what Triton has compiled (compiling.py; ptx_check.py looks at it before it runs). Later ones replace those values.

Where parameters lie is taken from Triton's signature, and checked against the PTX. If they lie elsewhere, because of another
Triton version perhaps, one warning says so and every launch of that kernel goes through Triton.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ..cache import BoundedCache
from ..warn import warn_user
from .driver import CudaDriver, Word
from .ptx_check import Verifier

_MAP_ALIGNMENT = 64
# As Triton counts element types on the device -> as the driver counts them: the same but for three floating-point types.
_DRIVER_TYPE = {8: 10, 9: 8, 10: 9}
_L2_PROMOTION_128B = 2
_ELSEWHERE = 0x5A5A_5A5A_5A50  # some address on 16 bytes


class PackedArguments:
    """The arguments of one launch in memory of their own, each parameter on 64 bytes as tensor maps want it.

    words: all of the memory, as 64-bit words. table: the address of each parameter. indices: by argument that of its first word,
    which of a tensor descriptor has the address of the tensor.
    """

    def __init__(self, driver: CudaDriver, entry: Entry, arguments: dict[str, Any]) -> None:
        *offsets, end = accumulate((_aligned(size) for size in entry.sizes), initial=0)
        self._memory = ctypes.create_string_buffer(end + _MAP_ALIGNMENT)
        start = _aligned(ctypes.addressof(self._memory))
        self.words = (ctypes.c_uint64 * (end // 8)).from_address(start)
        self.table = (ctypes.c_void_p * len(offsets))(*[start + offset for offset in offsets])
        self.indices: dict[str, int] = {}
        parameter, shapes = 0, iter(entry.maps)
        for name, kind in entry.signature.items():
            if kind == "constexpr":
                continue
            value, self.indices[name] = arguments[name], offsets[parameter] // 8
            if kind.startswith("tensordesc"):
                _encode(driver, start + offsets[parameter], value, next(shapes))
                parameter, numbers = parameter + 1, (*value.shape, *value.strides)
            else:
                numbers = (value.data_ptr() if kind.startswith("*") else value,)
            for number in numbers:  # the machine is little-endian: a smaller integer lies at the beginning of its word
                self.words[offsets[parameter] // 8] = number & (2**64 - 1)
                parameter += 1


def _encode(driver: CudaDriver, place: int, descriptor: Any, how: dict[str, Any]) -> None:
    """Write the tensor map of a row-major descriptor to `place`; the driver counts dimensions from the innermost. how: the shape
    of its map, as Triton tells it.

    Raises:
        LayoutError: the driver, told to replace the map's address, changes other than its first word. Launches store it there
            themselves: calling the driver costs 0.2 microseconds and more for each map.
    """
    rank, nbytes = len(descriptor.shape), how["elem_size"]
    sizes = (ctypes.c_uint64 * rank)(*reversed(descriptor.shape))
    strides = (ctypes.c_uint64 * (rank - 1))(*[stride * nbytes for stride in reversed(descriptor.strides[:-1])])
    box = (ctypes.c_uint32 * rank)(*reversed(how["block_size"]))
    steps = (ctypes.c_uint32 * rank)(*[1] * rank)
    kind = _DRIVER_TYPE.get(how["elem_type"], how["elem_type"])
    layout = (sizes, strides, box, steps, 0, how["swizzle"], _L2_PROMOTION_128B, 0)
    driver.check(driver.encode_tensor_map(place, kind, rank, descriptor.base.data_ptr(), *layout))
    memory = ctypes.create_string_buffer(MAP_BYTES + _MAP_ALIGNMENT)
    copied = _aligned(ctypes.addressof(memory))
    ctypes.memmove(copied, place, MAP_BYTES)
    failed = driver.replace_address(copied, _ELSEWHERE)
    expected = _ELSEWHERE.to_bytes(8, "little") + ctypes.string_at(place + 8, MAP_BYTES - 8)
    if failed or ctypes.string_at(copied, MAP_BYTES) != expected:
        raise LayoutError("a tensor map does not begin with its address")


def _aligned(address: int) -> int:
    """The next address, or number of bytes, at which a tensor map may lie."""
    return -(-address // _MAP_ALIGNMENT) * _MAP_ALIGNMENT


MAP_BYTES = 128  # of a tensor map
_NBYTES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "u32": 4, "fp32": 4, "i64": 8, "u64": 8}


class LayoutError(RuntimeError):
    """A kernel's parameters are not where this file expects them."""


class Entry:
    """How the driver launches a compiled kernel: the same for all sizes, slots and linears."""

    def __init__(self, compiled: Any) -> None:
        metadata, self.signature = compiled.metadata, compiled.src.signature
        self.sizes, threads = entry_of(compiled.asm["ptx"])
        layout = layout_of(self.signature)
        expected = [*(size for _, size in layout), 8, 8]  # at the end two pointers to scratch memory
        if expected != self.sizes or threads is None:
            raise LayoutError(f"the parameters of {metadata.name} are {self.sizes}, expected {layout} and two pointers")
        if metadata.global_scratch_size or metadata.profile_scratch_size or metadata.num_ctas > 1:
            raise LayoutError(f"{metadata.name} asks for scratch memory or clusters")
        self.function, self.threads, self.shared = _loaded(compiled), threads, metadata.shared
        self.maps = tuple(metadata.tensordesc_meta or ())


def _loaded(compiled: Any) -> int:
    """The driver's handle of a compiled kernel. Triton would build a launcher in C before it loads one, 0.5 s for each kernel."""
    from triton.runtime import driver

    active, metadata = driver.active, compiled.metadata
    _, function, *_ = active.utils.load_binary(
        metadata.name, compiled.kernel, metadata.shared, active.get_current_device()
    )
    return int(function)


def layout_of(signature: dict[str, str]) -> list[tuple[str, int]]:
    """(name, bytes) of each parameter: a tensor descriptor becomes its map, its shape (int32) and its strides (int64)."""
    layout: list[tuple[str, int]] = []
    for name, kind in signature.items():
        if kind.startswith("tensordesc"):
            rank = kind[kind.index("[") : kind.index("]")].count(",") + 1
            layout += [(name, MAP_BYTES), *[(name, 4)] * rank, *[(name, 8)] * rank]
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


# Launches that a call remembers. Some serve all ranks at once. Across nodes others are for one chunk of one rank: a gather waits
# for it; a scatter waits for those before and behind it, and adds them up.
_FOR_ALL, _FOR_A_CHUNK = 256, 4


@dataclass(frozen=True)
class Launch:
    """A kernel and everything that it is told.

    arguments: tensors, numbers and tensor descriptors by name. constants: constexprs and launch options.
    replaced: for each value that changes from launch to launch, the names of the arguments that take it. Such a value is the
        address of a tensor or of a tensor descriptor, or an integer, which has 64 bits of its own.
    """

    kernel: Any
    grid: tuple[int]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    replaced: tuple[tuple[str, ...], ...] = ()

    def through_triton(self) -> None:
        """Launch the kernel through Triton, which compiles it if it has not yet."""
        self.kernel[self.grid](**self.arguments, **self.constants)


class Launcher:
    """What all launches of a device share. verifier: knows the compiled kernels that have been checked. entries: how they are
    launched."""

    def __init__(self, driver: CudaDriver) -> None:
        self.driver = driver
        self.verifier = Verifier()
        self.entries: dict[str, Entry] = {}  # by Triton's hash of source, constants and target


class LaunchCache:
    """The packed launches of one call's kernels. A key says what distinguishes one launch from another."""

    def __init__(self, launcher: Launcher | None, chunks: int) -> None:
        """Start without launches. launcher None: there is no driver to launch with (the interpreter), and every launch goes
        through Triton. chunks: of all ranks' blocks together. In a large group a number for all groups would be too small, and
        every launch would be packed again in every call."""
        self._launcher = launcher
        self._packed: BoundedCache[Hashable, PackedLaunch] = BoundedCache(_FOR_ALL + _FOR_A_CHUNK * chunks)
        self._refused: set[Hashable] = set()

    def run(self, key: Hashable, values: tuple[int, ...], describe: Callable[..., Launch], *told: Any) -> None:
        """Launch on the current stream. RuntimeError: the compiled kernel lacks a wait or a signal; it does not run.

        values: addresses and integers for Launch.replaced, in that order. describe: returns the launch for `told`, and is called
        only if it is not packed. Launches of one key differ in `values` alone.
        """
        packed = self._packed.get(key)
        if packed is not None:
            packed(values)
            return
        launch = describe(*told)
        assert len(values) == len(launch.replaced), "each value has its arguments, or none"
        if self._launcher is None or key in self._refused:
            launch.through_triton()
        else:
            self._run_and_pack(self._launcher, key, values, launch)

    def _run_and_pack(self, launcher: Launcher, key: Hashable, values: tuple[int, ...], launch: Launch) -> None:
        """Launch what is not packed here yet, and pack it for later calls."""
        compiled = launcher.verifier.verify(launch.kernel, launch.grid, launch.arguments, launch.constants)
        packed = self._pack(launcher, key, launch, compiled)
        if packed is None:
            launch.through_triton()
        else:
            packed(values)

    def _pack(self, launcher: Launcher, key: Hashable, launch: Launch, compiled: Any) -> PackedLaunch | None:
        """Remember the launch, packed. None, after a warning, if it cannot be: another Triton may do something differently."""
        try:
            entry = launcher.entries.get(compiled.hash) or Entry(compiled)
            launcher.entries[compiled.hash] = entry
            return self._packed.put(key, PackedLaunch(launcher.driver, entry, launch))
        except Exception as error:
            self._refused.add(key)
            warn_user(f"{error}; launches of this kernel take 50 to 80 microseconds of host time")
            return None


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
    """A compiled kernel, its grid and its packed arguments. A call takes the values for Launch.replaced."""

    def __init__(self, driver: CudaDriver, entry: Entry, launch: Launch) -> None:
        self._launch, self._check, self._current_stream = driver.launch, driver.check, driver.current_stream
        self._arguments = PackedArguments(driver, entry, launch.arguments)
        self._words, indices = self._arguments.words, self._arguments.indices
        # (which of the values, index in words)
        self._places = tuple((number, indices[name]) for number, names in enumerate(launch.replaced) for name in names)
        self._configuration = _Configuration(launch.grid[0], 1, 1, entry.threads, 1, 1, entry.shared)
        pointers = (ctypes.addressof(self._configuration), entry.function, ctypes.addressof(self._arguments.table), 0)
        self._pointers, self._stream = tuple(map(Word, pointers)), 0

    def __call__(self, values: tuple[int, ...]) -> None:
        words = self._words
        for number, index in self._places:
            words[index] = values[number]
        stream = self._current_stream()
        if stream != self._stream:
            self._configuration.stream = self._stream = stream
        failed = self._launch(*self._pointers)
        if failed:
            self._check(failed)
