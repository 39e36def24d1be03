"""`overlap-train doctor`: the checks in their order, what each of them needs before it can begin, and the report."""

from __future__ import annotations

import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ... import OverlapConfig, shutdown
from ...flags import NETWORKS, PROVIDERS, Parser, add_options, from_args, option, positive_float, positive_int_or_0
from ...symmetric.nvshmem import finalize
from ..measure import world
from ..measure.world import World, first_line, join, pretend_nodes
from . import machine, ranks
from .job import CALL_S, Job, Work, open_job
from .report import FAIL, Finding, fail, ok, render, verdict, warn, write

_LATE = "run again; if it repeats, py-spy dump the named ranks and file an issue with this report"
_DRIVER = "the driver does not answer: nvidia-smi on this host, dmesg for Xid errors"
_JOIN = (
    "NCCL or gloo cannot connect the ranks: NCCL_DEBUG=INFO says why; NCCL_SOCKET_IFNAME / GLOO_SOCKET_IFNAME name the interface "
    "that all hosts share"
)


@dataclass(frozen=True)
class Doctor:
    """What the doctor is told. Every field is a flag."""

    json: str = option("", "write all findings of all ranks to FILE", metavar="FILE")
    provider: str = option("auto", "check this provider of symmetric memory only; auto: all of them", choices=PROVIDERS)
    network: str = option("auto", "what carries data between nodes, as in training", choices=NETWORKS)
    seconds: float | None = option(
        None, "how long to repeat the operators; default 30 on GPUs, 3 on CPUs", parse=positive_float, metavar="S"
    )
    limit: float = option(
        60.0, "longest time for one check, in seconds; operators have more", parse=positive_float, metavar="SECONDS"
    )
    node_ranks: int = option(
        0,
        "ranks per node, to try several nodes on one machine; 0: nodes are found",
        parse=positive_int_or_0,
        metavar="N",
    )


def main(arguments: list[str]) -> int:
    """Examine and report. Exit status: 0; 1 if any line says FAIL; else 2 if --json cannot be written.

    If a check hangs, this ends the process with status 1 and does not return: a thread that waits for a dead peer cannot be
    joined.

    Raises:
        ValueError: wrong arguments.
    """
    what = "Checks installation and GPUs; under torchrun also what is between the ranks:"
    top = Parser("overlap-train doctor", description=f"{what}\n\n    {world.START} doctor")
    add_options(top, Doctor)
    asked, variables = from_args(Doctor(), top.parse_args(arguments)), dict(os.environ)
    if asked.json and Path(asked.json).is_dir():
        raise ValueError(f"--json {asked.json} is a folder; name a file in it")
    os.environ.update(machine.WITHOUT_MULTICAST)  # before CUDA, NCCL or NVSHMEM start
    if asked.node_ranks:
        pretend_nodes(asked.node_ranks)
    try:
        job = open_job(asked.limit)
    except Exception as error:
        report(asked, [_no_store(error)], [socket.gethostname()])
        return 1
    Examination(asked, variables, job).run()
    speaker, is_written = min(job.answering), True
    if job.rank == speaker:
        is_written = report(asked, job.findings, job.hosts)
        job.post("reported", True)
    job.wait_for_report(speaker)  # a rank that ends with 1 makes torchrun end the others
    status = 1 if verdict(job.findings) == FAIL else 0 if is_written else 2
    if job.broken:
        sys.stdout.flush()
        os._exit(status)
    return status


def report(asked: Doctor, findings: list[Finding], hosts: list[str]) -> bool:
    """Print, and write what was asked for. Whether it could be written; a line says if not."""
    render(findings, len(hosts))
    try:
        if asked.json:
            write(Path(asked.json), findings, hosts)
    except OSError as error:
        problem = f"--json {asked.json} cannot be written: {error.strerror or error}; name another file"
        print(f"overlap-train doctor: error: {problem}", file=sys.stderr, flush=True)
        return False
    return True


def _no_store(error: Exception) -> Finding:
    """The only line where the ranks cannot even post."""
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    fix = "the first node must be reachable by that name and port from this host: name resolution, firewall, launcher"
    found = fail("store", first_line(error), f"the job's key-value store at {address} answers", fix)
    return replace(found, rank=int(os.environ.get("RANK", "0")), host=socket.gethostname())


