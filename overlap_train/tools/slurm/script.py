"""A job's batch script, written from launch/train.sbatch or compare.sbatch, and its way to Slurm."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from .job import Job, job_name, ranks_per_node

FOLDER = Path(__file__).parent
SOURCED = "/launch/job.sh"  # the line of the templates that reads it


def sbatch_options(job: Job) -> tuple[str, ...]:
    """What sbatch is told: on lines of the script, and again on its command line, where no SBATCH_ variable overrides it."""
    options = [f"--job-name={job_name(job)}", f"--nodes={job.nodes}", "--ntasks-per-node=1", f"--time={job.time}"]
    options.append(f"--output={job.run_dir}/%x-%j.out")
    options += [f"--{name}={getattr(job, name)}" for name in ("account", "partition") if getattr(job, name)]
    if job.gpus_per_node:
        options.append(f"--gpus-per-node={job.gpus_per_node}")
    if job.kind == "train":
        options += ["--open-mode=append", "--requeue", f"--signal=B:USR1@{job.stop_early_s}"]
    else:
        options.append("--no-requeue")
    return (*options, *job.sbatch)


def variables(job: Job) -> dict[str, str]:
    """The variables that the script reads, by name; those of the submitting shell do not get in."""
    names = ("run_dir", "python", "recipe", "module", "container_image", "container_mounts")
    values = {name.upper(): str(getattr(job, name)) for name in names}
    values["PROCS_PER_NODE"] = str(ranks_per_node(job))
    if job.kind == "train":
        values |= {"CHECKPOINT_DIR": job.checkpoints, "MAX_RESTARTS": str(job.max_restarts)}
        values["STOP_SECONDS"] = str(max(1, job.stop_early_s // 2))  # the other half is for Slurm to requeue in
    return values


def render(job: Job) -> str:
    """The whole script: complete by itself, to be submitted again with plain sbatch."""
    lines = (FOLDER / f"{job.kind}.sbatch").read_text().splitlines()
    end = 1 + max(number for number, line in enumerate(lines) if line.startswith("#SBATCH "))
    options = [f"#SBATCH {shlex.quote(option)}" for option in sbatch_options(job)]
    head = [line for line in lines[:end] if _option_name(line) not in map(_option_name, options)]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables(job).items()]
    chosen = ["", "# Put in by overlap-train launch.", *exports, "set -- " + shlex.join(job.arguments)]
    return "\n".join([*head, *options, *chosen, *_complete(lines[end:])]) + "\n"


def _option_name(line: str) -> str:
    """`#SBATCH --time=1` -> `#SBATCH --time`; other lines have no name."""
    return line.partition("=")[0] if line.startswith("#SBATCH ") else ""


def _complete(body: list[str]) -> list[str]:
    """The template's commands with the text of job.sh in the place of the line that sources it."""
    (number,) = [number for number, line in enumerate(body) if line.startswith(". ") and SOURCED in line]
    return [*body[: number - 1], (FOLDER / "job.sh").read_text(), *body[number + 1 :]]  # - 1: a note to shellcheck


def submit(job: Job) -> tuple[str, Path]:
    """Write the script into the run folder and hand it to sbatch; returns the id that Slurm gave to the job, and the script.

    Raises:
        ValueError: the run folder cannot be written, there is no sbatch, or it refused the job.
    """
    script = Path(job.run_dir) / f"{job_name(job)}.sbatch"
    try:
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(render(job))
    except OSError as error:
        raise ValueError(f"--run-dir {job.run_dir} cannot be written: {error.strerror or error}") from error
    command = ["sbatch", "--parsable", *sbatch_options(job), str(script)]
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ValueError(
            "sbatch was not found on PATH; submit from a login node of the cluster, or print the script with --dry-run"
        ) from error
    if result.returncode:
        said = " ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in result.stderr.splitlines())
        raise ValueError(f"sbatch refused the job: {said or f'exit status {result.returncode}'}")
    return result.stdout.strip().partition(";")[0], script  # "id;cluster" on sites with several
