"""Jobs, the scripts written from them and the command line, without Slurm: srun, scontrol and sbatch are stand-ins."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from overlap_train import cli
from overlap_train.tools.slurm.command import TRACKER
from overlap_train.tools.slurm.job import KINDS, Job
from overlap_train.tools.slurm.script import render, sbatch_options

ROOT = Path(__file__).parents[2]
DIFFICULT = ("a b", "$HOME", "c'd", 'e"f', "", "--flag=*", "`true`", "\\")
# Writes down what it was given, one argument after another; the file is named like the command.
RECORDER = """#!/bin/bash
printf '%s\\0' "$@" >"$RECORDS/${0##*/}"
"""
SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames n[07-08]" ] && printf 'n07\\nn08\\n'
"""
SLURM = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NODELIST": "n[07-08]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_SUBMIT_DIR": str(ROOT),
    "SLURM_GPUS_ON_NODE": "8",
}


class Commands:
    """A PATH with commands that only write down what they were given."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.records = folder / "records"
        self.bin = folder / "bin"
        for path in (self.records, self.bin):
            path.mkdir()
        monkeypatch.setenv("PATH", f"{self.bin}:{os.environ['PATH']}")
        monkeypatch.setenv("RECORDS", str(self.records))

    def add(self, name: str, text: str = RECORDER) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def given(self, name: str) -> list[str]:
        """The arguments of the command's last call."""
        return (self.records / name).read_text().split("\0")[:-1]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    return Commands(tmp_path, monkeypatch)


def started(script: Path, commands: Commands, *arguments: str, **given: str) -> subprocess.CompletedProcess[str]:
    """The script as a job of two nodes."""
    commands.add("srun")
    commands.add("scontrol", SCONTROL)
    environment = {**os.environ, **SLURM, **given}
    return subprocess.run(
        ["bash", str(script), *arguments], env=environment, capture_output=True, text=True, timeout=60
    )


def srun_of(script: Path, commands: Commands, *arguments: str, **given: str) -> list[str]:
    """The arguments of srun when the script runs."""
    result = started(script, commands, *arguments, **given)
    assert result.returncode == 0, result.stdout + result.stderr
    return commands.given("srun")


def written(tmp_path: Path, job: Job) -> Path:
    script = tmp_path / "written.sbatch"
    script.write_text(render(job))
    return script


