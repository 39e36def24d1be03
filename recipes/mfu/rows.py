"""One row for each model and variant: what JSON keeps, and the tables on the screen and in Markdown.

Set-up and throughput have the names of Megatron-Bridge's performance summary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from mfu.flops import step_flops
from mfu.measured import Measured
from mfu.names import DATA_PARALLEL, bare, is_graph, is_transformer_engine, loss_baseline
from mfu.plan import Plan
from overlap_train.config import METHODS
from overlap_train.tools.measure.results import Column, Columns, Row
from overlap_train.tools.pictures.style import look_of


def label_of(name: str) -> str:
    """How a variant is called in tables; one of ours that is a method is named with it."""
    variant = bare(name)
    label = look_of(variant).label
    return (f"overlap_train {label}" if variant in METHODS else label) + name[len(variant) :]


def rows_of(plan: Plan, measured: Measured, world_size: int, peak: float | None, precision: str) -> list[Row]:
    """A row for each variant of the plan; figures of one that did not run are None, and `status` says why."""
    return [_row(name, measured, world_size, peak, precision) for name in plan.names]


def _row(name: str, measured: Measured, world_size: int, peak: float | None, precision: str) -> Row:
    settings = measured.settings
    overlapped, fallen_back = measured.calls.get(name, (None, None))
    return {
        "model": settings.model, "title": settings.title, "layers": settings.num_layers, "variant": name,
        "gpus": world_size, "precision": precision, "gbs": settings.global_batch_size, "mbs": settings.micro_batch_size,
        "seq": settings.seq_length, "tp": settings.tp, "cp": settings.cp,
        "ga": settings.global_batch_size // (settings.micro_batch_size * (world_size // settings.replica_ranks)),
        "deterministic": bool(settings.deterministic),
        "status": measured.absent.get(name, "ran"),
        "flops_per_step": step_flops(settings), "peak_tflops": peak,
        **_speed(name, measured, world_size, peak),
        **_exposed(name, measured),
        **_losses(name, measured),
        # of one rank
        "held_bytes": measured.held_bytes.get(name), "peak_bytes": measured.peak_bytes.get(name),
        "symmetric_bytes": measured.symmetric_bytes.get(name),
        "overlapped_calls": overlapped, "fallen_back_calls": fallen_back,
    }  # fmt: skip


def _speed(name: str, measured: Measured, world_size: int, peak: float | None) -> Row:
    """How fast a variant is. Times are medians over rounds; MFU is a fraction of the peak."""
    if name not in measured.step_ms:
        return dict.fromkeys(("step_ms", "step_ms_rounds", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "speed_up"))
    settings, milliseconds = measured.settings, measured.median_ms(name)
    gpu_seconds = 1e-3 * milliseconds * world_size
    tflops = step_flops(settings) / gpu_seconds / 1e12
    return {
        "step_ms": milliseconds,
        "step_ms_rounds": measured.step_ms[name],
        "tokens_per_s_per_gpu": settings.global_batch_size * settings.seq_length / gpu_seconds,
        "tflops_per_gpu": tflops,
        "mfu": None if peak is None else tflops / peak,
        "speed_up": measured.speed_up(name),
    }


def _exposed(name: str, measured: Measured) -> Row:
    """Milliseconds that a step leaves exposed, and their fraction of the baseline's. A graph's are not known."""
    exposed, whole = measured.exposed_ms(name), measured.exposed_ms(measured.baseline)
    return {
        "forward_backward_ms": measured.passes_ms.get(name),
        "alone_ms": measured.alone_ms.get(name),
        "exposed_ms": exposed,
        "exposed_of_baseline": exposed / whole if exposed is not None and whole is not None and whole > 0 else None,
    }


def _losses(name: str, measured: Measured) -> Row:
    """Losses in nats per byte. loss_difference: the largest from the baseline's at any step. same_bits: of a repetition only."""
    if name not in measured.losses:
        return dict.fromkeys(("first_loss", "last_loss", "loss_difference", "same_bits"))
    losses = measured.losses[name]
    return {
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "loss_difference": largest_difference(losses, measured.losses[loss_baseline(measured.losses)]),
        "same_bits": measured.same.get(name),
    }


def largest_difference(losses: list[float], others: list[float]) -> float:
    """The largest difference of two losses at one step; NaN if there is a NaN."""
    differences = [abs(a - b) for a, b in zip(losses, others, strict=True)]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def _model(row: Row) -> str:
    return f"{row['title']}, {row['layers']} layers"


def _title(row: Row) -> str:
    return f"{_model(row)}: {label_of(row['variant'])}"


