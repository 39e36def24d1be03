"""Compiles the kernels of tests/gpu/test_operators.py on all cores, before the tests run one after the other (3 s a kernel).

    python -O benchmarks/probes/compile_tests.py --world 2 4 8 --jobs 30

Into Triton's cache, or into TRITON_CACHE_DIR. Needs no GPU: see compile_ahead.py. -O takes out the assertions, which compare what
was never computed.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import compile_ahead
import torch
import torch.distributed as dist

from overlap_train import OverlapConfig

# world, operator, method, dtype, (rows, k, n), chunks (0: as many as the plan takes)
Task = tuple[int, str, str, torch.dtype, tuple[tuple[int, ...], int, int], int]


def tasks(worlds: list[int]) -> Iterator[Task]:
    from tests.gpu.test_operators import SHAPES_OF_TILES
    from tests.linear_cases import OPERATORS

    ragged = [((rows, 1), 264, 520) for rows in (65, 129, 997, 4100)]
    chunks_within_tiles = {"row": (264, 4136), "to_heads": (264, 4136), "column": (4136, 264), "to_rows": (4136, 264)}
    for world, operator, method in itertools.product(worlds, OPERATORS, ("fused", "direct")):
        for name, shape in SHAPES_OF_TILES.items():
            if name == "two chunks" and world > 2:  # its fp64 tensors are too large for many a host
                continue
            dtypes = (
                (torch.bfloat16, torch.float16, torch.float32) if name in ("odd", "many tiles") else (torch.bfloat16,)
            )
            yield from ((world, operator, method, dtype, shape, 0) for dtype in dtypes)
        if operator in ("row", "to_heads"):
            yield (world, operator, method, torch.bfloat16, ((1088, 1), 264, 2040), 0)
        if world <= 4:  # as the test
            yield (world, operator, method, torch.bfloat16, ((4060, 1), *chunks_within_tiles[operator]), 0)
        yield from ((world, operator, method, torch.bfloat16, shape, 0) for shape in ragged)
        if (world, operator, method) == (2, "row", "fused"):  # a split reduction forward
            yield (world, operator, method, torch.bfloat16, ((2050, 1), 4096, 4096), 0)
        for rows, chunks in itertools.product((66, 130, 190, 196), (1, 2, 4)):
            shape = ((rows, 1), 272 + 8 * chunks, 528 + 8 * chunks)
            yield (world, operator, method, torch.bfloat16, shape, math.gcd(rows, chunks))
    # Sums of partials: their kernel knows which sizes and addresses 16 divides.
    sums = [*ragged, *(shape for name, shape in SHAPES_OF_TILES.items() if name != "two chunks")]
    for world, operator, shape in itertools.product(worlds, ("column", "row"), sums):
        yield (world, operator, "chunked", torch.bfloat16, shape, 0)


def run(task: Task) -> str:
    """One operator, forward and backward; what was compiled, and the seconds."""
    from tests.linear_cases import OPERATORS, Case

    world, operator, method, dtype, (rows, k, n), chunks = task
    begin = time.perf_counter()
    with compile_ahead.compiling(world) as stack:
        for name in ("chunk_count", "direct_chunk_count") if chunks else ():
            stack.enter_context(mock.patch(f"overlap_train.planning.plan.{name}", return_value=chunks))
        # a host takes minutes for the products that tests compare with
        stack.enter_context(mock.patch("torch.Tensor.__matmul__", lambda a, b: a.new_empty(*a.shape[:-1], b.shape[1])))
        config = OverlapConfig(method=method, symmetric_mib=16384)
        case = Case(dist.group.WORLD, torch.device("cpu"), config, torch.bfloat16)  # type: ignore[arg-type]
        OPERATORS[operator](replace(case, dtype=dtype), rows, k, n)
    return f"{world} ranks, {operator} by {method}, {dtype}, {rows} x {k} x {n}: {time.perf_counter() - begin:.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--world", type=int, nargs="+", default=[2])
    parser.add_argument("--jobs", type=int, default=2)
    a = parser.parse_args()
    if __debug__:
        raise SystemExit("start it by python -O: assertions would compare what was never computed")
    sys.path.append(str(Path(__file__).parents[2]))
    with ProcessPoolExecutor(a.jobs, mp_context=get_context("spawn")) as pool:
        for future in [pool.submit(run, task) for task in tasks(a.world)]:
            print(future.result() if future.exception() is None else f"failed: {future.exception()}", flush=True)


if __name__ == "__main__":
    main()
