"""Compiles the kernels of a benchmark's shapes on a machine without a GPU, so that time on one is not spent on it (3 s a kernel).

    python benchmarks/probes/compile_ahead.py --rows 1024 8192 --cache runs/triton
    tar c -C runs/triton . | xz > runs/triton.xz                                     to ~/.triton/cache on the other machine

Both need the same Triton: what it compiles is found by a hash of its own files, the kernel's text and the kinds of arguments. The
operators run on a stand-in for a GPU (stand_in_gpu.py), their products do nothing, and Triton compiles for sm_90.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import stand_in_gpu
import torch
import torch.distributed as dist

from overlap_train import OverlapConfig, all_gather_linear, linear_reduce_scatter
from overlap_train.gpu.ptx_check import compiled
from overlap_train.tools.measure.models import MODELS

SHAPES = ("llama-7b", "llama3-8b", "llama3-70b", "llama3-405b", "qwen2-72b")


class Compiling(stand_in_gpu.Unchecked):
    """Compiles what it is asked about, and says so."""

    def verify(self, kernel: Any, grid: tuple[int], arguments: dict[str, Any], constants: dict[str, Any]) -> Any:
        begin = time.perf_counter()
        compiled(kernel, grid, arguments, constants)
        print(f"{kernel.fn.__name__} {constants}: {time.perf_counter() - begin:.1f} s", flush=True)
        return super().verify(kernel, grid, arguments, constants)


def _no_product(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1]) if out is None else out


def compiling(world: int) -> ExitStack:
    """Bracket in which operators compile their kernels for one of `world` ranks, and do nothing else."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    target = GPUTarget("cuda", 90, 32)
    idle = dict(get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: target)
    driver.set_active(SimpleNamespace(**idle))  # type: ignore[arg-type]
    stack = ExitStack()
    stack.enter_context(mock.patch.object(stand_in_gpu, "Unchecked", Compiling))
    stack.enter_context(stand_in_gpu.stand_in(world))
    stack.enter_context(mock.patch("torch.mm", _no_product))
    return stack


def run(rows: int, inside: int, outside: int, method: str, world: int) -> None:
    """Forward and backward of a column and a row linear."""
    said = dict(group=dist.group.WORLD, config=OverlapConfig(method=method, symmetric_mib=16384))

    def tensor(m: int, n: int) -> torch.Tensor:
        return torch.empty(m, n, dtype=torch.bfloat16, requires_grad=True)

    y = all_gather_linear(tensor(rows // world, outside), tensor(inside // world, outside), **said)
    y.backward(torch.empty_like(y))
    z = linear_reduce_scatter(tensor(rows, inside // world), tensor(outside, inside // world), **said)
    z.backward(torch.empty_like(z))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--methods", nargs="+", default=["auto", "fused", "direct", "low_latency"])
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--cache", type=Path, default=Path("runs/triton"), help="Triton's cache")
    a = parser.parse_args()
    os.environ["TRITON_CACHE_DIR"] = str(a.cache)
    with compiling(a.world):
        for rows, name, method in product(a.rows, a.shapes, a.methods):
            if method != "low_latency" or rows <= 1024:
                run(rows, MODELS[name].ffn_hidden_size, MODELS[name].hidden_size, method, a.world)


if __name__ == "__main__":
    main()
