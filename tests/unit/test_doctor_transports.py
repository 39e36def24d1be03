"""Which transports between nodes the doctor checks, and what it says of one that cannot run; GPUs and libraries are stand-ins."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from overlap_train import OverlapConfig
from overlap_train.flags import NETWORKS
from overlap_train.schedule.order import Topology
from overlap_train.tools.doctor import command, examination, job, links, memory, network, operator
from overlap_train.tools.doctor.flags import Doctor
from overlap_train.tools.doctor.network import Settings, check_network
from overlap_train.tools.doctor.report import FAIL, WARN, Finding
from overlap_train.tools.measure.world import World, first_line
from tests.unit.doctor_cases import world

ASKED = Settings(1, "auto", "auto", 1.0)


def test_the_names_are_those_of_the_setting() -> None:
    assert set(NETWORKS) == {"auto", network.NCCL, network.NVSHMEM}
    assert ASKED.transports(on_gpu=True) == ("nccl", "nvshmem") and ASKED.transports(on_gpu=False) == ("gloo",)
    assert replace(ASKED, network="nvshmem").transports(on_gpu=True) == ("nvshmem",)


@pytest.mark.parametrize(
    ("transport", "provider", "chosen"),
    [("gloo", "auto", "auto"), ("nccl", "torch", "nccl"), ("nvshmem", "nvshmem", "nvshmem")],
)
def test_groups_are_told_the_transport(transport: str, provider: str, chosen: str) -> None:
    """Those of NVSHMEM get its symmetric memory, too, whatever other groups have."""
    config = replace(ASKED, provider="auto" if transport != "nccl" else provider).config(transport)
    assert config == OverlapConfig(provider=provider, network=chosen, node_ranks=1, timeout_s=network._TIMEOUT_S)


def found(
    monkeypatch: pytest.MonkeyPatch, transport: str, settings: Settings = ASKED, device: str = "cuda", nodes: int = 2,
    connect: Callable[..., Any] = lambda domain: None,
) -> list[Finding]:  # fmt: skip
    """The findings of one rank of two, on `nodes` nodes, whose peers are as it is."""

    def domain_of(group: Any, config: OverlapConfig, device: Any) -> Any:
        topology = Topology(nodes, 2 // nodes, 0)
        found_nodes = SimpleNamespace(problem=None, topology=topology)
        return SimpleNamespace(nodes=found_nodes, topology=topology, agreement=SimpleNamespace())

    def attempt(here: World, work: Callable[[], object]) -> str | None:
        try:
            work()
        except Exception as error:
            return first_line(error)
        return None

    monkeypatch.setattr(network, "domain_of", domain_of)
    monkeypatch.setattr(network, "connected", connect)
    monkeypatch.setattr(dist, "new_group", lambda: None)
    monkeypatch.setattr(World, "attempt", attempt)
    return check_network(world(0, 2, device), transport, settings)


def raises(error: Exception) -> Callable[..., Any]:
    def work(*arguments: Any) -> None:
        raise error

    return work


@pytest.mark.parametrize(
    ("transport", "settings", "device", "why"),
    [
        ("nccl", ASKED, "cpu", "nccl carries data between GPUs, and these ranks have none"),
        ("nvshmem", ASKED, "cpu", "nvshmem carries data between GPUs, and these ranks have none"),
        ("nvshmem", replace(ASKED, provider="torch"), "cuda",
         "nvshmem sends from NVSHMEM's own symmetric memory, which --provider torch leaves out"),
        ("nvshmem", ASKED, "cuda", "ImportError: No module named 'nvshmem'"),
    ],
)  # fmt: skip
def test_a_transport_that_cannot_run_says_why(
    monkeypatch: pytest.MonkeyPatch, transport: str, settings: Settings, device: str, why: str
) -> None:
    """And nobody connects anything."""
    monkeypatch.setattr(importlib, "import_module", raises(ImportError("No module named 'nvshmem'")))
    (line,) = found(monkeypatch, transport, settings, device, connect=raises(AssertionError()))
    assert (line.name, line.status, line.measured) == (f"network {transport}", WARN, f"cannot run here: {why}")
    assert line.fix
    assert found(monkeypatch, transport, settings, device, nodes=1) == [], "one node needs none"


def test_who_lacks_nothing_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank has the line."""
    monkeypatch.setattr(network, "_lacking", lambda *arguments: "failed on another rank")
    assert found(monkeypatch, "nvshmem") == []


