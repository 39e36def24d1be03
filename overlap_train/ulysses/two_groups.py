"""What the projections of Ulysses do under tensor parallelism (TP), part by part, so that both communications are hidden.

    to_heads    y = all_to_all(all_gather(x) @ w.T)        gathered over TP inside the product, then exchanged over Ulysses' ranks
    to_rows     y = reduce_scatter(all_to_all(x) @ w.T)    exchanged, then scattered over TP inside the product

A part is an operator of the TP group and an all-to-all of the Ulysses group. Each group has a domain of its own, with slots and a
copy engine. The product of a part runs while copies exchange the part before or after it (ahead.py). All ranks enter both domains
in one order: whoever waits has sent, in both, all that comes before.

    to_heads          [product 0] [product 1     ] [product 2     ]                 [a]: all-to-all of part a
                                  [0]              [1]              [2]
    to_rows           [0] [1]              [2]
                          [product 0     ] [product 1     ] [product 2     ]

heads_backward does as to_rows. rows_backward has x of a part and dx of the part before in one all-to-all under each product.

The two groups of TP x Ulysses: how many nodes they span, and what is wrong on one rank, which all ranks of both must know.

A rank tells one of its groups. Each rank that hears it tells its other group. Then all ranks of both groups know.

Each group has found its own nodes, and other groups of the same job may lie otherwise: a TP group on one node, its neighbour on
two. A rank that went by its own two groups alone could send what a peer does not wait for.

The projections of Ulysses under tensor parallelism (TP) as planned: parts, with a product and an all-to-all each.

All ranks of both groups must agree. Each group compares its own part: the TP ranks the product, Ulysses' ranks the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NoReturn

import torch
import torch.distributed as dist

from ..config import OverlapConfig
from ..group.domain import OverlapDomain
from ..group.registry import domain_of
from ..linear import column_backward, column_forward, row_backward, row_forward
from ..ops.a2a_gemm import AllToAllGemm
from ..ops.plan import error_together
from ..ops.plan_cache import Planned, PlannedOp, cache_of, made_cache, plan_of
from ..ops.spec import ALL_GATHER_LINEAR, ALL_TO_ALL, LINEAR_REDUCE_SCATTER, OperatorSpec
from ..ops.wgrad import WeightGradient
from ..symmetric.agreement import OverlapMismatchError
from .calls import Terms, like, rows_of_position, weight_error
from .exchange import InParts, summed_copies
from .layout import AttentionHeads
from .parts import Part, cut, parts_that_hide, run_steps
from .rows import Rows, RowsBackward


@dataclass(frozen=True)
class ShardedPart(Part):
    """A Part under tensor parallelism: positions of every TP rank's shard. product: the planned operator of the TP group.

    Its products are those of linear.py; they leave the SMs that an exchange across nodes holds beside them.
    """

    product: PlannedOp

    def column_forward(self, x_shard_m: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with self._beside_exchange():
            return column_forward(self.product, x_shard_m, w)

    def column_backward(
        self, dy: torch.Tensor, x: torch.Tensor | None, w: torch.Tensor, dw: WeightGradient | None, wants_dx: bool
    ) -> torch.Tensor | None:
        with self._beside_exchange():
            return column_backward(self.product, dy, x, w, dw, wants_dx)

    def row_forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with self._beside_exchange():
            return row_forward(self.product, x, w)

    def row_backward(
        self, dy_shard_m: torch.Tensor, x: Callable[[], torch.Tensor], w: torch.Tensor, dw: WeightGradient | None,
        wants_dx: bool,
    ) -> torch.Tensor | None:  # fmt: skip
        with self._beside_exchange():
            return row_backward(self.product, dy_shard_m, x, w, dw, wants_dx)

    def _beside_exchange(self) -> AbstractContextManager[None]:
        """Bracket of the library's products; kernels have it in their plan."""
        return self.exchange.domain.span.products_beside(self.exchange.plan.fprop)


