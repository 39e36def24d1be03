"""Symmetric memory between the ranks: does every provider open a heap, does each peer's memory take data, and in which order.

A heap is W blocks of BLOCK bytes and W signal words. Block s and word s of every rank are written by rank s alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import combinations

import torch
import torch.distributed as dist

from ..protocol.watchdog import poll
from ..symmetric import SymmetricHeap, open_heap
from .place import Place, first_line
from .report import CheckFailed, Finding

OpenHeap = Callable[[dist.ProcessGroup, int, str, torch.device], SymmetricHeap]

BLOCK = 1 << 20
_WORD = 8
_TRIPS = 20
_WAIT_S = 10.0
_SLOW_US = 1000.0

FIXES = {
    "host": "the ranks must run as one user in one PID namespace: each maps the others' memory through /proc/<pid>/fd",
    "torch": "peer access (nvidia-smi topo -p2p r), a container with --ipc=host; else --overlap-train-provider nvshmem",
    "nvshmem": 'pip install "overlap-train[nvshmem]" on every host, NVSHMEM_DEBUG=INFO for its reason; else '
    "--overlap-train-provider torch",
}


def check_memory(place: Place, provider: str, open_: OpenHeap = open_heap) -> list[Finding]:
    """Open a heap of `provider`, write every block of every peer, and send signals both ways between all pairs.

    Raises:
        CheckFailed: on the rank where opening, a copy or a wait went wrong.
    """
    missing = place.world.attempt(lambda: _load(provider))
    if missing is not None:
        return _not_loaded(place, provider, missing)
    name = f"rendezvous {provider}"
    try:
        began = time.monotonic()
        heap = open_(place.joined, place.size * (BLOCK + _WORD), provider, place.device)
        opened = place.ok(name, f"{place.size} rank{'s' * (place.size > 1)} in {time.monotonic() - began:.1f} s")
        found = _blocks(place, heap, name)
        if not place.any(bool(found)):
            found = [opened, *_signals(place, heap, f"signal {provider}")]
        heap.close()
    except CheckFailed:
        raise
    except Exception as error:
        problem = place.fail(name, first_line(error), "a heap on every rank", FIXES[provider])
        raise CheckFailed([problem]) from error
    return found


def _load(provider: str) -> None:
    """Before anything collective: a rank that cannot even load the library must not leave its peers in a rendezvous."""
    if provider == "nvshmem":
        import nvshmem.core  # noqa: F401
    elif provider == "torch":
        import torch.distributed._symmetric_memory  # noqa: F401


def _not_loaded(place: Place, provider: str, problem: str) -> list[Finding]:
    if problem == "failed on another rank":
        return []
    expected = "the same on all ranks; without it auto takes torch"
    return [place.warn(f"rendezvous {provider}", problem, expected, FIXES[provider])]


def _blocks(place: Place, heap: SymmetricHeap, name: str) -> list[Finding]:
    """Each rank writes its number into its block of every peer; findings about blocks that hold something else."""
    for peer in range(place.size):
        _block(heap.view(peer), place.rank).fill_(place.rank + 1)
    place.synchronize()
    dist.barrier(place.joined)
    own = heap.view(place.rank)
    wrong = [source for source in range(place.size) if not bool((_block(own, source) == source + 1).all())]
    dirty = bool(own[place.size * BLOCK :].any())
    dist.barrier(place.joined)  # nobody writes on while a rank still reads
    fix = "memory is mapped wrongly: see the lines on peer access, then file an issue with this report"
    writers = ", ".join(place.who(source) for source in wrong)
    found = [place.fail(name, f"what {writers} wrote is not there", "every peer's data", fix)] if wrong else []
    return found + ([place.fail(name, "a new heap is not zero", "zeros", fix)] if dirty else [])


def _signals(place: Place, heap: SymmetricHeap, name: str) -> list[Finding]:
    """Round trips between all pairs, one pair after the other: 1 MiB of data, a signal behind it, and the same back."""
    trips: dict[int, float] = {}
    early: list[int] = []
    for first, second in combinations(range(place.size), 2):
        if place.rank in (first, second):
            peer = second if place.rank == first else first
            times = [_trip(place, heap, peer, turn, name, early) for turn in range(1, _TRIPS + 1)]
            trips[peer] = statistics.median(times) * 1e6
    if early:
        writers = ", ".join(place.who(peer) for peer in sorted(set(early)))
        fix = "stop training with overlap here: file an issue with this report; until then --overlap-train-method collective"
        return [place.fail(name, f"a signal of {writers} came before its data", "data first", fix)]
    return _judge_trips(place, trips, name)


def _trip(place: Place, heap: SymmetricHeap, peer: int, turn: int, name: str, early: list[int]) -> float:
    """One round trip in seconds; the lower rank starts. Appends the peer to `early` if its signal came before its data."""
    began = time.perf_counter()
    if place.rank < peer:
        _send(place, heap, peer, turn)
    _receive(place, heap, peer, turn, name, early)
    if place.rank > peer:
        _send(place, heap, peer, turn)
    return time.perf_counter() - began


def _send(place: Place, heap: SymmetricHeap, peer: int, turn: int) -> None:
    view = heap.view(peer)
    _block(view, place.rank).copy_(torch.full((BLOCK,), turn, dtype=torch.uint8, device=place.device))
    _word(view, place).copy_(torch.full((1,), turn, dtype=torch.int64, device=place.device))


def _receive(place: Place, heap: SymmetricHeap, peer: int, turn: int, name: str, early: list[int]) -> None:
    own = heap.view(place.rank)
    word = own[place.size * BLOCK :].view(torch.int64)[peer : peer + 1]
    if not poll(lambda: int(word.item()) >= turn, _WAIT_S):
        fix = f"see the other lines of {place.who(peer)}; its copies do not arrive, or it has stopped"
        problem = place.fail(name, f"no signal from {place.who(peer)} in {_WAIT_S:g} s", "one in microseconds", fix)
        raise CheckFailed([problem])
    if not bool((_block(own, peer) == turn).all()):
        early.append(peer)


def _judge_trips(place: Place, trips: dict[int, float], name: str) -> list[Finding]:
    if not trips:
        return [place.ok(name, "a single rank: nobody to signal")]
    slowest = max(trips, key=trips.__getitem__)
    measured = f"round trip {statistics.median(trips.values()):.0f} us, slowest {trips[slowest]:.0f} us with {place.who(slowest)}"
    if place.device.type == "cuda" and trips[slowest] > _SLOW_US:
        fix = "the host is overloaded, or its processes are pinned to the wrong cores: nvidia-smi topo -m, numactl, cgroup limits"
        return [place.warn(name, measured, f"below {_SLOW_US:.0f} us with 1 MiB each way", fix)]
    return [place.ok(name, measured)]


def _block(view: torch.Tensor, source: int) -> torch.Tensor:
    return view[source * BLOCK : (source + 1) * BLOCK]


def _word(view: torch.Tensor, place: Place) -> torch.Tensor:
    return view[place.size * BLOCK :].view(torch.int64)[place.rank : place.rank + 1]
