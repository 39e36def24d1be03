"""Variants of compare_mfu that replay a CUDA graph, on stand-ins: no CPU has such graphs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpt.program import RecipeError
from gpt.settings import Settings
from mfu import after_training, measuring, variants
from mfu.after_training import record_timelines, time_without_communication
from mfu.measured import Measured
from mfu.measuring import capture_all, train_in_turns
from mfu.plan import read_flags
from mfu.rows import label_of, rows_of
from overlap_train import OverlapConfig
from overlap_train.tools.measure.timing import order_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SETTINGS = Settings(tp=2)


class Run:
    """A variant in training."""

    def __init__(self, name: str, problem: str = "") -> None:
        self.name, self.problem, self.captures, self.releases = name, problem, 0, 0

    def capture(self) -> None:
        self.captures += 1
        if self.problem:
            raise RuntimeError(self.problem)

    def release(self) -> None:
        self.releases += 1

    def forward_backward(self, index: int = 0) -> None: ...

    def forward_backward_alone(self, index: int = 0) -> None: ...


class World:
    device, group = CUDA, None

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def any(self, here: bool) -> bool:
        return here

    def attempt(self, work: Callable[[], object]) -> str | None:
        try:
            work()
        except RuntimeError as error:
            return str(error)
        return None


def runs(*names: str) -> Any:
    return {name: Run(name) for name in names}


def test_only_graph_variants_are_captured_once_each() -> None:
    trained, world = runs("megatron", "overlap", "overlap_graph", "overlap_graph again"), World()
    capture_all(trained, Measured(SETTINGS), world)  # type: ignore[arg-type]
    assert [run.captures for run in trained.values()] == [0, 0, 1, 1]


def test_what_cannot_be_captured_is_absent_with_its_reason() -> None:
    measured, world = Measured(SETTINGS), World()
    refused = Run("megatron_graph", "no capture here")
    trained: Any = {"megatron": Run("megatron"), "megatron_graph": refused}
    capture_all(trained, measured, world)  # type: ignore[arg-type]
    assert list(trained) == ["megatron"] and measured.absent == {"megatron_graph": "no capture here"}
    assert refused.releases == 1, "other ranks may have a graph"
    with pytest.raises(RecipeError, match="no variant can be captured here: overlap_graph: none"):
        capture_all({"overlap_graph": Run("overlap_graph", "none")}, Measured(SETTINGS), world)  # type: ignore[dict-item,arg-type]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was timed, each call 2 ms and each without communication 1.5 ms."""
    asked: list[str] = []

    def measure(calls: dict[str, Any], *_: object) -> dict[str, Any]:
        asked.extend(calls)
        return {name: SimpleNamespace(ms=1.5 if "alone" in name else 2.0) for name in calls}

    monkeypatch.setattr(after_training, "measure", measure)
    return asked


def test_a_graph_has_no_time_without_communication(timed: list[str]) -> None:
    measured, plan = Measured(SETTINGS), read_flags(["--variants", "megatron,overlap_graph"])[0]
    measured.step_ms = {"megatron": [4.0], "overlap_graph": [2.0]}
    measured.losses = {"megatron": [3.0], "overlap_graph": [3.0]}
    time_without_communication(plan, runs("megatron", "overlap_graph"), measured, World())  # type: ignore[arg-type]
    assert timed == ["megatron", "overlap_graph", "megatron, alone"]
    eager, graph = rows_of(plan, measured, 2, None, "BF16")
    assert (eager["forward_backward_ms"], eager["exposed_ms"], eager["exposed_of_baseline"]) == (2.0, 0.5, 1.0)
    assert (graph["forward_backward_ms"], graph["alone_ms"], graph["exposed_ms"]) == (2.0, None, None)
    assert graph["exposed_of_baseline"] is None


def test_the_step_of_a_graph_is_compared_with_that_of_a_graph() -> None:
    """As the picture says it, and never with a step that the host holds up."""
    times = {"megatron": 12.0, "overlap": 8.0, "megatron_graph": 6.0, "overlap_graph": 5.0, "overlap_graph again": 4.0}
    plan = read_flags(["--variants", ",".join(list(times)[:4]), "--repeat", "overlap_graph"])[0]
    measured = Measured(SETTINGS, step_ms={name: [ms] for name, ms in times.items()})
    assert [row["speed_up"] for row in rows_of(plan, measured, 2, None, "BF16")] == [1.0, 1.5, 1.0, 1.2, 1.5]
    measured.step_ms.pop("megatron_graph")
    assert [row["speed_up"] for row in rows_of(plan, measured, 2, None, "BF16")] == [1.0, 1.5, None, None, None]


