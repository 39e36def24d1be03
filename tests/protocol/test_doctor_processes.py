"""The doctor between real processes: a healthy job, and ranks that fail, are slow to answer, stop or die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_train import all_gather_linear, all_to_all_linear, linear_all_to_all, linear_reduce_scatter, shutdown
from overlap_train.symmetric import SymmetricHeap, open_heap
from overlap_train.symmetric.agreement import Agreement
from overlap_train.tools.doctor.job import Job
from overlap_train.tools.doctor.memory import check_memory
from overlap_train.tools.doctor.operator import Trial, check_trial
from overlap_train.tools.doctor.report import FAIL, OK, Finding
from overlap_train.tools.measure.world import World
from tests.processes import run_ranks, values
from tests.script_server import ScriptServer

Body = Callable[[World], list[Finding]]
DOCTOR = ("-m", "overlap_train", "doctor")
TRIAL = Trial(32, 24, 48, torch.float32, 0.2, ("chunked",), "host", timeout_s=20.0)


def doctor(*arguments: str, torchrun: bool) -> subprocess.CompletedProcess[str]:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2") if torchrun else ()
    command = [sys.executable, *launcher, *DOCTOR, *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)


def rows(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["rows"]


def test_two_ranks_that_are_well(script_server: ScriptServer, tmp_path: Path) -> None:
    arguments = ("--seconds", "0.2", "--json", str(tmp_path / "r.json"))
    status, said = script_server.run(*DOCTOR, *arguments, folder=tmp_path)
    assert status == 0, said
    found = {(row["name"], row["rank"]): row for row in rows(tmp_path / "r.json")}
    for name in (
        "device",
        "version torch",
        "gpu visible",
        "collectives",
        "rendezvous host",
        "signal host",
        "link",
        "operator chunked",
    ):
        assert (name, 0) in found and (name, 1) in found, name
    assert "bitwise" in found["operator chunked", 1]["expected"] and found["rendezvous host", 1]["status"] == OK
    assert said.count("overlap-train doctor") == 1 and "NVLink" in found["gpu visible", 0]["measured"]


def test_a_single_process_without_gpu_says_what_it_cannot_check(tmp_path: Path) -> None:
    run = doctor("--seconds", "0.1", "--json", str(tmp_path / "r.json"), torchrun=False)
    assert run.returncode == 0, run.stdout + run.stderr
    found = {row["name"]: row for row in rows(tmp_path / "r.json")}
    assert found["gpu visible"]["status"] == "WARN" and "not checked: NVLink" in found["gpu visible"]["measured"]
    assert found["operator chunked"]["status"] == OK
    assert "operator time" not in found, "a single rank has no communication to compare with"


def test_a_failure_under_torchrun_is_reported_in_full_and_ends_with_status_1(tmp_path: Path) -> None:
    """The rank that reports must not be ended by torchrun because another rank has ended with 1."""
    run = doctor("--seconds", "0.1", "--provider", "torch", "--json", str(tmp_path / "r.json"), torchrun=True)
    assert run.returncode == 1
    failed = {(row["name"], row["rank"]) for row in rows(tmp_path / "r.json") if row["status"] == FAIL}
    assert failed >= {("rendezvous torch", 0), ("rendezvous torch", 1)}
    assert "provider='torch' with tensors on cpu" in run.stdout and "doctor: FAIL" in run.stdout


def test_a_rank_that_never_came_is_named(script_server: ScriptServer, tmp_path: Path) -> None:
    arguments = ("--limit", "2", "--json", str(tmp_path / "r.json"))
    status, _ = script_server.run(*DOCTOR, *arguments, folder=tmp_path, world=1, WORLD_SIZE="2")
    assert status == 1
    failed = [row for row in rows(tmp_path / "r.json") if row["status"] == FAIL]
    assert [(row["name"], row["rank"]) for row in failed] == [("start", 1)] and "does not answer" in failed[0][
        "measured"
    ]


def on_hosts(rank: int, world: int) -> World:
    """All ranks as if on hosts of their own."""
    return World(dist.group.WORLD, torch.device("cpu"), rank, world, tuple(f"node{r}" for r in range(world)))


def examined(rank: int, world: int, folder: str, body: Body, limit_s: float) -> tuple[list[Finding], bool, list[int]]:
    """What a job of this rank finds with two checks, the second of which has the fault; and whether it can go on."""
    store = dist.FileStore(f"{folder}/board", world)
    store.set_timeout(timedelta(seconds=20))
    job = Job(store, rank, world, f"node{rank}", grace_s=1.0)
    here = on_hosts(rank, world)
    job.run("start", list, 60.0, "nothing")
    found = job.run("faulty", lambda: body(here), limit_s, "the way out")
    return found, job.broken, job.answering


def raises_on_one_rank(here: World) -> list[Finding]:
    def open_(agreement: Agreement, nbytes: int, provider: str, device: torch.device) -> SymmetricHeap:
        if here.rank == 1:
            raise OSError("no shared memory left")
        return open_heap(agreement, nbytes, provider, device)

    return check_memory(here, "host", open_)


def test_a_provider_that_raises_on_one_rank_is_reported_by_every_rank_without_waiting_for_the_limit(
    tmp_path: Path,
) -> None:
    for found, broken, answering in values(
        run_ranks(2, examined, str(tmp_path), raises_on_one_rank, 3600.0, limit_s=60)
    ):
        (fault,) = [finding for finding in found if finding.status == FAIL]
        assert (fault.name, fault.rank, fault.host, fault.fix) == ("faulty", 1, "node1", "the way out")
        assert fault.measured == "OSError: no shared memory left"
        assert broken and answering == [0, 1]


def memory_of_another_rank(here: World) -> list[Finding]:
    """Rank 1 has the views of its peers the wrong way round."""

    class Crossed:
        provider = "host"

        def __init__(self, heap: SymmetricHeap) -> None:
            self._heap = heap

        def view(self, rank: int) -> torch.Tensor:
            return self._heap.view(rank if here.rank == 0 else here.rank)

        def close(self) -> None:
            self._heap.close()

    return check_memory(here, "host", lambda *arguments: Crossed(open_heap(*arguments)))


def test_data_that_lands_in_the_wrong_memory_is_a_failure(tmp_path: Path) -> None:
    outcomes = values(run_ranks(2, examined, str(tmp_path), memory_of_another_rank, 60.0, limit_s=90))
    faults = [finding for finding in outcomes[0][0] if finding.status == FAIL]
    assert faults[0].name == "rendezvous host" and faults[0].rank == 0 and "rank 1 on node1" in faults[0].measured


def healthy_memory(here: World) -> list[Finding]:
    return check_memory(here, "host")


def test_three_ranks_exchange_signals_in_all_pairs(tmp_path: Path) -> None:
    for found, broken, _ in values(run_ranks(3, examined, str(tmp_path), healthy_memory, 60.0, limit_s=90)):
        assert not broken and {finding.status for finding in found} == {OK}
        assert {f.rank for f in found if f.name == "signal host"} == {0, 1, 2}


def wrong_gather(here: World) -> list[Finding]:
    """Rank 1's AG + GEMM is off by one in one row of what it gathered from rank 0, from the second round on."""
    rounds = iter(range(1000))

    def gather(*arguments: Any, **settings: Any) -> torch.Tensor:
        y = all_gather_linear(*arguments, **settings)
        if here.rank == 1 and next(rounds) >= 1:
            y[3] += 1
        return y

    # Long enough for a second round on a busy machine; it ends the trial.
    found = check_trial(here, replace(TRIAL, seconds=20.0, gather=gather))
    shutdown()
    return found


