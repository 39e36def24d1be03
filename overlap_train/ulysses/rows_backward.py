"""The backward of to_rows under tensor parallelism, turn by turn (two_groups.py).

Turn i has one all-to-all. It carries dx of part i - 1, and x of part i if x is sent again. Meanwhile the product for dx of part i
runs. The product for dw reads x when it has come. With an all-to-all of its own, x would have to come before the product: until
then a rank does not know that the third slot is free (protocol/slot_use.py).

    turn    0              1              2              3 (of three parts)
            [x 0 ]         [dx 0, x 1]    [dx 1, x 2]    [dx 2]
            [product 0  ]  [product 1  ]  [product 2  ]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Generic, TypeVar

import torch

from ..ops.a2a_gemm import Receiver
from .ahead import run_steps
from .parts import Part
from .rows import Rows

P = TypeVar("P", bound=Part)


class RowsBackward(Generic[P]):
    """The backward of one call of to_rows under tensor parallelism. x, dx: as for ShardedLinear.rows_backward.

    product: multiplies for a part, and returns its dx as it is sent, or None. It gets the part, and a function that returns the
    part's x, which it may call when dx is under way.
    """

    def __init__(
        self, x: Rows | list[torch.Tensor] | None, dx: Rows | None,
        product: Callable[[P, Callable[[], torch.Tensor]], torch.Tensor | None],
    ) -> None:  # fmt: skip
        self._dx, self._product = dx, product
        self._again = None if isinstance(x, list) else x
        self._kept = iter(x) if isinstance(x, list) else iter(())
        self._made: torch.Tensor | None = None  # dx of the last product, as it is sent

    def run(self, before: P | None, part: P | None) -> None:
        """Run one turn: send dx of `before` and x of `part` in one all-to-all, and multiply for `part` under it. before: None in
        the first turn; part: None in the last."""
        again = None if self._again is None or part is None else self._again.give(part)
        sent = [blocks for blocks in (self._made, again) if blocks is not None]
        back = 0 if self._made is None else self._made.shape[1]
        if not sent:
            self._multiply(part, self._next_kept)
            return

        def read(receiver: Receiver) -> None:
            received = cache(receiver.received_view)
            self._multiply(part, self._next_kept if again is None else lambda: received()[:, back:])
            if back and self._dx is not None and before is not None:
                self._dx.take(before, received()[:, :back])
            received()  # whatever is frozen here

        whole = sent[0] if len(sent) == 1 else torch.cat(sent, dim=1)
        step = before.backward if before is not None else part.again  # type: ignore[union-attr]
        run_steps([step(lambda: whole, read)])

    def _next_kept(self) -> torch.Tensor:
        return next(self._kept)

    def _multiply(self, part: P | None, x: Callable[[], torch.Tensor]) -> None:
        self._made = None if part is None else self._product(part, x)
