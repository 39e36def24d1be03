"""The linears of a Ulysses attention, Megatron's and TransformerEngine's, that exchange within their product.

    linear_qkv    to_heads    x [s/W, b, K] -> q, k, v of all rows and some heads     GEMM + all-to-all
    linear_proj   to_rows     x [s, b, K/W] -> y [s/W, b, N]                          all-to-all + GEMM

W: context-parallel ranks. The attention calls these two methods. They run as calls of the module, after its forward pre-hooks:
in those Megatron's DDP waits for gathered weights (--overlap-param-gather). Any other call serves what falls back. It is
Megatron's forward or, where tensor parallelism divides the weights (two_groups.py), that of the linear that overlaps over it.
Only the class of a built module changes: parameters and checkpoint keys stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from megatron.core.extensions import transformer_engine as megatron_te
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from overlap_train import OverlapConfig, QkNorm, Rotary, attention_output_linear, qkv_all_to_all
from overlap_train.integrations.megatron.linears.column_row import (
    OverlappedColumnParallelLinear,
    OverlappedRowParallelLinear,
    attach,
)
from overlap_train.integrations.megatron.linears.conditions import (
    divides_weights,
    exchange_reason,
    standing_exchange_reason,
)
from overlap_train.integrations.megatron.linears.exchange import Exchange, UlyssesOverlap
from overlap_train.integrations.megatron.linears.main_grad import fused_alike, through_main_grad
from overlap_train.integrations.megatron.linears.transformer_engine import (
    TEFallback,
    TELinearOverlap,
    normed,
    te_feature,
    te_forms,
)
from overlap_train.integrations.megatron.linears.two_groups import parts_of_call, why_apart

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Exchanging:
    """Makes a linear of a Ulysses attention exchange within its product (to_heads, to_rows). Mixed in before a linear class
    of Megatron's or TransformerEngine's."""

    overlap: UlyssesOverlap
    # What the call under way does, where it is not Megatron's linear.
    _instead: Callable[[torch.Tensor], Any] | None = None

    def reason(self: Any, x: torch.Tensor, exchange: Exchange) -> str | None:
        """Why this call cannot exchange within its product; None: it can. Counts the call.

        With a reason, the attention calls the linear and exchanges by a collective. Over TP the linear counts such a call itself.
        """
        reason = te_feature(self) or exchange_reason(self, x, exchange.group)
        if not divides_weights(self):
            self.overlap.count_exchange(reason, exchange)
            return reason
        if reason is None or self.overlap.has_told_nothing:  # later the table goes on to say what exchanges do
            self.overlap.apart = reason = reason or why_apart(self, x, exchange)
        if reason is None:
            self.overlap.count_over_tp(exchange, parts_of_call(self, x, exchange))
        return reason

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        instead, self._instead = self._instead, None
        return super().forward(*args, **kwargs) if instead is None else instead(*args)  # type: ignore[misc]

    def _call(self: Any, x: torch.Tensor, instead: Callable[[torch.Tensor], Any]) -> Any:
        """Call the module, with its hooks, and run `instead` in place of its forward.

        `instead` is no argument of the call: hooks would see it, and Megatron's activation logging saves the arguments of a call.
        """
        self._instead = instead
        try:
            return self(x)
        finally:
            self._instead = None

    def to_heads(
        self: Any, x: torch.Tensor, exchange: Exchange, norm: Callable[[], QkNorm] | None, rotary: Rotary | None
    ) -> Heads:
        """q [s, b, query/W, dim], k and v [s, b, max(1, kv/W), dim] in the order of the sequence, normalised and rotated.

        For a call of which `reason` is None. norm: makes the norms of q and k; called after the module's forward pre-hooks.
        """
        return self._call(x, partial(self._to_heads, exchange=exchange, norm=norm, rotary=rotary))

    def _to_heads(
        self: Any, x: torch.Tensor, exchange: Exchange, norm: Callable[[], QkNorm] | None, rotary: Rotary | None
    ) -> Heads:
        overlap, bias = self.overlap, self.bias if _has_bias(self) else None
        q, k, v = qkv_all_to_all(
            normed(self, x), self.weight, bias, shards=exchange.shards(self.tp_group), heads=exchange.heads,
            qk_norm=None if norm is None else norm(), rotary=rotary,
            config=overlap.settings(self, self.weight), name=overlap.name, on_plan=overlap.note_plan,
        )  # fmt: skip
        return overlap.watched(q), k, v

    def to_rows(self: Any, x: torch.Tensor, exchange: Exchange) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(y, None), or (y without b, b) where the caller adds the bias itself. For a call of which `reason` is None."""
        return self._call(x, partial(self._to_rows, exchange=exchange))

    def _to_rows(self: Any, x: torch.Tensor, exchange: Exchange) -> tuple[torch.Tensor, torch.Tensor | None]:
        overlap, bias = self.overlap, self.bias if _has_bias(self) else None
        added, returned = (None, bias) if _returns_bias(self) else (bias, None)
        y = attention_output_linear(
            x, self.weight, added, shards=exchange.shards(self.tp_group),
            config=overlap.settings(self, self.weight), name=overlap.name, on_plan=overlap.note_plan,
        )  # fmt: skip
        return overlap.watched(y), returned


