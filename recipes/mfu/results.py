"""What a comparison leaves: a table on the screen, and files of rank 0, written after each model, so that none is lost."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from gpt.program import RecipeError, say
from mfu import pictures
from mfu.flops import peak_tflops
from mfu.measured import Measured
from mfu.names import ASYNC_TP
from mfu.plan import Plan
from mfu.rows import notes_of, rows_of, tables_of
from overlap_train.tools.measure import results as output
from overlap_train.tools.measure.results import Row
from overlap_train.tools.measure.world import World


def markdown_of(rows: Sequence[Row], notes: Sequence[str]) -> str:
    """The text of mfu.md."""
    tables = [output.markdown(some, (), columns) for some, columns in tables_of(rows)]
    return "\n".join([*tables, *(f"- {note}" for note in notes)]) + "\n"


class Writer:
    """Collects the rows of all models; every rank calls it, rank 0 writes."""

    def __init__(self, plan: Plan, world: World) -> None:
        self._plan, self._world = plan, world
        self._hardware = output.hardware(world.device, world.size)
        self._peak = plan.peak_tflops or peak_tflops(world.device)
        self._rows: list[Row] = []
        self._losses: list[Row] = []
        self._spans: list[Row] = []

    def add(self, measured: Measured) -> None:
        """Take over one model's results and write all files."""
        precision = "BF16" if self._world.device.type == "cuda" else "FP32"
        self._rows += rows_of(self._plan, measured, self._world.size, self._peak, precision)
        which = {"model": measured.settings.model, "layers": measured.settings.num_layers}
        self._losses += [{**which, "variant": name, "losses": all_} for name, all_ in measured.losses.items()]
        self._spans += [{**which, "variant": name, **span} for name, some in measured.spans.items() for span in some]
        if self._world.rank == 0:
            self._write()

    def conclude(self, seconds: float) -> None:
        """Print the tables.

        Raises:
            RecipeError: on every rank, where Megatron-Core's or an overlapped variant did not run. Async-TP may be absent.
        """
        tables = [output.screen(rows, (), columns) for rows, columns in tables_of(self._rows)]
        say("\n\n".join([*tables, "\n".join(notes_of(self._plan, self._rows))]))
        say(f" {seconds:.0f} s in all; {self._plan.out}")
        missing = [row for row in self._rows if row["status"] != "ran" and row["variant"] != ASYNC_TP]
        if missing:
            reasons = "; ".join(f"{row['model']} {row['variant']}: {row['status']}" for row in missing)
            raise RecipeError(f"--variants {','.join(self._plan.variants)}: not all of them ran: {reasons}")

    def _write(self) -> None:
        folder = Path(self._plan.out)
        for name, rows in (("mfu", self._rows), ("losses", self._losses), ("timeline", self._spans)):
            if rows:
                output.write_json(folder / f"{name}.json", rows, self._hardware)
        (folder / "mfu.md").write_text(markdown_of(self._rows, notes_of(self._plan, self._rows)))
        if importlib.util.find_spec("matplotlib") is None:
            say(" no pictures: matplotlib is not installed (pip install matplotlib)")
            return
        for path in pictures.draw(folder):
            say(f" {path}")
