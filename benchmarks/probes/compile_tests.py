"""Compiles the kernels of tests/gpu on all cores, before the tests run one after the other (3 s a kernel).

    python benchmarks/probes/compile_tests.py --world 2 4 8 --jobs 30            those of test_operators.py
    python benchmarks/probes/compile_tests.py --tests nodes --world 2 4          those of test_nodes.py: two nodes of 1, of 2

Into Triton's cache, or into TRITON_CACHE_DIR. Needs no GPU: see compile_ahead.py. Each kernel is compiled once, by the process
that comes to it first. How many SMs a test leaves to others does not count: grids are no part of what is compiled.

With NVSHMEM test_nodes.py asks on 2 ranks for one kernel that no task here has: wait_and_keep_kernel of bf16 blocks on 16 bytes,
whose size 16 divides, but not that of a row. Which test asks is not known. Of what a GPU still compiles, record next time the
key, the signature and the constants (triton.knobs.compilation.listener), PYTEST_CURRENT_TEST and the rank.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import compile_ahead
import tested_calls
import torch
import torch.distributed as dist
from tested_calls import Task

from overlap_train import OverlapConfig

CALLS = {"operators": tested_calls.of_operators, "nodes": tested_calls.of_nodes}


def run(task: Task, claims: Path) -> str:
    """Compile what a task asks for, on each rank that may ask for something else; the task, and its seconds."""
    begin = time.perf_counter()
    torch.set_num_threads(1)  # one process a core
    for rank in task.ranks:
        call(task, rank, claims)
    return f"{task}: {time.perf_counter() - begin:.1f} s"


def call(task: Task, rank: int, claims: Path) -> None:
    from tests.linear_cases import OPERATORS, Case

    config = OverlapConfig(method=task.method, symmetric_mib=16384, node_ranks=task.node_ranks)
    with compile_ahead.compiling(task.world, rank, claims) as stack:
        for name, instead in patches(task).items():
            stack.enter_context(mock.patch(name, instead))
        case = Case(dist.group.WORLD, torch.device("cpu"), config, task.dtype)  # type: ignore[arg-type]
        OPERATORS[task.operator](case, *task.shape)


def patches(task: Task) -> dict[str, Any]:
    """Names, and what takes their place: the chunks of a task, and what would take a host minutes."""
    instead: dict[str, Any] = {
        # products that tests compare with, and those that add up in fp32
        "torch.Tensor.__matmul__": lambda a, b: a.new_empty(*a.shape[:-1], b.shape[1]),
        "torch.Tensor.addmm_": lambda total, a, b: total,
        "tests.linear_cases.Case.integers": lambda case, *shape, seed: torch.empty(shape, dtype=torch.float64),
        "tests.linear_cases.poison": lambda case: None,
        "tests.linear_cases.check_exact": lambda *compared: None,
    }
    if task.chunks and task.node_ranks:
        instead["overlap_train.ops.plan.chunks_of"] = lambda *given: task.chunks
    elif task.chunks:
        from tests.linear_cases import cut_into

        instead |= cut_into(lambda m_shard: task.chunks)
    return instead


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tests", nargs="+", choices=CALLS, default=["operators"], help="whose kernels")
    parser.add_argument("--world", type=int, nargs="+", default=[2])
    parser.add_argument("--jobs", type=int, default=2)
    a = parser.parse_args()
    sys.path.append(str(Path(__file__).parents[2]))
    tasks = [task for name in a.tests for task in CALLS[name](a.world)]
    with TemporaryDirectory() as claims, ProcessPoolExecutor(a.jobs, mp_context=get_context("spawn")) as pool:
        for task, future in [(task, pool.submit(run, task, Path(claims))) for task in tasks]:
            failure = future.exception()
            print(f"failed: {task}: {failure!r}" if failure else future.result(), flush=True)


if __name__ == "__main__":
    main()
