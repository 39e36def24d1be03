"""The variants in which a method can run: what the tuner tries of each, and what `auto` remembers beside the method."""

from __future__ import annotations

import itertools
from dataclasses import dataclass


@dataclass(frozen=True)
class Variant:
    """whole: every block in one piece, where a fused operator would cut it into chunks (fewer pushes, a longer tail).
    split_reduction: a fused scatter leaves the peers' partials to a second kernel, after what its caller does meanwhile. In a
    column linear's backward they come after x's blocks; waiting for them would keep all SMs from the weight gradient. And own
    rows may then share tiles with those of peers, which can save a wave of tiles.
    barrier_first: the ranks meet before they begin, because the pushes of skewed ranks collide.
    """

    whole: bool = False
    split_reduction: bool = False
    barrier_first: bool = False

    def named(self, method: str) -> str:
        """What a method that runs like this is called among measurements: "fused whole barrier first"."""
        return method + " whole" * self.whole + " split" * self.split_reduction + " barrier first" * self.barrier_first

    def __str__(self) -> str:
        return (
            "; blocks are sent whole" * self.whole
            + "; the reduction runs in a second kernel" * self.split_reduction
            + "; starts with a barrier" * self.barrier_first
        )


PLAIN = Variant()
VARIANTS = tuple(itertools.starmap(Variant, itertools.product((False, True), repeat=3)))


def method_of(name: str) -> str:
    """The reverse of `Variant.named`."""
    return name.partition(" ")[0]
