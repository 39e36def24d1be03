"""Whose turn it is, what counts, when an autotune run ends, and who has won: what two methods on CPU processes do not show
(tests/protocol/test_tune_steps.py)."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch

from overlap_train import choose
from overlap_train.schedule.kinds import Kind
from overlap_train.select import autotune
from overlap_train.select.autotune import (
    Autotune,
    TimedScope,
    methods_to_try,
    winners,
    work_of,
)
from overlap_train.select.method import NAMES, Method, Pass
from overlap_train.select.table import UNTUNED, Table, Winner

FPROP = Pass(Kind.AG_GEMM, 8, 3, 4, torch.float32, 2)
WORK = work_of(FPROP)


def _run(*methods: str, device: str = "cpu") -> Autotune:
    return Autotune(FPROP, methods or ("chunked", "collective"), 10, torch.device(device, 0))


def _took(
    run: Autotune, ms: float, *, name: str = "fc1", kind: str = Kind.AG_GEMM, method: str = "chunked", work: int = WORK
) -> None:
    with mock.patch.object(autotune.time, "perf_counter", return_value=1.0 + ms / 1e3):
        run.add(name, kind, method, work, 1.0)


def test_a_median_without_each_linears_first_call() -> None:
    run = _run()
    for ms in (1.0, 2.0, 3.0, 4.0, 5.0):
        for took in (900.0, ms):  # the first compiles
            _took(run, took, name=f"layers.{ms}.fc1")
    _took(run, 900.0, kind=Kind.GEMM_RS_AND_WGRAD)
    assert run.times() == {(Kind.AG_GEMM, "chunked"): pytest.approx(3.0)}


def test_what_is_larger_may_take_longer() -> None:
    """Sizes of one bucket differ; times are those for the sizes that began."""
    run = _run()
    for ms, work in ((1.0, WORK), (4.0, 2 * WORK), (4.0, 2 * WORK), (6.0, 3 * WORK)):
        _took(run, ms, work=work)
    assert run.times() == {(Kind.AG_GEMM, "chunked"): pytest.approx(2.0)}
    assert work_of(FPROP) == work_of(FPROP.dgrad) == 8 * 3 * 4


def test_the_last_samples_are_kept() -> None:
    """80 linears, of which each was slow in the first round that counts."""
    run = _run()
    for ms in (1.0, 5.0, 1.0):
        for layer in range(80):
            _took(run, ms, name=f"layers.{layer}.fc1")
    assert run.times() == {(Kind.AG_GEMM, "chunked"): pytest.approx(1.0)}


@pytest.mark.parametrize("methods", [2, 3, 4, 5])
@pytest.mark.parametrize("every", [1, 2])  # 2: the forward of each call is recomputed, and backward goes by the first
def test_every_method_has_its_turns(methods: int, every: int) -> None:
    run = _run(*map(str, range(methods)))
    untuned, *turns = (run.next_turn("fc1") for _ in range(1 + every * methods * methods))
    assert untuned is None and turns[:methods] == list(range(methods))
    used = turns[every - 1 :: every]
    assert {number: used.count(number) for number in range(methods)} == dict.fromkeys(range(methods), methods)
    assert run.next_turn("fc2") is None and run.next_turn("fc2") == 0, "of each linear"


def _calls(run: Autotune, count: int, kinds: tuple[str, ...] = (Kind.AG_GEMM, Kind.GEMM_RS_AND_WGRAD)) -> None:
    for _ in range(count):
        turn = run.next_turn("fc1")
        for kind in () if turn is None else kinds:
            _took(run, 1.0, kind=kind, method=run.methods[turn])


def test_a_run_waits_for_backward() -> None:
    """Of micro-batches in flight; and for two samples of each method, but not for ever."""
    run = _run()
    _calls(run, 12, (Kind.AG_GEMM,))
    assert not run.is_due("fc1")
    for method in 3 * run.methods:
        _took(run, 1.0, kind=Kind.GEMM_RS_AND_WGRAD, method=method)
    assert run.is_due("fc1")


def test_a_pass_in_a_cuda_graph_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its events would have no time."""
    run = _run(device="cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(3):
        with TimedScope(contextlib.nullcontext(), run, "fc1", Kind.AG_GEMM, "chunked", WORK):
            pass
    assert run.times() == {}


CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
FC1 = Pass(Kind.AG_GEMM, 16, 32, 32, torch.float32, 2)


def _times(**ms: float) -> dict[tuple[str, str], float]:
    return {(Kind.AG_GEMM, name): time for name, time in ms.items()}


def _won(*ranks: dict[tuple[str, str], float], table: Table = UNTUNED) -> dict[str, str]:
    return {winner.measured.kind: winner.how.name for winner in winners(FC1, ranks, table, CPU, 1)}


def _table(*passes: Pass) -> Table:
    return {pass_.bucket: Winner(pass_, Method("collective"), {}) for pass_ in passes}


def test_the_slowest_rank_counts_and_the_default_stays_within_noise() -> None:
    assert _won(_times(chunked=1.0, collective=0.5), _times(chunked=1.0, collective=1.5)) == {Kind.AG_GEMM: "chunked"}
    ranks = [_times(chunked=1.0, collective=0.5), _times(chunked=0.9, collective=0.6)]
    (winner,) = winners(FC1, ranks, UNTUNED, CPU, 1)
    ms = {Method("chunked"): 1.0, Method("collective"): 0.6}
    assert winner == Winner(FC1, Method("collective"), ms)
    assert _won(_times(chunked=1.0, collective=0.97)) == {Kind.AG_GEMM: "collective"}
    assert _won(_times(chunked=1.0, collective=0.99)) == {Kind.AG_GEMM: "chunked"}


def test_what_some_rank_has_not_timed_is_left_out_and_what_was_tuned_stays() -> None:
    all_three, two = _times(direct=0.1, chunked=1.0, collective=0.5), _times(chunked=1.0, collective=0.5)
    assert _won(all_three, two) == _won(two, all_three) == {Kind.AG_GEMM: "collective"}
    assert _won(two, _times(chunked=1.0)) == {}, "one method is no measurement"
    assert _won(_times(collective=1.0, direct=0.5)) == {}, "a default that was not timed does not lose"
    both = two | {(Kind.GEMM_RS_AND_WGRAD, name): ms for name, ms in (("chunked", 1.0), ("fused", 0.5))}
    assert _won(both) == {Kind.AG_GEMM: "collective", Kind.GEMM_RS_AND_WGRAD: "fused"}
    assert _won(both, table=_table(FC1)) == {Kind.GEMM_RS_AND_WGRAD: "fused"}


def test_who_takes_turns(hopper_gpu: pytest.MonkeyPatch) -> None:
    assert methods_to_try(FC1, CPU, 1)[0] == "chunked" and set(methods_to_try(FC1, CPU, 1)) == set(NAMES)
    many = methods_to_try(Pass(Kind.AG_GEMM, 8192, 4096, 4096, torch.bfloat16, 2), CUDA, 1)
    assert many[0] == "fused" and set(many) == set(NAMES) - {"low_latency"}, "it does not serve so many bytes"
    in_fp8 = Pass(Kind.AG_GEMM, 2048, 7168, 4096, torch.bfloat16, 2, fp8=True)
    assert methods_to_try(in_fp8, CUDA, 1)[0] == choose("auto", in_fp8, CUDA, UNTUNED).method == "direct"
    within_noise = {(in_fp8.kind, "direct"): 1.0, (in_fp8.kind, "fused"): 0.99}
    assert winners(in_fp8, [within_noise], UNTUNED, CUDA, 1)[0].how.name == "direct", "as where nothing is measured"
    across = methods_to_try(Pass(Kind.AG_GEMM, 65536, 4096, 4096, torch.bfloat16, 4), CUDA, 2)
    assert set(across) == {"fused", "chunked", "collective"}
