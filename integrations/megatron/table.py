"""What the parallel linears of a model do: report() as data, the table of it, when it is printed, and counters.

The table is printed once, when sizes are known: at the first gradient that reaches one of the linears. At that time every linear
that takes part in a step has had its forward, also with recomputation, a virtual pipeline, several micro-batches in flight, and
for graphs, which are captured after eager steps. Validation and inference have no gradient and print nothing.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from overlap_train.group.registry import made_domain
from overlap_train.group.topology import in_ranges
from overlap_train.integrations.megatron.attention import UlyssesSelfAttention, sharing_attentions, why_not_ulysses
from overlap_train.integrations.megatron.conditions import asks_for_fp8, divides_weights, not_in_fp8, standing_reason
from overlap_train.integrations.megatron.experts import (
    is_overlapped_layer,
    named_expert_layers,
    overlapped_expert_layers,
    why_not_experts,
)
from overlap_train.integrations.megatron.linears import (
    Model,
    chunks_of,
    is_overlapped,
    is_row,
    named_linears,
    overlapped_linears,
    slot_of,
    unwrapped,
    why_not,
)
from overlap_train.integrations.megatron.te_scales import has_delayed_scales
from overlap_train.integrations.megatron.ulysses_linears import WRAPPED, exchanges, exchanges_now, groups_of
from overlap_train.ops.plan_cache import made_cache
from overlap_train.warn import warn_user

# Characters of a line, unless names, methods and calls leave less than REASON_WIDTH to the reasons.
WIDTH, REASON_WIDTH = 120, 40
_NO_PASSES = ("-", "-", "-")


@dataclass(frozen=True)
class LinearReport:
    """One parallel linear. fprop, dgrad and wgrad say what each pass does.

    method: of the last call which the host made (a CUDA graph goes on with what it has captured): "fused", or "fused / chunked"
        where fprop and dgrad differ; "megatron" where all calls have been Megatron's own code; "-" before the first call.
    reasons: why that method: one, or those of fprop and of dgrad.
    overlapped_calls, fallback_calls: forward calls by our operators and by Megatron's own code, recomputed ones included. Of
        experts the latter have those that were collectives for want of room.
    exchange: of an attention's linear under context parallelism: how ranks get each other's rows, where its product does not.
    parts: over TP and Ulysses: into how many parts the last call was cut, which hide each other's exchanges.
    """

    name: str
    slot: str | None  # linear slot; None: not one of the linears that this package overlaps
    fprop: str
    dgrad: str
    wgrad: str
    method: str
    reasons: tuple[str, ...]
    overlapped_calls: int = 0
    fallback_calls: tuple[tuple[str, int], ...] = ()  # (reason, calls)
    exchange: str | None = None
    parts: int | None = None

    @property
    def reason(self) -> str:
        hides = "" if self.is_collective else " that hide exchanges"
        parts = None if self.parts is None else f"{self.parts} parts{hides}"
        return "; ".join(filter(None, (self.exchange, parts, " / ".join(self.reasons))))

    @property
    def is_collective(self) -> bool:
        """Whether our operators run this linear with the method collective in both passes, as Megatron-Core would."""
        return self.method == "collective"

    @property
    def calls(self) -> str:
        """How often each path has run, for example "overlapped 8, activations are offloaded to the CPU 2"; of collective "not
        overlapped 8"; of what has only run Megatron's own code, for the reason beside it, "fallback 8"."""
        if not self.overlapped_calls and [reason for reason, _ in self.fallback_calls] == [self.reason]:
            return f"{'not overlapped' if self.is_collective else 'fallback'} {self.fallback_calls[0][1]}"
        ours = "not overlapped" if self.is_collective else "overlapped"
        counts = [(ours, self.overlapped_calls)] if self.overlapped_calls else []
        return ", ".join(f"{what} {count}" for what, count in (*counts, *self.fallback_calls))