class Examination:
    """The doctor's checks on this rank. variables: the environment before the doctor changed it."""

    def __init__(self, asked: Doctor, variables: Mapping[str, str], job: Job) -> None:
        self._asked, self._variables, self._job = asked, variables, job
        self._on_gpu = torch.cuda.is_available()
        self._world: World | None = None  # the ranks of this node, once they have joined
        self._all: World | None = None  # those of the job

    def run(self) -> None:
        """Run all checks. What could not be checked is a finding, too."""
        job, on_gpu = self._job, self._on_gpu
        kind = "GPU ranks" if on_gpu else "CPU ranks: gloo and shared memory"
        self._check("start", lambda: [ok("device", kind)], _DRIVER)  # tells which ranks exist, and on which hosts
        same = [*job.findings, *self._check("versions", lambda: machine.check_versions(on_gpu))]
        job.findings += machine.disagreements(same)
        self._check("environment", lambda: machine.check_environment(on_gpu, self._variables))
        self._check("gpu", self._gpu, _DRIVER)
        cannot_join = {"device: ranks differ", "gpu visible"} & {f.name for f in job.findings if f.status == FAIL}
        if cannot_join or job.broken:
            self._not_checked("how ranks join, symmetric memory, links, operators")
            return
        self._check("join", self._join, _JOIN)
        self._together()
        self._check("leave", _leave)
        if job.broken:
            self._not_checked("whatever follows the check that did not end")

    def _together(self) -> None:
        """What ranks do together: those of a node, then all."""
        asked, on_gpu = self._asked, self._on_gpu
        call_s = asked.limit + CALL_S
        providers = ["torch", "nvshmem"] if on_gpu else ["host"]
        verdicts = set()
        for provider in providers if asked.provider == "auto" else [asked.provider]:
            heap = self._in_node(f"heap {provider}", partial(ranks.check_memory, provider=provider, call_s=call_s))
            verdicts.add(verdict(self._check(f"heap {provider}", heap, ranks.MEMORY_FIXES[provider])))
        if verdicts == {FAIL}:
            self._not_checked("links, operators")
            return
        self._check("links", self._in_node("link", lambda here: ranks.check_links(here, asked.provider, call_s)))
        seconds = asked.seconds or (30.0 if on_gpu else 3.0)
        limit_s = 2 * asked.limit + seconds  # kernels are compiled there
        config = OverlapConfig(provider=asked.provider, timeout_s=asked.limit / 2)

        def right(here: World) -> list[Finding]:
            return ranks.check_operators(here, "operator", ranks.methods_of(here), config, seconds, limit_s + CALL_S)

        self._check("operators", self._in_node("operator", right), limit_s=limit_s)
        hosts = Counter(self._job.hosts)
        if asked.node_ranks or len(hosts) > 1:
            self._check("before the network", _free)  # NVSHMEM has one world, which until now was of other ranks
            between = replace(config, network=asked.network, node_ranks=asked.node_ranks)
            self._check("network", lambda: self._between_nodes(hosts, between, seconds, limit_s), limit_s=limit_s)

    def _check(self, name: str, work: Work, fix: str = _LATE, limit_s: float | None = None) -> list[Finding]:
        return self._job.run(name, work, limit_s or self._asked.limit, fix)

    def _not_checked(self, what: str) -> None:
        self._job.findings.append(warn("not checked", what, "", "repair what says FAIL first, then run again"))

    def _gpu(self) -> list[Finding]:
        is_alone = "RANK" not in self._variables
        used = torch.cuda.device_count() if is_alone else int(self._variables.get("LOCAL_WORLD_SIZE", "1024"))
        return machine.check_gpu(int(self._variables.get("LOCAL_RANK", "0")), used)

    def _join(self) -> list[Finding]:
        joined = join(may_be_alone=True)
        hosts = tuple(self._job.hosts)
        self._world, self._all = joined.node(hosts), replace(joined, hosts=hosts)
        return ranks.check_collectives(joined)

    def _in_node(self, name: str, check: Callable[[World], list[Finding]]) -> Work:
        """The check, or, on a node with one GPU rank, a line that says what it needs."""

        def work() -> list[Finding]:
            assert self._world is not None
            if self._world.size > 1 or not self._on_gpu:
                return check(self._world)
            fix = f"torchrun --standalone --nproc-per-node {max(2, torch.cuda.device_count())} -m overlap_train doctor"
            return [warn(name, "not checked: one rank on this node", "a rank for each GPU", fix)]

        return work

    def _between_nodes(
        self, hosts: Counter[str], config: OverlapConfig, seconds: float, limit_s: float
    ) -> list[Finding]:
        """The operators of a group of all ranks of the job."""
        assert self._all is not None
        if not config.node_ranks and len(set(hosts.values())) > 1:
            measured = "not checked: " + ", ".join(f"{count} ranks on {host}" for host, count in hosts.items())
            fix = "keep tensor-parallel groups inside a node, or start as many ranks on each"
            return [warn("network", measured, "as many ranks on each node", fix)]
        return ranks.check_operators(self._all, "network", ["chunked"], config, seconds, limit_s + CALL_S)


def _free() -> list[Finding]:
    """Free symmetric memory."""
    shutdown()
    finalize()  # memory checks open NVSHMEM without a domain
    return []


def _leave() -> list[Finding]:
    """Free symmetric memory and end torch.distributed."""
    _free()
    dist.destroy_process_group()
    return []
