"""Colours: every thing of a picture is told apart."""

from __future__ import annotations

from overlap_train.tools.pictures import style


def test_every_thing_has_a_colour_of_its_own() -> None:
    colours = [look.colour for name, look in style.LOOKS.items() if name != "overlap"]  # auto, beside other programs
    assert len(set(colours)) == len(colours)
    assert style.look_of("overlap_graph").colour == style.look_of("auto").colour
    assert style.look_of("megatron_graph").label == "Megatron-Core, CUDA graph"
