"""Panels of bars, each with its number, against a bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .style import GRAPH, SMALL, canvas, look_of, save

BAR = 0.21  # inches, with the gap to the next
LINE = 0.17  # inches of each further line of a title
LONGEST_OF_THREE = 28  # characters of a line of a title over one of three panels


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
    """The axis of all panels: where bars start, where longer ones are broken, and what the line of the bounds is, as
    style.look_of knows it."""

    unit: str
    start: float = 0.0
    limit: float = float("inf")
    line: str = "bound"


def bars(panels: Mapping[str, Sequence[Bar]], header: tuple[str, ...], scale: Scale, path: Path) -> Path:
    """Panels of bars that lie, each with its number. A bar beyond the limit is broken: it ends there with a mark."""
    most, everything = max(len(some) for some in panels.values()), [bar for some in panels.values() for bar in some]
    named_alike = len({tuple(bar.label for bar in some) for some in panels.values()}) == 1
    longest = max(len(line) for title in panels for line in title.splitlines())
    # side by side: three, or two where each has names of its own, or a long title
    columns = min(len(panels), 3 if named_alike and longest <= LONGEST_OF_THREE and len(panels) > 2 else 2)
    bounds = [bar.bound for bar in everything if bar.bound is not None]
    height = BAR * most + 0.7 + LINE * max(title.count("\n") for title in panels)
    figure, grid = canvas(len(panels), columns, height, header, (scale.line,) if bounds else (), sharex=True)
    ends = [min(bar.value, scale.limit) for bar in everything]
    length, farthest = max(ends) - scale.start, max(bounds, default=scale.start) - scale.start
    grid[0][0].set_xlim(min(scale.start, *ends) - 0.01 * length, scale.start + max(1.3 * length, 1.15 * farthest))
    for number, (axes, (title, some)) in enumerate(zip(grid.flat, panels.items(), strict=False)):
        for place, bar in enumerate(some):
            _draw_bar(axes, place, bar, scale)
        is_told = named_alike and number % columns > 0  # by the panel on the left
        axes.set(title=title, ylim=(most - 0.4, -0.6))
        axes.set_yticks(range(len(some)), ["" if is_told else bar.label for bar in some])
        axes.tick_params(left=False, labelbottom=True)
    for axes in grid[-1]:
        axes.set_xlabel(scale.unit)
    return save(figure, path)


def _draw_bar(axes: Any, place: int, bar: Bar, scale: Scale) -> None:
    start, limit, end = scale.start, scale.limit, min(bar.value, scale.limit)
    strength = 0.6 if GRAPH in bar.name else 1.0
    axes.barh(place, end - start, 0.78, left=start, color=look_of(bar.name).colour, alpha=strength)
    if bar.value > limit:
        axes.text(end - 0.06 * (limit - start), place, "//", color="white", weight="bold", ha="center", va="center")
    # the number stands at the bar's end, or beyond the bound if that would cross it
    left, right = axes.get_xlim()
    is_near = bar.bound is not None and end <= bar.bound < end + 0.3 * (right - left)
    axes.text(bar.bound if is_near else end, place, f"  {bar.text}", va="center", fontsize=SMALL)
    if bar.bound is not None:
        axes.vlines(bar.bound, place - 0.5, place + 0.5, "black", linewidth=1.5, zorder=4)
