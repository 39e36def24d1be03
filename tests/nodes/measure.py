"""What overlap gains between two nodes of two CPU processes on a slow wire: python -m tests.nodes.measure, as root.

2 MiB leave each of two network namespaces in every operator, at 100 Mbit/s: 0.17 s. Products are stretched: each sleeps for its
part of the time that a rank's products are to take, which leaves the cores to the network, as a GPU does. Prints the median of
five calls, in seconds.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from overlap_train import OverlapConfig, all_gather_linear, all_to_all_linear, linear_all_to_all, linear_reduce_scatter
from tests.nodes.network import missing, running
from tests.nodes.ranks import started
from tests.processes import values

RATE, WORLD, CALLS = "100mbit", 4, 5
PRODUCTS_S = (0.08, 0.17, 0.34)
METHODS = ("chunked", "collective")
# The operator, and a rank's input and weight in fp32: blocks of 1 MiB for gather and scatter, of 0.5 for each far rank.
OPERATORS: dict[str, tuple[Callable[..., torch.Tensor], tuple[int, int], tuple[int, int]]] = {
    "AG + GEMM": (all_gather_linear, (1024, 256), (16, 256)),
    "GEMM + RS": (linear_reduce_scatter, (WORLD * 1024, 16), (256, 16)),
    "GEMM + A2A": (linear_all_to_all, (512, 16), (WORLD * 256, 16)),
    "A2A + GEMM": (all_to_all_linear, (WORLD * 512, 256), (16, WORLD * 256)),
}


@contextmanager
def stretched(seconds: float, flops: float) -> Iterator[None]:
    """Products take their part of `seconds`, which all of a call, `flops`, take together."""
    kept = torch.mm, torch.Tensor.__matmul__, torch.Tensor.addmm_

    def slow(product: Callable[..., torch.Tensor], first: int) -> Callable[..., torch.Tensor]:
        def run(*operands: Any, **settings: Any) -> torch.Tensor:
            a, b = operands[first : first + 2]
            time.sleep(seconds * a.shape[0] * a.shape[1] * b.shape[1] / flops)
            return product(*operands, **settings)

        return run

    torch.mm, torch.Tensor.__matmul__ = slow(kept[0], 0), slow(kept[1], 0)  # type: ignore[assignment, method-assign]
    torch.Tensor.addmm_ = slow(kept[2], 1)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.mm, torch.Tensor.__matmul__, torch.Tensor.addmm_ = kept  # type: ignore[method-assign]


def measured(rank: int, world: int) -> dict[tuple[str, float, str], float]:
    """Seconds of each operator, product and method."""
    found = {}
    for name, (operator, x_shape, w_shape) in OPERATORS.items():
        x, w = torch.ones(x_shape), torch.ones(w_shape)
        # A rank multiplies all rows by its part of the weight, or its part of the rows by all of it.
        flops = x.numel() * w.shape[0] * (world if operator is all_gather_linear else 1)
        for seconds in PRODUCTS_S:
            for method in METHODS:
                call = partial(operator, x, w, group=dist.group.WORLD, config=OverlapConfig(method=method))
                with stretched(seconds, flops):
                    found[name, seconds, method] = statistics.median([_seconds(call) for _ in range(CALLS + 1)][1:])
    return found


def _seconds(call: Callable[[], torch.Tensor]) -> float:
    dist.barrier()
    begin = time.monotonic()
    call()
    dist.barrier()
    return time.monotonic() - begin


def main() -> None:
    if why := missing():
        raise SystemExit(why)
    with running(nodes=2) as network, tempfile.TemporaryDirectory() as folder:
        for node in range(2):
            network.throttle(node, RATE)
        with started(network, Path(folder), (2, 2), measured) as ranks:
            found = values(ranks.outcomes(limit_s=300))[0]
    columns = [(name, method) for name in OPERATORS for method in METHODS]
    print("| products |", " | ".join(f"{name} `{method}`" for name, method in columns), "|")
    for seconds in PRODUCTS_S:
        print(f"| {seconds} |", " | ".join(f"{found[name, seconds, method]:.2f}" for name, method in columns), "|")


if __name__ == "__main__":
    from tests.nodes import measure  # under the name by which the ranks find what they run

    measure.main()
