"""report(): which path each parallel linear of a model takes, why, and how often each path has run."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from overlap_train.group.registry import made_domain
from overlap_train.integrations.megatron.attention.in_model import is_ulysses, sharing_attentions, why_not_ulysses
from overlap_train.integrations.megatron.enabling.passes import exchanges_now, in_two_groups, passes
from overlap_train.integrations.megatron.enabling.table import LinearReport, Report
from overlap_train.integrations.megatron.linears.conditions import standing_exchange_reason, standing_reason
from overlap_train.integrations.megatron.linears.in_model import (
    Model,
    groups_of,
    is_overlapped,
    named_linears,
    slot_of,
    why_not,
)
from overlap_train.integrations.megatron.linears.ulysses import exchanges
from overlap_train.ops.plan_cache import made_cache


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
    """(method, reason) of the last overlapped call, from the plan by which it ran."""
    plan, trial = linear.overlap.plan, linear.overlap.trial
    if plan is None:
        return "-", "not called yet"
    book = made_cache(made_domain(groups_of(linear)[-1]))
    if book is None:
        return "-", "symmetric memory has been freed (overlap_train.shutdown)"
    if trial is not None and book.runs.is_under_way(trial):
        methods = ", ".join(trial.methods)
        return "in turn", f"auto: tries {methods}, until a linear has made {trial.steps} calls (tune_steps)"
    fprop, dgrad = plan.fprop, plan.dgrad
    method = fprop.method if fprop.method == dgrad.method else f"{fprop.method} / {dgrad.method}"
    if trial is not None:
        return method, "auto: in its turn, the last of a trial that has ended; the next call takes the fastest"
    reason = _both(fprop.reason, dgrad.reason)
    if in_two_groups(linear):
        hides = "" if method == "collective" else " that hide exchanges"
        reason = f"{linear.overlap.parts} parts{hides}; {reason}"
    return method, reason


def _both(fprop: str, dgrad: str) -> str:
    """ "auto: not tuned: a long GEMM / a short GEMM": what both begin with is said once."""
    if fprop == dgrad:
        return fprop
    common, heads = "", (*re.finditer(": |tuned for ", dgrad), re.match("[^;]*; ", dgrad))
    for end in (head.end() for head in heads if head is not None):
        common = dgrad[:end] if fprop.startswith(dgrad[:end]) else common
    return f"{fprop} / {dgrad.removeprefix(common)}"
