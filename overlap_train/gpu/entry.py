"""Where a compiled kernel's parameters lie: taken from Triton's signature, and checked against the parameters in the PTX."""

from __future__ import annotations

import re
from typing import Any

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
        self.function, self.threads, self.shared = compiled.function, threads, metadata.shared
        self.maps = tuple(metadata.tensordesc_meta or ())


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
