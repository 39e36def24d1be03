"""The ways in which a method can run: what the tuner tries of each, and what `auto` remembers beside the method."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Way:
    """whole: every block in one piece, where a fused operator would cut it into chunks (fewer pushes, a longer tail).
    in_step: the ranks meet before they begin, so that their pushes do not collide.
    """

    whole: bool = False
    in_step: bool = False

    def named(self, method: str) -> str:
        """What a method that runs like this is called among measurements: "fused whole in step"."""
        return method + " whole" * self.whole + " in step" * self.in_step

    def __str__(self) -> str:
        return "; blocks are sent whole" * self.whole + "; ranks begin in step" * self.in_step


PLAIN = Way()
WAYS = tuple(Way(whole, in_step) for whole in (False, True) for in_step in (False, True))


def method_of(name: str) -> str:
    """The reverse of `Way.named`."""
    return name.partition(" ")[0]