@dataclass(frozen=True)
class Report:
    """All parallel linears of a model. `str()` of it is the table: one row for each group of identical linears, then the passes.
    problem: why nothing was enabled, or which linear slot is missing."""

    linears: tuple[LinearReport, ...]
    problem: str | None = None

    def __str__(self) -> str:
        rows = _folded(_folded(self.linears, "local_experts"), "layers")
        heading, *lines = _lines(rows)
        rule = "-" * max(map(len, (heading, *lines)))
        passes = _lines_of_passes(rows)
        if any("AR" in (row.fprop + row.dgrad).split() for row in rows):
            passes.append(
                "no sequence parallelism: sums are all-reduced, of which less is hidden than with --sequence-parallel"
            )
        notes = [] if self.problem is None else [f"overlap_train: {self.problem}"]
        return "\n".join([*notes, heading, rule, *lines, *([rule, *passes] if passes else [])])

    @property
    def heading(self) -> str:
        """A line that says at once, among the thousands that Megatron prints, whether overlap acts, and why not all of it."""
        where = f"{stage()}, layers counted within it: " if stage() else ""
        others, total = self._others, len(self.linears)
        counted = ", a layer of experts as one of them" * any(x.slot == "experts" for x in self.linears)
        line = f"overlap_train: {where}{total - others.total()} of {total} linears run our operators{counted}"
        if not others:
            return line
        mostly = ", mostly" if len(others) > 1 else ""
        return f"{line}; the other {others.total()}{mostly}: {others.most_common(1)[0][0]}"

    @property
    def _others(self) -> Counter[str]:
        """Why linears do not overlap -> how many."""
        others = (x for x in self.linears if x.is_collective or not x.overlapped_calls)
        return Counter("collective overlaps nothing" if x.is_collective else x.reason for x in others)

    def show(self) -> None:
        print(f"{self.heading}\n{self}", flush=True)
        if 0 < len(self.linears) == self._others.total():
            warn_user(self.heading)


def report(model: Model, problem: str | None = None) -> Report:
    """The parallel linears of a model, or of the chunks of a virtual pipeline, wrapped in DDP or not. Prints nothing."""
    attentions = {
        id(unwrapped(linear)): attention
        for attention in sharing_attentions(model) for part, linear in attention.named_children() if slot_of(part)
    }  # fmt: skip
    is_asked_for = any(each.overlap.config.experts for each in _overlapped(model))
    layers = [*named_expert_layers(model)] if is_asked_for else []
    # A row of the experts stands for their linears.
    theirs = {id(module) for _, layer in layers for module in layer.experts.modules()}
    linears = [(name, linear) for name, linear in named_linears(model) if id(linear) not in theirs]
    rows = [_row(name, linear, attentions.get(id(linear))) for name, linear in linears]
    return Report((*rows, *(_row_of_experts(name, layer) for name, layer in layers)), problem)


def _row_of_experts(name: str, layer: Any) -> LinearReport:
    row = LinearReport(name, "experts", *_NO_PASSES, "megatron", ())
    if not is_overlapped_layer(layer):
        return replace(row, reasons=(why_not_experts(layer) or "not enabled",))
    overlap = layer.overlap
    calls = tuple(sorted(overlap.fallback_calls.items()))
    row = replace(row, overlapped_calls=overlap.overlapped_calls, fallback_calls=calls)
    if overlap.plan is None:
        reason = overlap.fallback_calls.most_common(1)[0][0] if overlap.fallback_calls else "not called yet"
        return replace(row, method="megatron" if overlap.fallback_calls else "-", reasons=(reason,))
    ep, reasons, fp8 = f"(EP {layer.ep_group.size()})", [overlap.plan.fprop.reason], overlap.plan.config.fp8
    if asks_for_fp8(layer):
        reasons.append("not in fp8: experts" if fp8 == "off" else f"fp8 {fp8}")
    return replace(
        row, method=overlap.plan.fprop.method, reasons=(*reasons,),
        fprop=f"A2A(x) + GEMM, GEMM + A2A {ep}", dgrad=f"A2A(dy) + GEMM, GEMM + A2A {ep}", wgrad="GEMM with the received rows",
    )  # fmt: skip


def _row(name: str, linear: Any, attention: Any) -> LinearReport:
    """attention: under context parallelism, the one whose linear it is."""
    is_wrapped = attention is not None and linear not in attention.children()
    hides = exchanges_now(linear) and not is_wrapped
    slot = slot_of(name)
    exchange = None if attention is None or hides else _exchange_beside(linear, attention, is_wrapped)
    row = LinearReport(name, slot, *_NO_PASSES, "megatron", (), exchange=exchange)
    if not is_overlapped(linear):
        no_slot = "not one of qkv, proj, fc1, fc2, output" if slot is None else None
        return replace(row, reasons=(why_not(linear) or no_slot or "not enabled",))
    overlap = linear.overlap
    calls = tuple(sorted(overlap.fallback_calls.items()))
    row = replace(row, overlapped_calls=overlap.overlapped_calls, fallback_calls=calls)
    reason = standing_reason(linear, linear.weight, exchanges(linear) and not is_wrapped)
    if reason is None and not overlap.overlapped_calls and overlap.fallback_calls:
        reason = overlap.fallback_calls.most_common(1)[0][0]
    if reason is not None:
        return replace(row, reasons=(reason,))
    fprop, dgrad, wgrad = _passes(linear, hides)
    return _with_method(replace(row, fprop=fprop, dgrad=dgrad, wgrad=wgrad), linear, hides)


