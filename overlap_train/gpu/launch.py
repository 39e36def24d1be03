"""Launching a kernel again by one driver call: its arguments are packed once (parameters.py), and a few of them replaced.

Triton's launcher looks up, checks and packs every argument at every call, 50 to 80 microseconds of host time with tensor
descriptors. From call to call only the addresses of the caller's tensors and the tag of the call change. Therefore the first
launch goes through Triton, which compiles (ptx_check.py looks at the result before it runs). Later ones replace those values.

If a kernel's parameters are not where entry.py expects them, because of another Triton version perhaps, one warning says so and
every launch of that kernel goes through Triton.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from ..planning.cache import BoundedCache
from ..warn import warn_user
from .driver import CudaDriver
from .entry import Entry
from .parameters import PackedArguments, address_is_first_word
from .ptx_check import Verifier

# Launches that a call remembers. Some serve all ranks at once. Across nodes others are for one chunk of one rank: a gather waits
# for it; a scatter waits for those before and behind it, and adds them up.
_FOR_ALL, _FOR_A_CHUNK = 256, 4


@dataclass(frozen=True)
class Launch:
    """A kernel and everything that it is told.

    arguments: tensors, numbers and tensor descriptors by name. constants: constexprs and launch options.
    replaced: for each value that changes from launch to launch, the names of the arguments that take it. Such a value is the
        address of a tensor or of a tensor descriptor, or a 64-bit integer.
    """

    kernel: Any
    grid: tuple[int]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    replaced: tuple[tuple[str, ...], ...] = ()

    def through_triton(self) -> Any:
        """Launch the kernel through Triton, which compiles it if it has not yet. Returns what Triton has compiled."""
        return self.kernel[self.grid](**self.arguments, **self.constants)


class Launcher:
    """What all launches of a device share. verifier: knows the compiled kernels that have been checked. entries: how kernels
    that have run are launched."""

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

    def run(self, key: Hashable, values: tuple[int, ...], describe: Callable[[], Launch]) -> None:
        """Launch on the current stream.

        Args:
            values: addresses and integers for Launch.replaced, in that order.
            describe: returns the launch, and is called only if it is not packed. Launches of one key differ in `values` alone.

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
        else:
            self._run_and_pack(self._launcher, key, values, launch)

    def _run_and_pack(self, launcher: Launcher, key: Hashable, values: tuple[int, ...], launch: Launch) -> None:
        """Launch what is not packed here yet, and pack it for later calls."""
        compiled = launcher.verifier.verify(launch.kernel, launch.grid, launch.arguments, launch.constants)
        has_run = compiled.hash in launcher.entries  # with other sizes, or in another slot: then Triton is not needed
        if not has_run:
            compiled = launch.through_triton()
        packed = self._pack(launcher, key, launch, compiled)
        if has_run and packed is not None:
            packed(values)
        elif has_run:
            launch.through_triton()

    def _pack(self, launcher: Launcher, key: Hashable, launch: Launch, compiled: Any) -> PackedLaunch | None:
        """Remember the launch, packed. None, after a warning, if it cannot be packed: the kernel may be running already, and its
        pushes must follow, whatever another Triton does differently."""
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
        self._replace = driver.replace_address
        self._arguments = PackedArguments(driver, entry, launch.arguments)
        self._words, maps, indices = self._arguments.words, self._arguments.maps, self._arguments.indices
        replaced = [(number, name) for number, names in enumerate(launch.replaced) for name in names]
        sealed = {name for name, place in maps.items() if not address_is_first_word(driver, place)}
        # (which of the values, index in words), and (which of the values, address of a map that only the driver can change)
        self._places = tuple((number, indices[name]) for number, name in replaced if name not in sealed)
        self._sealed = tuple((number, maps[name]) for number, name in replaced if name in sealed)
        self._configuration = _Configuration(launch.grid[0], 1, 1, entry.threads, 1, 1, entry.shared)
        # ctypes converts numbers at each call; these stay as they are.
        pointers = (ctypes.addressof(self._configuration), entry.function, ctypes.addressof(self._arguments.table))
        self._pointers = tuple(map(ctypes.c_void_p, pointers))

    def __call__(self, values: tuple[int, ...]) -> None:
        words = self._words
        for number, index in self._places:
            words[index] = values[number]
        for number, place in self._sealed:
            self._check(self._replace(place, values[number]))
        self._configuration.stream = self._current_stream()
        failed = self._launch(*self._pointers, None)
        if failed:
            self._check(failed)
