"""Passes of the recipe in a CUDA graph, on a stand-in for the graph: who runs when, on which tensors, and what is freed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import overlap_train
from gpt import graph as recipe_graph
from gpt import streams
from gpt.data import Batch
from gpt.graph import EAGER_STEPS, GraphedTrainer, released, with_graph
from gpt.program import RecipeError
from gpt.settings import Settings
from gpt.training import Trainer
from mfu.plan import WARM_UP_STEPS
from overlap_train import OverlapTimeoutError


class Machine:
    """Runs kernels at once, or keeps those of a capture for each replay."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capture: FakeGraph | None = None
        self.graphs: list[FakeGraph] = []
        self.events: list[str] = []
        machine = self

        def passes(trainer: Trainer, batches: Iterator[Batch]) -> torch.Tensor:
            machine.events.append("captured" if machine.capture else "eager")
            taken, total = list(batches), torch.full((2,), torch.nan)
            machine.launch(lambda: total.copy_(torch.stack([batch["tokens"].sum() for batch in taken])))
            return total

        monkeypatch.setattr(Trainer, "forward_backward", passes)
        monkeypatch.setattr(recipe_graph, "micro_batches", lambda settings: 2)
        monkeypatch.setattr(recipe_graph, "get_all_rng_states", lambda: {"one": "state 1", "other": "state 2"})
        monkeypatch.setattr(recipe_graph, "graphed_model", lambda model: nullcontext())
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(machine))
        monkeypatch.setattr(torch.cuda, "graph", self.capturing)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: machine.events.append("synchronize"))

    def launch(self, kernel: Callable[[], Any]) -> None:
        if self.capture is None:
            kernel()
        else:
            self.capture.kernels.append(kernel)

    def capturing(self, graph: FakeGraph, stream: Any, capture_error_mode: str) -> FakeGraph:
        assert capture_error_mode == "thread_local"
        return graph


class FakeGraph:
    def __init__(self, machine: Machine) -> None:
        self.machine, self.kernels, self.states = machine, [], []
        machine.graphs.append(self)

    def __enter__(self) -> None:
        self.machine.capture = self

    def __exit__(self, *_: object) -> None:
        self.machine.capture = None

    def register_generator_state(self, state: str) -> None:
        assert self.machine.capture is None, "states are made known before the capture"
        self.states.append(state)

    def replay(self) -> None:
        self.machine.events.append("replay")
        for kernel in self.kernels:
            kernel()

    def reset(self) -> None:
        self.machine.events.append("reset")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def graphed_trainer() -> GraphedTrainer:
    model: Any = SimpleNamespace(stream=None, bare=None)
    trainer: Any = with_graph(Trainer(Settings(cuda_graph=1), model, None, None))  # type: ignore[arg-type]
    return trainer


def batches() -> Iterator[Batch]:
    """Micro-batch n holds n."""
    number = 0
    while True:
        yield {"tokens": torch.tensor([number])}
        number += 1


def test_eager_steps_then_one_capture_then_replays_on_new_batches(machine: Machine) -> None:
    trainer, data = graphed_trainer(), batches()
    totals = [trainer.forward_backward(data) for _ in range(EAGER_STEPS + 3)]
    expected = [[2 * n, 2 * n + 1] for n in range(EAGER_STEPS + 3)]
    assert [total.tolist() for total in totals] == expected, "each total is its own step's, also after later replays"
    assert [event for event in machine.events if event != "synchronize"] == [
        *["eager"] * EAGER_STEPS, "captured", *["replay"] * 3,
    ]  # fmt: skip
    assert [graph.states for graph in machine.graphs] == [["state 1", "state 2"]]


def test_the_callers_batches_are_not_what_is_captured(machine: Machine) -> None:
    trainer, data = graphed_trainer(), list(batches_of(2))
    trainer.capture(data)
    trainer.forward_backward(iter([{"tokens": torch.tensor([7])}, {"tokens": torch.tensor([8])}]))
    assert [batch["tokens"].item() for batch in data] == [0, 1]


def batches_of(count: int) -> Iterator[Batch]:
    return (batch for batch, _ in zip(batches(), range(count), strict=False))


def test_a_wait_that_gave_up_is_raised_before_the_next_replay(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, data = graphed_trainer(), batches()
    trainer.capture([next(data), next(data)])

    def check() -> None:
        raise OverlapTimeoutError("rank 1 is missing")

    monkeypatch.setattr(overlap_train, "check", check)
    with pytest.raises(OverlapTimeoutError):
        trainer.forward_backward(data)
    assert "replay" not in machine.events


@pytest.mark.parametrize(("error", "freed"), [(None, True), (RecipeError, True), (OverlapTimeoutError, False)])
def test_a_graph_is_freed_unless_a_peer_is_missing(
    machine: Machine, error: type[Exception] | None, freed: bool
) -> None:
    trainer, data = graphed_trainer(), batches()
    trainer.capture([next(data), next(data)])
    machine.events.clear()
    with pytest.raises(error) if error else nullcontext(), released(trainer):
        if error is not None:
            raise error("something")
    assert machine.events == (["synchronize", "reset"] if freed else [])
    assert (trainer.graph is None) == freed


def test_without_the_flag_nothing_changes(machine: Machine) -> None:
    trainer = Trainer(Settings(), None, None, None)  # type: ignore[arg-type]
    assert with_graph(trainer) is trainer
    with released(trainer):
        pass
    assert machine.events == []


def test_compare_mfu_captures_nothing_in_its_first_steps() -> None:
    """All variants take theirs before the first capture, because they share a heap."""
    assert EAGER_STEPS >= WARM_UP_STEPS


@pytest.mark.parametrize(("cuda_graph", "asked"), [(0, []), (1, [(True, True)])])
def test_random_states_can_be_captured_only_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, cuda_graph: int, asked: list[tuple[bool, bool]]
) -> None:
    calls: list[tuple[bool, bool]] = []

    def initialize(*, use_cudagraphable_rng: bool, force_reset: bool) -> None:
        calls.append((use_cudagraphable_rng, force_reset))

    monkeypatch.setattr(streams, "initialize_rng_tracker", initialize)
    streams.prepare_random_states(Settings(cuda_graph=cuda_graph))
    assert calls == asked


class FakeStream:
    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    def wait_stream(self, other: FakeStream) -> None:
        self.events.append(f"{self.name} waits for {other.name}")


def test_the_side_stream_is_between_what_its_caller_enqueues(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    side: Any = FakeStream("side", events)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: FakeStream("caller", events))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(events.append(f"in {stream.name}")))
    with streams.on_stream(side):
        events.append("passes")
    assert events == ["side waits for caller", "in side", "passes", "caller waits for side"]
    with streams.on_stream(None):
        assert len(events) == 4
