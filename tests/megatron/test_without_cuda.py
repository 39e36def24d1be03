"""run_without_cuda(): Megatron-Core's modules are answered with the CPU, and torch itself is left as it is."""

from __future__ import annotations

import sys

import pytest
import torch
from megatron.core.tensor_parallel import random as megatron_random

from overlap_train.integrations.megatron import run_without_cuda
from overlap_train.integrations.megatron.cpu import CUDA_USERS
from tests.megatron import layout
from tests.megatron.workers import Workers, on_ranks


@on_ranks
def test_each_module_has_the_stand_in() -> None:
    for name in CUDA_USERS:
        stand_in = sys.modules[name].torch
        assert stand_in.cuda.current_device() == torch.device("cpu"), name
        assert stand_in.zeros(2, device="cuda").device == torch.device("cpu"), name
        assert stand_in.cuda.synchronize() is None
        assert stand_in.float32 is torch.float32
        assert stand_in.nn is torch.nn
        assert stand_in.cuda.is_available() is False
    before = sys.modules["megatron.core.utils"].torch
    assert run_without_cuda() is True
    assert sys.modules["megatron.core.utils"].torch is before, "a second call changes nothing"
    for ask in (torch.cuda.current_device, lambda: torch.zeros(2, device="cuda")):  # torch itself is left as it is
        with pytest.raises((AssertionError, RuntimeError)):
            ask()


def test_nothing_happens_where_cuda_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert run_without_cuda() is False
    assert megatron_random.torch is torch


def random_numbers() -> tuple[torch.Tensor, torch.Tensor]:
    layout.use(seed=11)
    common = torch.rand(4)
    with megatron_random.get_cuda_rng_tracker().fork():
        own = torch.rand(4)
    assert not torch.equal(common, own)
    with megatron_random.get_cuda_rng_tracker().fork():
        assert not torch.equal(torch.rand(4), own), "a fork goes on where the one before it ended"
    layout.use(seed=11)
    with megatron_random.get_cuda_rng_tracker().fork():
        assert torch.equal(torch.rand(4), own), "the states of forks do not depend on what was drawn outside"
    assert torch.equal(torch.rand(4), common), "nor the other way round"
    return common, own


def test_random_states(workers: Workers) -> None:
    """Ranks draw the same numbers outside forks and different ones inside, as on GPUs."""
    (common, own), (other_common, other_own) = workers.call(random_numbers)
    assert torch.equal(common, other_common)
    assert not torch.equal(own, other_own)


@on_ranks
def test_recomputation_repeats_the_random_numbers() -> None:
    """Recomputation must draw the masks again that the first forward drew."""
    layout.use(seed=2)
    x = torch.ones(1000, requires_grad=True)

    def both(x: torch.Tensor) -> torch.Tensor:
        with megatron_random.get_cuda_rng_tracker().fork():
            inside = torch.nn.functional.dropout(x, 0.5)
        return inside * torch.nn.functional.dropout(x.detach(), 0.5)

    y = megatron_random.checkpoint(both, False, x)
    torch.rand(3)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach()), "d sum(mask * x) / dx is the mask, which is y at x = 1"
