"""Times two ways to multiply for an all-to-all by `collective`, on one GPU: a product for each rank's columns, or one batched product.

    python benchmarks/probes/blocks_in_one_product.py

    W products       a [M, K] @ b_kn[:, block d]  ->  blocks[d] [M, N/W]      as operators/gemm_all_to_all.py does
    one product      the same, by torch.bmm, with a W times (batch stride 0)
    one, then a pass a @ b_kn [M, N], copied to blocks

In turns, from CUDA graphs, so that host time does not count; the host's time of each is printed beside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

GPU = torch.device("cuda", 0)
# (M, N, K): rows and features of Ulysses' projections, Llama-3 8B and 70B, and short ones
SHAPES = [(1024, 6144, 4096), (4096, 6144, 4096), (4096, 10240, 8192), (512, 4096, 4096)]
WORLDS = (2, 4, 8, 16, 32)
ROUNDS, BURST = 9, 8
Call = Callable[[], object]


def ways(m: int, n: int, k: int, world: int, transposed: bool) -> tuple[dict[str, Call], torch.Tensor, torch.Tensor]:
    """The three ways, by name; the blocks that they write, and what these must be."""
    a = torch.randn(m, k, device=GPU, dtype=torch.bfloat16)
    b = torch.randn(n, k, device=GPU, dtype=torch.bfloat16).t() if transposed else torch.randn(k, n, device=GPU).bfloat16()
    blocks, whole = a.new_empty(world, m, n // world), a.new_empty(m, n)
    columns, batch = b.chunk(world, dim=1), b.unflatten(1, (world, -1)).movedim(1, 0)

    def products() -> None:
        for block, part in zip(blocks, columns, strict=True):
            torch.mm(a, part, out=block)

    def product_and_pass() -> None:
        blocks.copy_(torch.mm(a, b, out=whole).unflatten(1, (world, -1)).movedim(1, 0))

    calls: dict[str, Call] = {
        "W products": products,
        "one product": lambda: torch.bmm(a.expand(world, m, k), batch, out=blocks),
        "one, then a pass": product_and_pass,
    }
    return calls, blocks, (a @ b).unflatten(1, (world, -1)).movedim(1, 0)


def graph_of(call: Call) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(BURST):
            call()
    return graph


def microseconds(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / BURST * 1e3


def host_microseconds(call: Call) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(BURST):
        call()
    return (time.perf_counter() - begin) / BURST * 1e6


def main() -> None:
    torch.cuda.set_device(GPU)
    for m, n, k in SHAPES:
        for world in WORLDS:
            for transposed in (True, False):
                calls, blocks, right = ways(m, n, k, world, transposed)
                for call in calls.values():
                    blocks.zero_()
                    call()
                    torch.testing.assert_close(blocks, right, rtol=2e-2, atol=0.02 * k**0.5)
                graphs = {name: graph_of(call) for name, call in calls.items()}
                host = {name: host_microseconds(call) for name, call in calls.items()}
                found: dict[str, list[float]] = {name: [] for name in graphs}
                for _ in range(ROUNDS):
                    for name, graph in graphs.items():
                        found[name].append(microseconds(graph))
                shown = (f"{name} {statistics.median(us):.1f} (host {host[name]:.0f})" for name, us in found.items())
                print(f"{m} x {n} x {k}, W = {world}, {'nk' if transposed else 'kn'}: {', '.join(shown)} us", flush=True)


if __name__ == "__main__":
    main()
