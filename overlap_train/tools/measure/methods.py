"""Which methods can be measured where the ranks are. One that cannot is refused by name, before minutes of measuring."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...group.registry import domain_of
from ...ops.launch import is_interpreted
from ...select.method import NAMES, Method
from .runs import Session


def refuse_kernels_on_cpus(asked: Sequence[str], device: torch.device) -> None:
    """Raise ValueError if a method that was asked for cannot run on the device."""
    if device.type == "cuda" or is_interpreted():
        return
    for method in asked:
        if _has_kernels(method):
            possible = ", ".join(name for name in NAMES if not _has_kernels(name))
            raise ValueError(f"--methods: {method!r} is not one of {possible}, which run on CPU tensors; leave it out")


def refuse_methods_of_one_node(asked: Sequence[str], nodes: int) -> None:
    """Raise ValueError if the ranks are on several nodes and a method that was asked for stays inside one."""
    inside = [method for method in asked if nodes > 1 and method in NAMES and not Method(method).crosses]
    if inside:
        raise ValueError(f"--methods: {inside[0]!r} stays inside a node, and the ranks are on {nodes}; leave it out")


def nodes_of(session: Session) -> int:
    """How many nodes the ranks are on. Collective. Raises ValueError if they cannot share memory."""
    found = domain_of(session.world.group, session.settings.config, session.world.device).nodes
    if found.problem is not None:
        raise ValueError(found.problem)
    return found.topology.nodes


def _has_kernels(method: str) -> bool:
    """Whether a method runs kernels of ours. auto takes what can run."""
    return method in NAMES and Method(method).kernels
