"""Pictures of a comparison, drawn from its rows: MFU bars, loss curves, one layer's timeline. matplotlib is the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mfu.layer_timeline import PASSES, Span, exposed_parts
from mfu.plan import AGAIN, MEGATRON
from mfu.rows import label_of
from overlap_train.bench.output import Row
from overlap_train.bench.plots import bars, save

COLOURS = {"gemm": "#4c9f70", "compute": "#b9d8c4", "communication": "#3b6fb6", "waiting": "#3b6fb6"}
EXPOSED = "#d1495b"


def draw_speed(rows: Sequence[Row], path: Path) -> Path:
    """MFU of each model and variant, or tokens/s/GPU where no peak is known. The line: if all communication were hidden."""
    measured = [row for row in rows if row["step_ms"] is not None and not row["variant"].endswith(AGAIN)]
    has_peak = all(row["mfu"] is not None for row in measured)
    key, factor = ("mfu", 100.0) if has_peak else ("tokens_per_s_per_gpu", 1.0)
    models: dict[tuple[str, int], list[Row]] = {}
    for row in measured:
        models.setdefault((row["model"], row["layers"]), []).append(row)
    labels = [
        f"{some[0]['title']}, {some[0]['layers']} layers\ns = {some[0]['seq']}, TP {some[0]['tp']}"
        for some in models.values()
    ]
    series = {
        label_of(name): [_figure(some, name, key, factor) for some in models.values()]
        for name in dict.fromkeys(row["variant"] for row in measured)
    }
    bounds = [max(factor * row[key] * _without_exposed(row) for row in some) for some in models.values()]
    peak = measured[0]["peak_tflops"]
    title = (
        f"MFU in % of {peak:g} TFLOP/s; bound: nothing exposed" if has_peak else "tokens/s/GPU; bound: nothing exposed"
    )
    return bars(labels, series, bounds, title, path)


def _figure(rows: Sequence[Row], name: str, key: str, factor: float) -> float | None:
    return next((factor * row[key] for row in rows if row["variant"] == name), None)


def _without_exposed(row: Row) -> float:
    """How much faster the step were."""
    exposed = row["exposed_ms"] or 0.0
    return row["step_ms"] / (row["step_ms"] - exposed) if exposed > 0 else 1.0


def draw_losses(losses: dict[str, list[float]], title: str, path: Path) -> Path:
    """Above, the curves. Below, how far each is from the baseline's; a baseline trained twice shows how far noise goes."""
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(2, 1), layout="constrained"
    )
    baseline = MEGATRON if MEGATRON in losses else next(iter(losses))
    steps = range(1, len(losses[baseline]) + 1)
    for number, (name, values) in enumerate(losses.items()):
        style = {"linestyle": "--" if name.endswith(AGAIN) else "-", "color": f"C{number}", "linewidth": 1.2}
        above.plot(steps, values, label=label_of(name), **style)
        if name != baseline:
            differences = [value - other for value, other in zip(values, losses[baseline], strict=True)]
            below.plot(steps, differences, label=label_of(name), **style)
    below.axhline(0.0, color="black", linewidth=0.8)
    above.set(title=title, ylabel="loss, nats per byte")
    below.set(xlabel="step", ylabel=f"loss less that of\n{label_of(baseline)}")
    above.legend(fontsize=8)
    return save(figure, path)


def draw_timeline(spans: dict[str, list[Span]], title: str, path: Path) -> Path:
    """A line for each variant, forward on the left and backward on the right; red is communication that nothing hides."""
    from matplotlib import pyplot

    widths = [max(_length(some, name) for some in spans.values()) for name in PASSES]
    figure, grid = pyplot.subplots(
        len(spans),
        2,
        figsize=(12, 1.6 * len(spans) + 1),
        squeeze=False,
        sharex="col",
        width_ratios=widths,
        layout="constrained",
    )
    for lines, (variant, some) in zip(grid, spans.items(), strict=True):
        for axes, name in zip(lines, PASSES, strict=True):
            _draw_pass(axes, f"{label_of(variant)}, {name}", [span for span in some if span["pass"] == name])
        lines[1].set_yticks([])
    for axes in grid[-1]:
        axes.set_xlabel("microseconds")
    figure.suptitle(f"{title}: green products, light green other kernels, blue communication, red exposed", fontsize=10)
    return save(figure, path)


def _length(spans: Sequence[Span], name: str) -> float:
    return max((span["end"] for span in spans if span["pass"] == name), default=1.0)


def _draw_pass(axes: Any, title: str, spans: Sequence[Span]) -> None:
    for span in spans:
        lane = 1 if span["kind"] in ("gemm", "compute") else 0
        axes.broken_barh([(span["start"], span["end"] - span["start"])], (lane, 0.8), color=COLOURS[span["kind"]])
    parts = exposed_parts(spans)
    axes.broken_barh([(start, end - start) for start, end in parts], (0, 0.8), color=EXPOSED)
    axes.set_yticks([0.4, 1.4], ["copies, NCCL", "kernels"])
    axes.set_ylim(-0.1, 1.9)
    length, bare = max((span["end"] for span in spans), default=0.0), _covered(parts)
    axes.set_title(f"{title}: {length:.0f} µs, {bare:.0f} µs exposed", fontsize=9, loc="left")


def _covered(parts: Sequence[tuple[float, float]]) -> float:
    """Length of the union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(parts):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
