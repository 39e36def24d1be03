"""Which method runs, and why. The reason is part of the answer: what ran is never silent (docs/design.md, rule 8).

What was measured decides (table.py), else models of the hardware: untuned.py and untuned_nodes.py have methods,
untuned_variant.py variants.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..methods import TRAITS
from ..select.passes import SCATTER_AND_WGRAD, Pass
from .table import Table, Winner
from .untuned import method_in_node
from .untuned_nodes import method_across_nodes
from .untuned_variant import collides, splits_for_a_wave, untuned_variant
from .variants import PLAIN, Variant
from .waves import on_hopper, saves_a_wave


@dataclass(frozen=True)
class Choice:
    """A method of one operator pass, its variant, and the reason for both."""

    method: str
    reason: str
    variant: Variant = PLAIN


def choose(requested: str, pass_: Pass, device: torch.device, table: Table, nodes: int = 1) -> Choice:
    """The method for a pass: the one asked for, or for `auto` the measured winner, or a model-based default.

    nodes: that the group spans. What a group of another number has measured says nothing about it.
    """
    winner = winner_of(pass_, device, table, nodes)
    choice = _method(requested, pass_, device, winner, nodes)
    variant = _variant(choice.method, pass_, device, winner, nodes)
    return replace(choice, reason=f"{choice.reason}{variant}", variant=variant)


def winner_of(pass_: Pass, device: torch.device, table: Table, nodes: int) -> Winner | None:
    """What was measured for a pass. A bucket may hold features that the Hopper kernels serve and others: a measurement of one
    kind says nothing about the other. They serve any number of rows: rows that end within a tile count as whole tiles do."""
    winner = table.find(pass_) if table.nodes == nodes else None
    fits = winner is not None and on_hopper(winner.measured, device) == on_hopper(pass_, device)
    return winner if fits else None


def untuned(pass_: Pass, device: torch.device, nodes: int = 1) -> Choice:
    """What `auto` takes where nothing was measured."""
    method, why = method_in_node(pass_, device) if nodes == 1 else method_across_nodes(pass_, device, nodes)
    return Choice(method, f"auto: not tuned: {why}")


def may_choose(method: str, nodes: int) -> bool:
    """Whether `auto` and the tuner may choose a method in a group that spans so many nodes."""
    return nodes == 1 or TRAITS[method].crosses


def in_variant(choice: Choice, variant: Variant) -> Choice:
    """The same method in another variant, which the reason then names."""
    return replace(choice, reason=f"{choice.reason.removesuffix(str(choice.variant))}{variant}", variant=variant)


def alone(choice: Choice, pass_: Pass, device: torch.device) -> Choice:
    """The choice for a pass that nothing comes after: a reduction that is split to let a weight gradient run first is not."""
    splits = choice.variant.split_reduction and saves_a_wave(pass_, device)
    return in_variant(choice, replace(choice.variant, split_reduction=splits))


def _method(requested: str, pass_: Pass, device: torch.device, winner: Winner | None, nodes: int) -> Choice:
    if requested != "auto":
        return Choice(requested, "asked for")
    if winner is not None:
        return Choice(winner.method, f"auto: tuned for {winner.measured}")
    return untuned(pass_, device, nodes)


def _variant(method: str, pass_: Pass, device: torch.device, winner: Winner | None, nodes: int) -> Variant:
    """The variant in which a method runs a pass: the measured one, else the model's."""
    measured = None if winner is None else winner.variant_of(method)
    if nodes > 1:  # on CPUs, too: into how many chunks blocks are cut depends on the network
        return measured or PLAIN
    if device.type != "cuda":
        return PLAIN
    if winner is None or measured is None:  # a trial times one variant, which is the model's
        return untuned_variant(pass_, method, device)
    # Rows that share a measurement may have other waves.
    saves = winner.measured != pass_ and splits_for_a_wave(pass_, method, device)
    measured = replace(measured, split_reduction=saves or measured.split_reduction)
    # Backward passes that follow each other wait for each other anyway, for their slots: the tuner cannot tell what a barrier
    # gains.
    by_rule = pass_.kind == SCATTER_AND_WGRAD
    return replace(measured, barrier_first=collides(pass_, method)) if by_rule else measured
