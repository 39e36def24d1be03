"""What the projections of Ulysses do under tensor parallelism (TP), part by part, so that both communications are hidden.

    to_heads    y = all_to_all(all_gather(x) @ w.T)        gathered over TP inside the product, then exchanged over Ulysses' ranks
    to_rows     y = reduce_scatter(all_to_all(x) @ w.T)    exchanged, then scattered over TP inside the product

A part is an operator of the TP group and an all-to-all of the Ulysses group. All ranks enter both domains in one order: whoever
waits has sent, in both, all that comes before. heads_backward does as to_rows.

    to_heads          [product 0] [product 1     ] [product 2     ]                 [a]: all-to-all of part a
                                  [0]              [1]              [2]
    to_rows           [0] [1]              [2]
                          [product 0     ] [product 1     ] [product 2     ]
    rows_backward     [x 0 ]         [dx 0, x 1]    [dx 1, x 2]    [dx 2]
                      [product 0  ]  [product 1  ]  [product 2  ]

In rows_backward one all-to-all has dx of the part before and x of the next, if that is sent again: with an all-to-all of its own,
x would have to come before the product, because until then a rank does not know that the third slot is free
(group/workspace.py).

Each group compares its own part of a call. What else all ranks of both must know (refusals, nodes), a rank tells one of its
groups; each rank that hears it tells its other group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Any, NoReturn

import torch

from ..config import OverlapConfig
from ..group.domain import OverlapDomain
from ..group.registry import domain_of
from ..linear import column_backward, column_forward, row_backward, row_forward
from ..ops.a2a_gemm import AllToAllGemm
from ..ops.plan import error_together
from ..ops.plan_cache import cache_of, made_cache, plan_of
from ..ops.spec import ALL_GATHER_LINEAR, ALL_TO_ALL, LINEAR_REDUCE_SCATTER, OperatorSpec
from ..ranks.agreement import OverlapMismatchError
from .exchange import Linear, Rows, Terms, like, rows_of_position, summed_copies, weight_error
from .layout import AttentionHeads, SequenceShards
from .parts import Part, cut, parts_that_hide, run_steps


class ShardedLinear(Linear):
    """One call of a Ulysses projection under tensor parallelism. weight: this TP rank's shard. copies: int64 [N'], which columns
    of the product are sent, rank after rank. batch: rows of one position of a TP rank's shard."""

    @staticmethod
    def _multiply(product: Callable[..., Any], part: Part, *operands: Any) -> Any:
        """`product` of linear.py for a part. GEMMs of the library leave an exchange across nodes its SMs, as kernels do."""
        with part.exchange.domain.span.products_beside(part.exchange.plan.fprop):
            return product(part.product, *operands)

    def to_heads(self, x: torch.Tensor, y: Rows) -> torch.Tensor:
        """Returns x [positions * batch, K] for the weight gradient, perhaps as gathered."""
        kept = []

        def multiplied(part: Part) -> torch.Tensor:
            product, gathered = self._multiply(column_forward, part, self.rows(x, part), self.w)
            kept.append(gathered)
            return self.packed(product)

        def taken(part: Part, receiver: AllToAllGemm) -> None:
            y.take(part, receiver.received_view())

        run_steps([part.forward(partial(multiplied, part), partial(taken, part)) for part in self.parts])
        return _together(kept) if self.parts[0].product.keeps else x

    def heads_backward(
        self, x: torch.Tensor | None, dy: Rows, wants_dx: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        dx, dw, product = [], None if x is None else self.gradient(), self.parts[0].product
        batch = self.batch * (product.domain.world_size if product.keeps else 1)

        def multiplied(part: Part, receiver: AllToAllGemm) -> None:
            blocks = receiver.received_view()  # whatever is frozen here
            if wants_dx or x is not None:
                own = None if x is None else x[part.first * batch : part.last * batch]
                dx.append(self._multiply(column_backward, part, self._of_product(blocks), own, self.w, dw, wants_dx))

        run_steps([part.backward(partial(dy.give, part), partial(multiplied, part)) for part in self.parts])
        return _together(dx) if wants_dx else None, None if dw is None else dw.result()

    def to_rows(self, x: Rows, keep: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        y, kept = [], []

        def multiplied(part: Part, receiver: AllToAllGemm) -> None:
            received = self._of_product(receiver.received_view())
            y.append(self._multiply(row_forward, part, received, self.w))
            if keep:
                kept.append(received)

        run_steps([part.forward(partial(x.give, part), partial(multiplied, part)) for part in self.parts])
        return _together(y), kept

    def rows_backward(
        self, x: Rows | list[torch.Tensor] | None, dy: torch.Tensor, dx: Rows | None
    ) -> torch.Tensor | None:
        dw = None if x is None else self.gradient()
        kept = iter(x) if isinstance(x, list) else iter(())
        resent = None if isinstance(x, list) else x

        def multiplied(part: Part | None, x_of_part: Callable[[], torch.Tensor]) -> torch.Tensor | None:
            if part is None:
                return None
            made = self._multiply(row_backward, part, self.rows(dy, part), x_of_part, self.w, dw, dx is not None)
            return None if made is None else self.packed(made)

        def turn(before: Part | None, part: Part | None, made: torch.Tensor | None) -> torch.Tensor | None:
            """Send `made`, dx of `before`, and x of `part` in one all-to-all; under it multiply for `part`. Returns dx of it."""
            again = None if resent is None or part is None else resent.give(part)
            sent = [blocks for blocks in (made, again) if blocks is not None]
            if not sent:
                return multiplied(part, partial(next, kept))
            back, of_part = 0 if made is None else made.shape[1], []

            def read(receiver: AllToAllGemm) -> None:
                received = cache(receiver.received_view)
                of_part.append(multiplied(part, partial(next, kept) if again is None else lambda: received()[:, back:]))
                if before is not None and dx is not None:
                    dx.take(before, received()[:, :back])
                received()  # whatever is frozen here

            whole = sent[0] if len(sent) == 1 else torch.cat(sent, dim=1)
            step = before.backward if before is not None else part.again  # type: ignore[union-attr]
            run_steps([step(lambda: whole, read)])
            return of_part[0]

        made = None
        for before, part in pairwise((None, *self.parts, None)):
            made = turn(before, part, made)
        return None if dw is None else dw.result()

    def packed(self, product: torch.Tensor) -> torch.Tensor:
        """The blocks to send [W, rows, N'/W] of a product [rows, N]: for each rank its columns."""
        world = self.world_size
        if self.copies is None:
            return product.unflatten(1, (world, -1)).transpose(0, 1).contiguous()
        sent = product.new_empty(world, len(product), len(self.copies) // world)
        for block, columns in zip(sent, self.copies.chunk(world), strict=True):
            torch.index_select(product, 1, columns, out=block)
        return sent

    def _of_product(self, blocks: torch.Tensor) -> torch.Tensor:
        """The inverse of `packed`: received blocks [W, rows, N'/W] as [rows, N]. Columns that several ranks have are summed.
        Never a view of the slot, which is used again: the result may be kept."""
        if self.copies is None:
            return torch.cat(blocks.unbind(), dim=1)
        return summed_copies(blocks, self.copies, self.weight.shape[0])


def _together(parts: list[torch.Tensor]) -> torch.Tensor:
    """The rows of all parts in one tensor; never a view, which autograd would refuse to have written into."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _domains(
    shards: SequenceShards, config: OverlapConfig | None, device: torch.device
) -> tuple[OverlapDomain, OverlapDomain]:
    """Those of the Ulysses group and of the TP group, whose errors the ranks of the other one hear, too."""
    assert shards.tp_group is not None
    ulysses, tensor = (domain_of(group, config, device) for group in (shards.group, shards.tp_group))
    tensor.agreement.called = "tp_group"
    return ulysses, tensor


def refuse_in_both(
    wrong: str, product: OperatorSpec, shards: SequenceShards, config: OverlapConfig | None, device: torch.device,
    name: str,
) -> NoReturn:  # fmt: skip
    """Raise ValueError(wrong), for arguments of which no plan can be made: on every rank of both groups, at the first call. A
    group that knows its operator is not asked: its ranks may be in a call that they know. Once both do, this rank raises alone.
    product: the operator of the TP group."""
    ulysses, tensor = domains = _domains(shards, config, device)
    caches = made_cache(ulysses), made_cache(tensor)
    ulysses_knows, tensor_knows = (
        cache is not None and cache.knows(spec) for cache, spec in zip(caches, (ALL_TO_ALL, product), strict=True)
    )
    if tensor_knows and ulysses_knows:
        raise ValueError(wrong)
    if device.type == "cuda":
        _agreed_nodes(domains, name)  # as the ranks do that have nothing wrong
    if not tensor_knows:
        try:
            cache_of(tensor, name).refuse(wrong, product, name)
        except ValueError as refused:
            wrong = str(refused)
    cache_of(ulysses, name).refuse(wrong, ALL_TO_ALL, name)


def nodes_of_groups(
    shards: SequenceShards, config: OverlapConfig | None, device: torch.device, name: str
) -> tuple[int, int]:
    """How many nodes the Ulysses group and the TP group span: the worst answer of any rank of both, which communicate at their
    first call. A rank that went by its own two groups alone could send what a peer does not wait for."""
    return _agreed_nodes(_domains(shards, config, device), name)


def _agreed_nodes(domains: tuple[OverlapDomain, OverlapDomain], name: str) -> tuple[int, int]:
    ulysses, tensor = (cache_of(domain, name) for domain in domains)
    tp_group = tensor.domain.group
    if tp_group not in ulysses.nodes_with:
        found = (_nodes_of(domains[0]), _nodes_of(domains[1]))
        for (
            domain
        ) in domains:  # what one rank finds goes to its Ulysses group, and from all of these to their TP groups
            with domain.exclusively(name):
                what = f"{name}: compare the nodes of group and tp_group"
                told = domain.agreement.exchange(found, what, kind="nodes of two groups")
                # Groups that both span nodes before groups of which one does; in any order of ranks the same.
                found = max(told, key=lambda nodes: (min(nodes), max(nodes), nodes))
        ulysses.nodes_with[tp_group] = found
    return ulysses.nodes_with[tp_group]


def _nodes_of(domain: OverlapDomain) -> int:
    """A group whose nodes symmetric memory cannot serve, say unequal ones, has several."""
    return domain.topology.nodes if domain.nodes.problem is None else max(2, domain.topology.nodes)


def places_of(
    x: torch.Tensor, w: torch.Tensor, shards: SequenceShards, config: OverlapConfig, heads: AttentionHeads | None
) -> list[tuple[int, int]]:
    """(first, last) of each part of a projection: as many as fit and, where they hide each other's exchange, more. heads: of this
    TP rank, in a QKV projection, x [positions, b, K]; None: the output projection, x [s, b, K/W]."""
    positions = x.shape[0] if heads is not None else x.shape[0] // (shards.ranks * shards.tensor)
    rows, (carries, features) = shards.tensor * rows_of_position(x), _exchanged(x, shards, config, heads)
    wanted = parts_that_hide(positions * rows, w.shape[:1].numel(), w.shape[-1:].numel())
    return cut(positions, max(1, carries * rows * features * x.element_size()), config.exchange_limit_mib, rows, wanted)


def _exchanged(
    x: torch.Tensor, shards: SequenceShards, config: OverlapConfig, heads: AttentionHeads | None
) -> tuple[int, int]:
    """How many parts have rows in one all-to-all; features of a row in it, for all ranks of the Ulysses group."""
    if heads is not None:
        return 1, shards.ranks * heads.of_rank(shards.ranks).features
    # Backward of to_rows sends x of a part again with dx of another one.
    return 2 if config.gathered_input == "regather" else 1, shards.ranks * x.shape[-1]


def sharded_linear(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, heads: AttentionHeads | None, shards: SequenceShards,
    terms: Terms,
) -> tuple[ShardedLinear, torch.Tensor | None]:  # fmt: skip
    """A projection as planned, and of QKV (heads) the bias of the columns that this rank receives."""
    (config, name, *_), group, tp_group = terms, shards.group, shards.tp_group
    spec = LINEAR_REDUCE_SCATTER if heads is None else ALL_GATHER_LINEAR
    wrong = _rows_error(x, shards, name) if heads is None else weight_error(heads, w, bias, shards.ranks, name)
    if wrong is not None:
        refuse_in_both(wrong, spec, shards, config, x.device, name)
    domains = _domains(shards, config, x.device)
    nodes = _agreed_nodes(domains, name) if x.is_cuda else (1, 1)  # gloo carries both
    # Parts are cut for exchanges. Without a config of the call each group goes by that of its own first call.
    settings, copies = config or domains[0].config, None if heads is None else heads.sent_rows(shards.ranks, w.device)
    places = places_of(x, w, shards, settings, heads)
    if heads is not None:
        terms = terms.also(str(heads))
    if len(places) > 1:
        terms = terms.in_parts(places[-1][-1])
    (carries, features), parts = _exchanged(x, shards, settings, heads), []
    for first, last in places:
        rows = (last - first) * shards.tensor
        operand = x[: last - first] if heads is not None else like(x, rows, features)
        sent = like(x, carries * rows, features)
        try:
            multiplies = plan_of(spec, operand, w, bias, tp_group, config, name)
        except (ValueError, OverlapMismatchError) as refused:
            # On all ranks of tp_group. Those of group hear of it where they agree on the exchange.
            plan_of(ALL_TO_ALL, sent, w, None, group, config, name, problem=str(refused))
            raise
        exchanges = plan_of(ALL_TO_ALL, sent, w, None, group, config, name)
        apart = error_together(exchanges.plan, multiplies.plan, nodes)
        if apart is not None:
            raise ValueError(f"{name}: {apart}")
        multiplies = multiplies.beside(exchanges.plan.fprop.sm_margin)
        ops = (planned.linear(name, terms.meaning) for planned in (exchanges, multiplies))
        parts.append(Part(first, last, *ops))
    if terms.on_plan is not None:
        terms.on_plan(parts[0].product.plan, None)
    linear = ShardedLinear(tuple(parts), w, w.detach(), copies, rows_of_position(x))
    if heads is None or bias is None:
        return linear, None
    return linear, (bias if copies is None else bias[copies]).chunk(shards.ranks)[shards.rank]


def _rows_error(x: torch.Tensor, shards: SequenceShards, name: str) -> str | None:
    ranks = shards.ranks * shards.tensor
    if x.shape[0] and x.shape[0] % ranks == 0:
        return None
    return (
        f"{name}: x has {x.shape[0]} rows (shape {tuple(x.shape)}); they must be divisible by the "
        f"{shards.ranks} x {shards.tensor} ranks of group and tp_group, of which each keeps a part; pad the sequence to a "
        f"multiple of {ranks}"
    )
