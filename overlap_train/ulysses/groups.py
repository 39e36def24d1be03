"""The two groups of TP x Ulysses: how many nodes they span, and what is wrong on one rank, which all ranks of both must know.

A rank tells one of its groups. Each rank that hears it tells its other group. Then all ranks of both groups know.

Each group has found its own nodes, and other groups of the same job may lie otherwise: a TP group on one node, its neighbour on
two. A rank that went by its own two groups alone could send what a peer does not wait for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist

from ..config import OverlapConfig
from ..group.domain import OverlapDomain
from ..group.registry import domain_of
from ..ops.plan_cache import cache_of, made_cache
from ..ops.spec import ALL_TO_ALL, OperatorSpec


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


def refuse_in_both(
    wrong: str, product: OperatorSpec, groups: Groups, config: OverlapConfig | None, device: torch.device, name: str
) -> NoReturn:
    """Raise ValueError(wrong), for arguments of which no plan can be made: on every rank of both groups, at the first call.

    product: the operator of the TP group. A group that knows its operator is not asked (call_plan.refuse): its ranks may be in a
    call that they know. Once both do, this rank raises alone.
    """
    tensor, ulysses = (domain_of(group, config, device) for group in (groups.tensor, groups.ulysses))
    tensor_knows, ulysses_knows = _knows(tensor, product), _knows(ulysses, ALL_TO_ALL)
    if tensor_knows and ulysses_knows:
        raise ValueError(wrong)
    if device.type == "cuda":
        nodes_of_groups(groups, config, device, name)  # as the ranks do that have nothing wrong
    if not tensor_knows:
        try:
            cache_of(tensor, name).refuse(wrong, product, name)
        except ValueError as refused:
            wrong = of_tensor(refused)
    cache_of(ulysses, name).refuse(wrong, ALL_TO_ALL, name)


def _knows(domain: OverlapDomain, spec: OperatorSpec) -> bool:
    book = made_cache(domain)
    return book is not None and book.knows(spec)


def of_tensor(refused: Exception) -> str:
    """What was refused in the TP group, in words for the ranks of the Ulysses group, which is "the group" there."""
    return re.sub(r"\brank (\d+) of the group", r"rank \1 of tp_group", str(refused))


def nodes_of_groups(groups: Groups, config: OverlapConfig | None, device: torch.device, name: str) -> tuple[int, int]:
    """How many nodes the Ulysses group and the TP group of a rank span. Of all ranks that may differ: then it is the worst answer
    of any (_worst).

    The same on all ranks of both groups, which communicate at their first call.
    """
    ulysses, tensor = (cache_of(domain_of(group, config, device), name) for group in (groups.ulysses, groups.tensor))
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
