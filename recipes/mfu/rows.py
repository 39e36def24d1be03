"""One row for each model and variant: what JSON keeps, and the columns of the Markdown table.

The columns up to TFLOP/s are those of Megatron-Bridge's performance summary, in its order; what is compared here comes behind.
"""

from __future__ import annotations

import math
from typing import Any

from gpt.settings import architecture_of
from mfu.flops import step_flops
from mfu.measuring import Measured, baseline_of
from mfu.plan import AGAIN, ASYNC_TP, MEGATRON, MEGATRON_GRAPH, OVERLAP, OVERLAP_GRAPH, USERBUFFERS, Plan, is_graph
from overlap_train.bench.output import Column, Row

GIB, MIB = 1 << 30, 1 << 20
LABELS = {
    MEGATRON: "Megatron-Core",
    OVERLAP: "overlap_train",
    OVERLAP_GRAPH: "overlap_train, CUDA graph",
    MEGATRON_GRAPH: "Megatron-Core, CUDA graph",
    ASYNC_TP: "PyTorch async-TP",
    USERBUFFERS: "TransformerEngine userbuffers",
}


def label_of(name: str) -> str:
    """How a variant is called in tables and pictures."""
    variant = name.removesuffix(AGAIN)
    return LABELS.get(variant, f"overlap_train {variant}") + name[len(variant) :]


def rows_of(plan: Plan, measured: Measured, world_size: int, peak: float | None, precision: str) -> list[Row]:
    """A row for each variant of the plan; figures of one that did not run are None, and `status` says why."""
    return [_row(name, measured, world_size, peak, precision) for name in plan.names]


def _row(name: str, measured: Measured, world_size: int, peak: float | None, precision: str) -> Row:
    settings, architecture = measured.settings, architecture_of(measured.settings)
    replicas = world_size // settings.tp
    return {
        "model": settings.model, "title": architecture.title, "layers": settings.num_layers, "variant": name,
        "gpus": world_size, "precision": precision, "gbs": settings.global_batch_size, "mbs": settings.micro_batch_size,
        "seq": settings.seq_length, "fsdp": 0, "tp": settings.tp, "pp": 1, "cp": 1, "vp": 1, "ep": 1,
        "ga": settings.global_batch_size // (settings.micro_batch_size * replicas),
        "deterministic": bool(settings.deterministic),
        "status": measured.absent.get(name, "ran"),
        **_speed(name, measured, world_size, peak),
        **_exposed(name, measured),
        **_losses(name, measured),
        **_memory(name, measured),
    }  # fmt: skip


def _speed(name: str, measured: Measured, world_size: int, peak: float | None) -> Row:
    """Times are medians over rounds. MFU is a fraction of the peak."""
    keys = ("step_ms", "step_ms_rounds", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "speed_up")
    flops = {"flops_per_step": step_flops(measured.settings), "peak_tflops": peak}
    if name not in measured.step_ms:
        return dict.fromkeys(keys) | flops
    milliseconds = measured.median_ms(name)
    per_gpu = 1e-3 * milliseconds * world_size
    tokens = measured.settings.global_batch_size * measured.settings.seq_length
    tflops = flops["flops_per_step"] / per_gpu / 1e12
    values = (
        milliseconds,
        measured.step_ms[name],
        tokens / per_gpu,
        tflops,
        None if peak is None else tflops / peak,
        measured.median_ms(baseline_of(measured)) / milliseconds,
    )
    return dict(zip(keys, values, strict=True)) | flops


def _exposed(name: str, measured: Measured) -> Row:
    """Milliseconds a step; the last is a fraction of what the baseline leaves exposed. Of a graph only the first is known."""
    keys = ("forward_backward_ms", "alone_ms", "exposed_ms", "exposed_of_baseline")
    if name not in measured.passes_ms:
        return dict.fromkeys(keys)
    passes, exposed, baseline = (
        measured.passes_ms[name],
        measured.exposed_ms(name),
        measured.exposed_ms(baseline_of(measured)),
    )
    ratio = exposed / baseline if exposed is not None and baseline is not None and baseline > 0 else None
    return dict(zip(keys, (passes, measured.alone_ms.get(name), exposed, ratio), strict=True))


def _losses(name: str, measured: Measured) -> Row:
    """Nats per byte. The difference is the largest from the baseline's at any step; `same_bits` is of a repetition."""
    keys = ("first_loss", "last_loss", "loss_difference", "same_bits")
    if name not in measured.losses:
        return dict.fromkeys(keys)
    losses = measured.losses[name]
    difference = largest_difference(losses, measured.losses[baseline_of(measured)])
    return dict(zip(keys, (losses[0], losses[-1], difference, measured.same.get(name)), strict=True))


