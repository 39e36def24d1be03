"""Colours, markers and dashes: every thing of a picture is told apart, also by colour-blind readers."""

from __future__ import annotations

import math

import pytest

from overlap_train.tools.pictures import style


def test_every_thing_has_a_colour_of_its_own() -> None:
    # auto beside other programs; hidden communication as an outline; lines that bars of other pictures are held against
    same = {"overlap", "inside", "alone", "no_exchange"}
    colours = [look.colour for name, look in style.LOOKS.items() if name not in same]
    assert len(set(colours)) == len(colours)
    assert style.look_of("overlap_graph again").colour == style.look_of("auto").colour
    assert style.look_of("megatron_graph").label == "Megatron-Core, CUDA graph"


# What a linear RGB colour becomes for readers who lack cones: Machado, Oliveira and Fernandes 2009, severity 1.
SEEN = {
    "by all cones": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "without red": ((0.152, 1.053, -0.205), (0.115, 0.786, 0.099), (-0.004, -0.048, 1.052)),
    "without green": ((0.367, 0.861, -0.228), (0.280, 0.673, 0.047), (-0.012, 0.043, 0.969)),
}


def seen(colour: str, how: str) -> list[float]:
    """The sRGB values, 0 to 1, that such a reader sees."""
    linear = [(int(colour[at : at + 2], 16) / 255) ** 2.2 for at in (1, 3, 5)]
    mixed = [sum(part * value for part, value in zip(parts, linear, strict=True)) for parts in SEEN[how]]
    return [min(1.0, max(0.0, value)) ** (1 / 2.2) for value in mixed]


def difference(one: str, other: str, how: str) -> float:
    """How far apart two colours are for such a reader: 1 from black to white. Channels count as they do in brightness."""
    pairs = zip((0.30, 0.59, 0.11), seen(one, how), seen(other, how), strict=True)
    return math.sqrt(sum(weight * (a - b) ** 2 for weight, a, b in pairs))


@pytest.mark.parametrize("how", SEEN)
def test_three_gemms_look_like_nothing_else_of_their_pictures(how: str) -> None:
    """#DDAA33 beside the orange of `direct` was 0.08 away for most readers, 0.04 for some."""
    own = style.look_of("three_gemms")
    for name in ("by_nodes", "collective", "chunked", "fused", "direct", "low_latency", "auto"):
        other = style.look_of(name)
        assert difference(own.colour, other.colour, how) > 0.09, name
