"""`overlap-train doctor`: the checks in their order, the report, the exit status."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ... import shutdown
from ...flags import NETWORKS, PROVIDERS, Parser, add_options, from_args, option, positive_float, positive_int_or_0
from ...symmetric.nvshmem import finalize
from ..measure.pretended import pretend_nodes
from ..measure.world import World, first_line, join
from . import environment, gpus, links, memory, network, operator, versions
from .job import Job, Work, open_job
from .report import FAIL, WARN, Finding, fail, ok, render, verdict, warn, write
from .system import write_system

_LATE = "run again; if it repeats, py-spy dump the named ranks and file an issue with this report"
_DRIVER = "the driver does not answer: nvidia-smi on this host, dmesg for Xid errors"
_JOIN = (
    "NCCL or gloo cannot connect the ranks: NCCL_DEBUG=INFO says why; NCCL_SOCKET_IFNAME / GLOO_SOCKET_IFNAME name the interface "
    "that all hosts share"
)
_ON_GPUS = "GPU ranks"


@dataclass(frozen=True)
class Doctor:
    """What the doctor is told."""

    json: str = option("", "write all findings of all ranks to FILE", metavar="FILE")
    system_json: str = option("", "write what was measured to FILE, for overlap-train plan --system", metavar="FILE")
    provider: str = option("auto", "check this one only; auto: all of them", choices=PROVIDERS)
    network: str = option(
        "auto", "check this transport between nodes only; auto: all that serve the ranks", choices=NETWORKS
    )
    seconds: float | None = option(
        None,
        "how long to repeat the operators, and gathers by each transport between nodes; default 30 on GPUs, 3 on CPUs",
        parse=positive_float,
        metavar="S",
    )
    limit: float = option(
        60.0, "longest time for one check (operators and network: more)", parse=positive_float, metavar="SECONDS"
    )
    node_ranks: int = option(
        0,
        "ranks per node, to try several nodes on one machine; 0: nodes are found",
        parse=positive_int_or_0,
        metavar="N",
    )


def main(arguments: list[str]) -> int:
    """Examine and report. Exit status: 0, or 1 if any line says FAIL. Does not return if a check hangs: ends the process with 1,
    because threads that wait for a dead peer cannot be joined.

    Raises:
        ValueError: wrong arguments.
    """
    start = "all of it under torchrun --standalone --nproc-per-node GPUS -m overlap_train doctor"
    top = Parser("overlap-train doctor", description=f"Checks installation, GPUs, links and operators; {start}")
    add_options(top, Doctor)
    asked, variables = from_args(Doctor(), top.parse_args(arguments)), dict(os.environ)
    os.environ.update(environment.WITHOUT_MULTICAST)  # before CUDA, NCCL or NVSHMEM start
    if asked.node_ranks:
        pretend_nodes(asked.node_ranks)
    try:
        job = open_job(asked.limit)
    except Exception as error:
        report(asked, [no_store(error)], [socket.gethostname()])
        return 1
    Examination(asked, variables, job).run()
    speaker = min(job.answering)
    if job.rank == speaker:
        report(asked, job.findings, job.hosts)
        job.post("reported", True)
    job.wait_for_report(speaker)  # a rank that ends with 1 makes torchrun end the others
    status = 1 if verdict(job.findings) == FAIL else 0
    if job.broken:
        sys.stdout.flush()
        os._exit(status)
    return status


def report(asked: Doctor, findings: list[Finding], hosts: list[str]) -> None:
    """Print, and write what was asked for."""
    render(findings, len(hosts))
    if asked.json:
        write(Path(asked.json), findings, hosts)
    if asked.system_json:
        print(write_system(Path(asked.system_json), findings, plays_nodes=asked.node_ranks > 0))


def no_store(error: Exception) -> Finding:
    """The only line where the ranks cannot even post."""
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    fix = "the first node must be reachable by that name and port from this host: name resolution, firewall, launcher"
    found = fail("store", first_line(error), f"the job's key-value store at {address} answers", fix)
    return replace(found, rank=int(os.environ.get("RANK", "0")), host=socket.gethostname())


class Examination:
    """The checks in their order. `variables`: the environment before the doctor changed it."""

    def __init__(self, asked: Doctor, variables: Mapping[str, str], job: Job) -> None:
        self._asked, self._variables, self._job = asked, variables, job
        self._local, self._is_alone = int(variables.get("LOCAL_RANK", "0")), "RANK" not in variables
        self._on_gpu = False
        self._world: World | None = None  # the ranks of this node, once they have joined
        self._all: World | None = None  # those of the job

    def run(self) -> None:
        """All checks; what could not be checked is a finding too."""
        self._check("start", self._start, "a driver that does not answer: nvidia-smi on this host, dmesg")
        self._job.findings += versions.disagreements(self._check("versions", self._versions))
        self._check("environment", lambda: environment.check_environment(self._on_gpu, self._variables))
        self._check("gpus", self._gpus, _DRIVER)
        if not self._fit_to_join():
            self._not_checked("how ranks join, symmetric memory, links, operators")
            return
        self._check("join", self._join, _JOIN)
        for provider in self._providers():
            work = self._needs_ranks(f"rendezvous {provider}", partial(memory.check_memory, provider=provider))
            self._check(f"rendezvous {provider}", work, memory.FIXES[provider])
        self._check("links", self._links)
        seconds = self._asked.seconds or (30.0 if self._on_gpu else 3.0)
        trial = partial(operator.trial_of, seconds=seconds, provider=self._asked.provider)
        operators = self._needs_ranks("operators", lambda here: operator.check_trial(here, trial(here)))
        self._check("operators", operators, limit_s=2 * self._asked.limit + seconds)  # kernels are compiled there
        self._networks(network.Settings(self._asked.node_ranks, self._asked.provider, self._asked.network, seconds))
        self._check("leave", leave)
        if self._job.broken:
            self._not_checked("whatever follows the check that did not end")

    def _check(self, name: str, work: Work, fix: str = _LATE, limit_s: float | None = None) -> list[Finding]:
        return self._job.run(name, work, limit_s or self._asked.limit, fix)

    def _not_checked(self, what: str) -> None:
        self._job.findings.append(Finding("not checked", WARN, what, "", "repair what says FAIL first, then run again"))

    @property
    def _here(self) -> World:
        assert self._world is not None
        return self._world

    def _start(self) -> list[Finding]:
        """Find out whether ranks have GPUs. As the first check it also tells which ranks exist, and on which hosts."""
        self._on_gpu = torch.cuda.is_available()
        return [ok("device", _ON_GPUS if self._on_gpu else "CPU ranks: gloo and shared memory")]

    def _versions(self) -> list[Finding]:
        inventory = versions.read_inventory()
        loaded = torch.cuda.nccl.version() if self._on_gpu else None
        return [
            *versions.check_versions(inventory, self._on_gpu),
            *versions.check_driver(versions.driver_version(), inventory.torch_cuda),
            *versions.check_nccl(loaded, inventory.versions.get("nvidia-nccl-cu13")),
        ]

    def _gpus(self) -> list[Finding]:
        if not self._on_gpu:
            return [gpus.without_gpu()]
        count = torch.cuda.device_count()
        if self._local >= count:
            return [gpus.missing_gpu(self._local, count)]
        torch.cuda.set_device(self._local)
        used = range(count if self._is_alone else min(count, int(self._variables.get("LOCAL_WORLD_SIZE", count))))
        mine = used if self._is_alone else [self._local]
        read = [gpus.read_gpu(index, [other for other in used if other != index]) for index in mine]
        return gpus.check_gpus(read, gpus.read_smi())

    def _fit_to_join(self) -> bool:
        """Whether ranks can join. Those with and without GPU would start different backends and wait for each other."""
        devices = [finding for finding in self._job.findings if finding.name == "device"]
        if len({finding.measured for finding in devices}) > 1:
            strange = fail("device: ranks differ", "", _ON_GPUS, "see this rank's line `gpu visible`")
            self._job.findings += [
                replace(strange, measured=f.measured, rank=f.rank, host=f.host)
                for f in devices
                if f.measured != _ON_GPUS
            ]
            return False
        no_gpu = any(f.name == "gpu visible" and f.status == FAIL for f in self._job.findings)
        return not (self._job.broken or no_gpu)

    def _join(self) -> list[Finding]:
        world = join(may_be_alone=True)
        self._world, self._all = world.node(tuple(self._job.hosts)), replace(world, hosts=tuple(self._job.hosts))
        return check_collectives(world, nodes=len(set(self._job.hosts)))

    def _providers(self) -> list[str]:
        if self._asked.provider != "auto":
            return [self._asked.provider]
        return ["torch", "nvshmem"] if self._on_gpu else ["host"]

    def _links(self) -> list[Finding]:
        if self._on_gpu and self._here.size == 1:
            return links.check_alone(self._here, torch.cuda.device_count() if self._is_alone else 1)
        return links.check_links(self._here, self._asked.provider)

    def _networks(self, settings: network.Settings) -> None:
        """Check what goes between the nodes of the job, by one transport after the other; nothing where it has one rank."""

        def check(transport: str) -> list[Finding]:
            assert self._all is not None
            return network.check_network(self._all, transport, settings) if self._all.size > 1 else []

        for transport in settings.transports(self._on_gpu):
            name = network.name_of(transport)
            self._check(f"before {name}", free)  # NVSHMEM has one world, which until now was of other ranks
            self._check(name, partial(check, transport), limit_s=self._asked.limit + settings.seconds)

    def _needs_ranks(self, name: str, check: Callable[[World], list[Finding]]) -> Work:
        """The check, or, on a node with one GPU rank, a line that says what it needs."""

        def work() -> list[Finding]:
            if self._here.size > 1 or not self._on_gpu:
                return check(self._here)
            ranks = max(2, torch.cuda.device_count())
            fix = f"torchrun --standalone --nproc-per-node {ranks} -m overlap_train doctor"
            return [warn(name, "not checked: one rank on this node", "a rank for each GPU", fix)]

        return work


def check_collectives(world: World, nodes: int) -> list[Finding]:
    """Check a sum over all ranks of the job, not of the node only."""
    total = torch.full((1 << 20,), float(world.rank + 1), device=world.device)
    dist.all_reduce(total)
    backend, expected = dist.get_backend(), world.size * (world.size + 1) / 2
    wrong = int((total != expected).sum())
    if wrong:
        fix = "torch's own collective is wrong: run nccl-tests' all_reduce_perf -c 1 on these hosts"
        return [fail("collectives", f"{backend}: {wrong} of {total.numel()} sums wrong", "right sums", fix)]
    found = [ok("collectives", f"{backend} all-reduce over {world.size} rank{'s' * (world.size > 1)} is right")]
    if nodes > 1:
        several = (
            "the job has several hosts; each host's ranks are checked among themselves; see the lines `network ...`"
        )
        fix = "keep the tensor-parallel size within a node where it fits; across nodes only chunked overlaps (docs/multi-node.md)"
        found.append(warn("nodes", several, "tensor-parallel groups inside a host", fix))
    return found


def free() -> list[Finding]:
    """Free symmetric memory."""
    shutdown()
    finalize()  # memory checks open NVSHMEM without a domain
    return []


def leave() -> list[Finding]:
    """Free symmetric memory and end torch.distributed."""
    free()
    dist.destroy_process_group()
    return []
