"""The low-latency protocol: what planning says of it, and that its kernels compile for Hopper to whole, adjacent words."""

from __future__ import annotations

import importlib.util
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from overlap_train import OverlapConfig
from overlap_train.gpu.ptx_check import WORD_STORED, missing
from overlap_train.group.slots import SLOTS, Layout
from overlap_train.ops.plan import Plan, error_on_device, make_plan
from overlap_train.ops.spec import ALL_GATHER_LINEAR, ALL_TO_ALL_LINEAR, LINEAR_ALL_REDUCE, LINEAR_REDUCE_SCATTER
from overlap_train.schedule.kinds import Kind
from overlap_train.schedule.order import Topology
from overlap_train.select.method import (
    LOW_LATENCY,
    MOST_BYTES,
    ONE_SHOT,
    TWO_SHOTS,
    WORDS,
    Pass,
    flagged_bytes,
    serving,
)
from overlap_train.select.system import H200, System
from overlap_train.select.table import UNTUNED
from tests.unit import hopper_ptx

GPU, BF16 = torch.device("cuda", 0), torch.bfloat16
FEW = Pass(Kind.AG_GEMM, 256, 7168, 4096, BF16, 4)


def plan(
    rows: int, k: int, method: str = LOW_LATENCY, spec: Any = ALL_GATHER_LINEAR, n: int = 24, world: int = 2, **settings: Any
) -> Plan:  # fmt: skip
    x, w = torch.empty(rows, k, dtype=BF16, device="meta"), torch.empty(n, k, dtype=BF16, device="meta")
    return make_plan(spec, OverlapConfig(method=method, **settings), UNTUNED, Topology(1, world, 0), x, w)


def refusal(plan: Plan, device: torch.device = GPU, is_interpreted: bool = False) -> str | None:
    return error_on_device(plan, device, lambda: is_interpreted)


def test_words_take_twice_the_bytes_of_whole_blocks() -> None:
    assert flagged_bytes(1024, 2) == 2048
    assert flagged_bytes(2 * 2 * 21, 2) == 2 * 11 * 8, "21 numbers of 16 bits: the last word is half full"


def test_a_plan_asks_for_words_only() -> None:
    made = plan(8, 32)
    assert (made.request.slot_bytes, made.request.flagged_bytes) == (0, 2 * 16 * 32 * 2)
    assert {engine.method for engine in (made.fprop, made.dgrad, made.wgrad) if engine} == {LOW_LATENCY}
    assert made.fprop.slots == 1 and made.fprop.chunks == 1 and made.fprop.kernels == "library"
    assert plan(8, 32, "chunked").request.flagged_bytes == 0


def all_reducing(rows: int, world: int, n: int = 4096, method: str = LOW_LATENCY, **settings: Any) -> Plan:
    return plan(rows, 64, method, LINEAR_ALL_REDUCE, n, world, **settings)


@pytest.mark.parametrize(
    ("rows", "world", "settings", "shots"),
    [
        (8, 8, {}, WORDS), (16, 8, {}, ONE_SHOT), (256, 8, {}, TWO_SHOTS), (16, 4, {}, WORDS), (48, 4, {}, ONE_SHOT),
        (1024, 4, {}, TWO_SHOTS), (64, 2, {}, WORDS), (1024, 2, {}, ONE_SHOT), (2048, 2, {}, TWO_SHOTS),
        (64, 4, {"symmetric_mib": 5}, TWO_SHOTS), (64, 2, {"symmetric_mib": 6}, ONE_SHOT), (8192, 1, {}, ONE_SHOT),
    ],
)  # fmt: skip
def test_how_all_reduces_of_few_rows_go(rows: int, world: int, settings: dict[str, int], shots: str) -> None:
    """Of 8 KiB a row: as is estimated to be fastest, in the memory that there is, signals included."""
    made, received = all_reducing(rows, world, **settings), rows * 8192
    memory = {WORDS: (0, 2 * world * received), ONE_SHOT: (world * received, 0), TWO_SHOTS: (2 * received, 0)}
    assert (made.shots, (made.request.slot_bytes, made.request.flagged_bytes)) == (shots, memory[shots])


def test_auto_takes_another_method_where_no_way_of_few_rows_has_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each needs twice the memory of a scatter here."""
    monkeypatch.setattr(System, "of", classmethod(lambda cls, device: H200))
    monkeypatch.setattr("overlap_train.select.choose.on_hopper", lambda *_: True)
    roomy, tight = (all_reducing(1024, 2, 16384, "auto", symmetric_mib=mib) for mib in (256, 128))
    assert (roomy.fprop.method, roomy.shots) == (LOW_LATENCY, TWO_SHOTS)
    assert tight.fprop.method != LOW_LATENCY and tight.request.slot_bytes == 1024 * 16384 * 2
    asked = all_reducing(1024, 2, 16384, symmetric_mib=128)
    assert asked.shots == TWO_SHOTS, "is refused for its memory, by name"


@pytest.mark.parametrize("variable", ["CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING"])
def test_kernels_that_wait_are_refused_where_each_launch_waits(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs all ranks would stand still until timeout_s."""
    monkeypatch.setenv(variable, "1")
    for method in ("fused", "direct", LOW_LATENCY):
        told = refusal(plan(8, 32, method)) or ""
        assert f"method={method!r} with {variable} set" in told and "or use 'chunked'" in told
    by_auto = refusal(replace(plan(8, 32, "direct"), config=OverlapConfig())) or ""
    assert by_auto.startswith(f"method='auto', which takes 'direct' here, with {variable} set")
    for method in ("chunked", "collective"):
        assert refusal(plan(8, 32, method)) is None
    monkeypatch.setenv(variable, "0")
    assert refusal(plan(8, 32)) is None


