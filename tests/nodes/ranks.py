"""The ranks of one node: python -m tests.nodes.ranks FOLDER NODE, and what the test sees of them.

FOLDER/job.pickle says what to run; each rank leaves its outcome in FOLDER/rank<R>.pickle. Node 0 hosts the key-value store, as
torchrun does, in a process that outlives the ranks.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.nodes.network import DEVICE, Network
from tests.processes import Outcome

PORT = 29400  # in the node's own network


@dataclass(frozen=True)
class Job:
    """body(rank, world, *args) on ranks of nodes with so many ranks each. host: the address of node 0."""

    body: Callable[..., Any]
    args: tuple[Any, ...]
    sizes: tuple[int, ...]
    host: str


class Ranks:
    """The ranks that were started, as the test sees them."""

    def __init__(self, folder: Path, world: int) -> None:
        self._folder, self._world = folder, world

    def outcomes(self, limit_s: float) -> list[Outcome]:
        """What each rank ended with, after so many seconds at most."""
        end = time.monotonic() + limit_s
        files = [self._folder / f"rank{rank}.pickle" for rank in range(self._world)]
        while time.monotonic() < end and not all(file.exists() for file in files):
            time.sleep(0.05)
        return [Outcome(*pickle.loads(file.read_bytes()), 0) if file.exists() else Outcome() for file in files]

    def errors(self) -> str:
        """What all ranks wrote to standard error."""
        return "".join(file.read_text() for file in sorted(self._folder.glob("node*.log")))


@contextlib.contextmanager
def started(
    network: Network, folder: Path, sizes: Sequence[int], body: Callable[..., Any], *args: Any
) -> Iterator[Ranks]:
    """The ranks of all nodes, killed at the end of the block."""
    job = Job(body, args, tuple(sizes), network.address(0))
    (folder / "job.pickle").write_bytes(pickle.dumps(job))
    settings = {
        "GLOO_SOCKET_IFNAME": DEVICE,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join((os.getcwd(), *sys.path)),
    }
    environment = os.environ | settings
    with contextlib.ExitStack() as ends:
        for node in range(len(sizes)):
            log = ends.enter_context((folder / f"node{node}.log").open("wb"))
            words = [*network.command(node), sys.executable, "-m", "tests.nodes.ranks", str(folder), str(node)]
            process = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
            ends.callback(_end, process)
        yield Ranks(folder, sum(sizes))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def main(folder: Path, node: int) -> None:
    import torch.distributed as dist

    import overlap_train  # noqa: F401 # once, before the ranks are forked

    job: Job = pickle.loads((folder / "job.pickle").read_bytes())
    first = sum(job.sizes[:node])
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(folder, job, first + place)) for place in range(job.sizes[node])]
    for rank in ranks:
        rank.start()
    if node == 0:
        store = dist.TCPStore(job.host, PORT, is_master=True, wait_for_workers=False)
        time.sleep(3600)  # killed by the test
        del store
    for rank in ranks:
        rank.join()


def _rank(folder: Path, job: Job, rank: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    world = sum(job.sizes)
    store = dist.TCPStore(job.host, PORT, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    try:
        result = job.body(rank, world, *job.args), None
    except BaseException:
        result = None, traceback.format_exc()
    part = folder / f"rank{rank}.part"
    part.write_bytes(pickle.dumps(result))
    part.rename(folder / f"rank{rank}.pickle")
    time.sleep(3600)  # peers may still be reading from it; killed by the test


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
