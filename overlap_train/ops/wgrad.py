"""The weight gradient, returned or added into `weight.main_grad`.

    dw [N, K] = dy [M, N].T @ x [M, K]

What an all-to-all has brought comes in blocks: of dy [W, M, N/W] (rows of dw), or of x [W, M, K/W] (columns of dw).

Megatron's data parallelism keeps gradients in fp32 buffers: each parameter has `main_grad`, and by its mark
`grad_added_to_main_grad` weight.grad does not count. A backward that adds to main_grad returns nothing. A hook where autograd
accumulates sets the mark, unless others return a gradient of the weight: a penalty on it, an embedding that shares it. Where
somebody looks at the gradient itself, by a hook on the weight or by torch.autograd.grad, it is returned.

A weight with a `wgrad_store` has its product delayed: backward puts it there, and the owner of the store calls it later
(TransformerEngine's WeightGradStore, which Megatron's `backward_dw` empties). dw then goes into main_grad or weight.grad. Where
somebody has a hook on the weight it is not delayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from ..config import flag_name
from .product import BlockMatrix, Fp8Matrix


class WeightGradient:
    """dw as the sum over `parts` parts of the rows: in `weight.main_grad`, else in fp32 where there are several. So is that for a
    16-bit main_grad, to be rounded once and not by each part.

    main_grad: as in OverlapConfig. ctx: of the autograd function, whose tensor `number` the weight is, or what has its edges as
    next_functions; None: not known. store: gets the product, instead of backward; what is added must then stay as it is.
    """

    def __init__(
        self, weight: torch.Tensor, main_grad: str, parts: int = 1, ctx: Any = None, store: Any = None, number: int = 1
    ) -> None:
        self._weight, self._ctx, self._store, self.is_delayed = weight, ctx, store, store is not None
        self._number, self._target = number, target_of(weight, main_grad, ctx, number)
        self._dw: torch.Tensor | None = None
        self._sums_apart = parts > 1 and (self._target is None or self._target.dtype != torch.float32)

    @classmethod
    def of_backward(cls, ctx: Any) -> WeightGradient | None:
        """That of ctx.weight, by ctx.linear, in its backward; None: it is not wanted."""
        if not ctx.needs_input_grad[1]:
            return None
        weight = ctx.weight
        store = getattr(weight, "wgrad_store", None)
        store = store if store is not None and store.delay_wgrad_compute() else None
        if store is not None and is_watched(weight):
            store.put([], lambda: (weight.grad, None))  # for its owner, who takes one for each backward
            store = None
        return cls(weight, ctx.linear.plan.config.main_grad, ctx=ctx, store=store)

    def add(self, dy: torch.Tensor, x: torch.Tensor) -> None:
        """Add the product of one part's rows."""
        if self._store is None:
            self._add(dy, x)
        else:
            self._store.put([dy, x], partial(self._add_late, self._add))

    def add_scaled(self, dy_nm: torch.Tensor, x: Fp8Matrix | BlockMatrix) -> None:
        """Add the product in fp8 of dy_nm [N, M], dy's transpose, and x [M, K]: all that there is."""
        if self._store is None:
            self._add_scaled(dy_nm, x)
        else:
            self._store.put([dy_nm, x], partial(self._add_late, self._add_scaled))

    @torch.no_grad()  # backward has ended
    def _add_late(
        self, add: Callable[[torch.Tensor, Any], None], dy: torch.Tensor, x: torch.Tensor | Fp8Matrix | BlockMatrix
    ) -> tuple[torch.Tensor | None, None]:
        """(weight.grad or None, no gradient of a bias), which is what the store's owner takes: autograd has the bias's."""
        add(dy, x)
        dw = self._in_dtype_of_weight()
        if dw is None:  # it is in main_grad
            return None, None
        grad = self._weight.grad
        self._weight.grad = dw if grad is None else grad + dw
        return self._weight.grad, None

    def _add(self, dy: torch.Tensor, x: torch.Tensor) -> None:
        if self._sums_apart and self._dw is None:  # not before: it would run ahead of what is sent first
            self._dw = torch.zeros_like(self._weight, dtype=torch.float32)
        target = self._target if self._dw is None else self._dw
        if target is None:
            self._dw = _product(dy, x)
        else:
            for part, dy_part, x_part in _parts(target, dy, x):
                accumulate(part, dy_part, x_part)

    def _add_scaled(self, dy_nm: torch.Tensor, x: Fp8Matrix | BlockMatrix) -> None:
        if self._target is None:
            self._dw = x.multiply(dy_nm)
        else:
            x.accumulate(self._target, dy_nm)

    def result(self, placeholder: Callable[[], torch.Tensor] | None = None) -> torch.Tensor | None:
        """dw for autograd; None if it is delayed, or goes into `weight.main_grad`. placeholder: as in note_added. Called once."""
        ctx, self._ctx = self._ctx, None  # a store would keep the graph alive
        if self._target is None:
            unmark(self._weight, ctx, self._number)
            return self._in_dtype_of_weight()
        if self._dw is not None:
            self._target.add_(self._dw)
        if ctx is not None:
            note_added(self._weight, ctx, self._number, placeholder)
        return None

    def _in_dtype_of_weight(self) -> torch.Tensor | None:
        dw, dtype = self._dw, self._weight.dtype
        return dw if dw is None or dw.dtype is dtype else dw.to(dtype)


