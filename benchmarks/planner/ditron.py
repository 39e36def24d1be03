"""Plans the operators of the Ditron paper's scaling tables, and writes ditron.md beside this file.

    python benchmarks/planner/ditron.py

Nothing is measured here. Published: tables 9 to 11, AG + GEMM over cuBLAS + NCCL with shapes of table 4, on nodes of 8 GPUs.
Strong scaling keeps 32768 rows; weak scaling has 8192 for each node. For GEMM + RS (shapes of table 5) the paper prints no
figures. It names no dtype; bf16 is planned. docs/planner-model.md says how the figures come about, and where they miss.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from overlap_train.planning.choice import choose
from overlap_train.planning.machines import SYSTEMS, System
from overlap_train.planning.table import UNTUNED
from overlap_train.schedule.order import GATHER, SCATTER
from overlap_train.select.passes import Pass
from overlap_train.select.tiling import Target
from overlap_train.tools.plan.estimates import COLLECTIVE, estimate, methods_of, work_of
from overlap_train.tools.plan.prediction import FORWARD, Prediction
from overlap_train.tools.plan.simulation.programs import program

HERE = Path(__file__).parent
NODES, GPUS = (1, 2, 4), 8
STRONG, WEAK = (32768, 32768, 32768), (8192, 16384, 32768)  # rows, by number of nodes
# [N, K] of AG + GEMM; GEMM + RS has them the other way round.
SHAPES = {
    "LLaMA3-7B": (11008, 4096), "LLaMA3.1-8B": (14336, 4096), "Qwen3-32B": (25600, 5120), "Seed-OSS-36B": (27648, 5120),
    "LLaMA3.1-70B": (28672, 8192), "Qwen2-72B": (29568, 8192), "GPT-3-175B": (49152, 12288), "LLaMA3.1-405B": (53248, 16384),
}  # fmt: skip
WORDS = {GATHER: "AG + GEMM", SCATTER: "GEMM + RS"}
SLOWER = 0.8  # of the NICs' data sheet: another network that the summary plans for
HEAD = """# Planned beside the Ditron paper's scaling tables

