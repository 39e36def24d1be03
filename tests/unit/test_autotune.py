"""Whose turn it is, what counts, and when a trial ends: without any linear."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch

from overlap_train.operators import trials
from overlap_train.operators.trials import Timed, TimedBracket, Trial, work_of
from overlap_train.planning.passes import SCATTER_AND_WGRAD, Pass
from overlap_train.planning.schedule.kinds import GATHER
from overlap_train.runtime.bracket import Operator

FPROP = Pass(GATHER, 8, 3, 4, torch.float32, 2)
WORK = work_of(FPROP)


def _trial(*methods: str, device: str = "cpu") -> Trial:
    return Trial(FPROP, methods or ("chunked", "collective"), 10, torch.device(device, 0))


def _took(
    trial: Trial, ms: float, *, name: str = "fc1", kind: str = GATHER, method: str = "chunked", work: int = WORK
) -> None:
    with mock.patch.object(trials.time, "perf_counter", return_value=1.0 + ms / 1e3):
        trial.add(Timed(name, kind, method, work), 1.0)


def test_a_median_without_each_linears_first_call() -> None:
    trial = _trial()
    for ms in (1.0, 2.0, 3.0, 4.0, 5.0):
        for took in (900.0, ms):  # the first compiles
            _took(trial, took, name=f"layers.{ms}.fc1")
    _took(trial, 900.0, kind=SCATTER_AND_WGRAD)
    assert trial.times() == {(GATHER, "chunked"): pytest.approx(3.0)}


def test_what_is_larger_may_take_longer() -> None:
    """Sizes of one bucket differ; times are those for the sizes that began."""
    trial = _trial()
    for ms, work in ((1.0, WORK), (4.0, 2 * WORK), (4.0, 2 * WORK), (6.0, 3 * WORK)):
        _took(trial, ms, work=work)
    assert trial.times() == {(GATHER, "chunked"): pytest.approx(2.0)}
    assert work_of(FPROP) == work_of(FPROP.dgrad) == 8 * 3 * 4


def test_the_last_samples_are_kept() -> None:
    """80 linears, of which each was slow in the first round that counts."""
    trial = _trial()
    for ms in (1.0, 5.0, 1.0):
        for layer in range(80):
            _took(trial, ms, name=f"layers.{layer}.fc1")
    assert trial.times() == {(GATHER, "chunked"): pytest.approx(1.0)}


@pytest.mark.parametrize("methods", [2, 3, 4, 5])
@pytest.mark.parametrize("every", [1, 2])  # 2: the forward of each call is recomputed, and backward goes by the first
def test_every_method_has_its_turns(methods: int, every: int) -> None:
    trial = _trial(*map(str, range(methods)))
    untuned, *turns = (trial.next_turn("fc1") for _ in range(1 + every * methods * methods))
    assert untuned is None and turns[:methods] == list(range(methods))
    used = turns[every - 1 :: every]
    assert {number: used.count(number) for number in range(methods)} == dict.fromkeys(range(methods), methods)
    assert trial.next_turn("fc2") is None and trial.next_turn("fc2") == 0, "of each linear"


def _calls(trial: Trial, count: int, kinds: tuple[str, ...] = (GATHER, SCATTER_AND_WGRAD)) -> None:
    for _ in range(count):
        turn = trial.next_turn("fc1")
        for kind in () if turn is None else kinds:
            _took(trial, 1.0, kind=kind, method=trial.methods[turn])


def test_a_trial_ends_after_its_calls() -> None:
    trial = _trial()
    _calls(trial, 9)
    assert not trial.is_due("fc1")
    _calls(trial, 1)
    assert trial.is_due("fc1") and not trial.is_due("fc2"), "each linear counts its own"


def test_a_trial_waits_for_backward() -> None:
    """Of micro-batches in flight; and for two samples of each method, but not for ever."""
    trial = _trial()
    _calls(trial, 12, (GATHER,))
    assert not trial.is_due("fc1")
    for method in 3 * trial.methods:
        _took(trial, 1.0, kind=SCATTER_AND_WGRAD, method=method)
    assert trial.is_due("fc1")


def test_without_a_backward_the_forward_alone_is_decided_in_the_end() -> None:
    trial = _trial()
    _calls(trial, 39, (GATHER,))
    assert not trial.is_due("fc1")
    _calls(trial, 1, (GATHER,))
    assert trial.is_due("fc1") and {kind for kind, _ in trial.times()} == {GATHER}


def test_a_pass_that_raises_is_not_timed() -> None:
    trial, bracket = _trial(), mock.MagicMock(spec=Operator)
    bracket.__exit__.return_value = None
    for raises in (False, False, True):
        with contextlib.suppress(KeyError), TimedBracket(bracket, trial, Timed("fc1", GATHER, "chunked", WORK)):
            if raises:
                raise KeyError
    assert len(trial._samples[GATHER, "chunked"]) == 1 and bracket.__exit__.call_count == 3


def test_a_pass_in_a_cuda_graph_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its events would have no time."""
    trial = _trial(device="cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for _ in range(3):
        with TimedBracket(contextlib.nullcontext(), trial, Timed("fc1", GATHER, "chunked", WORK)):
            pass
    assert trial.times() == {} and not trial._seen
