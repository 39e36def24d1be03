"""Linears of tensor parallelism as nodes of a graph of torch.compile, which sees their operands, and nothing of what runs.

A node runs the autograd function that eager mode runs (linear.py, all_reduce.py); backward is a node of its own. What it
needs beside tensors of the graph (the planned call, the weight itself for its main_grad, what was gathered and kept) hangs on a
ticket, a tensor that the graph saves for it.

Nodes communicate, so compilers may neither merge nor drop them. Those of backward stay in order by tokens. Those of forward have
none, because checkpointing inside of a graph cannot recompute what has: they stay in the order of the graph, which is the same on
all ranks.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch._library.effects import EffectType
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.fx.node import has_side_effect

from . import all_reduce, linear
from .config import OverlapConfig
from .ops import spec
from .ops.plan_cache import OnPlan, op_of
from .ops.spec import PLAIN, PLAIN_OR_NONE
from .ops.wgrad import is_watched

_OPERATORS = {  # and its autograd function
    "all_gather_linear": (spec.ALL_GATHER_LINEAR, linear._AllGatherLinear),
    "linear_reduce_scatter": (spec.LINEAR_REDUCE_SCATTER, linear._LinearReduceScatter),
    "linear_dgrad_all_reduce": (spec.LINEAR_DGRAD_ALL_REDUCE, all_reduce._LinearDgradAllReduce),
    "linear_all_reduce": (spec.LINEAR_ALL_REDUCE, all_reduce._LinearAllReduce),
}
_SETTINGS = tuple(setting.name for setting in fields(OverlapConfig))


@functools.partial(
    torch.compiler.disable,
    reason="overlap_train calls this operator eagerly: it is no node of a graph (docs/quick-start.md, Without Megatron), or its "
    "arguments do not fit; without fullgraph=True it runs, or says what is wrong",
)
def eagerly(operator: Callable[..., Any], *operands: Any, **settings: Any) -> Any:
    """The call of what Dynamo does not trace. Made here, as loading Dynamo takes 1.4 s, and not where it is called: of a function
    that is wrapped while Dynamo traces it does not give the reason."""
    return operator(*operands, **settings)


def traced(
    operator: Callable[..., torch.Tensor], x: Any, w: Any, bias: Any, *,
    group: dist.ProcessGroup, config: OverlapConfig | None, name: str, on_plan: OnPlan | None,
) -> torch.Tensor:  # fmt: skip
    """The call of an operator, as Dynamo traces it: a node of the graph. The graph breaks where a node could not do what eager
    mode does: callbacks, tensors that are not plain, autocast, delayed weight gradients, and what is refused, as inside of
    torch.func's transforms and of forward-mode differentiation."""
    plain = type(x) in PLAIN and type(w) in PLAIN and type(bias) in PLAIN_OR_NONE
    known = isinstance(group, dist.ProcessGroup) and (config is None or type(config) is OverlapConfig)
    error = _OPERATORS[operator.__name__][0].error
    if (
        not (plain and known and on_plan is None) or torch._C._is_any_autocast_enabled()
        or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
        or _returns_dw(w, config) is None or error(x, w, bias, group.size(), name) is not None
    ):  # fmt: skip
        return eagerly(operator, x, w, bias, group=group, config=config, name=name, on_plan=on_plan)
    wanted = [torch.is_grad_enabled() and each is not None and each.requires_grad for each in (x, w, bias)]
    returned = [wanted[0], wanted[1] and bool(_returns_dw(w, config)), wanted[2]]
    y: torch.Tensor = _forward(
        torch.empty(0, device="cpu"), x, w, bias, operator.__name__, group.group_name, group.size(), _text_of(config), name,
        wanted, returned,
    )[0]  # fmt: skip
    return y


def _text_of(config: OverlapConfig | None) -> str:
    """Settings by value: compiled graphs are kept on disk, too. Dynamo takes numbers as constants where they are hashed."""
    if config is None:
        return ""
    return "{" + ", ".join([f"{one!r}: {next(iter({getattr(config, one)}))!r}" for one in _SETTINGS]) + "}"


@functools.lru_cache
def _config(text: str) -> OverlapConfig | None:
    return OverlapConfig(**ast.literal_eval(text)) if text else None


def _returns_dw(w: torch.Tensor, config: OverlapConfig | None) -> bool | None:
    """Whether backward returns dw, which does not go into main_grad; None: it is delayed."""
    if getattr(w, "wgrad_store", None) is not None:
        return None
    return (config is not None and config.main_grad == "off") or getattr(w, "main_grad", None) is None


class _Ticket(bytearray):
    context: Any  # of a forward pass, as its autograd function has it


_tickets: WeakValueDictionary[int, _Ticket] = WeakValueDictionary()  # by their address, as long as their tensors live


