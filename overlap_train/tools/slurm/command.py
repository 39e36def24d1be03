"""`overlap-train launch train|compare [flags] [--dry-run] -- [the recipe's arguments]`"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...flags import Parser, add_options, values_of
from .job import KINDS, Job, job_name
from .script import render, submit

USAGE = "overlap-train launch train|compare --time TIME [flags] [--dry-run] -- [the recipe's arguments]"
TRACKER = "latest_checkpointed_iteration.txt"  # as launch/job.sh has it
RECIPES = {"train": "recipes/pretrain_gpt.py", "compare": "recipes/compare_mfu.py"}
CHECKOUT = Path(__file__).resolve().parents[3]  # where overlap_train is not installed but cloned


def main(arguments: list[str]) -> int:
    """Write the job's script and submit it, or print it.

    Raises:
        ValueError: flags that are wrong, or a recipe that is not there.
        SubmitError: Slurm did not take the job.
    """
    job, dry_run = job_from_flags(arguments)
    for note in notes(job):
        print(f"note: {note}", file=sys.stderr)
    if dry_run:
        print(render(job), end="")
        return 0
    number, script = submit(job)
    print(f"submitted job {number}: {script}")
    print(f"output: {job.run_dir}/{job_name(job)}-{number}.out; ranks: {job.run_dir}/logs/{number}")
    return 0


def job_from_flags(arguments: list[str]) -> tuple[Job, bool]:
    """The job that the flags ask for, its paths resolved, and whether it is only to be printed. Raises ValueError."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    args = parser().parse_args(arguments[:end])
    job = Job(args.kind, tuple(arguments[end + 1 :]), **values_of(Job, args))
    return replace(job, **_found(job)), args.dry_run


def notes(job: Job) -> Iterator[str]:
    """What the user may not have meant, and would see only when the job has waited for its nodes."""
    newest = job.checkpoints and _newest(Path(job.checkpoints))
    if newest:
        found = f"{job.checkpoints} has checkpoint {newest}"
        yield f"{found}, from which the job goes on; for a new run give another --name or --checkpoints"


def _newest(checkpoints: Path) -> str:
    """The step that a folder's tracker names, as launch/job.sh reads it; empty: there is none, or it cannot be read here."""
    try:
        return (checkpoints / TRACKER).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _found(job: Job) -> dict[str, Any]:
    """Fields whose defaults depend on this machine, and absolute paths for all."""
    run_dir = Path(job.run_dir or f"runs/slurm/{job_name(job)}").absolute()
    found = {"python": job.python or sys.executable, "run_dir": str(run_dir)}
    if job.kind == "train":
        found["checkpoints"] = str(Path(job.checkpoints).absolute() if job.checkpoints else run_dir / "checkpoints")
    if not job.module:
        found["recipe"] = job.recipe if job.container_image and job.recipe else str(_recipe(job))
    return found


def _recipe(job: Job) -> Path:
    name = job.recipe or RECIPES[job.kind]
    places = [Path.cwd()]
    if not job.recipe and (CHECKOUT / "recipes").is_dir():
        places.append(CHECKOUT)
    for path in (place / name for place in places):
        if path.is_file():
            return path
    way_out = "give the file that is to run with --recipe FILE, or a module with --module NAME"
    raise ValueError(f"the recipe {name} is missing in {' and '.join(map(str, places))}; {way_out}")


def parser() -> argparse.ArgumentParser:
    """The flags are the fields of Job."""
    top = Parser(
        "overlap-train launch", usage=USAGE, description="Write a Slurm job from launch/*.sbatch and submit it."
    )
    meaning = "train: a recipe, resumed after a requeue; compare: with and without overlap"
    top.add_argument("kind", choices=KINDS, metavar="|".join(KINDS), help=meaning)
    top.add_argument("--dry-run", action="store_true", help="print the script and submit nothing")
    add_options(top, Job)
    return top