@pytest.mark.parametrize(
    ("transport", "asked", "status", "begin"),
    [
        ("nvshmem", "auto", WARN, "cannot run here: "),
        ("nvshmem", "nvshmem", FAIL, "failed: "),
        ("nccl", "auto", FAIL, "failed: "),
        ("nccl", "nccl", FAIL, "failed: "),
    ],
)
def test_ranks_that_cannot_be_connected_are_a_failure_where_training_connects_them(
    monkeypatch: pytest.MonkeyPatch, transport: str, asked: str, status: str, begin: str
) -> None:
    monkeypatch.setattr(importlib, "import_module", lambda name: None)
    connect = raises(RuntimeError("no route to host"))
    (line,) = found(monkeypatch, transport, replace(ASKED, network=asked), connect=connect)
    assert (line.status, line.measured) == (status, f"{begin}RuntimeError: no route to host") and line.fix


def test_calls_that_nothing_can_interrupt_get_the_checks_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the process of a rank would end before the doctor reports."""

    def connect(domain: Any) -> None:
        raise RuntimeError(f"a limit of {domain.agreement.call_s:g} s")

    monkeypatch.setattr(importlib, "import_module", lambda name: None)
    (line,) = found(monkeypatch, "nccl", replace(ASKED, call_s=91.0), connect=connect)
    assert line.measured == "failed: RuntimeError: a limit of 91 s"
    domain = SimpleNamespace(agreement=SimpleNamespace())
    monkeypatch.setattr(operator, "domain_of", lambda *arguments: domain)
    monkeypatch.setattr(operator, "_verify", lambda *arguments: [])
    monkeypatch.setattr(World, "any", lambda here, found: found)
    here = world(device="cpu")
    operator.check_trial(here, replace(operator.trial_of(here, 1.0, "auto"), call_s=92.0))
    assert domain.agreement.call_s == 92.0


def test_the_report_comes_before_such_a_call_is_ended_and_that_before_the_stacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each check passes on its own limit and CALL_S."""
    grace_s = job.Job(dist.HashStore(), 0, 1)._grace_s
    assert grace_s + 2 * job._KNOWN_S < job.CALL_S < grace_s + job._BACKSTOP_S
    limit_s, told = 0.0, dict[str, tuple[float, float]]()

    def run(name: str, work: Callable[[], Any], limit: float, fix: str) -> Any:
        nonlocal limit_s
        limit_s = limit
        return work()

    def tell(name: str, call_s: float) -> list[Finding]:
        told[name] = (limit_s, call_s)
        return []

    monkeypatch.setattr(memory, "check_memory", lambda here, call_s, **_: tell("memory", call_s))
    monkeypatch.setattr(links, "check_links", lambda here, provider, call_s: tell("links", call_s))
    monkeypatch.setattr(operator, "check_trial", lambda here, trial: tell("operators", trial.call_s))
    monkeypatch.setattr(network, "check_network", lambda here, name, settings: tell("network", settings.call_s))
    monkeypatch.setattr(examination, "free", list)
    doctor: Any = examination.Examination.__new__(examination.Examination)
    doctor._asked, doctor._on_gpu, doctor._all, doctor._world = Doctor(limit=50.0), False, world(), world(device="cpu")
    doctor._job = SimpleNamespace(run=run)
    doctor._memory()
    doctor._check("links", doctor._links)
    doctor._operators(3.0)
    doctor._networks(doctor._network_settings(3.0))
    limits = {"memory": 50.0, "links": 50.0, "operators": 103.0, "network": 53.0}
    assert told == {name: (limit, limit + job.CALL_S) for name, limit in limits.items()}


def test_symmetric_memory_is_free_before_each_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVSHMEM has one world a process, and one that was of the ranks of a host cannot join the nodes."""
    done: list[str] = []
    monkeypatch.setattr(examination, "shutdown", lambda: done.append("shutdown"))
    monkeypatch.setattr(examination, "finalize", lambda: done.append("finalize"))
    monkeypatch.setattr(network, "check_network", lambda here, transport, settings: done.append(transport) or [])
    doctor: Any = examination.Examination.__new__(examination.Examination)
    doctor._asked, doctor._on_gpu, doctor._all = Doctor(), True, world()
    doctor._check = lambda name, work, limit_s=None: done.append(name) or work()
    doctor._networks(ASKED)
    freed = ["shutdown", "finalize"]
    assert done == [
        *("before network nccl", *freed, "network nccl", "nccl"),
        *("before network nvshmem", *freed, "network nvshmem", "nvshmem"),
    ]


def test_pretended_nodes_are_told_to_nccl_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(os, "environ", dict(os.environ))  # what the doctor sets is of this test
    monkeypatch.setattr(command, "pretend_nodes", told.append)
    monkeypatch.setattr(command, "open_job", raises(RuntimeError("no store")))
    monkeypatch.setattr(command, "report", lambda *arguments: None)
    for arguments in ([], ["--node-ranks", "2"]):
        assert command.main(arguments) == 1
    assert told == [2]
