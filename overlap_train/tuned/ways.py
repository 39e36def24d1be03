"""The ways in which a method can run: what the tuner tries of each, and what `auto` remembers beside the method."""

from __future__ import annotations

import itertools
from dataclasses import dataclass


@dataclass(frozen=True)
class Way:
    """whole: every block in one piece, where a fused operator would cut it into chunks (fewer pushes, a longer tail).
    deferred: a fused scatter leaves the peers' partials to a kernel behind what its caller does meanwhile, where its last tiles
    would wait for them (a column linear's backward: they follow x's blocks, and the weight gradient would wait, too).
    in_step: the ranks meet before they begin, so that their pushes do not collide.
    """

    whole: bool = False
    deferred: bool = False
    in_step: bool = False

    def named(self, method: str) -> str:
        """What a method that runs like this is called among measurements: "fused whole in step"."""
        return method + " whole" * self.whole + " deferred" * self.deferred + " in step" * self.in_step

    def __str__(self) -> str:
        return (
            "; blocks are sent whole" * self.whole
            + "; partial sums are added behind the weight gradient" * self.deferred
            + "; ranks begin in step" * self.in_step
        )


PLAIN = Way()
WAYS = tuple(itertools.starmap(Way, itertools.product((False, True), repeat=3)))


def method_of(name: str) -> str:
    """The reverse of `Way.named`."""
    return name.partition(" ")[0]
