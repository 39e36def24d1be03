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
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch

from ..operators.all_to_all_gemm import Receiver
from ..operators.column_row import column_backward, column_forward, row_backward, row_forward
from ..operators.planned import PlannedLinear
from ..operators.start import products_beside
from ..operators.weight_gradient import WeightGradient
from .ahead import run_steps
from .copies import summed_copies
from .exchange import InParts
from .parts import Part
from .rows import Rows
from .rows_backward import RowsBackward


@dataclass(frozen=True)
class ShardedPart(Part):
    """A Part under tensor parallelism: positions of every TP rank's shard. product: the planned operator of the TP group.

    Its products are those of operators/column_row.py; they leave the SMs that an exchange across nodes holds beside them.
    """

    product: PlannedLinear

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
        return products_beside(self.exchange.domain, self.exchange.plan.fprop)


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

        def taken(part: ShardedPart, receiver: Receiver) -> None:
            y.take(part, receiver.received_view())

        run_steps([part.forward(partial(multiplied, part), partial(taken, part)) for part in self.parts])
        return _together(kept) if self.keeps_gathered else x

    def heads_backward(
        self, x: torch.Tensor | None, dy: Rows, wants_dx: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """(dx, dw). x: as `to_heads` returned it; None if dw is not wanted."""
        dx, dw = [], None if x is None else self._gradient()
        batch = self.batch * (self.shards if self.keeps_gathered else 1)

        def multiplied(part: ShardedPart, receiver: Receiver) -> None:
            blocks = receiver.received_view()  # whatever is frozen here
            if wants_dx or x is not None:
                own = None if x is None else x[part.first * batch : part.last * batch]
                dx.append(part.column_backward(self._of_product(blocks), own, self.w, dw, wants_dx))

        run_steps([part.backward(partial(dy.give, part), partial(multiplied, part)) for part in self.parts])
        return _together(dx) if wants_dx else None, None if dw is None else dw.result()

    def to_rows(self, x: Rows, keep: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(y [positions * batch, N] = reduce_scatter(all_to_all(x) @ w.T), what each part has received if it is kept)."""
        y, kept = [], []

        def multiplied(part: ShardedPart, receiver: Receiver) -> None:
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
