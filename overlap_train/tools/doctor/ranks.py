"""What ranks find out together: symmetric memory and its signals, links, and operators that are right and fast.

All functions are collective over the ranks of `here`. Figures of GPUs are judged by what the card reaches (select/system.py) and
by the other ranks'; those of CPUs are only told.
"""

from __future__ import annotations

import importlib
import operator
import statistics
import time
from collections.abc import Sequence
from functools import partial
from itertools import count, permutations

import torch
import torch.distributed as dist

from ... import OverlapConfig, all_gather_linear, linear_reduce_scatter
from ... import check as check_timeouts
from ...group.signals import poll
from ...ranks.agreement import Agreement
from ...select.system import System
from ...symmetric import open_heap
from ..measure.timing import Pace, measure
from ..measure.world import World
from .job import FAIL, OK, WARN, Finding

_ELSEWHERE = "failed on another rank"  # see World.attempt
_AGREE_S = 30.0  # for all ranks to come
_SIGNAL_S = 5.0
_LOW = 0.8  # of what the card reaches, or of the median: clocks move figures by 10 %
_PACE = Pace(3, 5)
_TURNS, _BLOCK = 20, 1 << 20  # of so many bytes
_LIBRARIES = {"torch": "torch.distributed._symmetric_memory", "nvshmem": "nvshmem.core"}
ALONE = "one rank: memory, links and operators are not checked", "", "start a rank for each GPU, by torchrun"
MEMORY_FIXES = {
    "host": "the ranks must run as one user in one PID namespace: each maps the others' memory through /proc/<pid>/fd",
    "torch": "peer access (nvidia-smi topo -p2p r), a container with --ipc=host; else --overlap-train-provider nvshmem",
    "nvshmem": "pip install nvshmem4py-cu13 cuda-core on every host, NVSHMEM_DEBUG=INFO for its reason; else "
    "--overlap-train-provider torch",
}
_FIX = (
    "see docs/troubleshooting.md for the message; a named rank's own lines and log come first. If a result is wrong, do not "
    "train here with overlap (--overlap-train-method collective), and file an issue with this report"
)


def check_memory(here: World, provider: str, call_s: float) -> list[Finding]:
    """Open a heap of `provider`; send data with signals between all ranks, then time the links.

    call_s: see Agreement. Raises what a provider raises, and TimeoutError where a signal does not come.
    """
    name, on_gpu = f"heap {provider}", here.device.type == "cuda"
    # Before anything collective: a rank that cannot even load the library must not leave its peers in a rendezvous.
    missing = here.attempt(lambda: importlib.import_module(_LIBRARIES.get(provider, "torch")))
    if missing is not None:
        expected = "the same on all ranks; without it auto takes torch"
        return [] if missing == _ELSEWHERE else [Finding(WARN, name, missing, expected, MEMORY_FIXES[provider])]
    began = time.monotonic()
    nbytes = here.size * (_BLOCK + 8) + ((128 << 20) if on_gpu else (4 << 20))
    heap = open_heap(Agreement(here.group, _AGREE_S, call_s), nbytes, provider, here.device)
    views = [heap.view(rank) for rank in range(here.size)]
    opened = Finding(OK, name, f"{here.size} rank{'s' * (here.size > 1)} in {time.monotonic() - began:.1f} s")
    signals = _check_signals(here, views, f"signal {provider}")
    links = judge_links(here, f"link {provider}", _speeds(here, views), System.of(here.device))
    heap.close()
    return [opened, signals, *links]


def _check_signals(here: World, views: Sequence[torch.Tensor], name: str) -> Finding:
    """Every rank sends 1 MiB of data and then a signal to each other one, again and again.

    A view begins with W blocks of data and W words: block s and word s of every rank are written by rank s alone.
    """
    size, me = here.size, here.rank
    blocks = [view[: size * _BLOCK].view(size, _BLOCK) for view in views]
    words = [view[size * _BLOCK :][: 8 * size].view(torch.int64) for view in views]
    peers = [(me + step) % size for step in range(1, size)]
    for turn in range(1, _TURNS + 1):
        for peer in peers:
            for there in (blocks[peer][me], words[peer][me : me + 1]):
                there.copy_(torch.full_like(there, turn))
        for peer in peers:
            if not poll(partial(operator.ge, words[me][peer], turn), _SIGNAL_S):
                raise TimeoutError(
                    f"no signal from {here.who(peer)} in {_SIGNAL_S:g} s: its copies do not arrive, or it has stopped"
                )
            if not bool((blocks[me][peer] == turn).all()):
                raise RuntimeError(f"a signal of {here.who(peer)} came before its data; do not train here with overlap")
        dist.barrier(here.group)  # all have read
    return Finding(OK, name, f"{_TURNS} times 1 MiB to and from {size - 1} peers, each before its signal")


def _speeds(here: World, views: Sequence[torch.Tensor]) -> dict[tuple[int, int], float]:
    """GB/s of every rank copying into every other's memory, one pair at a time: in another's turn a rank does nothing."""
    source, speeds = torch.ones_like(views[here.rank]), {}
    for first, second in permutations(range(here.size), 2):

        def copy(index: int, first: int = first, target: torch.Tensor = views[second]) -> None:
            if here.rank == first:
                target.copy_(source, non_blocking=True)

        speeds[first, second] = source.nbytes / measure({"": copy}, _PACE, here.group, here.device)[""].ms / 1e6
    return speeds


