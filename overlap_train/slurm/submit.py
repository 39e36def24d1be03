"""Write a job's script into its run folder and hand it to sbatch."""

from __future__ import annotations

import subprocess
from pathlib import Path

from .job import Job, job_name
from .script import render, sbatch_options


class SubmitError(Exception):
    """The job was not submitted; the text says why in one line."""


def submit(job: Job) -> tuple[str, Path]:
    """The id that Slurm gave to the job, and the script that was written.

    Raises:
        SubmitError: the run folder cannot be written, there is no sbatch, or it refused the job.
    """
    script = Path(job.run_dir) / f"{job_name(job)}.sbatch"
    try:
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(render(job))
    except OSError as error:
        raise SubmitError(f"--run-dir {job.run_dir} cannot be written: {error.strerror or error}") from error
    return _sbatch(sbatch_options(job), script), script


def _sbatch(options: tuple[str, ...], script: Path) -> str:
    try:
        result = subprocess.run(["sbatch", "--parsable", *options, str(script)], capture_output=True, text=True)
    except FileNotFoundError as error:
        raise SubmitError(
            "sbatch was not found on PATH; submit from a login node of the cluster, or print the script with --dry-run"
        ) from error
    if result.returncode:
        said = " ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in result.stderr.splitlines())
        raise SubmitError(f"sbatch refused the job: {said or f'exit status {result.returncode}'}")
    return result.stdout.strip().partition(";")[0]  # "id;cluster" on sites with several
