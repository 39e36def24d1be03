"""A kernel's arguments, packed in memory as the driver takes them: numbers, addresses and tensor maps."""

from __future__ import annotations

import ctypes
from typing import Any

from .driver import CudaDriver
from .entry import MAP_BYTES, Entry

_MAP_ALIGNMENT = 64
# As Triton counts element types on the device -> as the driver counts them: the same but for three floating-point types.
_DRIVER_TYPE = {8: 10, 9: 8, 10: 9}
_L2_PROMOTION_128B = 2
_ELSEWHERE = 0x5A5A_5A5A_5A50  # some address on 16 bytes


class Parameters:
    """Memory for a kernel's parameters, each on 64 bytes as tensor maps want it, and the table of their addresses.

    sizes: bytes of each parameter. words: all of the memory, as 64-bit words.
    """

    def __init__(self, sizes: list[int]) -> None:
        offsets, end = [], 0
        for size in sizes:
            offsets.append(end)
            end += -(-size // _MAP_ALIGNMENT) * _MAP_ALIGNMENT
        self._memory = ctypes.create_string_buffer(end + _MAP_ALIGNMENT)
        self._offsets, self._start = offsets, _aligned(ctypes.addressof(self._memory))
        self.words = (ctypes.c_uint64 * (end // 8)).from_address(self._start)
        self.table = (ctypes.c_void_p * len(sizes))(*[self._start + offset for offset in offsets])

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


class PackedArguments(Parameters):
    """The arguments of one launch in memory of their own. By argument, maps: the address of its tensor map, if it is a tensor
    descriptor; indices: that of its first word in `words`."""

    def __init__(self, driver: CudaDriver, entry: Entry, arguments: dict[str, Any]) -> None:
        super().__init__(entry.sizes)
        self.maps: dict[str, int] = {}
        self.indices: dict[str, int] = {}
        self._driver = driver
        self._encoded: dict[int, int] = {}  # descriptor -> its first map: what few ranks do not use is one, many times
        parameter, shapes = 0, iter(entry.maps)
        for name, kind in entry.signature.items():
            if kind.startswith("tensordesc"):
                parameter = self._pack_descriptor(name, parameter, arguments[name], next(shapes))
            elif kind != "constexpr":
                value = arguments[name].data_ptr() if kind.startswith("*") else arguments[name]
                self.indices[name] = self.set(parameter, value)
                parameter += 1

    def _pack_descriptor(self, name: str, parameter: int, descriptor: Any, how: dict[str, Any]) -> int:
        """Write a descriptor's map, shape and strides into the parameters from this one on; returns the number of the next.

        how: the shape of its map, as Triton tells it.
        """
        place = self.address(parameter)
        self.maps[name], self.indices[name] = place, self.word(parameter)
        first = self._encoded.setdefault(id(descriptor), place)
        if first == place:
            _encode(self._driver, place, descriptor, how)
        else:
            ctypes.memmove(place, first, MAP_BYTES)
        for number in (*descriptor.shape, *descriptor.strides):
            parameter += 1
            self.set(parameter, number)
        return parameter + 1


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


def address_is_first_word(driver: CudaDriver, place: int) -> bool:
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
