"""Checkpoints do not know about overlap: written with it on they load with it off, and the other way round."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from overlap_train import OverlapConfig
from tests.megatron.models import LLAMA, Recipe, batches, forward_backward, gpt, optimizer_of, train, wrap
from tests.megatron.workers import on_ranks

WITH = Recipe(LLAMA, overlap=OverlapConfig())
WITHOUT = replace(WITH, overlap=None)
DIRECTIONS = pytest.mark.parametrize(
    ("saved", "loaded"), [(WITH, WITHOUT), (WITHOUT, WITH)], ids=["on to off", "off to on"]
)


@on_ranks
def test_keys_and_parameter_marks_are_megatrons() -> None:
    on, off = gpt(WITH), gpt(WITHOUT)
    assert list(on.state_dict()) == list(off.state_dict())
    assert on.sharded_state_dict().keys() == off.sharded_state_dict().keys()
    attributes = [[(name, sorted(p.__dict__)) for name, p in model.named_parameters()] for model in (on, off)]
    assert attributes[0] == attributes[1], "parameters carry Megatron's marks and no others"


@DIRECTIONS
@on_ranks
def test_weights(saved: Recipe, loaded: Recipe, tmp_path: Path) -> None:
    """Plain and in Megatron's sharded format."""
    _, model = train(saved, steps=2)
    other = gpt(loaded)
    assert str(other.load_state_dict(model.module.state_dict())) == "<All keys matched successfully>"
    assert_equal(model.module, other)
    dist_checkpointing.save({"model": model.module.sharded_state_dict()}, str(tmp_path))
    dist.barrier()
    other = gpt(loaded)
    state = dist_checkpointing.load({"model": other.sharded_state_dict()}, str(tmp_path))
    other.load_state_dict(state["model"])
    assert_equal(model.module, other)


@DIRECTIONS
@on_ranks
def test_resume_with_optimizer(saved: Recipe, loaded: Recipe, tmp_path: Path) -> None:
    """Losses of steps three and four are the same, run through and after a resume of model and optimizer."""
    folder = str(tmp_path)

    def step_twice(recipe: Recipe, model: torch.nn.Module, optimizer: object) -> list[float]:
        losses, data = [], batches(seed=9)
        for _ in range(2):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            losses.append(forward_backward(recipe, model, data))
            optimizer.step()
        return losses

    first = wrap(saved, gpt(saved))
    optimizer = optimizer_of(first)
    step_twice(saved, first, optimizer)
    shards = first.module.sharded_state_dict()
    dist_checkpointing.save({"model": shards, "optimizer": optimizer.sharded_state_dict(shards)}, folder)
    expected = step_twice(saved, first, optimizer)

    second = wrap(loaded, gpt(loaded))
    optimizer = optimizer_of(second)
    shards = second.module.sharded_state_dict()
    wanted = {"model": shards, "optimizer": optimizer.sharded_state_dict(shards, is_loading=True)}
    state = dist_checkpointing.load(wanted, folder)
    second.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    assert step_twice(loaded, second, optimizer) == pytest.approx(expected, rel=1e-5)


def assert_equal(left: torch.nn.Module, right: torch.nn.Module) -> None:
    for (name, a), b in zip(left.named_parameters(), right.parameters(), strict=True):
        assert torch.equal(a, b), name