def test_a_variant_that_fails_in_its_turn_loses_only_its_own_results(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(calls: dict[str, Any], *_: object) -> dict[str, Any]:
        ((name, _),) = calls.items()
        turns.append(name)
        if name == "fused" and turns.count("fused") == 2:
            raise RuntimeError("out of memory")
        return {name: SimpleNamespace(ms=2.0)}

    turns: list[str] = []
    monkeypatch.setattr(measuring, "measure", measure)
    plan, measured = (
        read_flags(["--variants", "megatron,fused", "--steps", "3", "--round-steps", "1"])[0],
        Measured(SETTINGS),
    )
    trained: Any = {name: SimpleNamespace(name=name, step=None) for name in plan.names}
    train_in_turns(plan, trained, measured, World())  # type: ignore[arg-type]
    orders = [order_of(plan.names, turn) for turn in range(3)]
    assert turns == [*orders[0], *orders[1], "megatron"] and orders[0] != orders[1]
    assert measured.step_ms == {"megatron": [2.0] * 3} and measured.absent == {"fused": "out of memory"}
    assert list(trained) == ["megatron"]


def test_memory_of_a_variant_that_is_left_out_is_free_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its objects refer to each other, as a model and its optimizer do."""
    emptied: list[bool] = []
    run: Any = Run("fused")
    run.itself, gone = run, weakref.ref(run)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(gone() is None))
    measured, trained = Measured(SETTINGS), {"fused": run, "megatron": Run("megatron")}
    del run
    problem = "OutOfMemoryError: CUDA out of memory. Tried to allocate 3 GiB. GPU 0 has a total capacity of 79 GiB"
    measuring.go_on_without("fused", problem, trained, measured, World())  # type: ignore[arg-type]
    assert emptied == [True] and list(trained) == ["megatron"]
    assert measured.absent["fused"] == (
        "OutOfMemoryError: CUDA out of memory; all variants are in memory side by side: name fewer (--variants), or fewer "
        "layers (--layers)"
    )


@pytest.mark.parametrize(
    ("problem", "others", "shutdowns"),
    [
        ("OverlapTimeoutError: rank 1 did not arrive", ("nccl",), 1),
        ("OverlapTimeoutError: rank 1 did not arrive", ("overlap_graph",), 0),
        ("OutOfMemoryError: 1 GiB", ("nccl",), 0),
        (None, ("nccl",), 0),
    ],
)
def test_after_a_wait_that_gave_up_the_others_have_new_memory(
    monkeypatch: pytest.MonkeyPatch, problem: str | None, others: tuple[str, ...], shutdowns: int
) -> None:
    called: list[None] = []
    monkeypatch.setattr(measuring.overlap_train, "shutdown", lambda: called.append(None))
    measuring._begin_anew(problem, runs(*others), World())  # type: ignore[arg-type]
    assert len(called) == shutdowns


def test_a_graph_has_no_timeline_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, world = Measured(SETTINGS), World()
    monkeypatch.setattr(after_training.layer_timeline, "record", lambda run: [run.name])
    monkeypatch.setattr(after_training.dist, "barrier", lambda: None)
    record_timelines(runs("overlap", "overlap_graph"), measured, world)  # type: ignore[arg-type]
    assert measured.spans == {"overlap": ["overlap"]}
    assert world.said == [" small: no timeline of overlap_graph: a replay does not launch the layers' markers"]


def test_memory_of_both_groups_is_free_of_graphs_for_the_next_model(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[str] = []
    monkeypatch.setattr(measuring, "forget_graphs", forgotten.append)
    for name in ("tensor_model", "context"):
        monkeypatch.setattr(measuring.parallel_state, f"get_{name}_parallel_group", lambda name=name: name)
    measuring.forget_captured()
    assert forgotten == ["tensor_model", "context"]


def test_obstacles_of_graphs() -> None:
    assert variants.obstacle("overlap_graph", SETTINGS, CPU) == "CUDA graphs need CUDA devices"
    assert variants.obstacle("overlap_graph", SETTINGS, CUDA) is None
    assert "size 1" in str(variants.obstacle("overlap_graph", Settings(tp=1), CUDA))
    assert variants.obstacle("megatron_graph", Settings(tp=1), CUDA) is None
    assert variants.obstacle("overlap_graph", Settings(tp=1, cp=2), CUDA) is None
    assert "--recompute full" in str(variants.obstacle("megatron_graph", Settings(tp=2, recompute="full"), CUDA))


def test_a_graph_variant_is_its_eager_twin_but_for_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []
    monkeypatch.setattr(variants, "build_model", lambda settings, overlap, *_: built.append((settings, overlap)))
    monkeypatch.setattr(variants, "build_trainer", lambda settings, model: None)
    monkeypatch.setattr(variants, "with_graph", lambda trainer: trainer)
    overlap = OverlapConfig(method="chunked")
    names = ("overlap", "overlap_graph again", "megatron", "megatron_graph", "fused", "nccl_graph")
    layouts: Any = SimpleNamespace(use=lambda settings: None)
    main_grads = [variants.build_variant(name, SETTINGS, overlap, CUDA, layouts).main_grad for name in names]
    assert [settings.cuda_graph for settings, _ in built] == [0, 1, 0, 1, 0, 1]
    by_name = [OverlapConfig(method="fused"), OverlapConfig(method="collective")]
    assert [config for _, config in built] == [overlap, overlap, None, None, *by_name]
    assert main_grads == ["accumulate", "accumulate", "off", "off", "accumulate", "accumulate"]
    assert label_of("overlap_graph again") == "overlap_train, CUDA graph again"
