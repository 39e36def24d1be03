"""report(): which path each parallel linear of a model takes, why, and how often each path has run."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from overlap_train.operators.plan_book import PlanBook, made_book
from overlap_train.planning.choice import Choice, alone, choose
from overlap_train.planning.passes import Pass
from overlap_train.planning.schedule.kinds import A2A_GEMM, GATHER, GEMM_A2A, SCATTER
from overlap_train.runtime.domain import OverlapDomain
from overlap_train.runtime.registry import made_domain
from overlap_train.ulysses.parts import cut_exchange

from ..attention.in_model import is_ulysses, sharing_attentions, why_not_ulysses
from ..linears.conditions import divides_weights, standing_exchange_reason, standing_reason
from ..linears.in_model import Model, groups_of, is_overlapped, is_row, named_linears, slot_of, why_not
from ..linears.ulysses import exchanges
from .passes import exchanges_now, in_two_groups, passes
from .table import LinearReport, Report


def report(model: Model, problem: str | None = None) -> Report:
    """The parallel linears of a model, or of the chunks of a virtual pipeline, wrapped in DDP or not. Prints nothing."""
    attentions = _by_linear(model)
    linears = [(_report_linear(name, linear), linear) for name, linear in named_linears(model)]
    return Report(tuple(_with_exchange(row, linear, attentions.get(id(linear))) for row, linear in linears), problem)


def _by_linear(model: Model) -> dict[int, Any]:
    """Attentions under context parallelism, by the ids of their linears that do not exchange within their product."""
    found = {}
    for attention in sharing_attentions(model):
        for linear in (getattr(attention, "linear_qkv", None), attention.linear_proj):
            if linear is not None and not exchanges_now(linear):
                found[id(linear)] = attention
    return found


def _with_exchange(row: LinearReport, linear: Any, attention: Any) -> LinearReport:
    """Say of an attention's linear how the ranks of context parallelism get each other's rows."""
    if attention is None:
        return row
    ranks = attention.pg_collection.cp.size()
    if is_ulysses(attention):
        apart = linear.overlap.apart if exchanges(linear) else None
        said = f"all-to-all over {ranks} CP ranks not overlapped" + ("" if apart is None else f": {apart}")
    else:
        said = f"context parallelism: {why_not_ulysses(attention) or 'not enabled'}"
    return replace(row, reason=f"{said}; {row.reason}")


def _report_linear(name: str, linear: Any) -> LinearReport:
    slot = slot_of(name)
    if not is_overlapped(linear):
        no_slot = "not one of qkv, proj, fc1, fc2, output" if slot is None else None
        return LinearReport(name, slot, "-", "-", "-", "megatron", no_slot or why_not(linear) or "not enabled")
    overlap = linear.overlap
    counts = overlap.overlapped_calls, tuple(sorted(overlap.fallback_calls.items()))
    reason = (standing_exchange_reason if exchanges(linear) else standing_reason)(linear, linear.weight)
    if reason is None and not overlap.overlapped_calls and overlap.fallback_calls:
        reason = overlap.fallback_calls.most_common(1)[0][0]
    if reason is not None:
        return LinearReport(name, slot, "-", "-", "-", "megatron", reason, *counts)
    return LinearReport(name, slot, *passes(linear), *_method_and_reason(linear), *counts)


def _method_and_reason(linear: Any) -> tuple[str, str]:
    if linear.overlap.sizes is None:
        return "-", "not called yet"
    book = made_book(made_domain(groups_of(linear)[-1]))
    if book is None:
        return "-", "symmetric memory has been freed (overlap_train.shutdown)"
    pass_ = _forward_pass(linear, book.domain)
    trial = book.trials.under_way(pass_)
    if trial is not None and _tries(linear) and linear.overlap.name not in trial.captured:
        return (
            "in turn",
            f"auto: tries {', '.join(trial.methods)}, until a linear has made {trial.steps} calls (tune_steps)",
        )
    fprop, dgrad = _choices(linear, pass_, book)
    method = fprop.method if fprop.method == dgrad.method else f"{fprop.method} / {dgrad.method}"
    reason = _both(fprop.reason, dgrad.reason)
    if in_two_groups(linear):
        hides = "" if method == "collective" else " that hide exchanges"
        reason = f"{linear.overlap.parts[0]} parts{hides}; {reason}"
    return method, reason


def _tries(linear: Any) -> bool:
    """Whether a linear takes part in trials of its sizes."""
    is_wanted = linear.overlap.config.method == "auto" and linear.overlap.config.tune_steps
    return bool(is_wanted) and not _is_frozen(linear) and not in_two_groups(linear)


def _forward_pass(linear: Any, domain: OverlapDomain) -> Pass:
    """The forward pass of a linear, with the sizes of its last overlapped call."""
    x_shape, (n, k), dtype = linear.overlap.sizes
    alone = exchanges(linear) and not divides_weights(linear)
    row_kind, column_kind = (A2A_GEMM, GEMM_A2A) if alone else (SCATTER, GATHER)
    kind, ranks = (row_kind, 1) if is_row(linear) else (column_kind, domain.world_size)
    m = x_shape[:-1].numel() * ranks
    if in_two_groups(linear):
        _, m = linear.overlap.parts
    elif alone:
        m = _rows_of_part(m, k if is_row(linear) else n, linear, domain.world_size)
    return Pass(kind, m, n, k, dtype, domain.world_size)


def _choices(linear: Any, fprop: Pass, book: PlanBook) -> tuple[Choice, Choice]:
    """How fprop and dgrad run. Plans are made by the same function, table and nodes."""
    method, device, nodes = linear.overlap.config.method, book.domain.device, book.topology.nodes
    forward, backward = (choose(method, pass_, device, book.table, nodes) for pass_ in (fprop, fprop.dgrad))
    return forward, alone(backward, fprop.dgrad, device) if _is_frozen(linear) else backward


def _is_frozen(linear: Any) -> bool:
    """Whether a linear's weight is not trained. One that has none is given the embedding's at each call."""
    return linear.weight is not None and not linear.weight.requires_grad


def _rows_of_part(m: int, features: int, linear: Any, world_size: int) -> int:
    """Rows, of all ranks, of the first of the parts in which a long sequence is exchanged; each part is a pass of its own."""
    x_shape, _, dtype = linear.overlap.sizes
    batch = x_shape[1:-1].numel()
    positions = m // (batch * world_size)
    (_, end), *_ = cut_exchange(positions, batch, features * dtype.itemsize, linear.overlap.config)
    return end * batch * world_size


def _both(fprop: str, dgrad: str) -> str:
    """ "auto: not tuned: a long GEMM / a short GEMM": what both begin with is said once."""
    if fprop == dgrad:
        return fprop
    common, heads = "", (*re.finditer(": |tuned for ", dgrad), re.match("[^;]*; ", dgrad))
    for end in (head.end() for head in heads if head is not None):
        common = dgrad[:end] if fprop.startswith(dgrad[:end]) else common
    return f"{fprop} / {dgrad.removeprefix(common)}"
