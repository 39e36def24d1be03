"""The linears of a Ulysses attention, Megatron's and TransformerEngine's, that exchange within their product.

    linear_qkv    to_heads    x [s/W, b, K] -> q, k, v of all rows and some heads     GEMM + all-to-all
    linear_proj   to_rows     x [s, b, K/W] -> y [s/W, b, N]                          all-to-all + GEMM

W: context-parallel ranks. The attention calls these two methods. They run as calls of the module, after its forward pre-hooks:
in those Megatron's DDP waits for gathered weights (--overlap-param-gather). Only the class of a built module changes.

Where tensor parallelism (TP) divides the weights, a long sequence passes in parts: the product of one hides the exchange of
another. Where that cannot be (`why_apart`), the linear overlaps over TP alone, and the exchange is a collective.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from overlap_train import (
    AttentionHeads,
    Rotary,
    SequenceLayout,
    SequenceShards,
    attention_output_linear,
    qkv_all_to_all,
)
from overlap_train.config import flag_name
from overlap_train.integrations.megatron.conditions import divides_weights, exchange_reason, standing_reason
from overlap_train.integrations.megatron.linears import (
    LinearOverlap,
    biases,
    derived,
    fallbacks,
    overlapped_forms,
    te_feature,
    unwrapped,
)
from overlap_train.integrations.megatron.te_norm import normed
from overlap_train.ulysses.layout import kept
from overlap_train.ulysses.two_groups import nodes_of_groups, places_of

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
WRAPPED = "wrapped, as by LoRA"  # the attention calls the wrapper, which knows no exchange


@dataclass(frozen=True)
class Exchange:
    """One call's exchange between sequence shards and head shards.

    group: the context-parallel ranks; None where the call has none. heads: of all ranks of the group, and of this
    tensor-parallel rank. layout: how the ranks share the sequence, of `rows` rows. device: of the activations.
    """

    group: dist.ProcessGroup | None
    heads: AttentionHeads
    layout: SequenceLayout
    rows: int
    device: torch.device

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def order(self) -> torch.Tensor:
        """Which row of the sequence each row of each rank is, rank after rank."""
        return self.layout.rows_of_ranks(self.rows, self.ranks, self.device).flatten()

    @property
    def places(self) -> torch.Tensor:
        """Where each row of the sequence is in `order`."""
        return _places(self.device, self.layout, self.rows, self.ranks)

    def shards(self, tp_group: dist.ProcessGroup | None) -> SequenceShards:
        """Who has which rows, for the operators. tp_group: of the linear that exchanges."""
        assert self.group is not None
        return SequenceShards(self.group, self.layout, tp_group)


def why_apart(linear: Any, x: torch.Tensor, exchange: Exchange) -> str | None:
    """Why a linear over TP and the exchange of this call do not hide each other; None: they do. The same on all ranks of both
    groups. On GPUs the first call that is long enough communicates."""
    config = linear.overlap.config
    if linear.overlap.slot == "qkv" and linear.weight.shape[0] != exchange.heads.features:
        return "fewer KV heads than TP ranks: Megatron gathers the product first"
    if parts_of_call(linear, x, exchange) == 1:
        return "too short to be cut into parts"
    if not x.is_cuda:
        return None
    if config.method == "auto" and config.provider == "nvshmem":
        return "NVSHMEM serves one group of a process"
    nodes = nodes_of_groups(exchange.shards(linear.tp_group), config, x.device, linear.overlap.name)
    if min(nodes) > 1:
        return "both TP and CP ranks span nodes"
    if max(nodes) > 1 and config.method == "auto":
        return f"not measured across nodes of GPUs yet; {flag_name('method')} fused tries it"
    return None


def parts_of_call(linear: Any, x: torch.Tensor, exchange: Exchange) -> int:
    """Into how many parts this call is cut."""
    heads, shards = exchange.heads if linear.overlap.slot == "qkv" else None, exchange.shards(linear.tp_group)
    return len(places_of(x, linear.weight, shards, linear.overlap.config, heads))


class _Exchanging:
    """Makes a linear of a Ulysses attention exchange within its product. Mixed in before its class."""

    overlap: LinearOverlap
    is_in_an_exchange = True
    # What the call under way does, where it is not Megatron's linear.
    _instead: Callable[[torch.Tensor], Any] | None = None

    def reason(self: Any, x: torch.Tensor, exchange: Exchange) -> str | None:
        """Why this call cannot exchange within its product, so that the attention exchanges by a collective; None: it can. Counts
        the call; over TP the linear counts itself one with a reason."""
        reason = te_feature(self) or exchange_reason(self, x, exchange.group)
        overlap = self.overlap
        if not divides_weights(self):
            overlap.count(reason, exchange.group)
            return reason
        # Later the table goes on to say what exchanges do.
        if reason is None or (overlap.parts is None and overlap.apart is None):
            overlap.apart = reason = reason or why_apart(self, x, exchange)
        if reason is None:
            overlap.parts = parts_of_call(self, x, exchange)
            overlap.count(None, exchange.group)
        return reason

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        instead, self._instead = self._instead, None
        return super().forward(*args, **kwargs) if instead is None else instead(*args)  # type: ignore[misc]

    def _call(self: Any, x: torch.Tensor, instead: Callable[[torch.Tensor], Any]) -> Any:
        """Call the module, with its hooks, and run `instead` in place of its forward. It is no argument of the call: hooks would
        see it, and Megatron's activation logging saves arguments."""
        self._instead = instead
        try:
            return self(x)
        finally:
            self._instead = None

    def to_heads(self: Any, x: torch.Tensor, exchange: Exchange, rotary: Rotary | None) -> Heads:
        """q [s, b, query/W, dim], k and v [s, b, max(1, kv/W), dim] in the order of the sequence, rotated. For a call of which
        `reason` is None."""

        def product(x: torch.Tensor) -> Heads:
            overlap, bias = self.overlap, next((b for b in biases(self) if b is not None), None)
            q, k, v = qkv_all_to_all(
                normed(self, x), self.weight, bias, shards=exchange.shards(self.tp_group), heads=exchange.heads,
                rotary=rotary, config=overlap.config_of(self, self.weight), name=overlap.name, on_plan=overlap.note_plan,
            )  # fmt: skip
            return overlap.watched(q), k, v

        return self._call(x, product)

    def to_rows(self: Any, x: torch.Tensor, exchange: Exchange) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(y, None), or (y without b, b) where the caller adds the bias itself. For a call of which `reason` is None."""

        def product(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            overlap, (added, returned) = self.overlap, biases(self)
            y = attention_output_linear(
                x, self.weight, added, shards=exchange.shards(self.tp_group),
                config=overlap.config_of(self, self.weight), name=overlap.name, on_plan=overlap.note_plan,
            )  # fmt: skip
            return overlap.watched(y), returned

        return self._call(x, product)


@kept
def _places(device: torch.device, layout: SequenceLayout, rows: int, ranks: int) -> torch.Tensor:
    return layout.rows_of_ranks(rows, ranks, device).flatten().argsort()


@cache
def exchanging_forms(over_tp: bool) -> dict[type, type]:
    """Linear class -> the class that exchanges. over_tp: TP divides its weight, and calls that fall back overlap over it."""
    if over_tp:
        return {kind: derived(form, _Exchanging) for kind, form in overlapped_forms().items()}
    return {kind: derived(kind, _Exchanging, mixin) for kind, mixin in fallbacks().items()}


def exchanges(linear: Any) -> bool:
    """Whether a linear is of a class that exchanges within its product."""
    return isinstance(linear, _Exchanging)


def exchanges_call(linear: Any, x: torch.Tensor, exchange: Exchange) -> bool:
    """Whether a linear that an attention has exchanges within its product in this call. Counts the call; one within a wrapper,
    over TP, counts itself."""
    if exchanges(linear):
        return linear.reason(x, exchange) is None
    within = unwrapped(linear)
    if exchanges(within) and not divides_weights(within):
        within.overlap.count(WRAPPED)
    return False


def exchanges_now(linear: Any) -> bool:
    """Whether a product of the linear hides its exchange, as far as settings tell; over TP, whether it did in the last call."""
    if not exchanges(linear) or linear.overlap.apart is not None:
        return False
    return standing_reason(linear, linear.weight, exchanges=True) is None


def groups_of(linear: Any) -> list[dist.ProcessGroup]:
    """The groups over which an overlapped linear communicates, the last call's last."""
    if not exchanges(linear):
        return [linear.tp_group]
    return [*linear.overlap.groups, *([linear.tp_group] if divides_weights(linear) else [])]
