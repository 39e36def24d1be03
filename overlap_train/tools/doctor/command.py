"""`overlap-train doctor`: runs the examination, and says what it has found."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ...flags import Parser, add_options, from_args
from ..measure import world
from ..measure.pretended import pretend_nodes
from ..measure.world import first_line
from . import environment
from .examination import Examination
from .flags import Doctor
from .job import open_job
from .report import FAIL, Finding, fail, render, verdict, write


def main(arguments: list[str]) -> int:
    """Examine and report. Exit status: 0; 1 if any line says FAIL; else 2 if a file cannot be written.

    If a check hangs, this ends the process with status 1 and does not return: a thread that waits for a dead peer cannot be
    joined.

    Raises:
        ValueError: wrong arguments.
    """
    what = "Checks installation and GPUs; under torchrun also what is between the ranks:"
    top = Parser("overlap-train doctor", description=f"{what}\n\n    {world.START} doctor")
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
    """Print, and write what was asked for. Whether all could be written; a line says what not."""
    render(findings, len(hosts))

    return _write("--json", asked.json, lambda path: write(path, findings, hosts))


def _write(flagged: str, name: str, work: Callable[[Path], str | None]) -> bool:
    """Call `work` with the file `name`, if there is one, and print what it says. Whether the file could be written."""
    try:
        said = work(Path(name)) if name else None
    except OSError as error:
        problem = f"{flagged} {name} cannot be written: {error.strerror or error}; name another file"
        print(f"overlap-train doctor: error: {problem}", file=sys.stderr, flush=True)
        return False
    if said:
        print(said)
    return True


def no_store(error: Exception) -> Finding:
    """The only line where the ranks cannot even post."""
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    fix = "the first node must be reachable by that name and port from this host: name resolution, firewall, launcher"
    found = fail("store", first_line(error), f"the job's key-value store at {address} answers", fix)
    return replace(found, rank=int(os.environ.get("RANK", "0")), host=socket.gethostname())
