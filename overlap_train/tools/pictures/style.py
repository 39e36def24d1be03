"""The look of all pictures: one colour a thing, one width, one header. matplotlib is the optional extra `plot`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

WIDTH, HEADER_LINE = 9.0, 0.22  # inches
TEXT, SMALL = 10, 9  # points; nothing is smaller
SETTINGS: Any = {
    "figure.dpi": 150, "font.size": SMALL, "axes.titlesize": TEXT, "axes.titlelocation": "left", "axes.spines.top": False,
    "axes.spines.right": False, "axes.axisbelow": True,
}  # fmt: skip
GRAPH = "_graph"  # ends the name of what runs as a CUDA graph


@dataclass(frozen=True)
class Look:
    """How a thing is named and drawn."""

    label: str
    colour: str


# In the order of every picture: baselines first, ours last, the default last of all.
# Okabe and Ito's colours, Tol's wine, olive and sand, brown, greys: told apart by readers with the usual colour blindnesses
LOOKS = {
    "megatron": Look("Megatron-Core", "#444444"),
    "async_tp": Look("async-TP", "#999933"),
    "nccl": Look("NCCL, then cuBLAS", "#777777"),
    "te": Look("TransformerEngine", "#AA4466"),
    "te_userbuffers": Look("TE userbuffers", "#DDCC77"),
    "te_userbuffers_ring": Look("TE userbuffers, ring", "#661100"),
    "te_again": Look("TransformerEngine, again", "#332288"),
    "te_overlap": Look("overlap_train on TE", "#44AA99"),
    "collective": Look("collective", "#882255"),
    "chunked": Look("chunked", "#CC79A7"),
    "fused": Look("fused", "#009E73"),
    "direct": Look("direct", "#E69F00"),
    "low_latency": Look("low_latency", "#AA4499"),
    "auto": Look("overlap_train", "#0072B2"),
    "overlap": Look("overlap_train", "#0072B2"),  # `auto` among the variants of training
    "overlap_fp8": Look("overlap_train, fp8", "#56B4E9"),
    "gemm": Look("GEMM", "#53687E"),
    "compute": Look("other kernels", "#CBD3DB"),
    "hidden": Look("communication, hidden", "#88CCEE"),
    "exposed": Look("communication, exposed", "#D55E00"),
}


def look_of(name: str) -> Look:
    """The Look of a method, a baseline, or a variant of training; one as a CUDA graph has the same colour."""
    look = LOOKS[name.removesuffix(GRAPH)]
    return replace(look, label=f"{look.label}, CUDA graph") if name.endswith(GRAPH) else look


def in_order(names: Iterable[str]) -> list[str]:
    """In the order of LOOKS, a CUDA graph after the same without one."""
    places = list(LOOKS)
    return sorted(names, key=lambda name: (places.index(name.removesuffix(GRAPH)), len(name)))


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


def canvas(count: int, columns: int, row_height: float, header: tuple[str, ...]) -> tuple[Any, Any]:
    """A figure and its grid of `count` panels, `row_height` inches high, under the lines of the header."""
    rows = -(-count // columns)
    size = (WIDTH, rows * row_height + HEADER_LINE * (len(header) + 1))
    figure, grid = load().subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", sharex=True)
    figure.suptitle("\n".join(header), x=0.01, horizontalalignment="left", fontsize=TEXT)
    for axes in grid.flat[count:]:
        axes.remove()
    return figure, grid


def save(figure: Any, path: Path) -> Path:
    """Write a figure in 256 colours, a third of the bytes of all, and close it; returns the path."""
    from PIL import Image

    figure.savefig(path)
    Image.open(path).convert("RGB").quantize().save(path, optimize=True)
    load().close(figure)
    return path
