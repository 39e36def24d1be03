"""`overlap-train launch`, train.sbatch and compare.sbatch on a real Slurm of two nodes (cluster.py), ranks on CPUs.

What jobs do with a stand-in for a recipe. One that trains on two nodes, is requeued and resumes: test_slurm_nodes.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from overlap_train import cli
from tests.launch.cluster import Cluster, missing, running, until

ROOT = Path(__file__).parents[2]
STANDIN = Path(__file__).with_name("standin.py")

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(Cluster(tmp_path_factory.mktemp("slurm"))) as cluster:
        yield cluster


@pytest.fixture
def launch(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Launch:
    monkeypatch.setenv("SLURM_CONF", str(cluster.configuration))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("PYTHONUNBUFFERED", "CUDA_DEVICE_MAX_CONNECTIONS", "TRITON_CACHE_DIR"):  # which a user has not set
        monkeypatch.delenv(name, raising=False)
    return Launch(cluster, tmp_path / "run", capsys)


class Launch:
    """Submits jobs as a user does, with a run folder of their own."""

    def __init__(self, cluster: Cluster, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.cluster, self.run_dir, self.capsys = cluster, run_dir, capsys
        run_dir.mkdir()

    def __call__(self, kind: str, *words: object) -> str:
        """The number of the submitted job."""
        code = cli.main(
            ["launch", kind, "--run-dir", str(self.run_dir), "--time", "20", "--sbatch=--mem=0", *map(str, words)]
        )
        said = self.capsys.readouterr()
        assert code == 0, said.err
        return said.out.split()[2].rstrip(":")

    def output(self, number: str) -> str:
        """What the job has printed."""
        (file,) = self.run_dir.glob(f"*-{number}.out")
        return file.read_text(errors="replace")

    def logs(self, number: str, start: str = "0.0") -> dict[tuple[int, int], str]:
        """Standard output of every rank's file, by node and local rank."""
        found = {}
        for file in (self.run_dir / "logs" / number / f"start-{start}").glob("node-*/*/attempt_0/*/stdout.log"):
            node = int(file.relative_to(self.run_dir).parts[3].split("-")[1])
            found[node, int(file.parent.name)] = file.read_text(errors="replace")
        return found

    def said(self) -> dict[str, dict]:
        """What ranks of the stand-in wrote down, by file name."""
        return {file.stem: json.loads(file.read_text()) for file in self.run_dir.glob("rank*.json")}


def test_a_job_without_progress_is_not_requeued_and_its_ranks_are_told_to_end(launch: Launch) -> None:
    number = launch("train", "--procs-per-node", 2, "--recipe", STANDIN, "--", launch.run_dir, "wait")
    until(lambda: len(list(launch.run_dir.glob("*-waits"))) == 2, 120, "both ranks")
    until(lambda: "[rank 1] rank 1 on stdout" in launch.output(number), 20, "what ranks print while they run")
    launch.cluster.command("scancel", "--batch", "--signal=USR1", number)
    assert launch.cluster.wait(number) == "FAILED"
    assert "not requeued: no checkpoint was written" in launch.output(number)
    assert len(list(launch.run_dir.glob("*-told"))) == 2
    assert launch.cluster.job(number)["Restarts"] == "0"


def test_a_preempted_job_is_requeued_although_it_saved_nothing(launch: Launch) -> None:
    """The partition gives it a minute, in which Slurm ends its ranks and requeues nothing."""
    words = ("--nodes", 2, "--procs-per-node", 1, "--max-restarts", 1, "--sbatch=--exclusive", "--recipe", STANDIN)
    number = launch("train", *words, "--", launch.run_dir, "wait")
    until(lambda: len(list(launch.run_dir.glob("*-waits"))) == 2, 120, "both ranks")
    urgent = ("--partition=urgent", "--nodes=2", "--exclusive", "--mem=0", "--time=5", "--output=/dev/null")
    other = launch.cluster.command("sbatch", "--parsable", *urgent, "--wrap", "sleep 1").strip()
    assert launch.cluster.wait(other) == "COMPLETED"
    assert "requeued: the next start begins anew: there is no checkpoint" in launch.output(number)
    assert len(list(launch.run_dir.glob("*-told"))) == 2
    until(lambda: launch.cluster.job(number)["JobState"] == "RUNNING", 100, "a second start")
    assert launch.cluster.job(number)["Restarts"] == "1"
    assert not (launch.run_dir / "logs" / number / "start-0.1").exists(), (
        "ranks were started again in the time of grace"
    )
    launch.cluster.command("scancel", number)
    assert launch.cluster.wait(number) == "CANCELLED"