@dataclass(frozen=True)
class ShardedLinear(InParts):
    """One call of a Ulysses projection under tensor parallelism, as exchange.Linear. weight: this TP rank's shard; w: the same as
    autograd has kept it.

    copies: int64 [N'], which columns of the product are sent, rank after rank; None: all as they lie. batch: rows of one position
    of a TP rank's shard. shards: TP ranks.
    """

    parts: tuple[ShardedPart, ...]
    weight: torch.Tensor
    w: torch.Tensor
    copies: torch.Tensor | None
    batch: int
    shards: int

    @property
    def keeps_gathered(self) -> bool:
        """Whether what `to_heads` gathers is kept for the weight gradient."""
        return self.parts[0].product.keeps

    def to_heads(self, x: torch.Tensor, y: Rows) -> torch.Tensor:
        """y = all_to_all(all_gather(x [positions * batch, K]) @ w.T). Returns x for the weight gradient, perhaps as gathered."""
        kept = []

        def multiplied(part: ShardedPart) -> torch.Tensor:
            product, gathered = part.column_forward(self.rows(x, part), self.w)
            kept.append(gathered)
            return self.packed(product)

        def taken(part: ShardedPart, receiver: AllToAllGemm) -> None:
            y.take(part, receiver.received_view())

        run_steps([part.forward(partial(multiplied, part), partial(taken, part)) for part in self.parts])
        return _together(kept) if self.keeps_gathered else x

    def heads_backward(
        self, x: torch.Tensor | None, dy: Rows, wants_dx: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(dx, dw). x: as `to_heads` returned it; None if dw is not wanted."""
        dx, dw = [], None if x is None else self._gradient()
        batch = self.batch * (self.shards if self.keeps_gathered else 1)

        def multiplied(part: ShardedPart, receiver: AllToAllGemm) -> None:
            blocks = receiver.received_view()  # whatever is frozen here
            if wants_dx or x is not None:
                own = None if x is None else x[part.first * batch : part.last * batch]
                dx.append(part.column_backward(self._of_product(blocks), own, self.w, dw, wants_dx))

        run_steps([part.backward(partial(dy.give, part), partial(multiplied, part)) for part in self.parts])
        return _together(dx) if wants_dx else None, None if dw is None else dw.result()

    def to_rows(self, x: Rows, keep: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(y [positions * batch, N] = reduce_scatter(all_to_all(x) @ w.T), what each part has received if it is kept)."""
        y, kept = [], []

        def multiplied(part: ShardedPart, receiver: AllToAllGemm) -> None:
            received = self._of_product(receiver.received_view())
            y.append(part.row_forward(received, self.w))
            if keep:
                kept.append(received)

        run_steps([part.forward(partial(x.give, part), partial(multiplied, part)) for part in self.parts])
        return _together(y), kept

    def rows_backward(
        self, x: Rows | list[torch.Tensor] | None, dy: torch.Tensor, dx: Rows | None
    ) -> torch.Tensor | None:
        """Write dx and return dw [N, K] of to_rows. x, dx: see exchange.Linear.rows_backward."""
        dw = None if x is None else self._gradient()

        def multiplied(part: ShardedPart, received: Callable[[], torch.Tensor]) -> torch.Tensor | None:
            product = part.row_backward(self.rows(dy, part), received, self.w, dw, dx is not None)
            return None if product is None else self.packed(product)

        turns = RowsBackward(x, dx, multiplied)
        for before, part in pairwise((None, *self.parts, None)):
            turns.run(before, part)
        return None if dw is None else dw.result()

    def _gradient(self) -> WeightGradient:
        return WeightGradient(self.weight, self.parts[0].product.plan.config.main_grad, len(self.parts))

    def packed(self, product: torch.Tensor) -> torch.Tensor:
        """The blocks to send [W, rows, N'/W] of a product [rows, N]: for each rank its columns."""
        world = self.parts[0].exchange.domain.world_size
        if self.copies is None:
            return product.unflatten(1, (world, -1)).transpose(0, 1).contiguous()
        sent = product.new_empty(world, len(product), len(self.copies) // world)
        for block, columns in zip(sent, self.copies.chunk(world), strict=True):
            torch.index_select(product, 1, columns, out=block)
        return sent

    def _of_product(self, blocks: torch.Tensor) -> torch.Tensor:
        """The inverse of `packed`: received blocks [W, rows, N'/W] as [rows, N]. Columns that several ranks have are summed.

        Never a view of the slot, which is used again: the result may be kept.
        """
        if self.copies is None:
            return torch.cat(blocks.unbind(), dim=1)
        return summed_copies(blocks, self.copies, self.weight.shape[0])


def _together(parts: list[torch.Tensor]) -> torch.Tensor:
    """The rows of all parts in one tensor. One part is returned as it is, and not as a view, which autograd would refuse to have
    written into."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


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
    ulysses, tensor = _domains(groups, config, device)
    tensor_knows, ulysses_knows = _knows(tensor, product), _knows(ulysses, ALL_TO_ALL)
    if tensor_knows and ulysses_knows:
        raise ValueError(wrong)
    if device.type == "cuda":
        nodes_of_groups(groups, config, device, name)  # as the ranks do that have nothing wrong
    if not tensor_knows:
        try:
            cache_of(tensor, name).refuse(wrong, product, name)
        except ValueError as refused:
            wrong = str(refused)
    cache_of(ulysses, name).refuse(wrong, ALL_TO_ALL, name)


def _knows(domain: OverlapDomain, spec: OperatorSpec) -> bool:
    book = made_cache(domain)
    return book is not None and book.knows(spec)


def _domains(groups: Groups, config: OverlapConfig | None, device: torch.device) -> tuple[OverlapDomain, OverlapDomain]:
    """Those of the Ulysses group and of the TP group, whose errors the ranks of the other one hear, too."""
    ulysses, tensor = (domain_of(group, config, device) for group in (groups.ulysses, groups.tensor))
    tensor.agreement.called = "tp_group"
    return ulysses, tensor


def nodes_of_groups(groups: Groups, config: OverlapConfig | None, device: torch.device, name: str) -> tuple[int, int]:
    """How many nodes the Ulysses group and the TP group of a rank span. Of all ranks that may differ: then it is the worst answer
    of any (_worst).

    The same on all ranks of both groups, which communicate at their first call.
    """
    ulysses, tensor = (cache_of(domain, name) for domain in _domains(groups, config, device))
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
    if x.is_cuda:
        nodes = nodes_of_groups(groups, config, x.device, name)
    else:
        _domains(groups, config, x.device)
        nodes = (1, 1)  # gloo carries both
    for first, last in places:
        sent = like(x, sizes.carries * (last - first) * groups.shards, sizes.sent)
        try:
            multiplies = product(last - first)
        except (ValueError, OverlapMismatchError) as refused:
            # On all ranks of tp_group. Those of group hear of it where they agree on the exchange.
            plan_of(ALL_TO_ALL, sent, w, None, groups.ulysses, config, name, problem=str(refused))
            raise
        exchanges = plan_of(ALL_TO_ALL, sent, w, None, groups.ulysses, config, name)
        apart = error_together(exchanges.plan, multiplies.plan, nodes)
        if apart is not None:
            raise ValueError(f"{name}: {apart}")
        multiplies = multiplies.beside(exchanges.plan.fprop.sm_margin)
        parts.append(ShardedPart(first, last, exchanges.linear(name, meaning), multiplies.linear(name, meaning)))
    if terms.on_plan is not None:
        terms.on_plan(parts[0].product.plan, None)
    return ShardedLinear(tuple(parts), w, w.detach(), copies, rows_of_position(x), groups.shards)


def _settings(x: torch.Tensor, groups: Groups, terms: Terms) -> OverlapConfig:
    """Of the exchanges, which parts are cut for. Without a config of the call each group goes by that of its own first call."""
    return terms.config or domain_of(groups.ulysses, None, x.device).config
