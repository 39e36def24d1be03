"""`overlap-train launch train|compare [flags] [--dry-run] -- [the recipe's arguments]`"""

from __future__ import annotations

import sys
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
        ValueError: flags that are wrong, a recipe that is not there, or Slurm did not take the job.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    what = "Write a Slurm job from launch/*.sbatch and submit it."
    top = Parser("overlap-train launch", usage=USAGE, description=what)
    meaning = "train: a recipe, resumed after a requeue; compare: with and without overlap"
    top.add_argument("kind", choices=KINDS, metavar="|".join(KINDS), help=meaning)
    top.add_argument("--dry-run", action="store_true", help="print the script and submit nothing")
    add_options(top, Job)
    args = top.parse_args(arguments[:end])
    job = _resolved(Job(args.kind, tuple(arguments[end + 1 :]), **values_of(Job, args)))
    if job.checkpoints and Path(job.checkpoints, TRACKER).exists():
        way_out = "for a new run give another --name or --checkpoints"
        print(f"note: {job.checkpoints} has a checkpoint, from which the job goes on; {way_out}", file=sys.stderr)
    if args.dry_run:
        print(render(job), end="")
        return 0
    number, script = submit(job)
    print(f"submitted job {number}: {script}")
    print(f"output: {job.run_dir}/{job_name(job)}-{number}.out; ranks: {job.run_dir}/logs/{number}")
    return 0


def _resolved(job: Job) -> Job:
    """The job with absolute paths, and with defaults that depend on this machine."""
    run_dir = Path(job.run_dir or f"runs/slurm/{job_name(job)}").absolute()
    found: dict[str, Any] = {"python": job.python or sys.executable, "run_dir": str(run_dir)}
    if job.kind == "train":
        found["checkpoints"] = str(Path(job.checkpoints).absolute() if job.checkpoints else run_dir / "checkpoints")
    elif not (job.recipe or job.module or any(word.partition("=")[0] == "--out" for word in job.arguments)):
        found["arguments"] = (*job.arguments, "--out", str(run_dir))
    if not job.module:
        found["recipe"] = job.recipe if job.container_image and job.recipe else str(_recipe(job))
    return replace(job, **found)


def _recipe(job: Job) -> Path:
    name = job.recipe or RECIPES[job.kind]
    places = [Path.cwd()] if job.recipe else [Path.cwd(), CHECKOUT]
    for path in (place / name for place in places):
        if path.is_file():
            return path
    raise ValueError(
        f"the recipe {name} is missing in {' and '.join(map(str, places))}; give the file that is to run with --recipe FILE, or "
        "a module with --module NAME"
    )