class _OwnExchanging(_Exchanging):
    """Makes Megatron's own linears exchange."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The product of a call that falls back, by Megatron's own code (see main_grad.py)."""
        call = fused_alike(self, weight, kwargs)
        y = super()._forward_impl(input, through_main_grad(self, weight), *args, **call)  # type: ignore[misc]
        return self.overlap.watched(y)


class UlyssesColumnParallelLinear(_OwnExchanging, ColumnParallelLinear):
    """linear_qkv of a Ulysses attention."""


class UlyssesRowParallelLinear(_OwnExchanging, RowParallelLinear):
    """linear_proj of a Ulysses attention."""


class UlyssesColumnOverTP(_Exchanging, OverlappedColumnParallelLinear):
    """linear_qkv of a Ulysses attention whose weight tensor parallelism divides. Calls that fall back overlap over TP."""

    overlap: UlyssesOverlap


class UlyssesRowOverTP(_Exchanging, OverlappedRowParallelLinear):
    """linear_proj of a Ulysses attention whose weight tensor parallelism divides. Calls that fall back overlap over TP."""

    overlap: UlyssesOverlap


@dataclass
class TEUlyssesOverlap(UlyssesOverlap, TELinearOverlap):
    """The attribute `overlap` of a TransformerEngine linear that exchanges within its product."""


class _TEExchanging(_Exchanging, TEFallback):
    """Makes TransformerEngine's linears, as Megatron wraps them, exchange within their product."""


class _TEExchangingRow(_TEExchanging):
    input_is_parallel = True


@cache
def _forms(over_tp: bool) -> dict[type, type]:
    """Linear class -> the class that exchanges. TransformerEngine's keep their names: Megatron-FSDP and PEFT tools go by them."""
    forms: dict[type, type] = {
        ColumnParallelLinear: UlyssesColumnOverTP if over_tp else UlyssesColumnParallelLinear,
        RowParallelLinear: UlyssesRowOverTP if over_tp else UlyssesRowParallelLinear,
    }
    if megatron_te.HAVE_TE:
        mixins = {
            megatron_te.TELayerNormColumnParallelLinear: _TEExchanging,
            megatron_te.TEColumnParallelLinear: _TEExchanging,
            megatron_te.TERowParallelLinear: _TEExchangingRow,
        }
        for own, mixin in mixins.items():
            base = te_forms()[own] if over_tp else own
            forms[own] = type(own.__name__, (mixin, base), {"__module__": __name__, "__doc__": mixin.__doc__})
    return forms


def why_no_exchange(linear: Any) -> str | None:
    """Why no call of a linear can exchange within its product; None: some can."""
    if type(linear) not in _forms(over_tp=False):
        return f"{type(linear).__name__} has no form that exchanges"
    return te_feature(linear) or standing_exchange_reason(linear, None)


def exchange_in(linear: Any, config: OverlapConfig, slot: str, name: str) -> None:
    """Let a linear of which `why_no_exchange` is None exchange, in place."""
    linear.__class__ = _forms(divides_weights(linear))[type(linear)]
    if isinstance(linear, _TEExchanging):
        linear.overlap = TEUlyssesOverlap(config, slot, name)
    else:
        attach(linear, UlyssesOverlap(config, slot, name))


def exchanges(linear: Any) -> bool:
    """Whether a linear is of a class that exchanges within its product."""
    return isinstance(linear, _Exchanging)


def _has_bias(linear: Any) -> bool:
    """TransformerEngine's linears without a bias have an empty one."""
    return getattr(linear, "use_bias", linear.bias is not None)


def _returns_bias(linear: Any) -> bool:
    return linear.te_return_bias if hasattr(linear, "te_return_bias") else linear.skip_bias_add