def _column(heading: str, key: str, factor: float = 1.0, form: str = "") -> Column:
    """A figure of the row times `factor`; a table shows None as a dash."""

    def value(row: Row) -> Any:
        figure = row[key] if row[key] is None or factor == 1.0 else row[key] * factor
        return figure if figure is None or not form else format(figure, form)

    return heading, value


# Four tables, each narrow enough for a page. The first has a row a model, the others have one a variant.
SETUP: Columns = (
    ("Model", _model),
    _column("#-GPUs", "gpus"),
    _column("Precision", "precision"),
    _column("GBS", "gbs"),
    _column("MBS", "mbs"),
    _column("Sequence Length", "seq"),
    _column("TP", "tp"),
    _column("CP", "cp"),
    _column("GA", "ga"),
)
SPEED: Columns = (
    ("Model", _title),
    _column("Step ms", "step_ms"),
    _column("Speed-up", "speed_up"),
    _column("MFU %", "mfu", 100.0),
    _column("Model TFLOP / sec / GPU", "tflops_per_gpu"),
    _column("Tokens / sec / GPU", "tokens_per_s_per_gpu", form=".0f"),
)
COMMUNICATION: Columns = (
    ("Model", _title),
    _column("Forward + backward ms", "forward_backward_ms"),
    _column("Exposed comm ms", "exposed_ms"),
    _column("Exposed, of baseline's %", "exposed_of_baseline", 100.0),
)
OUTCOME: Columns = (
    ("Model", _title),
    _column("Last loss", "last_loss"),
    _column("Loss difference", "loss_difference", form=".1e"),
    _column("Peak GiB", "peak_bytes", 2**-30),
    _column("Symmetric MiB", "symmetric_bytes", 2**-20),
)


def tables_of(rows: Sequence[Row]) -> list[tuple[list[Row], Columns]]:
    """The tables of a comparison, each as its rows and columns."""
    models = {(row["model"], row["layers"]): row for row in rows}
    return [(list(models.values()), SETUP), *((list(rows), columns) for columns in (SPEED, COMMUNICATION, OUTCOME))]


# (which variants, what a reader of their table must know)
NOTES: Sequence[tuple[Callable[[str], bool], str]] = (
    (lambda name: name == DATA_PARALLEL,
     f"{look_of(DATA_PARALLEL).label}: the same global batches without context parallelism, whole sequences on each rank; losses "
     "are compared with its"),
    (is_transformer_engine,
     "TransformerEngine's modules: exposed communication is unknown; weight gradients are returned to DDP"),
    (is_graph, "CUDA graph: forward and backward are replayed, the optimizer is not; exposed communication is unknown, the calls "
     "of linears are those before the first replay, and the graph's memory counts"),
)  # fmt: skip


# Only the step that leaves NCCL's all-to-all out makes its copies, too, where ours needs none.
BELOW_0 = "exposed below 0: noise, or under TP x Ulysses the copies around NCCL's all-to-all, which ours does not make"


def notes_of(plan: Plan, rows: list[Row]) -> list[str]:
    """What a reader of the table must know, and what it does not show."""
    peak = next((row["peak_tflops"] for row in rows if row["peak_tflops"]), None)
    names = {row["variant"] for row in rows}
    return [
        f"MFU against {peak:g} TFLOP/s a GPU" if peak else "no MFU: no peak is known for this device (--peak-tflops)",
        "model FLOPs: matrix products of forward and backward, causal half of attention, no recomputation "
        "(Megatron-LM's num_floating_point_operations)",
        f"step: {plan.steps} steps or more in rounds of {plan.round_steps}, variants in turns; median of rounds, slowest rank",
        "exposed: forward and backward, less the same with the linears' communication left out and all products by cuBLAS",
        f"loss difference: the largest of {plan.trained_steps} steps, in nats; --repeat shows how far two equal runs differ",
        *(f"{_title(row)} did not run: {row['status']}" for row in rows if row["status"] != "ran"),
        *[BELOW_0] * any((row["exposed_ms"] or 0) < 0 for row in rows),
        *(_repeated(row) for row in rows if row["same_bits"] is not None),
        *(text for applies, text in NOTES if any(map(applies, names))),
        *["deterministic kernels: these times are not those of ordinary training"] * plan.bitwise,
    ]


def _repeated(row: Row) -> str:
    verdict = "the same bits" if row["same_bits"] else "other bits"
    return (
        f"{row['model']}: {row['variant']}: losses and weights have {verdict} as those of the first run; "
        f"from the baseline's losses at most {row['loss_difference']:.1e}"
    )