def judge_links(here: World, name: str, speeds: dict[tuple[int, int], float], card: System) -> list[Finding]:
    """One finding for each link out of this rank that is slow, else one for all of them. speeds: GB/s by (source, target)."""
    mine = {target: speed for (source, target), speed in speeds.items() if source == here.rank}
    if not mine:
        return []
    told = f"{min(mine.values()):.3g} to {max(mine.values()):.3g} GB/s to {len(mine)} peers"
    if here.device.type != "cuda":
        return [Finding(OK, name, f"{told} through shared memory", "not judged: CPU")]
    least = _LOW * (card.copy_gbs if card.is_measured else statistics.median(speeds.values()))
    expected = f"at least {least:.0f} GB/s"
    expected += ", as the median link: this card was not measured" * (not card.is_measured)
    fix = "nvidia-smi nvlink -s and -e on the host, nvidia-smi topo -m; other jobs on these GPUs; then have the host drained"
    found = [
        Finding(WARN, name, f"{speed:.0f} GB/s from {here.who(here.rank)} to {here.who(target)}", expected, fix)
        for target, speed in mine.items()
        if speed < least
    ]
    return found or [Finding(OK, name, told, expected)]


@torch.no_grad()
def check_operators(here: World, name: str, config: OverlapConfig, seconds: float) -> list[Finding]:
    """AG + GEMM and GEMM + RS, again and again until the seconds are up: bitwise equal to torch. Then the time of AG + GEMM
    beside the collective and the GEMM in sequence, told by one rank.

    The fc1 of Llama-3-8B at 8192 tokens on GPUs, a small linear on CPUs.
    """
    deadline, expected = time.monotonic() + seconds, "bitwise equal to torch"
    for rounds in count(1):
        error = here.attempt(partial(_compare, here, config, rounds))
        if error is not None:
            return [] if error == _ELSEWHERE else [Finding(FAIL, name, f"{error}, in round {rounds}", expected, _FIX)]
        if here.any(time.monotonic() > deadline):  # one rank's clock ends it for all
            break
    right = Finding(OK, name, f"{rounds} round{'s' * (rounds != 1)} of AG + GEMM and GEMM + RS", expected)
    x, w, *_ = _inputs(here, 0)
    calls = {
        "ours": lambda index: all_gather_linear(x, w, group=here.group, config=config, name="doctor/ag_gemm"),
        "sequence": lambda index: here.gather(x) @ w.t(),
    }
    ours, sequence = (took.ms for took in measure(calls, _PACE, here.group, here.device).values())
    if here.rank != 0 or here.size == 1:
        return [right]
    told = f"{ours:.3f} ms; collective then GEMM {sequence:.3f} ms: {sequence / ours:.2f} x"
    if here.device.type != "cuda" or config.node_ranks:
        return [right, Finding(OK, f"{name} time", told, "not judged: CPU, or nodes on one machine")]
    slow = "overlap does not pay here: see the lines on links; other load on the host, a GPU that throttles"
    fix = slow * (ours > sequence)
    return [right, Finding(WARN if fix else OK, f"{name} time", told, "faster than the sequence", fix)]


def _compare(here: World, config: OverlapConfig, seed: int) -> None:
    """Raises RuntimeError for a wrong result."""
    x, w, h, v = _inputs(here, seed)
    y = all_gather_linear(x, w, group=here.group, config=config, name="doctor/ag_gemm")
    z = linear_reduce_scatter(h, v, group=here.group, config=config, name="doctor/gemm_rs")
    here.synchronize()  # a wait on the GPU gives up there; then its output is NaN, but the reason is the time-out
    check_timeouts()
    products, sums = here.gather(x).float() @ w.float().t(), here.scatter(h.float() @ v.float().t())
    for name, result, expected in (("AG + GEMM", y, products), ("GEMM + RS", z, sums)):
        wrong = result != expected.to(result.dtype)
        if bool(wrong.any()):
            told = f"{name}: {int(wrong.sum())} of {result.numel()} elements wrong"
            sources = map(here.who, wrong.view(here.size, -1).any(dim=1).nonzero().flatten().tolist())
            raise RuntimeError(f"{told}, in rows of {', '.join(sources)}" if result is y else told)


def _inputs(here: World, seed: int) -> tuple[torch.Tensor, ...]:
    """x_shard_m [M/W, K], w_shard_n [N/W, K], h_shard_k [M, N/W], v_shard_k [K, N/W]

    Sparse and of values -1, 0, 1: partial sums are small integers, exact in bf16, so results must be equal.
    """
    size, on_gpu = here.size, here.device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    m, k, n = (8192 // (8 * size) * 8, 4096, 14336 // (8 * size) * 8) if on_gpu else (16, 64, 24)  # m, n: of one rank
    generator = torch.Generator(here.device).manual_seed(1000 * seed + here.rank)

    def sparse(rows: int, columns: int) -> torch.Tensor:
        # Two of 17 are not zero: a sum over 14336 products has a deviation of 14, and bf16 is exact to 256.
        numbers = torch.randint(-8, 9, (rows, columns), device=here.device, generator=generator)
        return numbers.div_(8, rounding_mode="trunc").to(dtype)

    return sparse(m, k), sparse(n, k), sparse(m * size, n), sparse(k, n)
