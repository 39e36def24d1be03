"""What a Slurm job is: one frozen dataclass, from which the flags of `overlap-train launch` and their help are made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...flags import flag, option, positive_int, positive_int_or_0

KINDS = ("train", "compare")


@dataclass(frozen=True)
class Job:
    """A job that runs a recipe on every rank. Every field from `nodes` on is a flag: `gpus_per_node` is `--gpus-per-node`.

    Raises:
        ValueError: a rule is broken; the text names flag, value, rule and way out.
    """

    kind: str  # of KINDS
    arguments: tuple[str, ...] = ()  # of the recipe
    nodes: int = option(1, "nodes", parse=positive_int)
    gpus_per_node: int = option(0, "GPUs of each node; 0: none, for ranks on CPUs", parse=positive_int_or_0)
    procs_per_node: int = option(0, "ranks of each node; 0: one a GPU", parse=positive_int_or_0)
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
    max_restarts: int = option(
        0, "train: times that failed ranks are started again in the job", parse=positive_int_or_0
    )
    stop_early_s: int = option(
        120, "train: seconds before the time limit to stop and requeue; less than the limit", parse=positive_int
    )
    container_image: str = option("", "image or .sqsh file (pyxis); without it, no container", metavar="IMAGE")
    container_mounts: str = option("", "FROM:TO,... besides this folder and the run's", metavar="MOUNTS")

    def __post_init__(self) -> None:
        for problem in _problems(self):
            raise ValueError(problem)


def _problems(job: Job) -> Iterator[str]:
    """What is wrong with the job, in words, beyond what sbatch says of its own options."""
    if not ranks_per_node(job):
        yield "no ranks: add --gpus-per-node N, or --procs-per-node N for ranks on CPUs"
    if job.gpus_per_node and job.procs_per_node > job.gpus_per_node:
        yield f"--procs-per-node {job.procs_per_node} is more than --gpus-per-node {job.gpus_per_node}; one rank a GPU at most"
    if not job.time:
        yield "--time is missing; give the job's time limit, such as --time 04:00:00"
    if job.recipe and job.module:
        yield f"--recipe {job.recipe} and --module {job.module} are both given; choose one"
    if job.container_mounts and not job.container_image:
        yield f"--container-mounts {job.container_mounts} without --container-image mounts nothing; add an image"
    if job.kind == "compare":
        for name in ("checkpoints", "max_restarts", "stop_early_s"):
            if (value := getattr(job, name)) != getattr(Job, name):  # the default
                yield f"{flag(name)} {value}: a comparison is neither saved, stopped early nor restarted; leave it out"
        return
    for word in job.arguments:
        if word.partition("=")[0] in ("--save", "--load"):
            yield f"{word} belongs to the job, which saves to and resumes from --checkpoints DIR; leave it out"


def ranks_per_node(job: Job) -> int:
    """Processes that torchrun starts on each node."""
    return job.procs_per_node or job.gpus_per_node


def job_name(job: Job) -> str:
    """The name that Slurm lists."""
    return job.name or f"overlap-{job.kind}"