def wrong_scatter(here: World) -> list[Finding]:
    def scatter(*arguments: Any, **settings: Any) -> torch.Tensor:
        z = linear_reduce_scatter(*arguments, **settings)
        return torch.full_like(z, float("nan")) if here.rank == 1 else z

    found = check_trial(here, replace(TRIAL, scatter=scatter))
    shutdown()
    return found


def by_all_kernels(here: World) -> list[Finding]:
    """In Triton's interpreter; the few rows of low_latency are wrong on rank 1."""

    def gather(x: torch.Tensor, *arguments: Any, **settings: Any) -> torch.Tensor:
        y = all_gather_linear(x, *arguments, **settings)
        return y + (here.rank == 1 and len(x) == 2)

    methods = ("fused", "direct", "low_latency")
    found = check_trial(here, replace(TRIAL, methods=methods, few_rows=4, gather=gather))
    shutdown()
    return found


def test_every_method_that_auto_takes_is_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """low_latency with few rows, and without the all-to-alls, which it does not serve."""
    monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "1")
    healthy, faulty = values(run_ranks(2, examined, str(tmp_path), by_all_kernels, 60.0, limit_s=90))
    said = {finding.name: finding.measured for finding in healthy[0] if finding.rank == 0}
    assert "round of all four operators on new" in said["operator fused"].replace("rounds", "round")
    assert "all four operators" in said["operator direct"]
    assert said["operator low_latency"] == "1 round of AG + GEMM and GEMM + RS of 4 rows on new inputs"
    (fault,) = [finding for finding in faulty[0] if finding.status == FAIL]
    assert (fault.name, fault.rank) == ("operator low_latency", 1) and "AG + GEMM: 96 of 96 elements" in fault.measured


def timed(here: World) -> list[Finding]:
    found = check_trial(here, replace(TRIAL, methods=("chunked", "low_latency"), few_rows=4))
    shutdown()
    return found


