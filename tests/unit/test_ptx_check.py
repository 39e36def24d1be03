"""What is demanded of compiled kernels: each has it as Triton compiles it here, and misses it when a line of its PTX is gone."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import pytest

from overlap_train.gpu.launch import Launch, LaunchCache
from overlap_train.gpu.ptx_check import (
    ACQUIRE,
    BARRIER,
    COUNT,
    FENCE,
    PROOFS,
    SIGNAL,
    STORE,
    TMA_LOAD,
    TMA_STORED,
    WORD_POLLED,
    WORD_STORED,
    Verifier,
    missing,
)
from tests.unit import hopper_ptx

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton's compiler")

TILES = dict(BLOCK_M=32, BLOCK_N=32, BLOCK_K=32, GROUP_M=8, PRECISION="ieee", TIMED=True, WORLD=2, LOCAL=2, CHUNKS=2)
FEW_ROWS = dict(WORLD=2, PER_WORD=1, BLOCK=1024, TIMED=True)
SHOTS = dict(WORLD=4, BLOCK=8192, TIMED=True, num_warps=8)
PORTABLE = {
    "wait_kernel": ("signal", dict(CHUNKS=1, TIMED=True, BLOCK=1024)),
    "wait_and_keep_kernel": ("signal", dict(CHUNKS=1, TIMED=True, BLOCK=2048)),
    "take_blocks_kernel": ("signal", dict(WORLD=2, CHUNKS=2, TIMED=True, BLOCK=16384, num_warps=16)),
    "barrier_kernel": ("signal", dict(WORLD=2, TIMED=True)),
    "all_gather_gemm_kernel": ("all_gather_gemm", TILES | {"DIRECT": False, "PIECE": 4096}),
    "all_to_all_gemm_kernel": ("all_to_all_gemm", TILES | {"DIRECT": False, "PIECE": 4096}),
    "gemm_reduce_scatter_kernel": ("gemm_reduce_scatter", TILES | {"EXCHANGE": False}),
    "low_latency_gather_kernel": ("low_latency", FEW_ROWS),
    "low_latency_scatter_kernel": ("low_latency", FEW_ROWS | {"DTYPE": "bfloat16"}),
    "low_latency_all_reduce_kernel": ("low_latency", FEW_ROWS | {"DTYPE": "bfloat16"}),
    "all_reduce_kernel": ("all_reduce", SHOTS),
    "two_shot_all_reduce_kernel": ("all_reduce", SHOTS),
}
PLAIN: dict[str, bool] = {}
DEFERRED = {"DIRECT": False, "REDUCE": False}
FUSED = {"DIRECT": False, "REDUCE": True}
DIRECT = {"DIRECT": True, "REDUCE": True}
SENDING = {"DIRECT": True}
EXCHANGE, EXCHANGE_DIRECT = (fused | {"EXCHANGE": True} for fused in (DEFERRED, DIRECT | {"REDUCE": False}))
CASES = [
    ("wait_kernel", PLAIN, (ACQUIRE,)),
    ("wait_and_keep_kernel", PLAIN, (ACQUIRE,)),
    ("take_blocks_kernel", PLAIN, (ACQUIRE,)),
    ("barrier_kernel", PLAIN, (SIGNAL, ACQUIRE)),
    ("low_latency_gather_kernel", PLAIN, (SIGNAL, WORD_STORED, WORD_POLLED)),
    ("low_latency_scatter_kernel", PLAIN, (SIGNAL, WORD_STORED, WORD_POLLED)),
    ("low_latency_all_reduce_kernel", PLAIN, (SIGNAL, WORD_STORED, WORD_POLLED)),
    ("all_reduce_kernel", PLAIN, (ACQUIRE, STORE, BARRIER, COUNT, SIGNAL)),
    ("two_shot_all_reduce_kernel", PLAIN, (ACQUIRE, STORE, BARRIER, COUNT, SIGNAL)),
    ("all_gather_gemm_kernel", PLAIN, (ACQUIRE,)),
    ("gemm_reduce_scatter_kernel", FUSED, (ACQUIRE, COUNT, STORE)),
    ("gemm_reduce_scatter_kernel", DEFERRED, (COUNT, STORE)),
    ("gemm_reduce_scatter_kernel", DIRECT, (ACQUIRE, COUNT, SIGNAL)),
    ("all_gather_gemm_kernel", SENDING, (ACQUIRE, STORE, BARRIER, COUNT, SIGNAL)),
    ("all_to_all_gemm_kernel", PLAIN, (ACQUIRE,)),
    ("all_to_all_gemm_kernel", SENDING, (ACQUIRE, STORE, BARRIER, COUNT, SIGNAL)),
    ("gemm_reduce_scatter_kernel", EXCHANGE, (COUNT, STORE)),
    ("gemm_reduce_scatter_kernel", EXCHANGE_DIRECT, (STORE, COUNT, SIGNAL)),
    ("hopper_all_to_all_gemm_kernel", PLAIN, (ACQUIRE, FENCE, TMA_LOAD)),
    ("hopper_all_to_all_gemm_kernel", SENDING, (ACQUIRE, FENCE, TMA_LOAD, STORE, BARRIER, COUNT, SIGNAL)),
    ("hopper_gemm_reduce_scatter_kernel", EXCHANGE, (COUNT, TMA_STORED, BARRIER)),
    ("hopper_gemm_reduce_scatter_kernel", EXCHANGE_DIRECT, (COUNT, SIGNAL, TMA_STORED)),
    ("hopper_all_gather_gemm_kernel", PLAIN, (ACQUIRE, FENCE, TMA_LOAD)),
    ("hopper_all_gather_gemm_kernel", SENDING, (ACQUIRE, FENCE, TMA_LOAD, STORE, BARRIER, COUNT, SIGNAL)),
    ("hopper_gemm_reduce_scatter_kernel", FUSED, (ACQUIRE, FENCE, COUNT, TMA_STORED, BARRIER)),
    ("hopper_gemm_reduce_scatter_kernel", DEFERRED, (COUNT, TMA_STORED, BARRIER)),
    ("hopper_gemm_reduce_scatter_kernel", DIRECT, (ACQUIRE, FENCE, COUNT, SIGNAL)),
]

Ptx = Callable[[str, dict[str, bool]], str]


@pytest.fixture(scope="module")
def ptx_of(compiling: ProcessPoolExecutor) -> Ptx:
    """PTX of a kernel by its name."""

    @functools.cache
    def compiled(name: str, *on: tuple[str, bool]) -> str:
        switches = dict(on)
        if name in PORTABLE:
            module, constants = PORTABLE[name]
            return compiling.submit(hopper_ptx.compiled_portable, module, name, **(constants | switches)).result(120)
        return compiling.submit(hopper_ptx.compiled, name.removesuffix("_kernel"), True, **switches).result(120)[0]

    return lambda name, switches: compiled(name, *switches.items())


@pytest.mark.parametrize(("name", "switches", "needed"), CASES)
def test_what_is_demanded_is_there_and_is_missed_when_it_is_gone(
    ptx_of: Ptx, name: str, switches: dict[str, bool], needed: tuple[str, ...]
) -> None:
    ptx = ptx_of(name, switches)
    assert missing(ptx, name, switches) is None
    for instruction in needed:
        assert missing(re.sub(instruction, "nop", ptx), name, switches), instruction


@pytest.mark.parametrize("capability", [80, 100])
@pytest.mark.parametrize(
    ("name", "switches"),
    [
        ("barrier_kernel", PLAIN), ("all_gather_gemm_kernel", SENDING), ("all_to_all_gemm_kernel", PLAIN),
        ("gemm_reduce_scatter_kernel", FUSED),
    ],
)  # fmt: skip
def test_plain_kernels_compile_for_an_a100_and_for_blackwell(
    compiling: ProcessPoolExecutor, name: str, switches: dict[str, bool], capability: int
) -> None:
    module, constants = PORTABLE[name]
    compiled = compiling.submit(hopper_ptx.compiled_portable, module, name, capability, **(constants | switches))
    assert missing(compiled.result(120), name, switches) is None


@pytest.mark.parametrize(("name", "shots"), [("all_reduce_kernel", 1), ("two_shot_all_reduce_kernel", 2)])
def test_each_signal_and_each_wait_of_an_all_reduce_is_missed(ptx_of: Ptx, name: str, shots: int) -> None:
    """One alone. A wait that fails exchanges a word, too: that is no signal."""
    ptx = ptx_of(name, PLAIN)
    counts, polls = ([found.start() for found in re.finditer(what, ptx)] for what in (COUNT, ACQUIRE))
    assert (len(counts), len(polls)) == (shots, 2 * shots)
    signals = [(first, next(poll for poll in polls if poll > first), SIGNAL) for first in counts]
    waits = [(first, second + 100, ACQUIRE) for first, second in zip(polls[::2], polls[1::2], strict=True)]
    for first, end, instruction in signals + waits:
        assert missing(ptx[:first] + re.sub(instruction, "nop", ptx[first:end]) + ptx[end:], name, PLAIN)


SENDERS = ("hopper_all_gather_gemm_kernel", "hopper_all_to_all_gemm_kernel")


@pytest.mark.parametrize("name", SENDERS)
def test_rows_that_are_not_sent_are_noticed_beside_stores_of_the_result(ptx_of: Ptx, name: str) -> None:
    ptx = ptx_of(name, SENDING)
    assert missing(ptx.replace("st.global.v4", "nop"), name, SENDING)


SCATTERING = (DEFERRED, FUSED, DIRECT, EXCHANGE, EXCHANGE_DIRECT)
COUNTING = [("hopper_gemm_reduce_scatter_kernel", switches) for switches in SCATTERING]
COUNTING += [(name, SENDING) for name in SENDERS]


@pytest.mark.parametrize(("name", "switches"), COUNTING)
def test_a_count_before_its_store_is_noticed(ptx_of: Ptx, name: str, switches: dict[str, bool]) -> None:
    ptx = ptx_of(name, switches)
    counts = re.findall(rf"^.*{COUNT}.*$", ptx, flags=re.MULTILINE)
    assert len(counts) == (2 if "scatter" in name else 1), "of each strip of a tile, or of pieces"
    for count in counts:
        assert missing(count + "\n" + ptx.replace(count, ""), name, switches)


def test_one_rank_has_nobody_to_wait_for() -> None:
    """Compilers know that, and leave out what would be proof of more."""
    assert missing("", "gemm_reduce_scatter_kernel", {"REDUCE": True, "DIRECT": True, "WORLD": 2})
    stores = "st.global bar.sync atom.global.sys.release.add"
    assert missing(stores, "gemm_reduce_scatter_kernel", {"REDUCE": True, "DIRECT": True, "WORLD": 1}) is None


def test_a_poll_that_was_moved_out_of_its_loop_is_noticed(ptx_of: Ptx) -> None:
    ptx = re.sub(ACQUIRE, "nop", ptx_of("wait_kernel", PLAIN), count=1)
    assert missing(ptx, "wait_kernel", PLAIN)


def test_every_kernel_has_an_entry() -> None:
    """One without is an error at its first launch, not silence."""
    files = (
        "add_blocks", "all_gather_gemm", "all_reduce", "all_to_all_gemm", "arrivals", "expert_tables", "gemm_reduce_scatter",
        "low_latency", "quantize", "sum_of_tokens", "signal",
    )  # fmt: skip
    modules = [importlib.import_module(f"overlap_train.kernels.{file}") for file in files]
    names = {name for module in modules for name in vars(module) if name.endswith("_kernel")}
    products = (
        "all_gather_gemm", "all_to_all_gemm", "gemm_reduce_scatter", "grouped_wgrad", "dispatch_gemm", "gemm_combine",
    )  # fmt: skip
    hopper = {f"hopper_{name}_kernel" for name in products}
    assert names | hopper == set(PROOFS)


def test_a_kernel_that_lacks_its_wait_is_not_launched() -> None:
    launches: list[str] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., object]:
            return lambda **arguments: launches.append("launched")

        def warmup(self, grid: tuple[int]) -> SimpleNamespace:
            return SimpleNamespace(
                metadata=SimpleNamespace(name="wait_kernel"), asm={"ptx": ".entry wait_kernel()"}, hash=""
            )

    cache = LaunchCache(SimpleNamespace(driver=object(), verifier=Verifier(), entries={}), 1)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"wait_kernel: as Triton .* its PTX lacks, in this order"):
        cache.run("kernel", (), lambda: Launch(Kernel(), (1,), {}, {}))
    assert not launches