def _exchange_beside(linear: Any, attention: Any, is_wrapped: bool) -> str:
    if not isinstance(attention, UlyssesSelfAttention):
        return f"context parallelism: {why_not_ulysses(attention) or 'not enabled'}"
    apart: str | None
    if is_wrapped:
        apart = WRAPPED
    elif exchanges(linear):
        apart = linear.overlap.apart
    else:
        apart = standing_reason(linear, linear.weight, exchanges=True) if is_overlapped(linear) else None
    why = "" if apart is None else f": {apart}"
    return f"all-to-all over {attention.pg_collection.cp.size()} CP ranks not overlapped{why}"


def _with_method(row: LinearReport, linear: Any, hides: bool) -> LinearReport:
    """The row with method and reasons of the last overlapped call, from the plan by which it ran. hides: an exchange."""
    plan, run = linear.overlap.plan, linear.overlap.run
    if plan is None:
        return replace(row, method="-", reasons=("not called yet",))
    book = made_cache(made_domain(groups_of(linear)[-1]))
    if book is None:
        return replace(row, method="-", reasons=("symmetric memory has been freed (overlap_train.shutdown)",))
    if run is not None and book.runs.is_under_way(run):
        methods = ", ".join(run.methods)
        tries = f"auto: tries {methods}, until a linear has made {run.steps} calls (tune_steps)"
        return replace(row, method="in turn", reasons=(tries,))
    method = " / ".join(dict.fromkeys((plan.fprop.method, plan.dgrad.method)))
    reasons = tuple(dict.fromkeys((plan.fprop.reason, plan.dgrad.reason)))
    if plan.config.fp8 != "off":
        reasons += (f"fp8 {plan.config.fp8}{', scales of TransformerEngine' * has_delayed_scales(linear.config)}",)
    elif asks_for_fp8(linear):
        reasons += (not_in_fp8(linear) or "not in fp8",)
    parts = linear.overlap.parts if hides and divides_weights(linear) else None
    return replace(row, method=method, reasons=reasons, parts=parts)


def _passes(linear: Any, hides: bool) -> tuple[str, str, str]:
    """What fprop, dgrad and wgrad do, and over how many ranks: CP of the last call, TP. hides: an exchange."""
    over_tp, row = divides_weights(linear), is_row(linear)
    is_both = over_tp and hides
    sends = "A2A" if exchanges(linear) and (row if is_both else not over_tp) else "AG"
    kept = linear.overlap.config.gathered_input == "keep"
    again = "GEMM with x kept" if kept else f"{sends}(x) under dgrad, then GEMM"
    cp = "".join(f" (CP {group.size()})" for group in [*linear.overlap.groups][-1:])
    if is_both:
        tp = f"(TP {linear.tp_group.size()})"
        if row:
            return f"A2A(x){cp}, GEMM + RS {tp}", f"AG(dy) + GEMM {tp}, A2A{cp}", again
        return f"AG(x) + GEMM {tp}, A2A{cp}", f"A2A(dy){cp}, GEMM + RS {tp}", again
    if sends == "A2A":
        if row:
            return f"A2A(x) + GEMM{cp}", f"GEMM + A2A{cp}", again
        return f"GEMM + A2A{cp}", f"A2A(dy) + GEMM{cp}", "GEMM with the received dy"
    if not linear.sequence_parallel:
        return ("GEMM + AR", "GEMM", "GEMM") if row else ("GEMM", "GEMM + AR", "GEMM under the AR of dx")
    if row:
        return "GEMM + RS", "AG(dy) + GEMM", "GEMM with the gathered dy"
    return "AG(x) + GEMM", "GEMM + RS", again


