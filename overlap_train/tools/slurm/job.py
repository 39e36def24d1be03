"""What a Slurm job is: one frozen dataclass, from which the flags of `overlap-train launch` and their help are made."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields

from ...flags import option, shown

KINDS = ("train", "compare")
TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")


@dataclass(frozen=True)
class Job:
    """A job that runs a recipe on every rank. Every field from `nodes` on is a flag: `gpus_per_node` is `--gpus-per-node`.

    Raises:
        ValueError: a rule is broken; the text names flag, value, rule and way out.
    """

    kind: str  # of KINDS
    arguments: tuple[str, ...] = ()  # of the recipe
    nodes: int = option(1, "nodes")
    gpus_per_node: int = option(0, "GPUs of each node; 0: none, for ranks on CPUs")
    procs_per_node: int = option(0, "ranks of each node; 0: one a GPU")
    time: str = option("", "time limit, such as 04:00:00 or 1-12", metavar="TIME")
    account: str = option("", "account that pays", metavar="NAME")
    partition: str = option("", "partition; without it, the cluster's default", metavar="NAME")
    name: str = option("", "name of the job (default: overlap-train or overlap-compare)", metavar="NAME")
    sbatch: tuple[str, ...] = option(
        (), "any other option of sbatch: --sbatch=--exclusive; may be repeated", metavar="OPTION", repeated=True
    )
    recipe: str = option("", "Python file (default: recipes/pretrain_gpt.py or compare_mfu.py)", metavar="FILE")
    module: str = option("", "Python module to run instead of a file", metavar="NAME")
    python: str = option("", "Python on the nodes, or in the container (default: this one)", metavar="FILE")
    run_dir: str = option("", "folder for script, logs and results (default: runs/slurm/NAME)", metavar="DIR")
    checkpoints: str = option(
        "", "train: folder to save to and resume from (default: checkpoints in --run-dir)", metavar="DIR"
    )
    max_restarts: int = option(0, "train: times that failed ranks are started again in the job")
    stop_early_s: int = option(120, "train: seconds before the time limit to stop and requeue")
    container_image: str = option("", "image or .sqsh file (pyxis); without it, no container", metavar="IMAGE")
    container_mounts: str = option("", "FROM:TO,... besides this folder and the run's", metavar="MOUNTS")

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise ValueError(problem)


def _problems(job: Job) -> Iterator[str]:
    """What is wrong with the job, in words."""
    if job.kind not in KINDS:
        yield f"{job.kind!r} is not a kind of job; choose one of {', '.join(KINDS)}"
    if job.nodes < 1:
        yield f"--nodes {job.nodes} must be at least 1"
    for name in ("gpus_per_node", "procs_per_node", "max_restarts"):
        if getattr(job, name) < 0:
            yield f"{shown(job, name)} must not be negative"
    if not ranks_per_node(job):
        yield "no ranks: add --gpus-per-node N, or --procs-per-node N for ranks on CPUs"
    if job.gpus_per_node and job.procs_per_node > job.gpus_per_node:
        yield f"--procs-per-node {job.procs_per_node} is more than --gpus-per-node {job.gpus_per_node}; one rank a GPU at most"
    yield from _time_problems(job)
    yield from _program_problems(job)
    for word in _words(job):
        if "\n" in word or "\0" in word:
            yield f"{word!r} has a line break, which a line of a batch script cannot hold; leave it out"


def _time_problems(job: Job) -> Iterator[str]:
    if not job.time:
        yield "--time is missing; give the job's time limit, such as --time 04:00:00"
    elif not TIME.fullmatch(job.time):
        yield f"--time {job.time} is not a time limit; write MINUTES, HH:MM:SS, DAYS-HH or DAYS-HH:MM:SS"
    elif job.kind == "train" and not 0 < job.stop_early_s <= seconds(job.time) - 60:
        # Slurm sends the signal up to a minute early.
        yield f"--stop-early-s {job.stop_early_s} must be above 0 and a minute or more below --time {job.time}"


def _program_problems(job: Job) -> Iterator[str]:
    if job.recipe and job.module:
        yield f"--recipe {job.recipe} and --module {job.module} are both given; choose one"
    if job.container_mounts and not job.container_image:
        yield f"--container-mounts {job.container_mounts} without --container-image mounts nothing; add an image"
    if job.kind == "compare":
        for name in ("checkpoints", "max_restarts"):
            if getattr(job, name):
                yield f"{shown(job, name)}: a comparison is neither saved nor restarted; leave it out"
        return
    for word in job.arguments:
        if word.partition("=")[0] in ("--save", "--load"):
            yield f"{word} belongs to the job, which saves to and resumes from --checkpoints DIR; leave it out"


def _words(job: Job) -> Iterator[str]:
    for value in (getattr(job, found.name) for found in fields(job)):
        yield from value if isinstance(value, tuple) else [str(value)]


def ranks_per_node(job: Job) -> int:
    """Processes that torchrun starts on each node."""
    return job.procs_per_node or job.gpus_per_node


def job_name(job: Job) -> str:
    """The name that Slurm lists."""
    return job.name or f"overlap-{job.kind}"


def seconds(time: str) -> int:
    """Seconds of a Slurm time limit: "90" (minutes), "90:00", "01:30:00", "1-12", "1-12:00", "1-12:00:00"."""
    match = TIME.fullmatch(time)
    assert match is not None, time
    parts = [int(part) for part in match["parts"].split(":")]
    if match["days"] is not None:  # what follows the days starts with hours
        hours, minutes, rest = [*parts, 0, 0][:3]
        return int(match["days"]) * 86400 + hours * 3600 + minutes * 60 + rest
    if len(parts) == 1:
        return parts[0] * 60
    hours, minutes, rest = [0, *parts][-3:]
    return hours * 3600 + minutes * 60 + rest
