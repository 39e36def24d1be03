"""Panels of horizontal bars, each with its number, against a bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .style import GRAPH, SMALL, canvas, look_of, save

BAR, LINE = 0.21, 0.17  # inches: of a bar with the gap to the next, of a line of a title


@dataclass(frozen=True)
class Bar:
    """One bar of a panel. name: of style.look_of. bound: where the line is that this bar is held against; None where that is
    not known."""

    label: str
    name: str
    value: float
    text: str
    bound: float | None


@dataclass(frozen=True)
class Scale:
    """The axis of all panels: where bars start, and where longer ones are broken."""

    unit: str
    start: float = 0.0
    limit: float = float("inf")


def bars(panels: Mapping[str, Sequence[Bar]], header: tuple[str, ...], scale: Scale, path: Path) -> Path:
    """Draw panels by their titles. A bar beyond the limit ends there with a mark."""
    most = max(len(some) for some in panels.values())
    height = BAR * most + 0.7 + LINE * max(title.count("\n") for title in panels)
    figure, grid = canvas(len(panels), min(len(panels), 2), height, header)
    everything = [bar for some in panels.values() for bar in some]
    ends = [min(bar.value, scale.limit) for bar in everything]
    farthest = max([*ends, *(bar.bound for bar in everything if bar.bound is not None)])
    grid[0][0].set_xlim(min(scale.start, *ends), scale.start + 1.3 * (farthest - scale.start))
    for axes, (title, some) in zip(grid.flat, panels.items(), strict=False):
        for place, bar in enumerate(some):
            _draw_bar(axes, place, bar, scale)
        axes.set(title=title, ylim=(most - 0.4, -0.6))
        axes.set_yticks(range(len(some)), [bar.label for bar in some])
        axes.tick_params(left=False, labelbottom=True)
    for axes in grid[-1]:
        axes.set_xlabel(scale.unit)
    return save(figure, path)


def _draw_bar(axes: Any, place: int, bar: Bar, scale: Scale) -> None:
    start, end = scale.start, min(bar.value, scale.limit)
    strength = 0.6 if GRAPH in bar.name else 1.0
    axes.barh(place, end - start, 0.78, left=start, color=look_of(bar.name).colour, alpha=strength)
    if bar.value > end:
        axes.text(end, place, "//  ", color="white", weight="bold", ha="right", va="center")
    beyond = end
    if bar.bound is not None:
        axes.vlines(bar.bound, place - 0.5, place + 0.5, "black", linewidth=1.5, zorder=4)
        beyond = max(end, bar.bound)  # the number does not cross the line
    axes.text(beyond, place, f"  {bar.text}", va="center", fontsize=SMALL)
