"""The look of all pictures: one colour a thing, one width, one header. matplotlib is the optional extra `plot`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

WIDTH = 9.0  # inches
TITLE, TEXT, SMALL = 12.5, 10, 9  # points; nothing is smaller
HEADER_LINE, LEGEND_COLUMNS = 0.24, 3  # inches
LEGEND: Any = {
    "loc": "upper left", "frameon": False, "fontsize": TEXT, "borderpad": 0, "borderaxespad": 0, "handlelength": 1.5,
    "handletextpad": 0.5, "columnspacing": 1.5, "ncols": LEGEND_COLUMNS,
}  # fmt: skip
SETTINGS: Any = {
    "figure.dpi": 150, "font.size": SMALL, "axes.titlesize": TEXT, "axes.titlelocation": "left", "axes.spines.top": False,
    "axes.spines.right": False, "axes.axisbelow": True, "grid.color": "#E4E4E4",
}  # fmt: skip

PERFECT = "perfect overlap"  # the name of the bound in every picture, drawn in black
BOUNDS = ("bound", "alone", "no_exchange")  # lines that bars are held against
GRAPH = "_graph"  # ends the name of what runs as a CUDA graph


@dataclass(frozen=True)
class Look:
    """How a thing is named and drawn."""

    label: str
    colour: str


# In the order of every picture: baselines first, ours last, the default last of all.
# Okabe and Ito's colours, Tol's wine, olive and sand, brown, greys: told apart by readers with the usual colour blindnesses
LOOKS = {
    "sequence": Look("NCCL + cuBLAS", "#999999"),
    "megatron": Look("Megatron-Core", "#444444"),
    "async_tp": Look("async-TP", "#999933"),
    "by_nodes": Look("NCCL node by node + cuBLAS", "#8C564B"),
    "three_gemms": Look("three GEMMs, asynchronous", "#56B4E9"),
    "nccl": Look("NCCL, then cuBLAS", "#777777"),
    "te": Look("TransformerEngine", "#AA4466"),
    "te_userbuffers": Look("TE userbuffers", "#DDCC77"),
    "collective": Look("collective", "#882255"),
    "chunked": Look("chunked", "#CC79A7"),
    "fused": Look("fused", "#009E73"),
    "direct": Look("direct", "#E69F00"),
    "low_latency": Look("low_latency", "#AA4499"),
    "tuned": Look("overlap_train, tuned", "#004488"),
    "auto": Look("overlap_train", "#0072B2"),
    "overlap": Look("overlap_train", "#0072B2"),  # `auto` among the variants of training
    "gemm": Look("GEMM", "#53687E"),
    "compute": Look("other kernels", "#CBD3DB"),
    "hidden": Look("communication, hidden", "#88CCEE"),
    "exposed": Look("communication, exposed", "#D55E00"),
    "inside": Look("inside the GEMM kernel: stores to peers", "#88CCEE"),
    "bound": Look(PERFECT, "black"),
    "alone": Look("GEMMs alone", "black"),
    "no_exchange": Look("without exchanges", "black"),
}


def plain(name: str) -> str:
    return name.removesuffix(GRAPH)


def look_of(name: str) -> Look:
    """The Look of a method, a baseline, or a variant of training; one as a CUDA graph has the same colour."""
    look = LOOKS[plain(name)]
    return replace(look, label=f"{look.label}, CUDA graph") if name.endswith(GRAPH) else look


def in_order(names: Iterable[str]) -> list[str]:
    """In the order of LOOKS, a CUDA graph after the same without one."""
    places = list(LOOKS)
    return sorted(names, key=lambda name: (places.index(plain(name)), len(name)))


def load() -> Any:
    """matplotlib's pyplot, set up for files.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ValueError("pictures need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(SETTINGS)
    return pyplot


def canvas(
    count: int, columns: int, row_height: float, header: tuple[str, ...], names: tuple[str, ...], **subplots: Any
) -> tuple[Any, Any]:
    """A figure and its grid of `count` panels, `row_height` inches high, under the header and a legend that explains `names`.
    subplots: passed on to matplotlib."""
    pyplot, rows = load(), -(-count // columns)
    above = (len(header) + -(-len(names) // LEGEND_COLUMNS)) * HEADER_LINE + 0.2
    height = above + rows * row_height
    figure, grid = pyplot.subplots(
        rows, columns, figsize=(WIDTH, height), squeeze=False, layout="constrained", **subplots
    )
    figure.get_layout_engine().set(rect=(0, 0, 0.995, 1 - above / height), w_pad=0.06, h_pad=0.06)
    for axes in grid.flat[count:]:
        axes.remove()
    for number, words in enumerate(header):
        style = {"fontsize": TEXT, "color": "#444444"} if number else {"fontsize": TITLE, "weight": "bold"}
        figure.text(0.01, 1 - (0.08 + number * HEADER_LINE) / height, words, va="top", **style)
    if names:
        place = (0.01, 1 - (0.1 + len(header) * HEADER_LINE) / height)
        figure.legend(handles=[_handle(name) for name in names], bbox_to_anchor=place, **LEGEND)
    return figure, grid


def _handle(name: str) -> Any:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    look = look_of(name)
    if name in BOUNDS:
        line: Any = {"linestyle": "", "marker": "|", "markersize": 13, "markeredgewidth": 2.5}
        return Line2D([], [], color=look.colour, label=look.label, **line)
    return Patch(label=look.label, **(outline() if name == "inside" else {"color": look.colour}))


def outline() -> dict[str, Any]:
    """How a bar is drawn that names communication without a measured begin and end: matplotlib's arguments."""
    return {"facecolor": "none", "edgecolor": LOOKS["inside"].colour, "linestyle": (0, (3, 2)), "linewidth": 1.5}


def save(figure: Any, path: Path) -> Path:
    """Write a figure in 256 colours, less than half the bytes of all, and close it; returns the path."""
    from PIL import Image

    figure.canvas.print_png(buffer := BytesIO())
    Image.open(buffer).convert("RGB").quantize(256, kmeans=1).save(path, optimize=True)
    load().close(figure)
    return path
