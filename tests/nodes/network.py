"""Nodes on one machine: a network namespace each, with an address of its own, and a switch that joins them.

    node 0   eth0 10.77.0.1 ──┐
    node 1   eth0 10.77.0.2 ──┴── bridge

A program that is started in a node has a PID namespace of its own, too. Its /proc shows the processes of that node only, so that
ranks of different nodes cannot map each other's memory. They have one host name.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

PACKAGE = "apt-get install -y --no-install-recommends iproute2"
DEVICE = "eth0"


def missing() -> str:
    """Why there can be no nodes here, as a reason to skip; empty where there can."""
    if os.getuid() != 0:
        return "no nodes here, so ranks without shared memory, a slow wire and a cut wire are not tested: needs root"
    programs = [program for program in ("ip", "tc", "unshare") if not shutil.which(program)]
    if programs:
        return f"no nodes here: missing programs {' '.join(programs)}; install with: {PACKAGE}"
    name = f"probe{os.getpid()}"
    tried = _try("ip", "netns", "add", name) or _try("ip", "netns", "exec", name, "unshare", "--pid", "--fork", "true")
    _try("ip", "netns", "del", name)
    return f"no nodes here: this kernel or container makes no namespaces ({tried})" if tried else ""


class Network:
    """The wires of `nodes` nodes."""

    def __init__(self, nodes: int) -> None:
        self._prefix = f"overlap{os.getpid()}"
        self._switch = f"{self._prefix}-switch"
        self.names = [f"{self._prefix}-{node}" for node in range(nodes)]

    def address(self, node: int) -> str:
        return f"10.77.0.{1 + node}"

    def command(self, node: int) -> list[str]:
        """What starts a program in a node, before its own words. It ends with all its children when this is killed."""
        return ["ip", "netns", "exec", self.names[node], "unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]

    def throttle(self, node: int, rate: str) -> None:
        """Let no more out of the node: "100mbit"."""
        limit = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "100ms"]
        _run("ip", "netns", "exec", self.names[node], "tc", "qdisc", "replace", "dev", DEVICE, *limit)

    def cut(self, node: int) -> None:
        """Pull the node's cable out of the switch."""
        _run("ip", "-n", self._switch, "link", "set", f"port{node}", "down")

    def mend(self, node: int) -> None:
        """Put the cable back."""
        _run("ip", "-n", self._switch, "link", "set", f"port{node}", "up")

    def build(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for node, name in enumerate(self.names):
            _run("ip", "netns", "add", name)
            peer = ["peer", "name", f"port{node}", "netns", self._switch]
            _run("ip", "link", "add", DEVICE, "netns", name, "type", "veth", *peer)
            _run("ip", "-n", self._switch, "link", "set", f"port{node}", "master", "bridge", "up")
            _run("ip", "-n", name, "addr", "add", f"{self.address(node)}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                _run("ip", "-n", name, "link", "set", device, "up")

    def remove(self) -> None:
        for name in (*self.names, self._switch):
            _try("ip", "netns", "del", name)


@contextlib.contextmanager
def running(nodes: int) -> Iterator[Network]:
    """A network that lives as long as the block."""
    network = Network(nodes)
    try:
        network.build()
        yield network
    finally:
        network.remove()


def _run(*words: str) -> None:
    failed = _try(*words)
    assert not failed, f"{' '.join(words)}: {failed}"


def _try(*words: str) -> str:
    """What it said if it failed, else nothing."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    return "" if done.returncode == 0 else done.stderr.strip() or f"status {done.returncode}"