Written by `python benchmarks/planner/ditron.py`. **Planned, not measured**: no figure here was taken on an H800 or an H20, and
overlap across nodes has not run on a network between GPUs yet. [The planner's
page](../../docs/planner-model.md#against-published-figures) says how the figures come about.

Speed-ups are over NCCL and the product, one after the other. **published**: the paper's kernels over cuBLAS + NCCL. **ours**: the
fastest of our methods; across nodes `direct` is left out, which does not cross nodes. **auto**: what the planner
chooses, which may be not to overlap (1.00), and within 2 % the simpler method. Untuned training goes by a rule, and does not ask
the planner: below each table stands where that would be least.
"""


@dataclass(frozen=True)
class Table:
    """A published table: speed-ups of AG + GEMM of each model, by number of nodes."""

    number: int
    system: str
    scaling: str
    rows: tuple[int, ...]
    speedups: tuple[tuple[float, ...], ...]

    def title(self, kind: str) -> str:
        published = f" (table {self.number})" if kind == GATHER else ""
        return f"{WORDS[kind]}: {self.scaling.lower()} scaling on {self.system.upper()}{published}"


TABLES = (
    Table(9, "h800", "Strong", STRONG, (
        (1.31, 1.11, 0.63), (1.35, 1.12, 0.61), (1.59, 1.32, 0.65), (1.64, 1.32, 0.64),
        (1.67, 1.36, 0.77), (1.67, 1.39, 1.03), (1.46, 1.68, 1.00), (1.44, 1.76, 1.02),
    )),
    Table(10, "h20", "Weak", WEAK, (
        (1.23, 1.50, 0.80), (1.19, 1.50, 0.86), (1.06, 1.22, 0.89), (1.05, 1.26, 0.89),
        (1.10, 1.29, 0.93), (1.01, 1.18, 1.36), (1.05, 1.23, 1.09), (1.05, 1.19, 1.08),
    )),
    Table(11, "h800", "Weak", WEAK, (
        (1.30, 0.98, 0.63), (1.30, 1.02, 0.61), (1.53, 1.14, 0.65), (1.57, 1.15, 0.64),
        (1.61, 1.25, 0.77), (1.66, 1.29, 1.03), (1.43, 1.58, 1.00), (1.34, 1.63, 1.02),
    )),
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One operator of one model on so many nodes. rule: the method that `auto` takes untuned. published: over cuBLAS + NCCL; None
    where nothing is."""

    model: str
    nodes: int
    planned: Prediction
    rule: str
    published: float | None = None

    @property
    def ours(self) -> float:
        """Speed-up of the fastest of our methods over NCCL and the product, one after the other."""
        us = min(e.us for name, e in self.planned.by_method.items() if name != COLLECTIVE)
        return self.planned.by_method[COLLECTIVE].us / us

    @property
    def auto(self) -> float:
        """The same of the planner's choice, which may be not to overlap."""
        return self.planned.by_method[COLLECTIVE].us / self.planned.chosen.us

    @property
    def by_rule(self) -> float:
        """The same of what training takes untuned."""
        return self.planned.by_method[COLLECTIVE].us / self.planned.by_method[self.rule].us


def cells(table: Table, kind: str, network: float = 1.0) -> Iterator[Cell]:
    """Model by model, for one node, two, and four. network: what the NICs reach of their data sheet."""
    system = SYSTEMS[table.system]
    system = replace(system, nic_gbs=network * system.nic_gbs)
    for model, speedups in zip(SHAPES, table.speedups, strict=True):
        for nodes, rows, speedup in zip(NODES, table.rows, speedups, strict=True):
            published = speedup if kind == GATHER else None
            yield Cell(model, nodes, *planned(system, kind, model, rows, nodes), published)


def planned(system: System, kind: str, model: str, rows: int, nodes: int) -> tuple[Prediction, str]:
    """All methods, and which of them `auto` takes untuned."""
    world, (n, k) = GPUS * nodes, SHAPES[model]
    n, k = (n // world, k) if kind == GATHER else (k, n // world)
    pass_ = Pass(kind, rows, n, k, torch.bfloat16, world)
    rule = choose("auto", pass_, Target(system.capability), UNTUNED, nodes)  # type: ignore[arg-type]  # a GPU that is not here
    works = {name: work_of(system, pass_, name, UNTUNED, is_alone=True, nodes=nodes) for name in methods_of(nodes)}
    estimates = {name: estimate(work, program(work)) for name, work in works.items()}
    alone = works[COLLECTIVE]
    return Prediction(model, FORWARD, pass_.rows, n, k, alone.gemm_us, alone.collective_us, estimates), rule.method


def section(title: str, some: Sequence[Cell]) -> list[str]:
    """A Markdown table: for each number of nodes published and planned speed-ups, with times of the parts."""
    is_published = some[0].published is not None
    names = [*(["published"] if is_published else []), "ours", "auto", "product, NCCL ms"]
    headings = ["model", *(f"{nodes} x 8: {name}" for nodes in NODES for name in names)]
    lines = [f"## {title}", "", "| " + " | ".join(headings) + " |", "| --- " * len(headings) + "|"]
    for model in SHAPES:
        row = [text for cell in some if cell.model == model for text in _texts(cell)]
        lines.append("| " + " | ".join([model, *row]) + " |")
    return [
        *lines,
        "",
        *(_distance(some) if is_published else []),
        f"Least `auto`: {min(c.auto for c in some):.2f}. {_least_by_rule(some)}",
        "",
    ]


MEANS = (
    "Geometric means of the eight models:", "",
    f"| table | nodes | published | ours | auto | ours, if the NICs reach {SLOWER} of their data sheet |",
    "| --- | --- | --- | --- | --- | --- |",
)  # fmt: skip


def mean_row(title: str, nodes: int, some: Sequence[Cell], slower: Sequence[Cell]) -> str:
    here = [cell for cell in some if cell.nodes == nodes]
    published = [cell.published for cell in here if cell.published is not None]
    figures = [[c.ours for c in here], [c.auto for c in here], [c.ours for c in slower if c.nodes == nodes]]
    means = [f"{statistics.geometric_mean(figure):.2f}" if figure else "-" for figure in (published, *figures)]
    return "| " + " | ".join([title, str(nodes), *means]) + " |"


def _texts(cell: Cell) -> list[str]:
    p = cell.planned
    published = [] if cell.published is None else [f"{cell.published:.2f}"]
    return [*published, f"{cell.ours:.2f}", f"{cell.auto:.2f}", f"{p.gemm_us / 1e3:.2f}, {p.nccl_us / 1e3:.2f}"]


def _distance(some: Sequence[Cell]) -> list[str]:
    """How far `ours` is from what was published, for one node."""
    errors = [cell.ours / cell.published - 1 for cell in some if cell.nodes == 1 and cell.published]
    within = sum(abs(error) <= 0.10 for error in errors)
    return [
        f"One node, `ours` against the published figure: {statistics.mean(map(abs, errors)):.1%} off in the mean, from "
        f"{min(errors):+.1%} to {max(errors):+.1%}; {within} of {len(errors)} within 10 %."
    ]


def _least_by_rule(some: Sequence[Cell]) -> str:
    least = min(some, key=lambda cell: cell.by_rule)
    return f"By the rule of untuned training: {least.by_rule:.2f} ({least.model}, {least.nodes} x 8, `{least.rule}`)."


def main() -> None:
    means: list[str] = []
    sections: list[str] = []
    for kind in (GATHER, SCATTER):
        for table in TABLES:
            some, slower = list(cells(table, kind)), list(cells(table, kind, SLOWER))
            means += [mean_row(table.title(kind), nodes, some, slower) for nodes in NODES]
            sections += section(table.title(kind), some)
    text = "\n".join([HEAD, *MEANS, *means, "", *sections])
    (HERE / "ditron.md").write_text(text.rstrip() + "\n")


if __name__ == "__main__":
    main()
