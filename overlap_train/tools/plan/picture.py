"""Pictures of a plan: its timeline in the look of the measured one, and predicted against measured times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from ...planning.machines import System
from ..pictures.lanes import KINDS, draw_lanes, label_lanes, stored_inside, unit_of
from ..pictures.style import LOOKS, canvas, in_order, look_of, save
from .check import WORST, Compared, mean_error
from .inputs import EXCHANGED, Strategy
from .prediction import FORWARD, Prediction
from .trace import as_recorded

TICKS = (0.03, 0.1, 0.3, 1, 3, 10, 30, 100)  # milliseconds
DRAWN = ("fc1", "fc2")  # as the measured picture has them
NOTE = "Planned, not measured. Exposed: the GPU computes nothing meanwhile. What a kernel waits inside itself counts as GEMM."


def draw_timeline(predictions: Sequence[Prediction], system: System, strategy: Strategy, path: Path) -> Path:
    """One forward call of two linears by each method, as `bench timeline` draws what it has recorded. Of Ulysses those that
    exchange: the others communicate nothing."""
    drawn = DRAWN if strategy.cp == 1 else EXCHANGED
    shown = [p for p in predictions if p.linear in drawn and p.direction == FORWARD]
    order = in_order(shown[0].by_method)
    across = f" on {strategy.nodes} nodes" if strategy.nodes > 1 else ""
    header = (
        f"One forward call by each method, planned for {strategy.ranks} x {system.name.upper()}{across}",
        "Shorter is better. " + "; ".join(f"{p.linear}: {p.m} x {p.n} x {p.k} on each rank" for p in shown) + "; bf16.",
        NOTE,
    )
    figure, grid = canvas(len(order) * len(shown), len(shown), 1.05, header, (*KINDS, "bound"), sharex="col")
    calls = {
        (p.linear, method): as_recorded(p.by_method[method].timeline, without_copies=method == "direct")
        for p in shown
        for method in order
    }
    unit = unit_of(calls.values())
    for line, method in zip(grid, order, strict=True):
        for axes, p in zip(line, shown, strict=True):
            spans = calls[p.linear, method]
            draw_lanes(axes, f"{p.linear} by {method}:", spans, stored_inside(spans, method), unit)
            axes.axvline(p.bound_us, color="black", linewidth=2)
    label_lanes(grid, unit)
    return save(figure, path)


def draw_check(compared: Sequence[Compared], path: Path) -> Path:
    """Predicted over measured time, against the measured time; a panel for each record."""
    methods = [one for one in compared if one.is_method and one.what in LOOKS]
    records, names = (
        list(dict.fromkeys(one.record for one in methods)),
        in_order({one.what for one in methods}),
    )
    header = (
        f"Planned time over measured time: {len(methods)} rows, {mean_error(methods):.1%} off in the mean",
        f"1 is right; grey: within {WORST:.0%}. Hollow: shapes that the planner's figures were fitted to.",
    )
    figure, grid = canvas(len(records), len(records), 3.2, header, tuple(names), sharey=True)
    for axes, record in zip(grid[0], records, strict=True):
        axes.axhspan(1 - WORST, 1 + WORST, color="#EEEEEE", zorder=0)
        axes.axhline(1, color="black", linewidth=1)
        for one in methods:
            if one.record == record:
                look = look_of(one.what)
                fill = {"markerfacecolor": "white"} if one.is_fitted else {}
                axes.plot(one.measured_us / 1e3, 1 + one.error, look.marker, color=look.colour, markersize=5, **fill)
        axes.set(xscale="log", title=record, xlabel="measured, ms", ylim=_height(methods))
        axes.minorticks_off()
        axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
        axes.set_xlim(*_width(methods))
    grid[0][0].set_ylabel("planned / measured")
    return save(figure, path)


def _height(compared: Sequence[Compared]) -> tuple[float, float]:
    """What the axis of errors spans: all of them, and twice what is aimed at."""
    ratios = [1 + one.error for one in compared]
    return min(1 - 2 * WORST, min(ratios) - 0.05), max(1 + 2 * WORST, max(ratios) + 0.05)


def _width(compared: Sequence[Compared]) -> tuple[float, float]:
    """What the axis of times spans, in milliseconds: all of them."""
    ms = [one.measured_us / 1e3 for one in compared]
    return min(ms) / math.sqrt(2), max(ms) * math.sqrt(2)