def test_methods_for_few_rows_are_not_timed_with_many(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "1")
    (found, _, _), _ = values(run_ranks(2, examined, str(tmp_path), timed, 60.0, limit_s=90))
    (time,) = [finding.measured for finding in found if finding.name == "operator time"]
    assert "chunked " in time and "low_latency" not in time


def wrong_exchanges(here: World) -> list[Finding]:
    """Rank 1 gets its columns of another weight, and sends its own to the wrong rank."""

    def to_heads(x: torch.Tensor, w: torch.Tensor, **settings: Any) -> torch.Tensor:
        return linear_all_to_all(x, w.flip(0) if here.rank == 1 else w, **settings)

    def to_rows(x: torch.Tensor, w: torch.Tensor, **settings: Any) -> torch.Tensor:
        return all_to_all_linear(x.roll(len(x) // 2, 0) if here.rank == 0 else x, w, **settings)

    found = check_trial(here, replace(TRIAL, to_heads=to_heads, to_rows=to_rows))
    shutdown()
    return found


def test_wrong_exchanges_are_found(tmp_path: Path) -> None:
    for found, broken, _ in values(run_ranks(2, examined, str(tmp_path), wrong_exchanges, 60.0, limit_s=90)):
        faults = [finding for finding in found if finding.status == FAIL]
        assert [(fault.name, fault.rank) for fault in faults] == [("operator chunked", 0), ("operator chunked", 1)]
        assert (
            all("GEMM + A2A: " in fault.measured and "A2A + GEMM: " in fault.measured for fault in faults)
            and not broken
        )


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (wrong_gather, "AG + GEMM: 24 of 768 elements wrong, in rows of rank 0 on node0, in round 2"),
        (wrong_scatter, "GEMM + RS: "),
    ],
)
def test_a_wrong_result_names_the_rank_that_has_it(body: Body, says: str, tmp_path: Path) -> None:
    for found, broken, _ in values(run_ranks(2, examined, str(tmp_path), body, 60.0, limit_s=90)):
        (fault,) = [finding for finding in found if finding.status == FAIL]
        assert (fault.name, fault.rank, fault.host) == ("operator chunked", 1, "node1") and says in fault.measured
        assert "collective" in fault.fix and not broken


def one_rank_raises_in_the_operator(here: World) -> list[Finding]:
    """Its peer runs into the operator's own time-out, which names the rank."""
    trial = replace(TRIAL, seconds=20.0, timeout_s=2.0)  # it ends in the second round, however slow the first one is
    calls = iter(range(1000))

    def gather(*arguments: Any, **settings: Any) -> torch.Tensor:
        if here.rank == 1 and next(calls) == 1:
            raise RuntimeError("kernel does not compile")
        return all_gather_linear(*arguments, **settings)

    return check_trial(here, replace(trial, gather=gather))


def test_an_operator_that_raises_on_one_rank(tmp_path: Path) -> None:
    for found, _, _ in values(run_ranks(2, examined, str(tmp_path), one_rank_raises_in_the_operator, 60.0, limit_s=90)):
        faults = {finding.rank: finding.measured for finding in found if finding.status == FAIL}
        assert "kernel does not compile" in faults[1] and "of rank 1: expected epoch" in faults[0]


def stops(here: World) -> list[Finding]:
    if here.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()
    return []


def dies(here: World) -> list[Finding]:
    if here.rank == 1:
        os._exit(3)
    dist.barrier()
    threading.Event().wait()  # gloo notices a closed connection; a GPU collective would not
    return []


def dies_and_torchrun_ends_the_others(here: World) -> list[Finding]:
    if here.rank == 1:
        os._exit(3)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()
    return []


@pytest.mark.parametrize(("body", "limit_s"), [(stops, 3.0), (dies, 3.0), (dies_and_torchrun_ends_the_others, 3600.0)])
def test_a_stopped_or_dead_rank_is_named(body: Body, limit_s: float, tmp_path: Path) -> None:
    survivor, _ = run_ranks(2, examined, str(tmp_path), body, limit_s, limit_s=60, grace_s=3.0)
    found, broken, answering = values([survivor])[0]
    fault = found[-1]
    assert (fault.status, fault.name, fault.rank, fault.host) == (FAIL, "faulty", 1, "node1")
    assert "does not answer" in fault.measured and "dmesg" in fault.fix and broken and answering == [0]


def hangs_alone(here: World) -> list[Finding]:
    if here.rank == 1:
        threading.Event().wait()
    return []


def test_a_rank_that_is_alive_but_does_not_end_a_check_is_named_with_the_checks_fix(tmp_path: Path) -> None:
    for found, broken, answering in values(run_ranks(2, examined, str(tmp_path), hangs_alone, 2.0, limit_s=60)):
        (fault,) = found
        assert (fault.rank, fault.host, fault.fix) == (
            1,
            "node1",
            "the way out",
        ) and "alive, but still" in fault.measured
        assert broken and answering == [0, 1]