def test_it_is_refused_by_name_where_it_cannot_serve() -> None:
    features = MOST_BYTES // 1024 // 2
    assert refusal(plan(512, features)) is None
    told = refusal(plan(512, features + 1)) or ""
    assert "takes 64.0 MiB as words with flags, at most 64 are served" in told and "--overlap-train-method" in told
    exchange = plan(8, 32, spec=ALL_TO_ALL_LINEAR)
    assert "it serves gathers and scatters, no all-to-alls" in (refusal(exchange) or "")
    assert "interpreter only" in (refusal(plan(8, 32, spec=LINEAR_REDUCE_SCATTER), torch.device("cpu")) or "")
    in_bf16 = plan(8, 32)  # which the library multiplies
    assert refusal(in_bf16, torch.device("cpu"), is_interpreted=True) is None


def test_it_serves_gathers_and_scatters_of_few_bytes() -> None:
    assert all(serving([LOW_LATENCY], pass_) for pass_ in (FEW, FEW.dgrad, FEW.dgrad.dgrad))
    assert not any(
        serving([LOW_LATENCY], pass_) for pass_ in (replace(FEW, m=1 << 16), replace(FEW, kind=Kind.A2A_GEMM))
    )


def test_flagged_words_lie_behind_the_blocks() -> None:
    """Blocks are any bytes, which could look like a flag."""
    layout = Layout(3, 5000, 7000)
    starts = [layout.offset(slot) for slot in range(SLOTS)] + [layout.flagged_offset(slot) for slot in range(SLOTS)]
    ends = [
        *(start + layout.slot_bytes for start in starts[:SLOTS]),
        *(start + layout.flagged_bytes for start in starts[SLOTS:]),
    ]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False)) and ends[-1] <= layout.nbytes
    assert all(start % 512 == 0 for start in starts)
    assert layout.covering(100) == layout and layout.covering(0, 8000) == Layout(3, 5000, 8000)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton's compiler")
@pytest.mark.parametrize("per_word", [1, 2])
@pytest.mark.parametrize("world", [2, 8])
@pytest.mark.parametrize(
    ("kernel", "bias"),
    [
        ("low_latency_gather_kernel", False),
        *[(f"low_latency_{what}_kernel", bias) for what in ("scatter", "all_reduce") for bias in (False, True)],
    ],
)
def test_each_word_is_one_access_beside_that_of_the_next_thread(
    compiling: ProcessPoolExecutor, kernel: str, bias: bool, world: int, per_word: int
) -> None:
    """8 words a thread. Adjacent threads have adjacent words: what a warp stores leaves as one packet of 256 bytes."""
    constants = dict(WORLD=world, PER_WORD=per_word, BLOCK=1024, TIMED=True)
    constants |= {} if "gather" in kernel else {"DTYPE": "bfloat16"}  # type: ignore[dict-item]
    ptx = compiling.submit(hopper_ptx.compiled_portable, "low_latency", kernel, bias=bias, **constants).result(120)
    assert missing(ptx, kernel, constants) is None
    assert len(re.findall(WORD_STORED, ptx)) == 8 * (1 if "scatter" in kernel else world - 1)
    assert len(re.findall(r"@%p\d+ ld\.volatile\.global\.b64", ptx)) == 8 and "ld.volatile.global.v" not in ptx
    used = compiling.submit(hopper_ptx.resources, ptx).result(120)
    assert used.spilled <= hopper_ptx.may_spill() and used.registers <= 128


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton's compiler")
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kernel", ["all_reduce_kernel", "two_shot_all_reduce_kernel"])
def test_longer_all_reduces_take_16_bytes_at_once(compiling: ProcessPoolExecutor, kernel: str, world: int) -> None:
    constants = dict(WORLD=world, BLOCK=8192, TIMED=True)
    on_16 = ["partial_ptr", "y_ptr", "blocks_ptr", "size", "n", *["share"] * kernel.startswith("two")]
    told = constants | dict(num_warps=8, divisible=tuple(on_16))
    ptx = compiling.submit(hopper_ptx.compiled_portable, "all_reduce", kernel, **told).result(120)
    assert missing(ptx, kernel, constants) is None
    assert not re.findall(r"\b(?:ld|st)\.global\.b(?:16|32)\b.*%rs", ptx) and "st.global.v4" in ptx
    assert compiling.submit(hopper_ptx.resources, ptx).result(120).spilled == 0
