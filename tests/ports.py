"""Ports for programs that tests start."""

from __future__ import annotations

import contextlib
import random
import socket

_BELOW_CONNECTIONS = range(20000, 30000)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, below those that systems give to connections by themselves (Linux: from 32768 on).

    Seconds pass until a program listens. By then a port from 32768 on may be that of another test's connection: the rank that
    should listen ends at once, and its peers wait for it until they are killed.
    """
    with contextlib.ExitStack() as stack:
        return [_bound(stack) for _ in range(count)]


def _bound(stack: contextlib.ExitStack) -> int:
    while True:
        probe = stack.enter_context(socket.socket())
        with contextlib.suppress(OSError):
            probe.bind(("", random.choice(_BELOW_CONNECTIONS)))
            return int(probe.getsockname()[1])
