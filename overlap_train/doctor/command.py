"""The command line of the doctor: arguments, report, exit status."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

from .board import open_board
from .environment import WITHOUT_MULTICAST
from .examination import Examination
from .place import first_line
from .report import FAIL, Finding, render, verdict, write
from .running import Runner, Terminated, terminated_as_error


def main(argv: list[str]) -> int:
    """Examine and report. Exit status: 0, 1 if any line says FAIL, 2 for wrong arguments. Does not return if a check hangs: ends
    the process with 1, because threads that wait for a dead peer cannot be joined."""
    args = parser().parse_args(argv)
    variables = dict(os.environ)
    os.environ.update(WITHOUT_MULTICAST)  # before CUDA, NCCL or NVSHMEM start
    host = socket.gethostname()
    try:
        board = open_board(args.limit)
    except Exception as error:
        return _report(args, [_no_store(host, error)], [host])
    runner = Runner(board, host)
    with terminated_as_error():
        try:
            Examination(args, variables, runner).run()
        except Terminated:
            runner.broken = True
            runner.findings.append(Finding("end", FAIL, "the job was ended (SIGTERM)", "", "see the other ranks' logs"))
    speaker = min(runner.answering)
    if board.rank == speaker:
        _report(args, runner.findings, runner.hosts)
        board.post("reported", True)
    board.wait("reported", 10.0, [speaker])  # a rank that ends with 1 makes torchrun end the others
    status = 1 if verdict(runner.findings) == FAIL else 0
    if runner.broken:
        sys.stdout.flush()
        os._exit(status)
    return status


def parser() -> argparse.ArgumentParser:
    """Of `overlap-train doctor`."""
    top = argparse.ArgumentParser(
        prog="overlap-train doctor",
        description="Checks installation, GPUs, links and operators; all of it under torchrun --nproc-per-node GPUS",
    )
    top.add_argument("--json", type=Path, metavar="FILE", help="write all findings of all ranks to FILE")
    top.add_argument(
        "--provider",
        choices=("auto", "nvshmem", "torch", "host"),
        default="auto",
        help="check this one only; default all",
    )
    top.add_argument(
        "--seconds",
        type=_positive,
        default=None,
        help="how long to repeat the operators; default 30 on GPUs, 3 on CPUs",
    )
    top.add_argument(
        "--limit",
        type=_positive,
        default=60.0,
        metavar="SECONDS",
        help="longest time for one check, default 60 (operators: more)",
    )
    return top


def _report(args: argparse.Namespace, findings: list[Finding], hosts: list[str]) -> int:
    render(findings, len(hosts))
    if args.json is not None:
        write(args.json, findings, hosts)
    return 1 if verdict(findings) == FAIL else 0


def _no_store(host: str, error: Exception) -> Finding:
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    fix = "the first node must be reachable by that name and port from this host: name resolution, firewall, launcher"
    rank = int(os.environ.get("RANK", "0"))
    return Finding("store", FAIL, first_line(error), f"the job's key-value store at {address} answers", fix, rank, host)


def _positive(text: str) -> float:
    value = 0.0
    with suppress(ValueError):
        value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return value
