"""The kernels between nodes compile for Hopper, few registers each: NCCL's run beside them."""

from __future__ import annotations

import importlib.util
import re
from concurrent.futures import ProcessPoolExecutor

import pytest

pytest.importorskip("triton")

from overlap_train.kernels.add_blocks import MOST_OF_64_KIB, ON_ALL_SMS, ON_FEW_SMS, WARPS
from tests.unit import hopper_ptx

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton's compiler")


@pytest.mark.parametrize(
    ("count", "nbytes"),
    [(1, ON_FEW_SMS), (3, ON_FEW_SMS), (MOST_OF_64_KIB, ON_FEW_SMS), (2, ON_ALL_SMS), (22, ON_ALL_SMS)],
)
def test_a_sum_compiles_without_atomics_and_spills(compiling: ProcessPoolExecutor, count: int, nbytes: int) -> None:
    """On the SMs that products leave it, and on all as the last one, of 22 other blocks on 16 nodes of 8."""
    aligned = ("own_ptr", "received_ptr", "order_ptr", "y_ptr", "size", "pitch")
    constants = dict(COUNT=count, BLOCK=nbytes // 2, num_warps=WARPS, divisible=aligned)
    submitted = compiling.submit(hopper_ptx.compiled_portable, "add_blocks", "add_blocks_kernel", **constants)
    added = submitted.result(120)
    assert re.search(r"st\.global", added) and not re.search(r"\b(atom|red)\.", added)
    assert hopper_ptx.resources(added).spilled == 0


@pytest.mark.parametrize("kernel", ["all_gather_gemm", "all_to_all_gemm"])
def test_threads_of_a_kernel_that_leaves_share_what_they_decide_by(compiling: ProcessPoolExecutor, kernel: str) -> None:
    """What it claims and what is here it reads by atomics, one load each of which all threads get. Of a plain load each thread
    has its own result: some would go on, others leave."""
    ptx = {}
    for local in (4, 2):
        constants = dict(
            WORLD=4, LOCAL=local, CHUNKS=2, DIRECT=False, PIECE=16384, PRECISION="ieee", TIMED=True, num_warps=8
        )
        constants |= dict(BLOCK_M=128, BLOCK_N=128, BLOCK_K=32, GROUP_M=8)
        ptx[local] = compiling.submit(hopper_ptx.compiled_portable, kernel, f"{kernel}_kernel", **constants).result(120)
    loads, exchanges = ({n: len(re.findall(what, ptx[n])) for n in ptx} for what in (r"ld\.volatile", r"atom\S*\.cas"))
    assert loads[2] == loads[4], "of the flag that a wait has given up"
    assert exchanges[2] == exchanges[4] + 2, "a claim before the loop, and one in it"


@pytest.mark.parametrize("kernel", ["hopper_all_gather_gemm", "hopper_all_to_all_gemm"])
def test_hopper_kernels_that_leave_claim_by_exchanges_and_spill_nothing(
    compiling: ProcessPoolExecutor, kernel: str
) -> None:
    ptx = {n: compiling.submit(hopper_ptx.compiled, kernel, True, LOCAL=n).result(120)[0] for n in (4, 2)}
    loads, exchanges = ({n: len(re.findall(what, ptx[n])) for n in ptx} for what in (r"ld\.volatile", r"atom\S*\.cas"))
    assert loads[2] == loads[4] and exchanges[2] == exchanges[4] + 2
    assert hopper_ptx.resources(ptx[2]).spilled == 0
