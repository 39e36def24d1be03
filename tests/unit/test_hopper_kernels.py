"""The Hopper kernels compile without a GPU, keep their registers, and have every wait and signal in their PTX, in order.

They cannot run in the interpreter; compilers are known to move or drop such instructions, so the PTX itself is checked.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import pytest

from overlap_train.gpu.ptx_check import missing
from overlap_train.kernels.hopper_scaled import BLOCKS, PRECISE, TENSORS
from tests.unit import hopper_ptx
from tests.unit.ptx_flow import reachable_without

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton's compiler")

ACQUIRE, RELEASE_ADD = r"ld\.global\.sys\.acquire", r"(?:atom|red)\S*\.release\S*\.add"
COUNT, SIGNAL = r"atom\S*\.sys\.acq_rel\S*\.add", r"atom\S*\.release\S*\.exch"
TMA_LOAD, TMA_STORE = r"cp\.async\.bulk\.tensor\.2d\.shared", r"cp\.async\.bulk\.tensor\.3d\.global\.shared"
LEAVE = r"atom\S*\.gpu\.acq_rel\S*\.add"
WIDE_LOAD, WIDE_STORE = r"ld\.global\.v4\.b32", r"st\.global\.v4\.b32"
FENCE, WRITTEN = r"fence\.proxy\.async\.global", r"cp\.async\.bulk\.wait_group 0;"
SHARED_FENCE, READ = r"fence\.proxy\.async\.shared", r"cp\.async\.bulk\.wait_group\.read\s+0;"

Compile = Callable[..., tuple[str, int]]


@pytest.fixture(scope="module")
def compiled(compiling: ProcessPoolExecutor) -> Compile:
    """hopper_ptx.compiled."""
    return functools.cache(lambda *args, **kwargs: compiling.submit(hopper_ptx.compiled, *args, **kwargs).result(120))


def in_order(ptx: str, *patterns: str) -> bool:
    """Whether matches of the patterns can be found one behind the other."""
    return re.search(".*?".join(patterns), ptx, flags=re.DOTALL) is not None


@pytest.mark.parametrize(("kernel", "loads"), [("hopper_all_gather_gemm", 18), ("hopper_all_to_all_gemm", 12)])
def test_a_kernel_waits_and_fences_before_it_loads_what_is_a_peers(compiled: Compile, kernel: str, loads: int) -> None:
    """Two strips of A, and B, for whole and for half tiles: of the own shard or block by loads that no wait guards; of the peers'
    only behind the fence, as tiles with a strip of each, which a gather has."""
    ptx, _ = compiled(kernel, True)
    assert in_order(ptx, r"globaltimer", ACQUIRE, FENCE, TMA_LOAD)
    assert len(re.findall(ACQUIRE, ptx)) == 2, "one poll before the loop, one inside"
    assert len(re.findall(TMA_LOAD, ptx)) == loads
    for needed in (ACQUIRE, FENCE):
        assert len(re.findall(TMA_LOAD, reachable_without(ptx, needed))) == 6


@pytest.mark.parametrize("direct", [True, False])
def test_the_kernel_before_an_all_to_all_polls_nothing_and_loads_a_and_b_only(compiled: Compile, direct: bool) -> None:
    """Who takes the blocks waits; what is received is no operand."""
    ptx, _ = compiled("hopper_gemm_reduce_scatter", True, DIRECT=direct, REDUCE=False, EXCHANGE=True)
    assert not re.search(ACQUIRE, ptx) and not re.search("globaltimer", ptx)
    assert len(re.findall(TMA_LOAD, ptx)) == 2 * 3, "two strips of A, and B, for whole and for half tiles"


@pytest.mark.parametrize("direct", [True, False])
def test_the_scattering_kernel_waits_before_it_adds_each_peers_partial(compiled: Compile, direct: bool) -> None:
    ptx, _ = compiled("hopper_gemm_reduce_scatter", True, DIRECT=direct)
    assert len(re.findall(ACQUIRE, ptx)) == 2 * 4, "a wait for each source rank, the own one skipped at run time"
    behind_fences = re.split(FENCE, ptx)[1:]
    assert len(behind_fences) == 4
    for part in behind_fences:  # for each half two strips of two messages each; waiting itself lies out of line
        assert len(re.findall(TMA_LOAD, part.split("globaltimer")[0])) >= 4
    for needed in (ACQUIRE, FENCE):
        assert len(re.findall(TMA_LOAD, reachable_without(ptx, needed))) == 2 * 3, (
            "A and B only, of whole and half tiles"
        )


KERNELS = [
    ("hopper_all_gather_gemm", {}),
    ("hopper_all_gather_gemm", {"DIRECT": True}),
    ("hopper_gemm_reduce_scatter", {"DIRECT": False}),
    ("hopper_gemm_reduce_scatter", {"DIRECT": False, "REDUCE": False}),
    ("hopper_gemm_reduce_scatter", {"DIRECT": True}),
    ("hopper_all_to_all_gemm", {}),
    ("hopper_all_to_all_gemm", {"DIRECT": True}),
    ("hopper_gemm_reduce_scatter", {"DIRECT": False, "REDUCE": False, "EXCHANGE": True}),
    ("hopper_gemm_reduce_scatter", {"DIRECT": True, "REDUCE": False, "EXCHANGE": True}),
]


@pytest.mark.parametrize(("kernel", "switches"), [case for case in KERNELS if case[1].get("DIRECT")])
def test_a_kernel_that_sends_itself_counts_the_epoch_when_its_last_cta_leaves(
    compiled: Compile, kernel: str, switches: dict[str, bool]
) -> None:
    """The others must not: copies that are still under way send the word."""
    (count,) = re.finditer(LEAVE, compiled(kernel, True, **switches)[0])
    assert in_order(count.string[: count.start()][-2000:], r"bar\.sync")
    assert len(re.findall(r"st\.global", count.string[count.end() :])) == 4 + 4 * 8 + 1, "each counter, and the epoch"
    assert not re.search(LEAVE, compiled(kernel, True, **switches | {"DIRECT": False})[0])


STAGES = [  # panels of the ring
    ("hopper_all_gather_gemm", {}, 4),
    ("hopper_all_to_all_gemm", {}, 4),
    ("hopper_gemm_reduce_scatter", {"DIRECT": False}, 4),
    ("hopper_gemm_reduce_scatter", {"DIRECT": True, "REDUCE": False, "EXCHANGE": True}, 3),
    ("hopper_gemm_reduce_scatter", {"DIRECT": True}, 3),
    ("hopper_dispatch_gemm", {}, 4),
    ("hopper_gemm_combine", {}, 4),
]


@pytest.mark.parametrize(("kernel", "switches", "stages"), STAGES)
def test_barriers_wait_for_all_who_read(compiled: Compile, kernel: str, switches: dict[str, bool], stages: int) -> None:
    """What is full comes from one; a panel is free when both multiplying groups have read it, an index when all have."""
    ptx, _ = compiled(kernel, True, **switches)
    counts = [int(count) for count in re.findall(r"mbarrier\.init\.\S+ \[\S+\], (\d+);", ptx)]
    # by how many groups of warps arrive at them: of the panels, of two tile indices, of the outbox
    assert Counter(counts) == {1: stages + 2 + 8, 2: stages, 3: 2}


# Of each of two multiplying groups: fences for what it writes into shared memory (left, right and a half tile), and the storing
# warp's waits until TMA has read it, at each of the places where a strip may belong.
HANDED_TO_TMA = [
    ("hopper_all_gather_gemm", {}, 3, 1),
    ("hopper_all_to_all_gemm", {}, 3, 1),
    ("hopper_gemm_reduce_scatter", {"DIRECT": False}, 3, 2),
    ("hopper_gemm_reduce_scatter", {"DIRECT": True}, 3, 4),
]


@pytest.mark.parametrize(("kernel", "switches", "fences", "reads"), HANDED_TO_TMA)
def test_a_buffer_is_fenced_before_tma_reads_it_and_read_before_it_is_written_again(
    compiled: Compile, kernel: str, switches: dict[str, bool], fences: int, reads: int
) -> None:
    """Without either, a store races with TMA, which no test of values can be trusted to see."""
    ptx, _ = compiled(kernel, True, **switches)
    of_barriers = 2  # after those of the rings, and of the outbox, are made
    assert len(re.findall(SHARED_FENCE, ptx)) == of_barriers + 2 * fences
    assert len(re.findall(READ, ptx)) == 2 * reads


def test_a_deferred_reduction_leaves_no_wait_in_the_scattering_kernel(compiled: Compile) -> None:
    """Else the weight gradient behind it would wait, too; it counts and stores like the others."""
    ptx, _ = compiled("hopper_gemm_reduce_scatter", True, DIRECT=False, REDUCE=False)
    assert not re.search(ACQUIRE, ptx)
    assert len(re.findall(RELEASE_ADD, ptx)) == 2, "of an upper strip alone, and of a lower one or both of a tile"
    assert len(re.findall(TMA_STORE, ptx)) == 2 * 2 * 2, "two strips of the own rows, or into staging"


ACROSS_NODES = [  # where other blocks come next; nothing is sent or added by the kernel
    ("hopper_all_gather_gemm", {"LOCAL": 2}),
    ("hopper_all_to_all_gemm", {"LOCAL": 2}),
    ("hopper_gemm_reduce_scatter", {"LOCAL": 2, "DIRECT": False, "REDUCE": False}),
    ("hopper_gemm_reduce_scatter", {"LOCAL": 2, "DIRECT": False, "REDUCE": False, "EXCHANGE": True}),
]
WITH_BIAS = [
    ("hopper_all_gather_gemm", {"bias": True}),
    ("hopper_gemm_reduce_scatter", {"bias": True, "DIRECT": False}),
    ("hopper_gemm_reduce_scatter", {"bias": True, "DIRECT": True}),
]


def _keeps_its_registers_and_fits(ptx: str, shared: int) -> None:
    assert shared <= 232_448, "what one CTA may take on Hopper"
    assert ".local" not in ptx
    assert len(re.findall(r"wgmma\.mma_async", ptx)) >= 4
    assert "setmaxnreg.inc" in ptx


def _spills_no_more_than_it_may(compiling: ProcessPoolExecutor, ptx: str, shared: int) -> hopper_ptx.Resources:
    _keeps_its_registers_and_fits(ptx, shared)
    said = compiling.submit(hopper_ptx.resources, ptx).result(120)
    assert said.spilled <= hopper_ptx.may_spill()
    return said


@pytest.mark.parametrize(("kernel", "switches"), KERNELS + ACROSS_NODES + WITH_BIAS)
def test_registers_are_enough_and_the_stages_fit(
    compiled: Compile, compiling: ProcessPoolExecutor, kernel: str, switches: dict[str, bool]
) -> None:
    _spills_no_more_than_it_may(compiling, *compiled(kernel, True, **switches))


WIDE = {"BLOCK_K": 128}  # panels of one-byte operands
E4M3, GRADIENTS = ("fp8e4nv", "fp8e4nv"), ("fp8e5", "fp8e4nv")
ONE_BYTE = [
    ("hopper_all_gather_gemm", E4M3, WIDE | {"SCALING": TENSORS}),
    ("hopper_all_gather_gemm", E4M3, WIDE | {"SCALING": TENSORS, "bias": True}),
    ("hopper_all_gather_gemm", GRADIENTS, WIDE | {"SCALING": PRECISE, "DIRECT": True}),
    ("hopper_gemm_reduce_scatter", E4M3, WIDE | {"SCALING": TENSORS, "DIRECT": True}),
    ("hopper_gemm_reduce_scatter", E4M3, WIDE | {"SCALING": TENSORS, "DIRECT": False, "bias": True}),
    ("hopper_gemm_reduce_scatter", GRADIENTS, WIDE | {"SCALING": PRECISE, "DIRECT": False}),
    ("hopper_gemm_reduce_scatter", GRADIENTS, WIDE | {"SCALING": PRECISE, "DIRECT": False, "REDUCE": False}),
    ("hopper_gemm_reduce_scatter", GRADIENTS, WIDE | {"SCALING": PRECISE, "DIRECT": True, "WORLD": 2}),
    ("hopper_all_gather_gemm", E4M3, WIDE | {"SCALING": BLOCKS, "bias": True}),
    ("hopper_all_gather_gemm", E4M3, WIDE | {"SCALING": BLOCKS, "DIRECT": True}),
    ("hopper_gemm_reduce_scatter", E4M3, WIDE | {"SCALING": BLOCKS, "DIRECT": False, "bias": True}),
    ("hopper_gemm_reduce_scatter", E4M3, WIDE | {"SCALING": BLOCKS, "DIRECT": False, "REDUCE": False}),
    ("hopper_gemm_reduce_scatter", E4M3, WIDE | {"SCALING": BLOCKS, "DIRECT": True}),
]


@pytest.mark.parametrize(("kernel", "formats", "switches"), ONE_BYTE)
def test_products_of_one_byte_operands_keep_their_registers_and_run_on_the_tensor_cores(
    compiled: Compile, compiling: ProcessPoolExecutor, kernel: str, formats: tuple[str, str], switches: dict[str, int]
) -> None:
    """They wait and signal as the others do. Two products of one group in flight at once would be serialized."""
    ptx, shared = compiled(kernel, True, formats, **switches)
    assert not _spills_no_more_than_it_may(compiling, ptx, shared).serialized
    a, b = ({"fp8e4nv": "e4m3", "fp8e5": "e5m2"}[format] for format in formats)
    assert re.search(rf"wgmma\.mma_async\S+k32\.f32\.{a}\.{b}", ptx)
    assert missing(ptx, f"{kernel}_kernel", {"REDUCE": True, "DIRECT": False, "WORLD": 4} | switches) is None


# How B lies concerns the warps that load and multiply. Those of a scatter are the same with and without a reduction, so only the
# one with it, which has more code and registers, is compiled once more.
@pytest.mark.parametrize(("kernel", "switches"), [case for case in KERNELS if case[1].get("REDUCE", True)] + WITH_BIAS)
def test_registers_are_enough_and_the_stages_fit_where_b_is_transposed(
    compiled: Compile, kernel: str, switches: dict[str, bool]
) -> None:
    _keeps_its_registers_and_fits(*compiled(kernel, False, **switches))


@pytest.mark.parametrize(("kernel", "switches"), WITH_BIAS)
def test_a_bias_is_loaded_two_columns_at_a_time_and_once_for_all_rows(
    compiled: Compile, kernel: str, switches: dict[str, bool]
) -> None:
    """Of both groups for the left, the right and a half tile: 128 columns, of which each of four threads of a row has 32."""
    with_and_without = (compiled(kernel, True, **switches | {"bias": bias})[0] for bias in (True, False))
    loads = [len(re.findall(r"ld\.global\.b32", ptx)) for ptx in with_and_without]
    assert loads[0] - loads[1] == 2 * 3 * 16


# A kernel that sends to peers itself, or adds their partial sums, has a piece of code for each. The others walk their peers in a
# loop: for 8 ranks their PTX has the same instructions as for 4, one by one, which the tests above have read.
CODE_FOR_EACH_PEER = [
    (kernel, switches)
    for kernel, switches in KERNELS
    if switches.get("DIRECT") or ("scatter" in kernel and switches.get("REDUCE", True))
]


@pytest.mark.parametrize(
    ("kernel", "switches", "world"),
    [(*case, world) for case in KERNELS for world in (1, 2)] + [(*case, 8) for case in CODE_FOR_EACH_PEER],
)
def test_what_is_demanded_of_the_ptx_is_there_for_every_number_of_ranks(
    compiled: Compile, kernel: str, switches: dict[str, bool], world: int
) -> None:
    """The compiler lays loops out otherwise where there is one peer, and leaves them out where there is none; a kernel that is
    found wanting would not be launched."""
    constants = {"REDUCE": True, "DIRECT": False, "WORLD": world} | switches
    ptx, _ = compiled(kernel, True, **switches, WORLD=world)
    assert missing(ptx, f"{kernel}_kernel", constants) is None


EXPERTS = [(kernel, numbers) for kernel in ("hopper_dispatch_gemm", "hopper_gemm_combine") for numbers in (False, True)]
BLOCKS = dict(SCALING=3, BLOCK_K=128, STEP=2048, formats=("fp8e4nv", "fp8e4nv"))


@pytest.mark.parametrize(("kernel", "numbers"), EXPERTS)
def test_kernels_of_experts_send_16_bytes_a_thread_and_their_registers_are_enough(
    compiled: Compile, compiling: ProcessPoolExecutor, kernel: str, numbers: bool
) -> None:
    """Rows that are sent are stored before they are counted, and all of them before the signal."""
    for b_is_nk, world, how in ((True, 4, {}), (False, 8, {}), (True, 4, {"divisible": False}), (True, 4, BLOCKS)):
        ptx, shared = compiled(kernel, b_is_nk, numbers=numbers, WORLD=world, **how)
        _spills_no_more_than_it_may(compiling, ptx, shared)
        assert in_order(ptx, WIDE_STORE, COUNT, SIGNAL) and len(re.findall(WIDE_STORE, ptx)) >= 16
        assert len(re.findall(LEAVE, ptx)) == 1
    for world in (1, 2, 4, 8):
        for how in ({}, BLOCKS):
            assert missing(compiled(kernel, True, WORLD=world, **how)[0], f"{kernel}_kernel", {"WORLD": world}) is None


def test_dispatch_waits_and_combine_does_not(compiled: Compile) -> None:
    ptx, _ = compiled("hopper_dispatch_gemm", True)
    assert in_order(ptx, FENCE, TMA_LOAD) and re.search("globaltimer", ptx)
    assert len(re.findall(ACQUIRE, ptx)) == 2, "one poll before the loop, one inside"
    ptx, _ = compiled("hopper_gemm_combine", True)
    assert not re.search(ACQUIRE, ptx) and not re.search("globaltimer", ptx)