def target_of(weight: torch.Tensor, main_grad: str, ctx: Any, number: int) -> torch.Tensor | None:
    """weight.main_grad, if the gradient is added to it; None: it is returned. Arguments: see WeightGradient."""
    target: torch.Tensor | None = getattr(weight, "main_grad", None) if main_grad == "accumulate" else None
    if target is None or is_watched(weight) or not is_accumulated(ctx, number):
        return None
    if target.shape != weight.shape:
        raise ValueError(
            f"weight.main_grad is {list(target.shape)}, the weight {list(weight.shape)}; give main_grad the weight's "
            f"shape, or use main_grad='off' ({flag_name('main_grad')})"
        )
    return target


def is_watched(weight: torch.Tensor) -> bool:
    """Whether somebody has a hook on the gradient of this weight. DDP's own hook is not on the weight."""
    return bool(weight._backward_hooks or weight._post_accumulate_grad_hooks)


def note_added(
    weight: torch.Tensor, ctx: Any, number: int, placeholder: Callable[[], torch.Tensor] | None = None
) -> None:
    """Note that a backward has added the gradient of input `number`, a weight, to main_grad, and returns None. ctx: of that
    backward. placeholder: makes memory, which weights may share, for what data parallelism's hook finds in weight.grad."""
    if not (weight.is_leaf and hasattr(weight, "grad_added_to_main_grad")):
        return
    node = ctx.next_functions[number][0]
    accumulation = node.metadata.get("overlap_train")  # as long as the node lives
    if accumulation is None:
        accumulation = node.metadata["overlap_train"] = _Accumulation(weight)
        node.register_prehook(accumulation)
    accumulation.placeholder = placeholder or partial(torch.empty_like, weight)


class _Accumulation:
    """A hook that autograd runs before it accumulates the gradients of a weight. It sets the mark for data parallelism."""

    ADDED = 1  # Megatron's and TransformerEngine's backward set True, and return memory without a value: nobody may add that

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight: Any = weight
        self.placeholder: Callable[[], torch.Tensor] | None = None

    def __call__(self, gradients: tuple[torch.Tensor | None]) -> None:
        weight, placeholder, self.placeholder = self._weight, self.placeholder, None
        if gradients[0] is not None:
            weight.grad_added_to_main_grad = weight.grad_added_to_main_grad is True
        elif placeholder is not None:
            weight.grad_added_to_main_grad = self.ADDED
            if weight.grad is None:
                weight.grad = placeholder()
                if getattr(weight, "zero_out_wgrad", False):
                    weight.grad.zero_()


def unmark(weight: torch.Tensor, ctx: Any, number: int) -> None:
    """Let data parallelism add what autograd returns for a weight, also after a call of the same step that has added its own."""
    if getattr(weight, "grad_added_to_main_grad", False) and is_accumulated(ctx, number):
        weight.grad_added_to_main_grad = False  # type: ignore[attr-defined]


def is_accumulated(ctx: Any, number: int) -> bool:
    """Whether backward adds to the gradient of input `number` of an autograd function; False: torch.autograd.grad takes it, or
    nobody. ctx: of its backward; None: not known."""
    try:
        return ctx is None or bool(torch._C._will_engine_execute_node(ctx.next_functions[number][0]))
    except RuntimeError:  # what torch says of a leaf whose gradient is taken
        return False


def _product(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if dy.dim() == x.dim() == 2:
        return torch.mm(dy.t(), x)
    n, k = (matrix.shape[-1] * (len(matrix) if matrix.dim() == 3 else 1) for matrix in (dy, x))
    dw = x.new_empty(n, k)
    for part, dy_part, x_part in _parts(dw, dy, x):
        torch.mm(dy_part.t(), x_part, out=part)
    return dw


def _parts(
    target: torch.Tensor, dy: torch.Tensor, x: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(part of target [N, K], dy [M, *], x [M, *]) of each product."""
    if dy.dim() == 3:
        yield from ((part, block, x) for part, block in zip(target.chunk(len(dy), 0), dy, strict=True))
    elif x.dim() == 3:
        yield from ((part, dy, block) for part, block in zip(target.chunk(len(x), 1), x, strict=True))
    else:
        yield target, dy, x


def accumulate(target: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> None:
    """target [N, K] += dy [M, N].T @ x [M, K], with the products summed in fp32 and added without rounding to dy's dtype."""
    if not len(dy):  # of an expert without rows
        return
    if target.dtype == dy.dtype:
        target.addmm_(dy.t(), x)
    elif target.dtype != torch.float32:
        target.add_(dy.t() @ x)
    elif target.device.type == "cuda":
        torch.addmm(target, dy.t(), x, out_dtype=torch.float32, out=target)
    else:
        target.addmm_(dy.t().float(), x.float())
