"""The variants in which a method can run: what the tuner tries of each, and what `auto` remembers beside the method."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

CHUNK_COUNTS = (1, 2, 4, 8)  # of a block; a slot has signals for eight


@dataclass(frozen=True)
class Variant:
    """The schedule options with which a method runs.

    whole: every block in one piece, where a fused operator would cut it into chunks (fewer pushes, a longer tail).
    split_reduction: a fused scatter leaves the peers' partials to a second kernel, after what its caller does meanwhile. In a
    column linear's backward they come after x's blocks; waiting for them would keep all SMs from the weight gradient. And own
    rows may then share tiles with those of peers, which can save a wave of tiles, or half of one.
    barrier_first: the ranks meet before they begin, because the pushes of skewed ranks collide.
    chunks: of CHUNK_COUNTS, where a group spans nodes: into how many chunks each block is cut. 0: as many as the plan works out.
    """

    whole: bool = False
    split_reduction: bool = False
    barrier_first: bool = False
    chunks: int = 0

    def named(self, method: str) -> str:
        """What a method that runs like this is called among measurements: "fused whole barrier first", "chunked in 4"."""
        cut = " whole" * self.whole + f" in {self.chunks}" * bool(self.chunks)
        return method + cut + " split" * self.split_reduction + " barrier first" * self.barrier_first

    def __str__(self) -> str:
        return (
            "; whole blocks" * (self.whole or self.chunks == 1)
            + f"; blocks in {self.chunks} chunks" * (self.chunks > 1)
            + "; split reduction" * self.split_reduction
            + "; barrier first" * self.barrier_first
        )


PLAIN = Variant()
IN_CHUNKS = tuple(Variant(chunks=count) for count in CHUNK_COUNTS)  # across nodes
VARIANTS = (*itertools.starmap(Variant, itertools.product((False, True), repeat=3)), *IN_CHUNKS)


def method_of(name: str) -> str:
    """The reverse of `Variant.named`."""
    return name.partition(" ")[0]
