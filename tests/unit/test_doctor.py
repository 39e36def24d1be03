"""What the doctor says of machines that tests do not have: GPUs and their links, and of arguments that are wrong."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from overlap_train import cli
from overlap_train.select.system import SYSTEMS, System
from overlap_train.tools.doctor import machine, ranks
from overlap_train.tools.doctor.command import lines_of
from overlap_train.tools.doctor.job import FAIL, OK, WARN, Finding
from overlap_train.tools.measure.world import World

HERE = World(object(), torch.device("cuda"), 1, 4, ("node1",) * 4, (4, 5, 6, 7))  # type: ignore[arg-type]


def test_equal_lines_become_one_and_a_failure_shows_rank_host_and_fix() -> None:
    found = [Finding(OK, "device", "GPU ranks", "a GPU", rank=rank, host="node0") for rank in range(4)]
    found.append(Finding(FAIL, "signal", "none", "data first", "replace it", rank=2, host="node0"))
    assert list(lines_of(found, 4)) == [
        "OK    device, all ranks: GPU ranks [a GPU]",
        "FAIL  signal, rank 2 on node0: none [data first]",
        "        fix: replace it",
        "doctor: FAIL (1 FAIL, 1 OK)",
    ]


@pytest.mark.parametrize("card", [SYSTEMS["h200"], SYSTEMS["b200"]])
def test_a_slow_link_is_named_at_its_source(card: System) -> None:
    speeds = {(s, t): 380.0 for s in range(4) for t in range(4) if s != t} | {(1, 3): 190.0}
    (slow,) = ranks.judge_links(HERE, "link", speeds, card)
    assert slow.status == WARN and slow.measured == "190 GB/s from rank 5 on node1 to rank 7 on node1"
    (good,) = ranks.judge_links(HERE, "link", speeds | {(1, 3): 380.0}, card)
    assert good.status == OK


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if torch saw two GPUs that reach each other."""
    card = SimpleNamespace(name="NVIDIA H200", major=9, minor=0)
    answers = {
        "device_count": 2,
        "set_device": None,
        "get_device_properties": card,
        "mem_get_info": (140 << 30, 141 << 30),
    }
    for name, answer in (answers | {"can_device_access_peer": True}).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    return monkeypatch


def test_a_gpu_that_is_busy_cut_off_or_missing(two_gpus: pytest.MonkeyPatch) -> None:
    assert [found.status for found in machine.check_gpu(1, used=2)] == [OK, OK]
    assert [found.name for found in machine.check_gpu(1, used=1)] == ["gpu", "peer access"]
    (missing,) = machine.check_gpu(2, used=3)
    assert missing.status == FAIL and missing.measured == "local rank 2, but 2 visible GPUs"
    two_gpus.setattr(torch.cuda, "mem_get_info", lambda index: (70 << 30, 141 << 30))
    two_gpus.setattr(torch.cuda, "can_device_access_peer", lambda *_: False)
    busy, cut_off = machine.check_gpu(0, used=2)
    assert (busy.status, cut_off.status) == (WARN, FAIL) and cut_off.measured == "GPU 0: none to GPU 1"


def test_a_driver_that_torch_cannot_use_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert [found.status for found in machine.check_gpu(0, 1)] == [WARN]
    monkeypatch.setattr(os.path, "exists", lambda path: True)
    assert [found.status for found in machine.check_gpu(0, 1)] == [FAIL]


@pytest.mark.parametrize(("version", "told"), [("0.15.3", "0.15.3"), ("9.0", "9.0"), (None, "not installed")])
def test_versions_outside_what_pyproject_allows(
    version: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = machine.installed
    monkeypatch.setattr(machine, "installed", lambda name: version if name == "megatron-core" else real(name))
    found = {line.name: line for line in machine.check_versions(on_gpu=False)}["version megatron-core"]
    assert found.status == WARN and found.measured == told and "pip install" in found.fix


@pytest.mark.parametrize("line", ["--limit 0", "--seconds soon", "--provider mpi", "--unknown"])
def test_wrong_arguments_are_one_line(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", *line.split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith("overlap-train doctor: error: ") and said.count("\n") == 1


def test_a_folder_for_the_report_is_refused_before_minutes_of_checks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["doctor", "--json", str(tmp_path)]) == 2
    said = f"--json {tmp_path} cannot be written: Is a directory; name another file"
    assert capsys.readouterr().err == f"overlap-train doctor: error: {said}\n"


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        (None, "127.0.0.1:1 must be reachable"),
        ("WORLD_SIZE", "RANK is set and WORLD_SIZE is not"),
        ("MASTER_PORT", "torchrun"),
    ],
)
def test_a_job_without_its_store_says_where_it_looked(
    missing: str | None, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {**job, **machine.WITHOUT_MULTICAST}.items():
        monkeypatch.setenv(name, value)
    if missing:
        monkeypatch.delenv(missing)
    assert cli.main(["doctor", "--limit", "1"]) == 1
    said = capsys.readouterr().out
    assert "FAIL  store: " in said and words in said
