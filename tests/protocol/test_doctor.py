"""`overlap-train doctor` on CPU processes: a healthy job, and planted defects, each named with its rank and host."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import torch

from tests.script_server import ScriptServer

HOST = socket.gethostname()
# The doctor in a process where rank 1 has a defect; it waits 2 s for what takes 5 elsewhere.
FAULTY = """
import os, pathlib, signal, sys, torch, overlap_train
if os.environ["RANK"] == "0":
    pathlib.Path("first").write_text(str(os.getpid()))
else:
    gather, copy = overlap_train.all_gather_linear, torch.Tensor.copy_
    {fault}
from overlap_train.cli import main
from overlap_train.tools.doctor import job, ranks
job._GRACE_S = ranks._SIGNAL_S = 2.0
sys.exit(main(["doctor", "--seconds", "0.2", "--json", "r.json", *sys.argv[1:]]))
"""
FAULTS = {
    "another version": 'torch.__version__ = "2.99.0"',
    "wrong result": "overlap_train.all_gather_linear = lambda *a, **k: gather(*a, **k) + torch.eye(32, 24)",
    "no signals": "torch.Tensor.copy_ = lambda s, *a, **k: s if (s.dtype, len(s)) == (torch.int64, 1) else copy(s, *a, **k)",
    "raises": "overlap_train.all_gather_linear = None",
    # and torchrun ends the other ranks
    "dies": "overlap_train.all_gather_linear = "
    "lambda *a, **k: (os.kill(int(pathlib.Path('first').read_text()), signal.SIGTERM), os._exit(3))",
    # and, as under srun, the store with it
    "kills the first": "overlap_train.all_gather_linear = "
    "lambda *a, **k: os.kill(int(pathlib.Path('first').read_text()), signal.SIGKILL)",
}


def lines(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "r.json").read_text())["rows"]


def doctor(
    server: ScriptServer, folder: Path, *arguments: str, faults: tuple[str, ...] = (), **job: Any
) -> tuple[int, str]:
    """Exit status, and what all ranks have printed."""
    (folder / "faulty.py").write_text(FAULTY.format(fault="; ".join(FAULTS[fault] for fault in faults) or "pass"))
    return server.run(str(folder / "faulty.py"), *arguments, folder=folder, **job)


def failures(folder: Path) -> dict[tuple[str, int], str]:
    """(check, rank) -> what was measured; each of them has host and fix."""
    found = [line for line in lines(folder) if line["status"] == "FAIL"]
    assert all(line["host"] == HOST and line["fix"] for line in found), found
    return {(line["name"], line["rank"]): line["measured"] for line in found}


def test_ranks_that_are_well(script_server: ScriptServer, tmp_path: Path) -> None:
    status, said = doctor(script_server, tmp_path, "--node-ranks", "1")
    assert status == 0, said
    assert said.count("overlap-train doctor") == 1 and "doctor: WARN (1 WARN," in said, "one rank prints"
    found = {(line["name"], line["rank"]): line["status"] for line in lines(tmp_path)}
    for name in (
        "device", "version torch", "join", "heap host", "signal host", "link host", "operator", "network",
    ):  # fmt: skip
        assert found[name, 0] == found[name, 1] == "OK", name
    assert found["operator time", 0] == "OK" and ("operator time", 1) not in found
    assert {name for (name, _), status in found.items() if status != "OK"} == {"gpu visible"}


def test_a_wrong_result_is_named(script_server: ScriptServer, tmp_path: Path) -> None:
    status, said = doctor(script_server, tmp_path, faults=("wrong result",))
    assert status == 1 and f"rank 1 on {HOST}" in said
    wrong = (
        f"RuntimeError: AG + GEMM: 24 of 768 elements wrong, in rows of rank 0 on {HOST}, rank 1 on {HOST}, in round 1"
    )
    assert failures(tmp_path) == {("operator", 1): wrong}


def test_so_are_unequal_versions(script_server: ScriptServer, tmp_path: Path) -> None:
    status, said = doctor(script_server, tmp_path, faults=("another version",))
    assert status == 1 and "fix: install the same packages" in said
    found = failures(tmp_path)
    assert found["version torch: ranks differ", 1].startswith("2.99.0")
    assert f"rank 0 of the group has torch={torch.__version__}" in found["operator", 1], "and operators refuse them"


def test_a_rank_without_signals_is_named(script_server: ScriptServer, tmp_path: Path) -> None:
    status, _ = doctor(script_server, tmp_path, faults=("no signals",))
    assert status == 1
    assert f"TimeoutError: no signal from rank 1 on {HOST} in 2 s" in failures(tmp_path)["heap host", 0]
    assert not any(line["name"].startswith("operator") for line in lines(tmp_path))


def test_an_operator_that_raises_on_one_rank(script_server: ScriptServer, tmp_path: Path) -> None:
    status, said = doctor(script_server, tmp_path, "--limit", "16", faults=("raises",))
    assert status == 1
    assert "'NoneType' object is not callable" in failures(tmp_path)["operator", 1]
    assert "rank 1" in failures(tmp_path).get(("operator", 0), "rank 1"), said


def test_a_rank_that_dies_is_named(script_server: ScriptServer, tmp_path: Path) -> None:
    doctor(script_server, tmp_path, faults=("dies",))
    assert failures(tmp_path)["operators", 1].startswith("does not answer when the job was ended (SIGTERM) after ")


def test_a_first_rank_that_dies_is_named_without_its_store(script_server: ScriptServer, tmp_path: Path) -> None:
    _, said = doctor(script_server, tmp_path, faults=("kills the first",))
    assert failures(tmp_path)["operators", 0].startswith("the job's store is gone: rank 0,"), said
    assert "doctor: FAIL (1 FAIL," in said and "Traceback" not in said


def test_a_rank_that_never_came_is_named(script_server: ScriptServer, tmp_path: Path) -> None:
    status, _ = doctor(script_server, tmp_path, "--limit", "2", world=1, WORLD_SIZE="2")
    (failed,) = [line for line in lines(tmp_path) if line["status"] == "FAIL"]
    assert status == 1 and (failed["name"], failed["rank"]) == ("start", 1) and "does not answer" in failed["measured"]


def test_a_single_process_says_what_it_cannot_check(script_server: ScriptServer, tmp_path: Path) -> None:
    words = ("-m", "overlap_train", "doctor", "--seconds", "0.1")
    status, said = script_server.run(*words, folder=tmp_path, world=1)
    assert status == 0 and "none, so GPUs, links and the operators" in said and "operator time" not in said
