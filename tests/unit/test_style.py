"""Colours: every thing of a picture is told apart."""

from __future__ import annotations

from overlap_train.tools.pictures import style


def test_every_thing_has_a_colour_of_its_own() -> None:
    # auto beside other programs; hidden communication as an outline; lines that bars of other pictures are held against
    same = {"overlap", "inside", "alone", "no_exchange"}
    colours = [look.colour for name, look in style.LOOKS.items() if name not in same]
    assert len(set(colours)) == len(colours)
    assert style.look_of("overlap_graph").colour == style.look_of("auto").colour
    assert style.look_of("megatron_graph").label == "Megatron-Core, CUDA graph"