@torch.library.custom_op(
    "overlap_train::forward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,),
    schema="(Tensor unique, Tensor x, Tensor w, Tensor? bias, str operator, str group, int world, str config, str name, "
    "bool[] wanted, bool[] returned) -> (Tensor, Tensor)",
)  # fmt: skip
def _forward(
    unique: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, operator: str, group: str,
    world: int, config: str, name: str, wanted: list[bool], returned: list[bool],
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(y, ticket [8] in uint8). unique: of this call alone, so that no other is the same to compilers. wanted: which gradients;
    returned: which of these autograd gets."""
    row, function = _OPERATORS[operator]
    if wanted[1] and _returns_dw(w, _config(config)) is not returned[1]:
        raise RuntimeError(
            f"{name}: main_grad or wgrad_store of its weight was set, or taken away, after torch.compile had traced the call; "
            f"set them first, or call torch.compiler.reset()"
        )
    with torch.set_grad_enabled(any(wanted)):  # plans ask what is trained, and compilers hand over tensors without that
        likes = [tensor.detach().requires_grad_(wants) for tensor, wants in zip((x, w), wanted, strict=False)]
        if hasattr(w, "fp8_scales"):
            likes[1].fp8_scales = w.fp8_scales  # type: ignore[attr-defined]
        op = op_of(row, likes[0], likes[1], bias, _resolve_process_group(group), _config(config), name)
    kept: list[Any] = []
    context = SimpleNamespace(needs_input_grad=(*wanted, False), save_for_backward=lambda *saved: kept.extend(saved))
    context.function = function
    with torch.no_grad():
        y = context.function.forward(context, x, w, bias, op)
    if not any(wanted):
        return y, torch.empty(8, dtype=torch.uint8, device="cpu")
    # Operands by name: the compiler, which does not know of tickets, may write something else where they lay.
    context.saved = ["x" if one is x else "w" if one is w else one for one in kept]
    (ticket := _Ticket(8)).context = context
    held = torch.frombuffer(ticket, dtype=torch.uint8)
    _tickets[held.data_ptr()] = ticket
    return y, held


@_forward.register_fake
def _(
    unique: Any, x: Any, w: Any, bias: Any, operator: str, group: str, world: int, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    row, length = _OPERATORS[operator][0], x.shape[0]
    if not row.replicated:
        length = length * world if row.sends_input else length // world
    return x.new_empty(length, *x.shape[1:-1], w.shape[0]), torch.empty(8, dtype=torch.uint8, device="cpu")


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    _, x, w, *_, config, _, wanted, ctx.returned = inputs
    ctx.length = x.shape[0]
    in_fp8 = bool(config) and "'fp8': 'off'" not in config  # where the ticket has what is saved of x
    ctx.save_for_backward(x if wanted[1] and not in_fp8 else None, w, output[1])


def _differentiate(ctx: Any, dy: torch.Tensor, _: Any) -> tuple[Any, ...]:
    gradients = iter(_backward(dy, *ctx.saved_tensors, ctx.length, ctx.returned))
    return (None, *(next(gradients) if returns else None for returns in ctx.returned), *[None] * 7)


_forward.register_autograd(_differentiate, setup_context=_set_up)


@torch.library.custom_op(
    "overlap_train::backward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,),
    schema="(Tensor dy, Tensor? x, Tensor w, Tensor ticket, SymInt length, bool[] returned) -> Tensor[]",
)  # fmt: skip
def _backward(
    dy: torch.Tensor, x: torch.Tensor | None, w: torch.Tensor, ticket: torch.Tensor, length: int, returned: list[bool]
) -> list[torch.Tensor]:
    """Those of dx, dw and dbias that are returned. length: of x."""
    forward = _tickets.get(ticket.data_ptr())
    if forward is None:
        raise RuntimeError(
            "backward of a compiled linear: hooks have replaced saved tensors; call it in eager mode (torch.compiler.disable)"
        )
    ctx, operands = SimpleNamespace(**vars(forward.context)), {"x": x, "w": w}
    ctx.saved_tensors = [operands[one] if isinstance(one, str) else one for one in ctx.saved]
    ctx.next_functions = ((None, 0), (_node(ctx.weight), 0))
    with torch.no_grad():
        dx, dw, dbias, _ = ctx.function.backward(ctx, dy)
    if dw is not None and not returned[1] and is_watched(ctx.weight):
        raise RuntimeError(
            f"{ctx.linear.tags.dgrad.op}: its weight has a hook, and in this graph dw goes into main_grad; use "
            f"main_grad='off', or call it in eager mode (torch.compiler.disable)"
        )
    return [each.contiguous() for each, returns in zip((dx, dw, dbias), returned, strict=True) if returns]


@_backward.register_fake
def _(dy: Any, x: Any, w: Any, ticket: Any, length: int, returned: list[bool]) -> list[torch.Tensor]:
    shapes = [(length, *dy.shape[1:-1], w.shape[1]), w.shape, w.shape[:1]]
    return [dy.new_empty(shape) for shape, returns in zip(shapes, returned, strict=True) if returns]


def _node(weight: torch.Tensor) -> Any:
    """Where autograd adds the gradient of a weight with main_grad, in which WeightGradient looks whether it does."""
    if not (weight.requires_grad and hasattr(weight, "main_grad")):
        return None
    included, none = torch._C._dispatch_tls_local_include_set(), torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
    with torch._C._ForceDispatchKeyGuard(included, none), torch.enable_grad():  # a node runs below autograd
        return get_gradient_edge(weight).node


has_side_effect(torch.ops.overlap_train.forward.default)
_backward.register_effect(EffectType.ORDERED)
