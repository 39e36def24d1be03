"""The command line: overlap-train launch train|compare [flags] [--dry-run] -- [the recipe's arguments]"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ..one_line import Parser
from .job import KINDS, Job, flag, job_name
from .script import render
from .submit import SubmitError, submit

USAGE = "overlap-train launch train|compare --time TIME [flags] [--dry-run] -- [the recipe's arguments]"
RECIPES = {"train": "recipes/pretrain_gpt.py", "compare": "recipes/compare_mfu.py"}
CHECKOUT = Path(__file__).resolve().parents[2]  # where overlap_train is not installed but cloned


def main(argv: list[str]) -> int:
    """Run the command. Exit status: 0, 1 if the job was not submitted, 2 for wrong flags."""
    try:
        job, dry_run = job_from_flags(argv)
        if dry_run:
            print(render(job), end="")
            return 0
        number, script = submit(job)
    except (ValueError, SubmitError) as error:
        print(f"overlap-train launch: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    print(f"submitted job {number}: {script}")
    print(f"output: {job.run_dir}/{job_name(job)}-{number}.out; ranks: {job.run_dir}/logs/{number}")
    return 0


def job_from_flags(argv: list[str]) -> tuple[Job, bool]:
    """The job that the flags ask for, its paths resolved, and whether it is only to be printed.

    Raises:
        ValueError: flags that are wrong, or a recipe that is not there.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    given = vars(parser().parse_args(argv[:end]))
    dry_run = given.pop("dry_run")
    given["sbatch"] = tuple(given["sbatch"])
    job = Job(**given, arguments=tuple(argv[end + 1 :]))
    return replace(job, **_found(job)), dry_run


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
    """Flags made from the fields of Job."""
    top = Parser(
        "overlap-train launch", usage=USAGE, description="Write a Slurm job from launch/*.sbatch and submit it."
    )
    meaning = "train: a recipe, resumed after a requeue; compare: with and without overlap"
    top.add_argument("kind", choices=KINDS, metavar="|".join(KINDS), help=meaning)
    top.add_argument("--dry-run", action="store_true", help="print the script and submit nothing")
    groups: dict[str, Any] = {}
    for option in fields(Job):
        if "group" not in option.metadata:
            continue
        title = option.metadata["group"]
        if title not in groups:
            groups[title] = top.add_argument_group(title)
        _add_flag(groups[title], option.name, option.default, option.metadata["help"], option.metadata["metavar"])
    return top


def _add_flag(group: Any, name: str, default: Any, help: str, metavar: str) -> None:
    if isinstance(default, tuple):
        group.add_argument(flag(name), action="append", default=[], metavar=metavar, help=help)
    else:
        shown = f" (default: {default})" if default else ""
        group.add_argument(flag(name), type=type(default), default=default, metavar=metavar, help=help + shown)
