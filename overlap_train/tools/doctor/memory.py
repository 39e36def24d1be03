"""Symmetric memory between the ranks: does every provider open a heap, does each peer's memory take data, and in which order.

A heap is W blocks of BLOCK bytes and W signal words. Block s and word s of every rank are written by rank s alone.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from itertools import combinations

import torch
import torch.distributed as dist

from ...group.signals import poll
from ...symmetric import SymmetricHeap, open_heap
from ...symmetric.agreement import Agreement
from ..measure.world import World
from .report import Finding, fail, ok, warn

OpenHeap = Callable[[Agreement, int, str, torch.device], SymmetricHeap]
AGREE_S = 30.0  # for all ranks to come

BLOCK = 1 << 20
_WORD = 8
_TRIPS = 20
_WAIT_S = 10.0
_SLOW_US = 1000.0

LIBRARIES = {"torch": "torch.distributed._symmetric_memory", "nvshmem": "nvshmem.core"}
FIXES = {
    "host": "the ranks must run as one user in one PID namespace: each maps the others' memory through /proc/<pid>/fd",
    "torch": "peer access (nvidia-smi topo -p2p r), a container with --ipc=host; else --overlap-train-provider nvshmem",
    "nvshmem": "pip install nvshmem4py-cu13 cuda-core on every host, NVSHMEM_DEBUG=INFO for its reason; else "
    "--overlap-train-provider torch",
}


def check_memory(here: World, provider: str, open_: OpenHeap = open_heap, call_s: float | None = None) -> list[Finding]:
    """Open a heap of `provider`, write every block of every peer, and send signals both ways between all pairs.

    call_s: see Agreement. Raises what a provider raises, and TimeoutError where a signal does not come.
    """
    name = f"rendezvous {provider}"
    # Before anything collective: a rank that cannot even load the library must not leave its peers in a rendezvous.
    missing = here.attempt(lambda: importlib.import_module(LIBRARIES.get(provider, "torch")))
    if missing is not None:
        expected = "the same on all ranks; without it auto takes torch"
        return [] if missing == "failed on another rank" else [warn(name, missing, expected, FIXES[provider])]
    began = time.monotonic()
    heap = open_(Agreement(here.group, AGREE_S, call_s), here.size * (BLOCK + _WORD), provider, here.device)
    opened = ok(name, f"{here.size} rank{'s' * (here.size > 1)} in {time.monotonic() - began:.1f} s")
    found = _blocks(here, heap, name)
    if not here.any(bool(found)):
        found = [opened, _signals(here, heap, f"signal {provider}")]
    heap.close()
    return found


def _blocks(here: World, heap: SymmetricHeap, name: str) -> list[Finding]:
    """Each rank writes its number into its block of every peer; findings about blocks that hold something else."""
    for peer in range(here.size):
        _block(heap.view(peer), here.rank).fill_(here.rank + 1)
    here.synchronize()
    dist.barrier(here.group)
    own = heap.view(here.rank)
    wrong = [source for source in range(here.size) if not bool((_block(own, source) == source + 1).all())]
    dirty = bool(own[here.size * BLOCK :].any())
    dist.barrier(here.group)  # nobody writes on while a rank still reads
    fix = "memory is mapped wrongly: see the lines on peer access, then file an issue with this report"
    writers = ", ".join(here.who(source) for source in wrong)
    found = [fail(name, f"what {writers} wrote is not there", "every peer's data", fix)] if wrong else []
    return found + ([fail(name, "a new heap is not zero", "zeros", fix)] if dirty else [])


def _signals(here: World, heap: SymmetricHeap, name: str) -> Finding:
    """Round trips between all pairs, one pair after the other: 1 MiB of data, then a signal, and the same back."""
    trips: dict[int, float] = {}
    early: set[int] = set()
    for pair in combinations(range(here.size), 2):
        if here.rank in pair:
            peer = pair[1 - pair.index(here.rank)]
            times = [_trip(here, heap, peer, turn, early) for turn in range(1, _TRIPS + 1)]
            trips[peer] = statistics.median(times) * 1e6
    if early:
        writers = ", ".join(here.who(peer) for peer in sorted(early))
        fix = "stop training with overlap here: file an issue with this report; until then --overlap-train-method collective"
        return fail(name, f"a signal of {writers} came before its data", "data first", fix)
    if not trips:
        return ok(name, "a single rank: nobody to signal")
    slowest = max(trips, key=trips.__getitem__)
    measured = f"round trip {statistics.median(trips.values()):.0f} us, slowest {trips[slowest]:.0f} us with {here.who(slowest)}"
    if here.device.type == "cuda" and trips[slowest] > _SLOW_US:
        fix = "the host is overloaded, or its processes are pinned to the wrong cores: nvidia-smi topo -m, numactl, cgroup limits"
        return warn(name, measured, f"below {_SLOW_US:.0f} us with 1 MiB each way", fix)
    return ok(name, measured)


def _trip(here: World, heap: SymmetricHeap, peer: int, turn: int, early: set[int]) -> float:
    """One round trip in seconds; the lower rank starts. Adds the peer to `early` if its signal came before its data."""
    began = time.perf_counter()
    if here.rank < peer:
        _send(here, heap.view(peer), turn)
    own = heap.view(here.rank)
    if not poll(lambda: int(_word(own, peer, here.size).item()) >= turn, _WAIT_S):
        raise TimeoutError(
            f"no signal from {here.who(peer)} in {_WAIT_S:g} s: its copies do not arrive, or it has stopped"
        )
    if not bool((_block(own, peer) == turn).all()):
        early.add(peer)
    if here.rank > peer:
        _send(here, heap.view(peer), turn)
    return time.perf_counter() - began


def _send(here: World, view: torch.Tensor, turn: int) -> None:
    _block(view, here.rank).copy_(torch.full((BLOCK,), turn, dtype=torch.uint8, device=here.device))
    _word(view, here.rank, here.size).copy_(torch.full((1,), turn, dtype=torch.int64, device=here.device))


def _block(view: torch.Tensor, source: int) -> torch.Tensor:
    return view[source * BLOCK : (source + 1) * BLOCK]


def _word(view: torch.Tensor, source: int, size: int) -> torch.Tensor:
    return view[size * BLOCK :].view(torch.int64)[source : source + 1]
