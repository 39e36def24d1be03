"""Times a linear's forward and backward across two pretended nodes, by each method that crosses nodes.

    benchmarks/lent/steady_wire.sh 40gbit torchrun --standalone --nproc-per-node 2 benchmarks/probes/nodes_backward.py

Column and row linears with hidden 4096 and M = 8192, whose products take about half as long as the network, and as long.
`bench hierarchical` times products without a weight gradient; here one stands between the exchanges of dx, or behind them. Prints
the median milliseconds of a forward and a backward together, the least and the most, beside the network and the products alone.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from functools import partial

from overlap_train.tools.measure.pretended import pretend_nodes

pretend_nodes(1)  # before torch and NCCL look

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from overlap_train import OverlapConfig, all_gather_linear, linear_reduce_scatter, shutdown  # noqa: E402

ROWS, HIDDEN = 8192, 4096
INNER = (157696, 315392)  # of both ranks
METHODS = ("fused", "chunked", "collective")
WARM_UP, RUNS = 2, 7
AHEAD = 8_000_000  # clocks that the GPU waits, so that the host is ahead


def milliseconds(call: Callable[[], object]) -> tuple[float, float, float]:
    """(median, least, most) of RUNS, each after all ranks have met."""
    for _ in range(WARM_UP):
        call()
    found = []
    for _ in range(RUNS):
        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        torch.cuda._sleep(AHEAD)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return statistics.median(found), min(found), max(found)


def random(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=torch.bfloat16)


class Linears:
    """A column linear [N/2, hidden] and a row linear [hidden, N/2] of one rank, with what goes in at both ends."""

    def __init__(self, device: torch.device, inner: int) -> None:
        part, shard = inner // 2, ROWS // 2
        self.x, self.h = random(device, shard, HIDDEN).requires_grad_(), random(device, ROWS, part).requires_grad_()
        self.w1, self.w2 = (
            random(device, part, HIDDEN).requires_grad_(),
            random(device, HIDDEN, part).requires_grad_(),
        )
        self.dy, self.dz = random(device, ROWS, part), random(device, shard, HIDDEN)
        self.whole = random(device, ROWS, HIDDEN)

    def network(self) -> None:
        dist.all_gather_into_tensor(self.whole, self.x.detach())

    def products(self) -> None:
        with torch.no_grad():
            _ = self.whole @ self.w1.t(), self.dy @ self.w1, self.dy.t() @ self.whole

    def column(self, config: OverlapConfig) -> None:
        all_gather_linear(self.x, self.w1, group=dist.group.WORLD, config=config).backward(self.dy)
        self.x.grad = self.w1.grad = None

    def row(self, config: OverlapConfig) -> None:
        linear_reduce_scatter(self.h, self.w2, group=dist.group.WORLD, config=config).backward(self.dz)
        self.h.grad = self.w2.grad = None


def main() -> None:
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    for inner in INNER:
        linears = Linears(device, inner)
        network, products = milliseconds(linears.network)[0], milliseconds(linears.products)[0]
        say(f"N = {inner}: the network takes {network:.2f} ms, three products {products:.2f} ms")
        for method in METHODS:
            config = OverlapConfig(method=method, node_ranks=1)
            for name, call in (("column", linears.column), ("row", linears.row)):
                median, least, most = milliseconds(partial(call, config))
                say(f"  {method}, {name}: {median:.2f} ms ({least:.2f} to {most:.2f})")
            dist.barrier()
            shutdown()
        del linears
        torch.cuda.empty_cache()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
