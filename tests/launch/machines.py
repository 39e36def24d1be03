"""Machines for a Slurm cluster: namespaces with a host name, an address, processes and /dev/shm of their own.

    login   10.77.0.1 ──┐   slurmctld; sbatch is called here
    node0   10.77.0.2 ──┼── bridge
    node1   10.77.0.3 ──┘

They share the machine's files, as a cluster shares a file system. /etc/hosts in each of them has the names of all.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.launch import cluster
from tests.nodes import network

SKIPPED = "a job on two nodes with networks of their own, and one that loses a node, are not tested"
# Bash stays as the machine's first process and collects the children of processes that have ended.
START = """
hostname "$0" && mount -t tmpfs tmpfs /dev/shm && mount --bind "$1" /etc/hosts || exit 70
shift
"$@" &
wait $!
"""


def missing() -> str:
    """Why there can be no such machines here, as a reason to skip; empty where there can."""
    if reason := cluster.missing() or network.missing():
        return f"{SKIPPED}: {reason}"
    words = ["unshare", "--mount", "--uts", "bash", "-c", START, "probe", "/etc/hosts", "true"]
    tried = subprocess.run(words, capture_output=True, text=True, timeout=30)
    return f"{SKIPPED}: no host name and mounts of its own ({tried.stderr.strip()})" if tried.returncode else ""


@dataclass(frozen=True)
class Machines:
    """The login machine, the nodes, and the wires between them."""

    network: network.Network
    login: cluster.Machine
    nodes: tuple[cluster.Machine, ...]

    def cut(self, node: int) -> None:
        self.network.cut(1 + node)

    def mend(self, node: int) -> None:
        self.network.mend(1 + node)

    def throttle(self, rate: str) -> None:
        for node in range(len(self.nodes)):
            self.network.throttle(1 + node, rate)


@contextlib.contextmanager
def running(folder: Path, nodes: int) -> Iterator[Machines]:
    """Machines that live as long as the block."""
    names = ["login", *(f"node{node}" for node in range(nodes))]
    with network.running(len(names)) as wires:
        addresses = [wires.address(place) for place in range(len(names))]
        hosts = folder / "hosts"
        lines = [f"{address} {name}\n" for address, name in zip(addresses, names, strict=True)]
        hosts.write_text("".join(["127.0.0.1 localhost\n", *lines]))
        made = [
            cluster.Machine(
                name, address, (*wires.command(place), "unshare", "--uts", "bash", "-c", START, name, str(hosts))
            )
            for place, (name, address) in enumerate(zip(names, addresses, strict=True))
        ]
        yield Machines(wires, made[0], tuple(made[1:]))
