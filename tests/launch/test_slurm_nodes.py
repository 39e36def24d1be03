"""train.sbatch on a real Slurm whose two nodes are machines of their own (machines.py): requeue, resume, and a lost node."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.launch import cluster, machines
from tests.recipes import recipe_runs

SMALL = [str(word) for pair in recipe_runs.SMALL.items() for word in pair]
STEPS, SAVED = 10, 4  # steps in all, and between checkpoints
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # a start on a busy machine takes minutes


@dataclass
class Site:
    """The cluster and its machines."""

    slurm: cluster.Cluster
    machines: machines.Machines


@dataclass
class Run:
    """One submitted job and its run folder."""

    site: Site
    folder: Path
    number: str = ""

    def submit(self, ranks: int, *flags: object) -> None:
        """The small model on two nodes with so many ranks each, tensor parallel 2."""
        options = ["--nodes=2", "--time=20", "--mem=0", f"--output={self.folder}/output"]
        words = [*SMALL, "--overlap-train", "--tp", 2, "--save-interval", SAVED, *flags]
        variables = {"RUN_DIR": self.folder, "PYTHON": sys.executable, "PROCS_PER_NODE": ranks}
        command = ["sbatch", "--parsable", *options, "launch/train.sbatch", *map(str, words)]
        self.number = self.site.slurm.command(*command, **variables, CUDA_VISIBLE_DEVICES="").strip()

    def output(self) -> str:
        """What the job has printed."""
        file = self.folder / "output"
        return file.read_text(errors="replace") if file.exists() else ""

    def logs(self, start: int) -> dict[tuple[str, int], str]:
        """Standard output of every rank's file, by its node's folder and local rank."""
        files = (self.folder / "logs" / self.number / f"start-{start}.0").glob("node-*/*/attempt_0/*/stdout.log")
        return {(file.parts[-5], int(file.parts[-2])): file.read_text(errors="replace") for file in files}

    def losses(self, start: int) -> dict[int, float]:
        """lm loss by iteration."""
        log = self.logs(start).get(("node-0-node0", 0), "")
        return {int(step): float(loss) for step, loss in recipe_runs.ROWS.findall(log)}

    def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait; where it does not come, say what the job has printed."""
        try:
            cluster.until(condition, 240, what)
        except AssertionError as error:
            raise AssertionError(f"{error}; {self.job('JobState')}, {self.job('Reason')}\n{self.output()}") from None

    def job(self, field: str) -> str:
        """What Slurm says of the job."""
        return self.site.slurm.job(self.number)[field]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if reason := machines.missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(machines.running(folder, nodes=2))
        slurm = cluster.Cluster(folder, made.nodes, made.login)
        yield Site(stack.enter_context(cluster.running(slurm)), made)


@pytest.fixture
def run(site: Site, tmp_path: Path) -> Iterator[Run]:
    run = Run(site, tmp_path)
    site.machines.throttle("1gbit")
    yield run
    site.slurm.command("scancel", run.number)


def test_the_doctor_tries_operators_between_two_hosts(site: Site, tmp_path: Path) -> None:
    first, report = site.machines.nodes[0].address, tmp_path / "r.json"
    words = f"-m torch.distributed.run --nnodes=2 --nproc-per-node=1 --master-addr={first} --master-port=29555"
    doctor = f"-m overlap_train doctor --seconds 0.3 --json {report}"
    started = [
        subprocess.Popen(
            [*node.command, sys.executable, *words.split(), f"--node-rank={number}", *doctor.split()],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )
        for number, node in enumerate(site.machines.nodes)
    ]
    assert [node.wait(timeout=240) for node in started] == [0, 0]
    rows = [row for row in json.loads(report.read_text())["rows"] if row["name"] == "network"]
    assert [(row["rank"], row["host"], row["status"]) for row in rows] == [(0, "node0", "OK"), (1, "node1", "OK")]


def check_that_losses_continue(run: Run) -> None:
    """The second start goes on after a checkpoint of the first one, with the losses that it had."""
    first, second = run.losses(0), run.losses(1)
    (resumed,) = re.findall(r"resumed from checkpoint \S+iter_(\d+)", run.logs(1)["node-0-node0", 0])
    assert int(resumed) in (SAVED, 2 * SAVED)
    assert list(second) == list(range(int(resumed) + 1, STEPS + 1))
    assert second[int(resumed) + 1] < first[int(resumed)] < first[1]
    for step in first.keys() & second.keys():
        assert second[step] == pytest.approx(first[step], rel=1e-4), step


def test_a_job_on_two_nodes_is_requeued_and_resumes(run: Run) -> None:
    """A tensor-parallel group in each node, and the gradients of two replicas between them."""
    run.site.machines.throttle("1mbit")  # so that steps are left when the signal comes
    run.submit(2, "--train-iters", STEPS)
    run.until(lambda: SAVED + 1 in run.losses(0), "the step after a checkpoint")
    run.site.slurm.command("scancel", "--batch", "--signal=USR1", run.number)  # as Slurm does before the time limit
    run.until(lambda: "requeued: the next start resumes" in run.output(), "a requeue")
    run.site.machines.throttle("1gbit")
    run.until(lambda: run.job("JobState") in cluster.ENDED, "the job's end")
    assert run.job("JobState") == "COMPLETED", run.output()
    check_that_losses_continue(run)
    ranks = {(node, rank) for node in ("node-0-node0", "node-1-node1") for rank in range(2)}
    assert run.logs(0).keys() == run.logs(1).keys() == ranks
    assert "4 on CPU, tensor parallel 2, data parallel 2" in run.logs(1)["node-0-node0", 0]


def test_a_job_whose_node_is_lost_says_so_and_starts_again_when_it_is_back(run: Run) -> None:
    """One tensor-parallel group over both nodes; the second is cut off, and later switched off and on again.

    Slurm is told of the loss, as by a site's health check: SlurmdTimeout, short enough for a test, would race the rank's message.
    Whose wait meets the cut, an operator's or a collective of Megatron's own, is chance; both have a limit and both say so.
    """
    limits = ("--overlap-train-timeout-s", 5, "--distributed-timeout-minutes", 1)
    run.submit(1, "--train-iters", 10**6, *limits)
    run.until(lambda: SAVED + 1 in run.losses(0), "the step after a checkpoint")
    run.site.machines.cut(1)
    ours, megatrons = "of node 1,? over the network", "a collective of Megatron's or torch's own lost a rank"
    message = f"pretrain_gpt: error: .*({ours}|{megatrons})"
    run.until(lambda: re.search(message, run.output()), "the rank's word on the lost node")
    assert "2 ranks on 2 nodes of 1, found by operating system: ranks 0, 1; gloo between nodes" in run.output()
    run.site.slurm.command("scontrol", "update", "NodeName=node1", "State=DOWN", "Reason=lost")
    run.until(lambda: run.job("Restarts") == "1", "a requeue by Slurm")
    run.until(lambda: "Node failure on node1" in run.output(), "Slurm's name of the lost node")
    run.site.machines.mend(1)
    run.site.slurm.reboot(run.site.machines.nodes[1])
    run.until(lambda: re.search(r"newest checkpoint: \d+; .*/start-1\.0$", run.output(), re.MULTILINE), "a new start")