def test_ranks_that_are_restarted_resume_too(launch: Launch) -> None:
    words = ("--nodes", 2, "--procs-per-node", 1, "--max-restarts", 1, "--recipe", STANDIN)
    number = launch("train", *words, "--", launch.run_dir, "fail-once", "a b", "$HOME", "c'd")
    assert launch.cluster.wait(number) == "COMPLETED", launch.output(number)
    checkpoints = str(launch.run_dir / "checkpoints")
    said = launch.said()
    assert said.keys() == {"rank0-restart0", "rank1-restart0", "rank0-restart1", "rank1-restart1"}
    for rank in (0, 1):
        first, second = said[f"rank{rank}-restart0"], said[f"rank{rank}-restart1"]
        assert first["ranks"] == second["ranks"] == 2
        assert first["arguments"] == ["a b", "$HOME", "c'd", "--save", checkpoints]
        assert second["arguments"] == [*first["arguments"], "--load", checkpoints]
        assert first["SLURM_NODEID"] == str(rank)
        assert first["MASTER_ADDR"] == "127.0.0.1"
        assert first["CUDA_DEVICE_MAX_CONNECTIONS"] == "1" and first["TRITON_CACHE_DIR"].endswith(
            f"/triton-{os.getuid()}"
        )


def test_a_failed_recipe_fails_the_job_and_says_where_to_look(launch: Launch) -> None:
    number = launch("train", "--procs-per-node", 2, "--recipe", STANDIN, "--", launch.run_dir, "fail")
    assert launch.cluster.wait(number) == "FAILED"
    output = launch.output(number)
    assert f"each rank's output is under {launch.run_dir}/logs/{number}/start-0.0" in output
    assert "exitcode  : 5" in output
    assert "[rank 1] rank 1 on stderr" in output


def test_a_comparison_gets_its_arguments_and_no_checkpoints(launch: Launch) -> None:
    """Also where sbatch passes on no variable: its tasks still need those of the script, such as PATH."""
    words = ("--procs-per-node", 1, "--sbatch=--export=NONE", "--recipe", STANDIN)
    number = launch("compare", *words, "--", launch.run_dir, "ok", "--steps", "3")
    assert launch.cluster.wait(number) == "COMPLETED", launch.output(number)
    said = launch.said()["rank0-restart0"]
    assert said["arguments"] == ["--steps", "3"]
    assert said["RUN_DIR"] == str(launch.run_dir)
    assert launch.cluster.job(number)["Requeue"] == "0"


@pytest.mark.parametrize("name", ["RUN_DIR", "PROCS_PER_NODE"])
def test_a_site_value_that_is_not_set_is_explained(launch: Launch, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for given in {"RUN_DIR", "PYTHON", "PROCS_PER_NODE"} - {name}:
        monkeypatch.setenv(given, str(launch.run_dir))
    monkeypatch.delenv(name, raising=False)
    number = submit_plainly(launch, "launch/train.sbatch")
    assert launch.cluster.wait(number) == "FAILED"
    assert re.search(rf": {name}: \w+", launch.output(number)), launch.output(number)


def submit_plainly(launch: Launch, *words: str) -> str:
    command = ["sbatch", "--parsable", "--mem=0", f"--output={launch.run_dir}/%x-%j.out", *words]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize(
    ("flag", "why"), [("--partition nosuch", "invalid partition"), ("--time 4h", "Invalid --time")]
)
def test_what_sbatch_refuses_is_one_line(
    launch: Launch, capsys: pytest.CaptureFixture[str], flag: str, why: str
) -> None:
    words = f"launch train --run-dir {launch.run_dir} --time 10 --procs-per-node 1 --recipe {STANDIN} {flag}"
    assert cli.main(words.split()) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("overlap-train launch: error: sbatch refused the job: ")
    assert why in said