def _lines(rows: Sequence[LinearReport]) -> list[str]:
    """The heading and the rows. A reason that is too wide goes on in the next line."""
    cells = [("linear", "method", "calls"), *((row.name, row.method, row.calls) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    indent = " " * (sum(widths) + 2 * len(widths))
    wrapper = textwrap.TextWrapper(max(WIDTH, len(indent) + REASON_WIDTH), break_on_hyphens=False)
    wrapper.subsequent_indent = indent
    lines = []
    for row, reason in zip(cells, ("reason", *(row.reason for row in rows)), strict=True):
        wrapper.initial_indent = "".join(f"{cell:{width}}  " for cell, width in zip(row, widths, strict=True))
        lines += wrapper.wrap(reason) or [wrapper.initial_indent.rstrip()]
    return lines


def _lines_of_passes(rows: Sequence[LinearReport]) -> list[str]:
    """A line for all linears that do the same. A slot whose linears differ is named by its linears."""
    passes = [(row, (row.fprop, row.dgrad, row.wgrad)) for row in rows if row.fprop != "-"]
    kinds = Counter(slot for slot, _ in {(row.slot, does) for row, does in passes})
    named: dict[tuple[str, str, str], list[str]] = {}
    for row, does in passes:
        named.setdefault(does, []).append(row.slot if row.slot and kinds[row.slot] == 1 else row.name)
    return [
        f"{', '.join(dict.fromkeys(names))}: fprop {fprop}; dgrad {dgrad}; wgrad {wgrad}"
        for (fprop, dgrad, wgrad), names in named.items()
    ]


def _folded(rows: Sequence[LinearReport], part: str) -> list[LinearReport]:
    """One row for linears that differ in one index of their names only: "decoder.layers.0-3.mlp.linear_fc1" of `layers`."""
    groups: dict[LinearReport, list[int]] = {}
    for row in rows:
        index = re.search(rf"\b{part}\.(\d+)\.", row.name)
        name = row.name if index is None else row.name.replace(index[0], f"{part}.*.", 1)
        groups.setdefault(replace(row, name=name), []).extend([int(index[1])] if index else [])
    ranges = {row: ",".join(in_ranges(sorted(numbers))) for row, numbers in groups.items()}
    return [replace(row, name=row.name.replace("*", those, 1)) for row, those in ranges.items()]


class FirstTable:
    """Prints the table of a model when it is called, once. Linears call it with their outputs' gradients."""

    def __init__(self, model: Model) -> None:
        self._chunks = chunks_of(model)
        for linear in _overlapped(self._chunks):
            linear.overlap.on_gradient = self

    def __call__(self, gradient: torch.Tensor | None = None) -> None:
        chunks, self._chunks = self._chunks, []
        for linear in _overlapped(chunks):
            linear.overlap.on_gradient = None
        if chunks and _prints():
            report(chunks).show()


def _overlapped(model: Model) -> list[Any]:
    """The overlapped linears and layers of experts."""
    return [*overlapped_linears(model), *overlapped_expert_layers(model)]


def print_table(model: Model) -> None:
    """Print the table of an enabled model now, unless it has been printed."""
    for linear in _overlapped(model):
        if linear.overlap.on_gradient is not None:
            linear.overlap.on_gradient()


def _prints() -> bool:
    """Whether this rank speaks for the ranks whose table is the same: global rank 0, and the first rank of each other stage."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        return True
    if not stage():
        return False
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    return parallel_state.get_tensor_model_parallel_rank() == 0 and replica == 0


def stage() -> str:
    """For example "pipeline stage 0 of 2"; empty without a pipeline."""
    if not parallel_state.model_parallel_is_initialized():
        return ""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    return f"pipeline stage {parallel_state.get_pipeline_model_parallel_rank()} of {stages}" if stages > 1 else ""


def counters(model: Model) -> dict[str, float]:
    """Counters of overlapped linears by name, for Megatron's TensorBoard and W&B writers.

        overlap_train/<slot>/overlapped_calls   forward calls that overlapped, of all linears of that slot, or of experts
        overlap_train/<slot>/fallback_calls     forward calls that took Megatron's own path
        overlap_train/symmetric_mib             symmetric memory of this rank, in MiB

    Calls are counted from the start of the process, recomputed ones included. With a pipeline Megatron writes those of the last
    stage.
    """
    values: Counter[str] = Counter()
    linears, experts = overlapped_linears(model), overlapped_expert_layers(model)
    for overlap in (each.overlap for each in (*linears, *experts)):
        values[f"overlap_train/{overlap.slot}/overlapped_calls"] += overlap.overlapped_calls
        values[f"overlap_train/{overlap.slot}/fallback_calls"] += overlap.fallback_calls.total()
    calling = [linear for linear in linears if linear.overlap.overlapped_calls]  # the others hold no memory
    groups = {group for linear in calling for group in groups_of(linear)}
    groups |= {layer.ep_group for layer in experts if layer.overlap.overlapped_calls}
    domains = [domain for group in groups if (domain := made_domain(group)) is not None and domain.heap is not None]
    return {**values, "overlap_train/symmetric_mib": sum(domain.layout.nbytes for domain in domains) / 2**20}
