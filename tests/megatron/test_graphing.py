"""Full-iteration CUDA graphs of Megatron: its wrapper's capture is bracketed, everything else is left alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from megatron.core.full_cuda_graph import FullCudaGraphWrapper

from overlap_train import OverlapConfig
from overlap_train.integrations.megatron import graphed_model, graphed_passes
from overlap_train.integrations.megatron.enabling import graphing
from overlap_train.integrations.megatron.launcher.hooks import ScriptHooks
from overlap_train.integrations.megatron.linears.state import LinearOverlap

FULL = "megatron.core.full_cuda_graph"


class Linear(torch.nn.Module):
    """A linear in one of our slots, as far as graphing.py looks at it."""

    def __init__(self, group: str, calls: int | None) -> None:
        super().__init__()
        self.weight, self.tp_group = torch.nn.Parameter(torch.ones(1)), group
        if calls is not None:  # None: Megatron's own
            self.overlap = LinearOverlap(OverlapConfig(), "fc1", "fc1", overlapped_calls=calls)


def model(**linears: Linear) -> torch.nn.Module:
    return torch.nn.ModuleDict(linears)


OVERLAPPING = {"linear_qkv": Linear("tp", 2), "linear_fc1": Linear("tp", 2), "output_layer": Linear("other", 1)}


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Brackets that were opened and closed."""
    seen: list[str] = []

    @contextmanager
    def graphed(group: str) -> Iterator[None]:
        seen.append(f"begin {group}")
        yield
        seen.append(f"end {group}")

    monkeypatch.setattr(graphing, "graphed", graphed)
    return seen


def capturing(monkeypatch: pytest.MonkeyPatch, answer: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: answer)


def test_each_group_whose_linears_overlap_is_bracketed_once(events: list[str]) -> None:
    with graphed_model(model(**OVERLAPPING)):
        events.append("passes")
    assert events == ["begin tp", "begin other", "passes", "end other", "end tp"]


def test_a_model_that_does_not_overlap_has_no_barriers(events: list[str]) -> None:
    with graphed_model([model(linear_qkv=Linear("tp", None)), model(linear_fc1=Linear("tp", 0))]):
        pass
    assert events == []


@pytest.mark.parametrize(
    ("is_captured", "forward_only", "bracketed"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_training_passes_are_bracketed_while_they_are_captured(
    events: list[str], monkeypatch: pytest.MonkeyPatch, is_captured: bool, forward_only: bool, bracketed: bool
) -> None:
    capturing(monkeypatch, is_captured)
    passes = graphed_passes(lambda **kwargs: [*events, kwargs["num_microbatches"]])
    result = passes(model=[model(linear_fc1=Linear("tp", 1))], num_microbatches=3, forward_only=forward_only)
    assert result == (["begin tp", 3] if bracketed else [3])
    assert events == (["begin tp", "end tp"] if bracketed else [])


@pytest.mark.parametrize("overlap", [OverlapConfig(), None])
def test_the_launcher_hooks_the_wrapper_with_overlap_only(overlap: OverlapConfig | None) -> None:
    assert (FULL in ScriptHooks(overlap).by_module()) == (overlap is not None)


def test_megatrons_wrapper_calls_its_function_bracketed(events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType(FULL)
    module.FullCudaGraphWrapper = FullCudaGraphWrapper
    ScriptHooks(OverlapConfig()).by_module()[FULL](module)
    capturing(monkeypatch, True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *args, **kwargs: None)
    wrapper = module.FullCudaGraphWrapper(lambda **kwargs: events.append("passes"), cuda_graph_warmup_steps=2)
    assert isinstance(wrapper, FullCudaGraphWrapper) and wrapper.cuda_graph_warmup_steps == 2
    wrapper.forward_backward_func(model=[model(linear_fc1=Linear("tp", 1))], forward_only=False)
    assert events == ["begin tp", "passes", "end tp"]
    assert module.FullCudaGraphWrapper.cuda_graph is FullCudaGraphWrapper.cuda_graph, "one graph a process, as before"


class Graph:
    """A captured graph, as far as its end goes."""

    def __init__(self) -> None:
        self.resets = 0

    def reset(self) -> None:
        self.resets += 1


def test_the_end_of_a_script_destroys_the_graphs_that_megatron_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL waits for them when the process ends."""
    hooks = ScriptHooks(OverlapConfig())
    monkeypatch.setattr(ScriptHooks, "_assert_enabled", lambda self, when: None)
    graphs = {"training": Graph(), "validation": None}
    monkeypatch.setattr(FullCudaGraphWrapper, "cuda_graph", dict(graphs))
    hooks.finish()
    hooks.finish()
    assert graphs["training"].resets == 1
    assert FullCudaGraphWrapper.cuda_graph == {"training": None, "validation": None}
