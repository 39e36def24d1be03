"""`overlap-train doctor`: the checks in their order, what each of them needs before it can begin, and the report."""

from __future__ import annotations

import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from ... import OverlapConfig, shutdown
from ...flags import (
    NETWORKS,
    PROVIDERS,
    Parser,
    add_options,
    from_args,
    is_rank_0,
    option,
    positive_float,
    positive_int_or_0,
)
from ...symmetric.nvshmem import finalize
from ..measure import world
from ..measure.results import write_json
from ..measure.world import World, first_line, join, pretend_nodes
from . import machine, ranks
from .job import CALL_S, FAIL, OK, WARN, Finding, Job, Work, open_job, verdict

_LATE = "run again; if it repeats, py-spy dump the named ranks and file an issue with this report"
_DRIVER = "the driver does not answer: nvidia-smi on this host, dmesg for Xid errors"
_VARIABLES = "start all ranks with torchrun, or export RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT on each"
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
        0, "ranks per node, to try several nodes on one machine; 0: nodes are found", parse=positive_int_or_0, metavar="N"
    )  # fmt: skip


def main(arguments: list[str]) -> int:
    """Examine and report. Exit status: 0, or 1 if any line says FAIL.

    If a check hangs, this ends the process with status 1 and does not return: a thread that waits for a dead peer cannot be
    joined.

    Raises:
        ValueError: wrong arguments, or --json cannot be written.
    """
    what = "Checks installation and GPUs; under torchrun also what is between the ranks:"
    top = Parser("overlap-train doctor", description=f"{what}\n\n    {world.START} doctor")
    add_options(top, Doctor)
    asked = from_args(Doctor(), top.parse_args(arguments))
    if asked.json and is_rank_0():
        try:
            Path(asked.json).open("a").close()  # before minutes of checks
        except OSError as error:
            raise ValueError(f"--json {asked.json} cannot be written: {error.strerror}; name another file") from error
    os.environ.update(machine.WITHOUT_MULTICAST)  # before CUDA, NCCL or NVSHMEM start
    if asked.node_ranks:
        pretend_nodes(asked.node_ranks)
    try:
        job = open_job(asked.limit)
    except Exception as error:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        said = first_line(error)
        fix = f"{address} must be reachable from this host: name resolution, firewall, launcher"
        if isinstance(error, KeyError):
            said, fix = f"RANK is set and {error.args[0]} is not", _VARIABLES
        print(f"FAIL  store: {said} (host {socket.gethostname()})\n        fix: {fix}", flush=True)
        return 1
    if check_machine(job, asked.limit):
        check_together(job, asked)
        job.run("leave", _leave, asked.limit, _LATE)
    if job.speaks:
        print("overlap-train doctor", *lines_of(job.findings, job.size), sep="\n", flush=True)
        if asked.json:
            summary = {"verdict": verdict(job.findings), "hosts": job.hosts}
            write_json(Path(asked.json), [asdict(finding) for finding in job.findings], summary)
    job.leave()
    status = int(verdict(job.findings) == FAIL)
    if job.broken:
        sys.stdout.flush()
        os._exit(status)
    return status


def lines_of(findings: Sequence[Finding], size: int) -> Iterator[str]:
    """What is printed. Ranks that say the same share a line. size: ranks of the job."""
    together: dict[tuple[str, ...], list[Finding]] = {}
    for f in findings:
        together.setdefault((f.status, f.name, f.measured, f.expected, f.fix), []).append(f)
    for (status, name, measured, expected, fix), same in together.items():
        ranks = ", ".join(f"{f.rank} on {f.host}" for f in same if f.rank is not None)
        where = "" if size == 1 or not ranks else ", all ranks" if len(same) == size else f", rank {ranks}"
        yield f"{status:<4}  {name}{where}: {measured}" + f" [{expected}]" * bool(expected)
        if fix:
            yield f"        fix: {fix}"
    counts = [f"{n} {status}" for status in (FAIL, WARN, OK) if (n := sum(key[0] == status for key in together))]
    yield f"doctor: {verdict(findings)} ({', '.join(counts)})"


def check_machine(job: Job, limit_s: float) -> bool:
    """What ranks find each by itself; whether they can then join."""
    on_gpu = torch.cuda.is_available()
    kind = "GPU ranks" if on_gpu else "CPU ranks: gloo and shared memory"
    # The first check tells which ranks exist, and on which hosts.
    same = job.run("start", lambda: [Finding(OK, "device", kind)], limit_s, _DRIVER)
    same += job.run("versions", lambda: machine.check_versions(on_gpu), limit_s, _LATE)
    job.findings += machine.disagreements(same)
    used = int(os.environ.get("LOCAL_WORLD_SIZE", "1024"))
    job.run("gpu", lambda: machine.check_gpu(int(os.environ.get("LOCAL_RANK", "0")), used), limit_s, _DRIVER)
    failed = {finding.name for finding in job.findings if finding.status == FAIL}
    if {"device: ranks differ", "gpu visible"} & failed:
        job.skip("how ranks join, symmetric memory, links, operators")
        return False
    return not job.broken


def check_together(job: Job, asked: Doctor) -> None:
    """What ranks do together: those of a node, then all."""
    on_gpu, limit, worlds = torch.cuda.is_available(), asked.limit, list[World]()

    def join_ranks() -> list[Finding]:
        joined, hosts = join(may_be_alone=True), tuple(job.hosts)
        worlds[:] = joined.node(hosts), replace(joined, hosts=hosts)
        dist.barrier()
        found = [Finding(OK, "join", f"{joined.size} rank{'s' * (joined.size > 1)} by {dist.get_backend()}")]
        return [*found, Finding(WARN, "node", *ranks.ALONE)] if on_gpu and worlds[0].size == 1 else found

    def in_node(work: Callable[..., list[Finding]], *given: object) -> Work:
        return lambda: [] if on_gpu and worlds[0].size == 1 else work(worlds[0], *given)

    if verdict(job.run("join", join_ranks, limit, _JOIN)) == FAIL:
        return job.skip("symmetric memory, links, operators")
    providers = [asked.provider] if asked.provider != "auto" else ["torch", "nvshmem"] if on_gpu else ["host"]
    heaps = set[str]()
    for name in providers:
        work = in_node(ranks.check_memory, name, limit + CALL_S)
        heaps.add(verdict(job.run(f"heap {name}", work, limit, ranks.MEMORY_FIXES[name])))
    if heaps == {FAIL}:
        return job.skip("operators")
    seconds = asked.seconds or (30.0 if on_gpu else 3.0)
    longest = 2 * limit + seconds  # kernels are compiled there
    config = OverlapConfig(provider=asked.provider, timeout_s=limit / 2)
    job.run("operators", in_node(ranks.check_operators, "operator", config, seconds), longest, _LATE)
    hosts = Counter(job.hosts)

    def over_nodes() -> list[Finding]:
        _free()  # NVSHMEM has one world, which until now was of other ranks
        between = replace(config, method="chunked", network=asked.network, node_ranks=asked.node_ranks)
        return ranks.check_operators(worlds[1], "network", between, seconds)

    if asked.node_ranks or len(set(hosts.values())) == 1 < len(hosts):
        job.run("network", over_nodes, longest, _LATE)
    elif len(hosts) > 1:
        job.skip("operators between nodes: hosts have unequal numbers of ranks")
    return None


def _free() -> None:
    """Free symmetric memory."""
    shutdown()
    finalize()  # memory checks open NVSHMEM without a domain


def _leave() -> list[Finding]:
    _free()
    if dist.is_initialized():
        dist.destroy_process_group()
    return []
