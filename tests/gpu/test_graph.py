"""A layer's forward and backward as a CUDA graph: replayed an odd and an even number of times, with eager calls between."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from overlap_train import all_gather_linear, forget_graphs, graphed, linear_reduce_scatter
from tests.linear_cases import OPERATORS, Case

K, N_SHARD, ROWS = 512, 256, 256


class Layer:
    """Column and row linear on fixed buffers, forward and backward; x [ROWS * W, K], integers that stay exact."""

    def __init__(self, case: Case) -> None:
        self.case = case = replace(case, dtype=torch.bfloat16)
        weight = case.integers(N_SHARD * case.world, K, seed=1)
        self.weight = weight.float()
        self.column, self.row = case.mine(weight, 0), case.mine(weight.t().contiguous(), 1)
        self.x = torch.zeros(ROWS, K, device=case.device, dtype=case.dtype, requires_grad=True)
        self.dy = torch.zeros(ROWS * case.world, N_SHARD, device=case.device, dtype=case.dtype)

    def fill(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """New inputs; the whole x and dy."""
        case = self.case
        x = case.integers(ROWS * case.world, K, seed=10 + number)
        dy = case.integers(ROWS * case.world, N_SHARD * case.world, seed=50 + number)
        with torch.no_grad():
            self.x.copy_(case.mine(x, 0))
            self.dy.copy_(case.mine(dy, 1))
        return x.float(), dy.float()

    def run(self) -> tuple[torch.Tensor, ...]:
        """y, z, dx, dw of the column linear; z is the row linear of dy."""
        group, config = self.case.group, self.case.config
        y = all_gather_linear(self.x, self.column, group=group, config=config)
        dx, dw = torch.autograd.grad(y, [self.x, self.column], self.dy)
        return y, linear_reduce_scatter(self.dy, self.row, group=group, config=config), dx, dw

    def check(self, results: tuple[torch.Tensor, ...], x: torch.Tensor, dy: torch.Tensor) -> None:
        case, exact = self.case, (x @ self.weight.t(), dy @ self.weight, dy @ self.weight, dy.t() @ x)
        for name, result, whole, dim in zip(("y", "z", "dx", "dw"), results, exact, (1, 0, 0, 0), strict=True):
            wrong = (result != whole.chunk(case.world, dim)[case.rank].to(result.dtype)).sum().item()
            assert wrong == 0, f"{name}: {wrong} elements differ"


@pytest.mark.parametrize("method", ["fused", "direct", "low_latency", "chunked"])
def test_replays_are_exact(case: Case, method: str) -> None:
    layer = Layer(case)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for number in range(3):
            inputs = layer.fill(number)
            layer.check(layer.run(), *inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), graphed(case.group):
        results = layer.run()
    number = 3
    for replays in (1, 2, 3, 4):
        for _ in range(replays):
            inputs = layer.fill(number)
            graph.replay()
            layer.check(results, *inputs)
            number += 1
        for _ in range(replays % 2 + 1):  # eager calls go on from wherever the slots were
            OPERATORS["column"](case, (64, 1), 128, 64, seed=number)
    for _ in range(20):
        graph.replay()  # back to back, without the host between
    layer.check(results, *inputs)
    # Rows of a rank; low_latency serves 64 MiB of words with flags at most.
    most = (1 << 10) // case.world if method == "low_latency" else 1 << 14
    large, weight = (torch.zeros(rows, 1 << 13, device=case.device, dtype=torch.bfloat16) for rows in (most, 64))
    with pytest.raises(ValueError, match="CUDA graph holds addresses"):
        all_gather_linear(large, weight, group=case.group, config=case.config)
    torch.cuda.synchronize()
    del graph, results
    forget_graphs(case.group)  # for the tests behind this one
