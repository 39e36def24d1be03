"""The two groups of TP x Ulysses, and how many nodes they span, which all ranks of both must answer alike.

Each group has found its own nodes, and other groups of the same job may lie otherwise: a TP group on one node, its neighbour on
two. A rank that went by its own two groups alone could send what a peer does not wait for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..config import OverlapConfig
from ..operators.plan_book import book_of
from ..runtime.domain import OverlapDomain
from ..runtime.registry import domain_of


@dataclass(frozen=True)
class Groups:
    """The process groups of one rank. ulysses: the ranks that exchange. tensor: those that divide the weights."""

    ulysses: dist.ProcessGroup
    tensor: dist.ProcessGroup

    @property
    def shards(self) -> int:
        return self.tensor.size()

    @property
    def ranks(self) -> int:
        return self.ulysses.size()


def nodes_of_groups(groups: Groups, config: OverlapConfig | None, device: torch.device, name: str) -> tuple[int, int]:
    """How many nodes the Ulysses group and the TP group of a rank span. Of all ranks that may differ: then it is the worst answer
    of any (_worst).

    The same on all ranks of both groups, which communicate at their first call.
    """
    ulysses, tensor = (book_of(domain_of(group, config, device), name) for group in (groups.ulysses, groups.tensor))
    if groups.tensor not in ulysses.nodes_with:
        ulysses.nodes_with[groups.tensor] = _agreed((ulysses.domain, tensor.domain), name)
    return ulysses.nodes_with[groups.tensor]


def _agreed(domains: tuple[OverlapDomain, OverlapDomain], name: str) -> tuple[int, int]:
    """What one rank finds goes to all of its Ulysses group, and from each of these to all of its TP group."""
    ulysses, tensor = domains
    found = (_nodes_of(ulysses), _nodes_of(tensor))
    for domain in domains:
        with domain.exclusively(name):
            what = f"{name}: compare the nodes of group and tp_group"
            told = domain.agreement.exchange(found, what, kind="nodes of two groups")
        found = _worst(told)
    return found


def _nodes_of(domain: OverlapDomain) -> int:
    """A group whose nodes symmetric memory cannot serve, say unequal ones, has several."""
    return domain.topology.nodes if domain.nodes.problem is None else max(2, domain.topology.nodes)


def _worst(spans: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """Groups that both span nodes before groups of which one does. In any order of ranks the same."""
    return max(spans, key=lambda nodes: (min(nodes), max(nodes), nodes))
