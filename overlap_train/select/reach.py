"""How far a group reaches, as the choice of a method sees it: inside one node here, across several in nodes/choice.py."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch

from .cost import Estimate, Work, nccl_us
from .method import Method
from .passes import Pass
from .system import System


class Reach:
    """A group inside one node.

    nodes: that it spans. has_rules: whether rules say how a method runs (choose.by_rules); else it runs plainly, or as measured.
    """

    nodes = 1
    has_rules = True

    def may_choose(self, method: str) -> bool:
        """Whether `auto` and the tuner may choose a method here."""
        return True

    def key_fields(self, device: torch.device, network: str) -> dict[str, Any]:
        """What measurements depend on here besides the fields of table.Key that hold everywhere. network: of OverlapConfig."""
        return {}

    def collective_us(self, pass_: Pass, system: System) -> float:
        """NCCL's exchange of a pass."""
        return nccl_us(pass_, system)

    def estimate(self, pass_: Pass, how: Method, system: System, backward: bool = False) -> Estimate:
        """What a pass takes by a method.

        backward: the whole backward of its linear: also the weight gradient, under which a column linear's partial sums leave,
        and for which it gathers its input again.
        """
        return Work(pass_, how, system).estimate(backward)


@cache
def reach_of(nodes: int) -> Reach:
    """The Reach of groups that span so many nodes."""
    if nodes == 1:
        return Reach()
    across: Reach = import_module("...nodes.choice", __name__).AcrossNodes(nodes)
    return across
