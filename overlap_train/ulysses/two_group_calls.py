"""The projections of Ulysses under tensor parallelism (TP) as planned: parts, with a product and an all-to-all each.

All ranks of both groups must agree. Each group compares its own part: the TP ranks the product, Ulysses' ranks the exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..config import OverlapConfig
from ..group.registry import domain_of
from ..ops.plan import why_not_together
from ..ops.plan_cache import Planned, plan_of
from ..ops.spec import ALL_GATHER_LINEAR, ALL_TO_ALL, LINEAR_REDUCE_SCATTER
from ..symmetric.agreement import OverlapMismatchError
from .arguments import weight_error
from .calls import Terms, like, rows_of_position
from .groups import Groups, nodes_of_groups, of_tensor, refuse_in_both
from .layout import AttentionHeads
from .parts import cut, parts_that_hide
from .two_groups import ShardedLinear, ShardedPart


@dataclass(frozen=True)
class Sizes:
    """The sizes of one projection on one rank.

    positions: in the shard of one TP rank. rows: of one position, over all TP ranks. sent: features of a row that are exchanged,
    for all ranks of the Ulysses group. n, k: of the weight shard [n, k]. carries: how many parts have rows in one all-to-all.
    """

    positions: int
    rows: int
    sent: int
    n: int
    k: int
    itemsize: int
    carries: int = 1

    def parts(self, config: OverlapConfig) -> list[tuple[int, int]]:
        """(first, last) of each part: as many as fit and, where they hide each other's exchange, more."""
        nbytes = max(1, self.carries * self.rows * self.sent * self.itemsize)
        wanted = parts_that_hide(self.positions * self.rows, self.n, self.k)
        return cut(self.positions, nbytes, config.exchange_limit_mib, self.rows, wanted)


def sizes_of_heads(x: torch.Tensor, w: torch.Tensor, heads: AttentionHeads, groups: Groups) -> Sizes:
    """The Sizes of a QKV projection. x [positions, b, K], w [N, K]: this TP rank's shards. heads: of this TP rank."""
    sent = heads.of_rank(groups.ranks).features * groups.ranks
    return _sizes(x, w, x.shape[0], sent, groups)


def sizes_of_rows(x: torch.Tensor, w: torch.Tensor, groups: Groups, config: OverlapConfig) -> Sizes:
    """The Sizes of an output projection. x [s, b, K/W]: all rows and some of the features of the weight shard w [N, K].

    Backward sends x of a part again together with dx of another one.
    """
    positions = x.shape[0] // (groups.ranks * groups.shards)
    sizes = _sizes(x, w, positions, groups.ranks * x.shape[-1], groups)
    return replace(sizes, carries=2 if config.gathered_input == "regather" else 1)


def _sizes(x: torch.Tensor, w: torch.Tensor, positions: int, sent: int, groups: Groups) -> Sizes:
    rows, (n, k) = groups.shards * rows_of_position(x), (w.shape[:1].numel(), w.shape[-1:].numel())
    return Sizes(positions, rows, sent, n, k, x.element_size())


def sharded_heads_linear(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, heads: AttentionHeads, groups: Groups, terms: Terms
) -> tuple[ShardedLinear, torch.Tensor | None]:
    """The QKV projection as planned, and the bias of the columns that this rank receives."""
    wrong = weight_error(heads, w, bias, groups.ranks, terms.name)
    if wrong is not None:
        refuse_in_both(wrong, ALL_GATHER_LINEAR, groups, terms.config, x.device, terms.name)
    copies = heads.sent_rows(groups.ranks, w.device)

    def product(positions: int) -> Planned:
        return plan_of(ALL_GATHER_LINEAR, x[:positions], w, bias, groups.tensor, terms.config, terms.name)

    linear = _linear(x, w, copies, groups, sizes_of_heads(x, w, heads, groups), product, terms.also(heads.meaning))
    sent = bias if bias is None or copies is None else bias[copies]
    own = None if sent is None else sent.chunk(groups.ranks)[groups.ulysses.rank()]
    return linear, own


def sharded_rows_linear(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, groups: Groups, terms: Terms
) -> ShardedLinear:
    """The output projection as planned."""
    wrong = _rows_error(x, groups, terms.name)
    if wrong is not None:
        refuse_in_both(wrong, LINEAR_REDUCE_SCATTER, groups, terms.config, x.device, terms.name)
    sizes = sizes_of_rows(x, w, groups, _settings(x, groups, terms))

    def product(positions: int) -> Planned:
        received = like(x, positions * groups.shards, sizes.sent)
        return plan_of(LINEAR_REDUCE_SCATTER, received, w, bias, groups.tensor, terms.config, terms.name)

    return _linear(x, w, None, groups, sizes, product, terms)


def _rows_error(x: torch.Tensor, groups: Groups, name: str) -> str | None:
    ranks = groups.ranks * groups.shards
    if x.shape[0] and x.shape[0] % ranks == 0:
        return None
    return (
        f"{name}: x has {x.shape[0]} rows (shape {tuple(x.shape)}); they must be divisible by the "
        f"{groups.ranks} x {groups.shards} ranks of group and tp_group, of which each keeps a part; pad the sequence to a "
        f"multiple of {ranks}"
    )


def _linear(
    x: torch.Tensor, w: torch.Tensor, copies: torch.Tensor | None, groups: Groups, sizes: Sizes,
    product: Callable[[int], Planned], terms: Terms,
) -> ShardedLinear:  # fmt: skip
    """The call in parts. product: returns the plan of the product of so many positions."""
    parts, places = [], sizes.parts(_settings(x, groups, terms))
    terms = terms if len(places) == 1 else terms.in_parts(sizes.positions)
    config, name, meaning = terms.config, terms.name, terms.meaning
    nodes = nodes_of_groups(groups, config, x.device, name) if x.is_cuda else (1, 1)  # gloo carries both
    for first, last in places:
        sent = like(x, sizes.carries * (last - first) * groups.shards, sizes.sent)
        try:
            multiplies = product(last - first)
        except (ValueError, OverlapMismatchError) as refused:
            # On all ranks of tp_group. Those of group hear of it where they agree on the exchange.
            plan_of(ALL_TO_ALL, sent, w, None, groups.ulysses, config, name, problem=of_tensor(refused))
            raise
        exchanges = plan_of(ALL_TO_ALL, sent, w, None, groups.ulysses, config, name)
        apart = why_not_together(exchanges.plan, multiplies.plan, nodes)
        if apart is not None:
            raise ValueError(f"{name}: {apart}")
        multiplies = multiplies.beside(exchanges.plan.fprop.spared_sms)
        parts.append(ShardedPart(first, last, exchanges.linear(name, meaning), multiplies.linear(name, meaning)))
    if terms.on_plan is not None:
        terms.on_plan(parts[0].product.plan, None)
    return ShardedLinear(tuple(parts), w, w.detach(), copies, rows_of_position(x), groups.shards)


def _settings(x: torch.Tensor, groups: Groups, terms: Terms) -> OverlapConfig:
    """Of the exchanges, which parts are cut for. Without a config of the call each group goes by that of its own first call."""
    return terms.config or domain_of(groups.ulysses, None, x.device).config
