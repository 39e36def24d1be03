"""Ranks of one machine that play several nodes: NCCL is told that they are on different hosts, and goes over sockets."""

from __future__ import annotations

import os

# Sockets over loopback carried 2.0 GB/s each way as they come, and 5.3 so (2 x H200).
_SOCKETS = {
    "NCCL_SOCKET_NTHREADS": "8",
    "NCCL_NSOCKS_PERTHREAD": "4",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
}
_HOST = "NCCL_HOSTID"


def pretend_nodes(node_ranks: int) -> None:
    """Let NCCL take the ranks of this machine for several hosts, where torchrun has started more than a node has. Before NCCL."""
    here, count = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if count > node_ranks:
        for name, value in (_SOCKETS | {_HOST: f"node{here // node_ranks}"}).items():
            os.environ.setdefault(name, value)


def pretends() -> bool:
    """Whether NCCL takes ranks of this machine for several hosts, so that it goes over sockets between them."""
    return _HOST in os.environ
