"""Pictures of a comparison, drawn from the JSON files of its folder: MFU bars, loss curves, a layer's timeline."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mfu.layer_timeline import PASSES
from mfu.names import AGAIN, MEGATRON, OVERLAP, is_graph, loss_baseline, speed_baseline
from overlap_train.config import METHODS
from overlap_train.tools.measure.results import Row
from overlap_train.tools.pictures.bars import Bar, Scale, bars, has_bound
from overlap_train.tools.pictures.held_up import remarks
from overlap_train.tools.pictures.lanes import (
    KINDS,
    NOTE,
    Span,
    draw_lanes,
    label_lanes,
    length_of,
    stored_inside,
    unit_of,
)
from overlap_train.tools.pictures.machine import gpus_of
from overlap_train.tools.pictures.style import PERFECT, canvas, in_order, look_of, marks, save

AGREE = "The curves should agree: all variants have the same model, global batches and seed."
GRAPHS = "A CUDA graph is compared with a graph. How much of it is exposed is not known."
BY_METHOD = "overlap_train with one method for all linears; by default it chooses for each."
NOISE = " Dashed: trained a second time."
RISES = (
    "The loss rises first because weights are random and the learning rate is full after a few steps. This amplifies",
    "rounding differences; training Megatron-Core twice (--repeat megatron) shows by how much.",
)


def draw(folder: Path) -> list[Path]:
    """Draw mfu.json, losses.json and timeline.json of a folder; returns the images' paths.

    Raises:
        ValueError: matplotlib is not installed, or the folder has no mfu.json.
    """
    if not (folder / "mfu.json").exists():
        raise ValueError(f"{folder}: no mfu.json; run compare_mfu.py with --out {folder}")
    documents = [
        json.loads((folder / name).read_text()) if (folder / name).exists() else {"rows": []}
        for name in ("mfu.json", "losses.json", "timeline.json")
    ]
    rows, losses, spans = (_by_model(document["rows"]) for document in documents)
    found = documents[0]["hardware"]
    drawn = [draw_speed(documents[0]["rows"], found, folder / "mfu.png")]
    for key, members in rows.items():
        name, title = f"{key[0]}-{key[1]}-layers", title_of(members[0])
        if curves := {row["variant"]: row["losses"] for row in losses.get(key, ())}:
            drawn.append(draw_losses(curves, title, folder / f"loss-{name}.png"))
        if key in spans:
            heading = f"One layer of {title}, {members[0]['gpus']} x {found.get('device')}"
            drawn.append(draw_timeline(spans[key], heading, folder / f"timeline-{name}.png"))
    return drawn


def _by_model(rows: Sequence[Row]) -> dict[tuple[str, int], list[Row]]:
    models: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        models.setdefault((row["model"], row["layers"]), []).append(row)
    return models


def title_of(row: Row) -> str:
    """What a picture calls a model: its name, and how it was trained."""
    ulysses = f", CP {row['cp']}" if row["cp"] > 1 else ""
    return f"{row['title']}, {row['layers']} layers, s = {row['seq']}, TP {row['tp']}{ulysses}"


def draw_speed(rows: Sequence[Row], found: Mapping[str, Any], path: Path) -> Path:
    """MFU of each model and variant, or tokens/s of a rank where no peak is known. found: what results.hardware has found."""
    measured = [row for row in rows if row["step_ms"] is not None and not row["variant"].endswith(AGAIN)]
    has_peak = all(row["mfu"] is not None for row in measured)
    key, factor, what = ("mfu", 100.0, "MFU") if has_peak else ("tokens_per_s_per_gpu", 1.0, "tokens/s")
    unit = f"{what}, % of {measured[0]['peak_tflops']:g} TFLOP/s a GPU" if has_peak else f"{what} of a rank"
    methods = dict.fromkeys(row["variant"] for row in measured if row["variant"] in METHODS)
    baseline = look_of(speed_baseline({row["variant"] for row in measured}) or MEGATRON).label
    panels = {title_of(some[0]): bars_of(some, key, factor) for some in _by_model(measured).values()}
    perfect = f" {PERFECT.capitalize()}: {look_of(OVERLAP).label}'s step without its exposed communication."
    header = (
        f"Training on {gpus_of(found, measured[0]['gpus'])}: {what}, and speed-up of a step over {baseline}",
        "Higher is better." + perfect * has_bound(panels),
        *((f"{', '.join(methods)}: {BY_METHOD}",) if methods else ()),
        *((GRAPHS,) if any(is_graph(row["variant"]) for row in measured) else ()),
    )
    return bars(panels, header, Scale(unit), path)


def bars_of(rows: Sequence[Row], key: str, factor: float) -> list[Bar]:
    """The bars of one model. Each names the speed-up of its step over the baseline's, eager over eager and graph over graph.

    All have the bound of `overlap`, the variant that a user runs. The bound of a CUDA graph is not known.
    """
    known, found = {row["variant"]: row for row in rows}, []
    ours = known.get(OVERLAP)
    bound = factor * ours[key] * _without_exposed(ours) if ours is not None and ours["exposed_ms"] is not None else None
    for name in in_order(known):
        row, value = known[name], factor * known[name][key]
        baseline = speed_baseline(known, name)
        is_rated = baseline not in (None, name)
        text = f"{value:.1f}" + (f"  ({known[baseline]['step_ms'] / row['step_ms']:.2f}x)" if is_rated else "")
        found.append(Bar(look_of(name).label, name, value, text, None if is_graph(name) else bound))
    return found


def _without_exposed(row: Row) -> float:
    """How many times faster the step of a row would be without its exposed communication."""
    return row["step_ms"] / (row["step_ms"] - max(0.0, row["exposed_ms"]))


def draw_losses(losses: dict[str, list[float]], title: str, path: Path) -> Path:
    """Above, the curves. Below, how far each is from the baseline's; a baseline trained twice shows how far noise goes."""
    baseline = loss_baseline(losses)
    first, highest = losses[baseline][0], max(losses[baseline])
    names = tuple(in_order(name for name in losses if not name.endswith(AGAIN)))
    header = (f"Loss of {title}", AGREE + NOISE * (len(names) < len(losses)), *RISES * (highest > 1.1 * first))
    figure, grid = canvas(2, 1, 2.4, header, names, "-", sharex=True, height_ratios=(2, 1))
    for name, values in losses.items():
        look, steps = look_of(name), range(1, len(values) + 1)
        # the baseline is wide, so that it is seen under curves that are equal to it
        style: dict[str, Any] = {"color": look.colour, "linewidth": 3 if name == baseline else 1.3}
        again = {"linestyle": "--"}
        style |= again if name.endswith(AGAIN) else {**marks(name), "markevery": max(1, len(values) // 18)}
        differences = [value - other for value, other in zip(values, losses[baseline], strict=True)]
        for axes, curve in zip(grid.flat, (values, differences), strict=True):
            axes.plot(steps, curve, markersize=5, **style)
            axes.grid(axis="y")
            axes.xaxis.get_major_locator().set_params(integer=True)
    grid[0][0].set_ylabel("loss, nats per byte")
    grid[1][0].set(xlabel="step", ylabel=f"less that of\n{look_of(baseline).label}")
    return save(figure, path)


def draw_timeline(spans: Sequence[Span], title: str, path: Path) -> Path:
    """A line for each variant, forward on the left and backward on the right."""
    variants = in_order({span["variant"] for span in spans})
    calls = {(variant, name): _part(spans, variant, name) for variant in variants for name in PASSES}
    lengths = [max(length_of(calls[variant, name]) for variant in variants) for name in PASSES]
    widths = [1.03 * max(length, 0.65 * max(lengths)) for length in lengths]  # one scale, and room for the titles
    header, unit = (title, "Shorter is better. " + NOTE, *remarks(calls.values())), unit_of(calls.values())
    height = 1.1 + 0.4 / len(variants)  # the axis below the last one takes room
    figure, grid = canvas(2 * len(variants), 2, height, header, KINDS, sharex="col", width_ratios=widths)
    for line, variant in zip(grid, variants, strict=True):
        for axes, name in zip(line, PASSES, strict=True):
            part = calls[variant, name]
            heading = f"{look_of(variant).label}:\n{name}" if name == PASSES[0] else name
            draw_lanes(axes, heading, part, stored_inside(part, variant), unit)
    for axes, width in zip(grid[0], widths, strict=True):
        axes.set_xlim(-0.01 * width, width)
    label_lanes(grid, unit)
    return save(figure, path)


def _part(spans: Sequence[Span], variant: str, name: str) -> list[Span]:
    """What one variant did in one pass."""
    return [span for span in spans if (span["variant"], span["pass"]) == (variant, name)]
