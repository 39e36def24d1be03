"""`overlap-train doctor`: the checks in their order, what each of them needs before it can begin, and the report."""

from __future__ import annotations

import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from ... import OverlapConfig, shutdown
from ...flags import NETWORKS, PROVIDERS, Parser, add_options, from_args, option, positive_float, positive_int_or_0
from ...symmetric.nvshmem import finalize
from ..measure import world
from ..measure.results import write_json
from ..measure.world import World, first_line, join, pretend_nodes
from . import machine, ranks
from .job import CALL_S, Job, Work, open_job
from .report import FAIL, OK, WARN, Finding, lines_of, verdict

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
        0, "ranks per node, to try several nodes on one machine; 0: nodes are found", parse=positive_int_or_0, metavar="N"
    )  # fmt: skip


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
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        fix = f"{address} must be reachable from this host: name resolution, firewall, launcher"
        print(f"FAIL  store: {first_line(error)} (host {socket.gethostname()})\n        fix: {fix}", flush=True)
        return 1
    if check_machine(job, asked, variables):
        check_together(job, asked)
        job.run("leave", _leave, asked.limit, _LATE)
    worst, is_written = verdict(job.findings), True
    if job.speaks:
        print("overlap-train doctor", *lines_of(job.findings, job.size), sep="\n", flush=True)
        is_written = not asked.json or _is_written(asked.json, job)
    job.leave()
    status = 1 if worst == FAIL else 0 if is_written else 2
    if job.broken:
        sys.stdout.flush()
        os._exit(status)
    return status


def _is_written(file: str, job: Job) -> bool:
    """Write the report; a line says if it could not be."""
    try:
        summary = {"verdict": verdict(job.findings), "hosts": job.hosts}
        write_json(Path(file), [asdict(finding) for finding in job.findings], summary)
    except OSError as error:
        problem = f"--json {file} cannot be written: {error.strerror or error}; name another file"
        print(f"overlap-train doctor: error: {problem}", file=sys.stderr, flush=True)
        return False
    return True


def check_machine(job: Job, asked: Doctor, variables: Mapping[str, str]) -> bool:
    """What ranks find each by itself; whether they can then join. variables: the environment before the doctor changed it."""
    on_gpu, limit = torch.cuda.is_available(), asked.limit
    kind = "GPU ranks" if on_gpu else "CPU ranks: gloo and shared memory"
    # The first check tells which ranks exist, and on which hosts.
    same = job.run("start", lambda: [Finding(OK, "device", kind)], limit, _DRIVER)
    same += job.run("versions", lambda: machine.check_versions(on_gpu), limit, _LATE)
    job.findings += machine.disagreements(same)
    job.run("environment", lambda: machine.check_environment(on_gpu, variables), limit, _LATE)
    local, alone = int(variables.get("LOCAL_RANK", "0")), "RANK" not in variables
    used = torch.cuda.device_count() if alone else int(variables.get("LOCAL_WORLD_SIZE", "1024"))
    job.run("gpu", lambda: machine.check_gpu(local, used), limit, _DRIVER)
    failed = {finding.name for finding in job.findings if finding.status == FAIL}
    if {"device: ranks differ", "gpu visible"} & failed and not job.broken:
        job.skip("how ranks join, symmetric memory, links, operators")
        return False
    return not job.broken


def check_together(job: Job, asked: Doctor) -> None:
    """What ranks do together: those of a node, then all."""
    on_gpu, call_s, worlds = torch.cuda.is_available(), asked.limit + CALL_S, list[World]()

    def check(name: str, work: Work, fix: str = _LATE, limit_s: float = asked.limit) -> str:
        return verdict(job.run(name, work, limit_s, fix))

    def join_ranks() -> list[Finding]:
        joined, hosts = join(may_be_alone=True), tuple(job.hosts)
        worlds[:] = joined.node(hosts), replace(joined, hosts=hosts)
        dist.barrier()
        return [Finding(OK, "join", f"{joined.size} rank{'s' * (joined.size > 1)} by {dist.get_backend()}")]

    def in_node(work: Callable[..., list[Finding]], *given: object) -> Work:
        return lambda: [] if is_alone else work(here, *given)

    if check("join", join_ranks, _JOIN) == FAIL:
        return None if job.broken else job.skip("symmetric memory, links, operators")
    here, everyone = worlds
    is_alone = on_gpu and here.size == 1
    fix = f"torchrun --standalone --nproc-per-node {max(2, torch.cuda.device_count())} -m overlap_train doctor"
    one = Finding(WARN, "node", "one rank: memory, links and operators are not checked", "a rank for each GPU", fix)
    check("node", lambda: [one] if is_alone else [])
    providers = [asked.provider] if asked.provider != "auto" else ["torch", "nvshmem"] if on_gpu else ["host"]
    heaps = [
        check(f"heap {name}", in_node(ranks.check_memory, name, call_s), ranks.MEMORY_FIXES[name]) for name in providers
    ]
    if set(heaps) == {FAIL}:
        return None if job.broken else job.skip("operators")
    seconds = asked.seconds or (30.0 if on_gpu else 3.0)
    limit_s = 2 * asked.limit + seconds  # kernels are compiled there
    config = OverlapConfig(provider=asked.provider, timeout_s=asked.limit / 2)
    right = in_node(ranks.check_operators, "operator", ranks.methods_of(here), config, seconds)
    check("operators", right, limit_s=limit_s)
    hosts = Counter(job.hosts)
    if asked.node_ranks or len(set(hosts.values())) == 1 < len(hosts):
        check("before the network", _free)  # NVSHMEM has one world, which until now was of other ranks
        between = replace(config, network=asked.network, node_ranks=asked.node_ranks)
        work = partial(ranks.check_operators, everyone, "network", ["chunked"], between, seconds)
        check("network", work, limit_s=limit_s)
    elif len(hosts) > 1:
        job.skip("operators between nodes: hosts have unequal numbers of ranks")
    return None


def _free() -> list[Finding]:
    """Free symmetric memory."""
    shutdown()
    finalize()  # memory checks open NVSHMEM without a domain
    return []


def _leave() -> list[Finding]:
    _free()
    if dist.is_initialized():
        dist.destroy_process_group()
    return []