def _memory(name: str, measured: Measured) -> Row:
    """Of one rank: bytes that stay, the most during a step, and the symmetric heap; and how often linears overlapped."""
    overlapped, fallen_back = measured.calls.get(name, (None, None))
    return {
        "held_bytes": measured.held_bytes.get(name),
        "peak_bytes": measured.peak_bytes.get(name),
        "symmetric_bytes": measured.symmetric_bytes.get(name),
        "overlapped_calls": overlapped,
        "fallen_back_calls": fallen_back,
    }


def largest_difference(losses: list[float], others: list[float]) -> float:
    """Over all steps; NaN if either has one."""
    differences = [abs(a - b) for a, b in zip(losses, others, strict=True)]
    return math.nan if any(math.isnan(d) for d in differences) else max(differences)


def _title(row: Row) -> str:
    status = "" if row["status"] == "ran" else f" ({row['status']})"
    return f"{row['title']}, {row['layers']} layers: {label_of(row['variant'])}{status}"


def _scaled(row: Row, key: str, factor: float) -> Any:
    return row[key] and row[key] * factor


def _rounded(row: Row, key: str) -> Any:
    return row[key] and round(row[key])


COLUMNS: tuple[Column, ...] = (
    ("Model", _title),
    ("#-GPUs", lambda row: row["gpus"]),
    ("Precision", lambda row: row["precision"]),
    ("GBS", lambda row: row["gbs"]),
    ("MBS", lambda row: row["mbs"]),
    ("Sequence Length", lambda row: row["seq"]),
    ("FSDP", lambda row: row["fsdp"]),
    ("TP", lambda row: row["tp"]),
    ("PP", lambda row: row["pp"]),
    ("CP", lambda row: row["cp"]),
    ("VP", lambda row: row["vp"]),
    ("EP", lambda row: row["ep"]),
    ("GA", lambda row: row["ga"]),
    ("Tokens / sec / GPU", lambda row: _rounded(row, "tokens_per_s_per_gpu")),
    ("Model TFLOP / sec / GPU", lambda row: row["tflops_per_gpu"]),
    ("MFU %", lambda row: _scaled(row, "mfu", 100.0)),
    ("Step ms", lambda row: row["step_ms"]),
    ("Speed-up", lambda row: row["speed_up"]),
    ("Forward + backward ms", lambda row: row["forward_backward_ms"]),
    ("Exposed comm ms", lambda row: row["exposed_ms"]),
    ("Exposed, of baseline's %", lambda row: _scaled(row, "exposed_of_baseline", 100.0)),
    ("Last loss", lambda row: row["last_loss"]),
    ("Loss difference", lambda row: None if row["loss_difference"] is None else f"{row['loss_difference']:.1e}"),
    ("Peak GiB", lambda row: _scaled(row, "peak_bytes", 1 / GIB)),
    ("Symmetric MiB", lambda row: _scaled(row, "symmetric_bytes", 1 / MIB)),
)  # fmt: skip

# What fits on a screen.
SCREEN_COLUMNS = tuple(column for column in COLUMNS if column[0] not in {name for name, _ in COLUMNS[1:13]})


def notes_of(plan: Plan, rows: list[Row]) -> list[str]:
    """What a reader of the table must know, and what it does not show."""
    peak = next((row["peak_tflops"] for row in rows if row["peak_tflops"]), None)
    notes = [
        f"MFU against {peak:g} TFLOP/s a GPU" if peak else "no MFU: no peak is known for this device (--peak-tflops)",
        "model FLOPs: matrix products of forward and backward, causal half of attention, no recomputation "
        "(Megatron-LM's num_floating_point_operations)",
        f"step: {plan.steps} steps or more in rounds of {plan.round_steps}, variants in turns; median of rounds, slowest rank",
        "exposed: forward and backward, less the same with the linears' communication left out and all products by cuBLAS",
    ]
    for row in rows:
        if row["same_bits"] is not None:
            verdict = "the same bits" if row["same_bits"] else "other bits"
            notes.append(
                f"{row['model']}: {row['variant']}: losses and weights have {verdict} as those of the first run; "
                f"from the baseline's losses at most {row['loss_difference']:.1e}"
            )
    if any(is_graph(row["variant"]) for row in rows):
        notes.append(
            "CUDA graph: forward and backward are replayed, the optimizer is not; exposed communication is unknown, the calls of "
            "linears are those before the first replay, and the graph's memory counts"
        )
    if plan.is_bitwise:
        notes.append("deterministic kernels: these times are not those of ordinary training")
    return notes
