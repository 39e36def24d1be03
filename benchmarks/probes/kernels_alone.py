"""Times the Hopper kernels of AG + GEMM and GEMM + A2A alone, on one GPU, beside cuBLAS: what a change of the kernels does.

    python benchmarks/probes/kernels_alone.py old=FOLDER new=.        folders that hold another version's kernels/ each

The kernels run as rank 0 of two whose peer has sent everything: nothing waits, and no copy engine moves anything. In turns, from
CUDA graphs, so that host time does not count. Prints the median microseconds of a launch, and over cuBLAS's.
"""

from __future__ import annotations

import importlib
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from overlap_train.operators.hopper import (
    BLOCK_K,
    BLOCK_M,
    BLOCK_N,
    HALF_N,
    LAUNCH,
    PART_M,
    STAGES,
    _descriptor,
    _operand,
    _stored,
)
from overlap_train.planning.tiling import HOPPER_TILE

GPU, SMS, WORLD = torch.device("cuda", 0), 132, 2
# (M, N, K): K from 1024, where a tile's end counts most, to 8192
SHAPES = [(40960, 2048, 2048), (16384, 4096, 1024), (16384, 4096, 2048), (16384, 4096, 4096), (16384, 4096, 8192)]
ROUNDS, BURST_US = 9, 3000
Kernel = Any
Launch = Callable[[], object]


def kernels_of(folder: str) -> tuple[Kernel, Kernel]:
    """The kernels of AG + GEMM and of GEMM + RS or A2A that lie in `folder`/kernels."""
    for name in [name for name in sys.modules if name.split(".")[0] == "kernels"]:
        del sys.modules[name]
    sys.path.insert(0, folder)
    gather = importlib.import_module("kernels.hopper_all_gather_gemm").hopper_all_gather_gemm_kernel
    scatter = importlib.import_module("kernels.hopper_gemm_reduce_scatter").hopper_gemm_reduce_scatter_kernel
    sys.path.pop(0)
    return gather, scatter


def protocol() -> dict[str, Any]:
    """Of a rank whose signals are all there: they and the epoch are zero."""
    sizes = dict(
        signals_ptr=WORLD * 8, epoch_ptr=1, outgoing_at_ptr=WORLD, counter_ptr=1, complete_ptr=WORLD * 8, left_ptr=1,
        abort_ptr=1, record_ptr=8,
    )  # fmt: skip
    words = {name: torch.zeros(size, dtype=torch.int64, device=GPU) for name, size in sizes.items()}
    return dict(rank=0, tag=0, limit=int(20e9)) | words


def tile(b_kn: torch.Tensor) -> dict[str, Any]:
    blocks = dict(BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, GROUP_M=HOPPER_TILE.group_m)
    return dict(STAGES=STAGES, B_IS_NK=b_kn.stride(0) == 1, WORLD=WORLD, CHUNKS=1, DIRECT=False) | blocks | LAUNCH


def panels(b_kn: torch.Tensor) -> dict[str, Any]:
    return dict(b_desc=_operand(b_kn, BLOCK_N), b_half_desc=_operand(b_kn, HALF_N))


def all_gather_gemm(kernel: Kernel, a: torch.Tensor, b_kn: torch.Tensor) -> tuple[Launch, Callable[[], torch.Tensor]]:
    """Half of a [M, K] is the own shard. Returns the launch, and what gives its result [M, N]."""
    (m, k), n = a.shape, b_kn.shape[1]
    own, y, words = a[: m // WORLD], a.new_empty(m, n), protocol()
    arguments = dict(
        own_desc=_descriptor(own, PART_M, BLOCK_K), own_ptr=own, gathered_desc=_descriptor(a, PART_M, BLOCK_K),
        y_desc=_stored(y, WORLD), m_shard=m // WORLD, n=n, k=k, sent_ptr=words["left_ptr"],
        memory_at_ptr=words["outgoing_at_ptr"], **panels(b_kn), **words,
    )  # fmt: skip
    constants = tile(b_kn) | dict(PIECE=16384, STEP=1024)
    grid = (min(SMS, 2 * HOPPER_TILE.count(m // WORLD, n, WORLD)),)
    return launch(kernel, grid, arguments | constants), lambda: y


def gemm_all_to_all(kernel: Kernel, a: torch.Tensor, b_kn: torch.Tensor) -> tuple[Launch, Callable[[], torch.Tensor]]:
    """Half of the columns of b_kn [K, N] is the peer's. Returns the launch, and what gives its result [M, N]."""
    (m, k), n = a.shape, b_kn.shape[1] // WORLD
    y, staging, words = a.new_empty(m, n), a.new_empty(WORLD, m, n), protocol()
    place = _stored(staging.flatten(0, 1), WORLD)
    arguments = dict(
        a_desc=_descriptor(a, PART_M, BLOCK_K), y_desc=_stored(y, 1), m_shard=m, n=n, k=k,
        received_desc=_descriptor(staging.flatten(0, 1), PART_M, HALF_N), **panels(b_kn), **words,
    ) | {f"to{step}_desc": place for step in range(1, 8)}  # fmt: skip
    constants = tile(b_kn) | dict(REDUCE=False, EXCHANGE=True, RUN=1, BUFFERS=1)
    grid = (min(SMS, HOPPER_TILE.count(m, n) * WORLD),)
    return launch(kernel, grid, arguments | constants), lambda: torch.cat([y, staging[1]], dim=1)


def launch(kernel: Kernel, grid: tuple[int], arguments: dict[str, Any]) -> Launch:
    def run() -> None:
        arguments["counter_ptr"].zero_()
        kernel[grid](**arguments)

    return run


def graph_of(call: Launch, times: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    return graph


def microseconds(graph: torch.cuda.CUDAGraph, times: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / times * 1e3


def measure(versions: dict[str, tuple[Kernel, Kernel]], m: int, n: int, k: int) -> dict[str, float]:
    a, b = (torch.randn(rows, k, device=GPU, dtype=torch.bfloat16) for rows in (m, n))
    right = torch.mm(a, b.t())
    calls: dict[str, Launch] = {"cuBLAS": lambda: torch.mm(a, b.t(), out=right)}
    for name, (gather, scatter) in versions.items():
        for label, (call, result) in {
            f"AG {name}": all_gather_gemm(gather, a, b.t()),
            f"A2A {name}": gemm_all_to_all(scatter, a, b.t()),
        }.items():
            call()
            torch.testing.assert_close(result(), right, rtol=2e-2, atol=0.02 * k**0.5)
            calls[label] = call
    times = max(2, int(BURST_US / (2 * m * n * k / 650e6)))
    graphs = {label: graph_of(call, times) for label, call in calls.items()}
    found: dict[str, list[float]] = {label: [] for label in graphs}
    for _ in range(ROUNDS):
        for label, graph in graphs.items():
            found[label].append(microseconds(graph, times))
    return {label: statistics.median(times) for label, times in found.items()}


def main() -> None:
    if not sys.argv[1:] or not all("=" in argument for argument in sys.argv[1:]):
        raise SystemExit((__doc__ or "").strip())
    torch.cuda.set_device(GPU)
    versions = {name: kernels_of(folder) for name, folder in (argument.split("=", 1) for argument in sys.argv[1:])}
    for m, n, k in SHAPES:
        found = measure(versions, m, n, k)
        shown = ", ".join(f"{label} {us:.1f} ({us / found['cuBLAS']:.3f})" for label, us in found.items())
        print(f"{m} x {n} x {k}: {shown}", flush=True)


if __name__ == "__main__":
    main()