def a_job(tmp_path: Path, kind: str = "train", **changes: object) -> Job:
    recipe = tmp_path / "my recipe.py"
    recipe.touch()
    settings = {"nodes": 2, "gpus_per_node": 8, "time": "04:00:00", "python": sys.executable}
    settings |= {"run_dir": str(tmp_path / "run"), "recipe": str(recipe)}
    if kind == "train":
        settings["checkpoints"] = str(tmp_path / "run" / "checkpoints")
    return Job(kind, **(settings | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_reach_srun_as_they_were_given(tmp_path: Path, commands: Commands, kind: str) -> None:
    job = a_job(tmp_path, kind, arguments=DIFFICULT)
    given = srun_of(written(tmp_path, job), commands, "ignored", SLURM_SUBMIT_DIR="/nonexistent", RECIPE="/other.py")
    at = given.index(job.recipe)
    assert given[at - 1] == sys.executable
    assert given[at + 1 :] == [*DIFFICULT, *(["--save", job.checkpoints] if kind == "train" else [])]
    assert "--nodes=2" in given
    assert {"--ntasks-per-node=1", "--export=ALL"} <= set(given)
    assert "n07:24567" in given  # the first node, and 20000 + the last four digits of the job's id
    assert not [word for word in given if word.startswith("--container")]


def test_a_module_takes_the_place_of_the_file(tmp_path: Path, commands: Commands) -> None:
    job = a_job(
        tmp_path, recipe="", module="overlap_train.integrations.megatron", arguments=("pretrain_gpt.py", "--bf16")
    )
    given = srun_of(written(tmp_path, job), commands)
    words = ["-m", "overlap_train.integrations.megatron", "pretrain_gpt.py", "--bf16", "--save", job.checkpoints]
    assert given[-6:] == words


def test_a_container_sees_the_folders_of_the_job(tmp_path: Path, commands: Commands) -> None:
    image, mounts = "nvcr.io#nvidia/pytorch:26.01-py3", "/data:/data:ro"
    checkpoints = str(tmp_path / "checkpoints")
    job = a_job(
        tmp_path, container_image=image, container_mounts=mounts, checkpoints=checkpoints, recipe="/in/image/train.py"
    )
    given = srun_of(written(tmp_path, job), commands)
    here, run = os.getcwd(), job.run_dir
    assert f"--container-image={image}" in given
    assert f"--container-workdir={here}" in given
    assert f"--container-mounts={here}:{here},{run}:{run},{checkpoints}:{checkpoints},{mounts}" in given


@pytest.mark.parametrize(
    ("tracker", "folders", "is_resumed"),
    [
        ("6", (), True),  # the recipe names what is missing
        (None, (), False),
        (None, ("iter_0000002.tmp", "iter_0000002.old", "iter_notes"), False),
        (None, ("iter_0000002",), True),
        ("", ("iter_0000002", "iter_0000010"), True),
    ],
)
def test_a_checkpoint_is_resumed_from_although_its_name_is_lost(
    tmp_path: Path, commands: Commands, tracker: str | None, folders: tuple[str, ...], is_resumed: bool
) -> None:
    """Else the job would train from its first step, or, beside an empty tracker, would be refused for want of --load."""
    job = a_job(tmp_path)
    for name in folders:
        Path(job.checkpoints, name).mkdir(parents=True)
    if tracker is not None:
        Path(job.checkpoints).mkdir(parents=True, exist_ok=True)
        Path(job.checkpoints, TRACKER).write_text(tracker)
    given = srun_of(written(tmp_path, job), commands)
    assert ("--load" in given) == is_resumed


def test_a_script_of_megatron_is_not_started_beside_an_empty_tracker(tmp_path: Path, commands: Commands) -> None:
    job = a_job(tmp_path, recipe="", module="overlap_train.integrations.megatron")
    Path(job.checkpoints, "iter_0000002").mkdir(parents=True)
    Path(job.checkpoints, TRACKER).touch()
    result = started(written(tmp_path, job), commands)
    assert result.returncode == 2
    assert f"error: {job.checkpoints}/{TRACKER} is empty" in result.stderr


@pytest.mark.parametrize(
    ("claimed", "running", "is_refused"),
    [
        ("12", "11\n12", True),
        ("12", "", False),
        ("12", SLURM["SLURM_JOB_ID"], False),
        (SLURM["SLURM_JOB_ID"], SLURM["SLURM_JOB_ID"], False),
        ("", "12", False),
    ],
    ids=["another job that runs", "one that has ended", "another task of this array", "this job, requeued", "no job"],
)
def test_two_jobs_do_not_save_into_one_folder(
    tmp_path: Path, commands: Commands, claimed: str, running: str, is_refused: bool
) -> None:
    job = a_job(tmp_path)
    claim = Path(job.checkpoints, "slurm_job")
    claim.parent.mkdir(parents=True)
    claim.write_text(claimed)
    commands.add("squeue", f'#!/bin/bash\n[[ " $* " = *" --jobs={claimed} "* ]] && echo "{running}"\n')
    result = started(written(tmp_path, job), commands)
    assert result.returncode == (2 if is_refused else 0), result.stderr
    assert ("error: job 12 is running and saves into" in result.stderr) == is_refused
    assert claim.read_text().strip() == (claimed if is_refused else SLURM["SLURM_JOB_ID"])


def test_a_folder_that_cannot_be_claimed_is_named(tmp_path: Path, commands: Commands) -> None:
    job = a_job(tmp_path)
    Path(job.checkpoints, "slurm_job").mkdir(parents=True)  # root may write everywhere
    result = started(written(tmp_path, job), commands)
    assert result.returncode == 2
    assert f"error: CHECKPOINT_DIR={job.checkpoints} cannot be written" in result.stderr


def test_relative_folders_are_mounted_at_their_own_paths(
    tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {"RUN_DIR": "run", "PYTHON": sys.executable, "RECIPE": "r.py", "CONTAINER_IMAGE": "image"}
    settings["CDPATH"] = ".:/elsewhere"  # with which `cd run` prints the folder
    given = srun_of(ROOT / "launch" / "train.sbatch", commands, **settings)
    run = f"{tmp_path}/run"
    assert f"--container-mounts={tmp_path}:{tmp_path},{run}:{run},{run}/checkpoints:{run}/checkpoints" in given
    assert given[-2:] == ["--save", f"{run}/checkpoints"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_itself_takes_ranks_from_slurm_and_arguments_from_its_line(
    tmp_path: Path, commands: Commands, kind: str
) -> None:
    job = a_job(tmp_path)
    settings = {"RUN_DIR": job.run_dir, "PYTHON": sys.executable, "RECIPE": job.recipe}
    given = srun_of(ROOT / "launch" / f"{kind}.sbatch", commands, "x y", **settings)
    checkpoints = ["--save", f"{job.run_dir}/checkpoints"] if kind == "train" else []
    logs = f"{job.run_dir}/logs/1234567/start-0.0"
    assert given[given.index(logs) :] == [logs, "8", sys.executable, job.recipe, "x y", *checkpoints]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus_per_node": 0}, "no ranks: add --gpus-per-node N, or --procs-per-node N"),
        ({"procs_per_node": 9}, "--procs-per-node 9 is more than --gpus-per-node 8; one rank a GPU at most"),
        ({"time": ""}, "--time is missing"),
        ({"module": "m"}, "are both given; choose one"),
        ({"container_mounts": "/a:/a"}, "--container-mounts /a:/a without --container-image mounts nothing"),
        ({"kind": "compare", "max_restarts": 2}, "--max-restarts 2: a comparison is neither saved, stopped early nor"),
        (
            {"kind": "compare", "stop_early_s": 500},
            "--stop-early-s 500: a comparison is neither saved, stopped early nor",
        ),
        ({"arguments": ("--load=x",)}, "--load=x belongs to the job, which saves to and resumes from --checkpoints"),
    ],
)
def test_a_job_that_cannot_run_is_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        a_job(tmp_path, **changes)  # type: ignore[arg-type]


def flags(job: Job) -> list[str]:
    words = [str(job.nodes), str(job.gpus_per_node), job.time, job.run_dir, job.recipe]
    names = ("--nodes", "--gpus-per-node", "--time", "--run-dir", "--recipe")
    return [job.kind, *(word for pair in zip(names, words, strict=True) for word in pair)]


def test_dry_run_prints_what_would_be_submitted_and_writes_nothing(
    tmp_path: Path, commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.add("sbatch")
    job = a_job(tmp_path)
    assert cli.main(["launch", *flags(job), "--dry-run", "--", "--train-iters", "2"]) == 0
    said = capsys.readouterr()
    checkpoints = f"{job.run_dir}/checkpoints"
    assert said.out == render(a_job(tmp_path, checkpoints=checkpoints, arguments=("--train-iters", "2")))
    assert said.err == ""
    assert not Path(job.run_dir).exists()
    assert not (commands.records / "sbatch").exists()


@pytest.mark.parametrize("given", [[], ["--out=there"], ["--out", "there"]])
def test_a_comparison_writes_into_the_folder_of_its_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str]
) -> None:
    words = ["compare", "--time", "20", "--procs-per-node", "2", "--run-dir", str(tmp_path)]
    assert cli.main(["launch", *words, "--dry-run", "--", "--quick", *given]) == 0
    expected = shlex.join(["set", "--", "--quick", *(given or ["--out", str(tmp_path)])])
    assert expected in capsys.readouterr().out.splitlines()


def test_sbatch_gets_the_options_and_the_script(
    tmp_path: Path, commands: Commands, capsys: pytest.CaptureFixture[str]
) -> None:
    commands.add("sbatch", RECORDER + "echo '77;cluster'\n")
    job = a_job(tmp_path)
    assert cli.main(["launch", *flags(job), "--sbatch=--exclusive", "--dry-run", "--", "x"]) == 0
    expected = capsys.readouterr().out
    assert cli.main(["launch", *flags(job), "--sbatch=--exclusive", "--", "x"]) == 0
    script = f"{job.run_dir}/overlap-train.sbatch"
    assert commands.given("sbatch") == ["--parsable", *sbatch_options(job), "--exclusive", script]
    assert Path(script).read_text() == expected
    assert f"submitted job 77: {script}\noutput: {job.run_dir}/overlap-train-77.out;" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no sbatch", "sbatch was not found on PATH; submit from a login node of the cluster, or"),
        ("refused", "sbatch refused the job: Batch job submission failed: no; try again"),
        ("no recipe", "the recipe nowhere.py is missing in "),
        ("unknown flag", "unrecognized arguments: --nods (--help lists the flags)"),
        ("no folder", "cannot be written: File exists"),
    ],
)
def test_errors_are_one_line(
    tmp_path: Path,
    commands: Commands,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    case: str,
    message: str,
) -> None:
    words = flags(a_job(tmp_path))
    if case == "no sbatch":
        monkeypatch.setenv("PATH", str(commands.bin))
    elif case == "refused":
        says = "sbatch: error: Batch job submission failed: no;\\ntry again"
        commands.add("sbatch", f"#!/bin/bash\nprintf '{says}\\n' >&2\nexit 1\n")
    elif case == "no folder":
        (tmp_path / "run").touch()
    elif case == "no recipe":
        words += ["--recipe", "nowhere.py"]
    else:
        words += ["--nods"]
    assert cli.main(["launch", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("overlap-train launch: error: ")
    assert message in said
    assert said.count("\n") == 1


def test_a_job_that_would_go_on_from_an_older_one_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every job has the same folder where neither --name nor --run-dir is given."""
    words = ["train", "--time", "20", "--procs-per-node", "2", "--run-dir", str(tmp_path)]
    assert cli.main(["launch", *words, "--dry-run"]) == 0
    assert capsys.readouterr().err == ""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / TRACKER).write_text("500\n")
    assert cli.main(["launch", *words, "--dry-run"]) == 0
    said = capsys.readouterr()
    assert f"note: {tmp_path}/checkpoints has a checkpoint, from which the job goes on" in said.err
    assert "note: " not in said.out, "that is the script"
    assert f"tracker={TRACKER}" in (ROOT / "launch" / "job.sh").read_text()
