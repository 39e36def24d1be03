"""What measurements depend on besides the shape: the key of a file of winners. Under another key nothing of them is used.

In the key is what changes the answer, and is known before anything is sent. Not in it:

- The provider of symmetric memory. Engines send by the same copies and stores, whoever has mapped the peers' memory. No record
  compares providers.
- The number of hardware queues, inside one node: no exchange is enqueued before a product there that it could hold up. No record
  has many.
- What the network carries, which does matter. It is measured only where nodes are connected, after the table is read, and one
  network took 4.4 to 8.2 ms for the same bytes within one run (benchmarks/notes.md).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

# Raised whenever what is measured becomes something else: a kernel, whom the kernels serve, how blocks are cut into chunks.
KERNELS = 5
# The same of what runs in groups that span nodes alone: their schedule. Tables of one node stay.
CROSSINGS = 1
_NONE = "not installed"  # of overlap-train: a checkout on the path
_DRIVER = Path("/proc/driver/nvidia/version")
# Fields that older files lack, and what such a file means. Files leave them out where they have this value: names stay the same.
LEFT_OUT: Mapping[str, Any] = {"nodes": 1, "crossings": 0, "network": "nccl", "queues": "one"}


@dataclass(frozen=True)
class Key:
    """What measurements depend on besides the shape.

    nodes: that the ranks are on, as many on each. crossings: CROSSINGS where there are several. network, queues: between nodes of
    GPUs, else as in LEFT_OUT. network: what carries data, nccl or nvshmem. queues: hardware queues of all streams of a GPU, one
    (CUDA_DEVICE_MAX_CONNECTIONS=1) or many: in one, an exchange holds up products that are enqueued after it. A GEMM + RS whose
    product takes twice as long as the network takes 31 ms by `fused` and 36 by `chunked` in one queue, 32 by both with many
    (h200x2/hierarchical).
    """

    gpu: str  # "cpu" without one
    torch: str
    triton: str
    driver: str
    overlap_train: str
    world: int
    kernels: int = KERNELS
    nodes: int = 1
    crossings: int = 0
    network: str = "nccl"
    queues: str = "one"

    def as_dict(self) -> dict[str, Any]:
        """The key as a file has it."""
        return {name: value for name, value in asdict(self).items() if name not in LEFT_OUT or value != LEFT_OUT[name]}

    @property
    def file_name(self) -> str:
        """The name of the key's file. It tells people the GPU and the numbers of ranks and nodes; the digest tells versions
        apart."""
        digest = hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()[:12]
        nodes = f"-{self.nodes}-nodes" if self.nodes > 1 else ""
        return f"tuned-{re.sub('[^A-Za-z0-9]+', '-', self.gpu)}-{self.world}-ranks{nodes}-{digest}.json"


def key_of(device: torch.device, world: int, nodes: int = 1, network: str = "auto") -> Key:
    """The Key of this machine and installation, for `world` ranks on `nodes` nodes. network: of OverlapConfig."""
    key = replace(_key_in_node(device, world), nodes=nodes, crossings=CROSSINGS if nodes > 1 else 0)
    if nodes == 1 or device.type != "cuda":
        return key
    queues = "one" if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1" else "many"
    return replace(key, network="nvshmem" if network == "nvshmem" else "nccl", queues=queues)


@functools.cache
def _key_in_node(device: torch.device, world: int) -> Key:
    on_gpu = device.type == "cuda"
    gpu = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    driver = _driver_version() if on_gpu else "none"
    versions = str(torch.__version__), installed("triton") or _NONE, driver, installed("overlap-train") or _NONE
    return Key(gpu, *versions, world)


def installed(package: str) -> str | None:
    """The version of a package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver_version() -> str:
    """ "570.86.15"; the kernel module's own word, which is there in containers too."""
    try:
        found = re.search(r"\d+\.\d+(\.\d+)*", _DRIVER.read_text().splitlines()[0])
    except (OSError, IndexError):
        found = None
    return found[0] if found else "unknown"
