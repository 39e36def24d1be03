"""What `auto` takes without measurements, against what the tuner has measured on 2 and 4 x H200."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest
import torch

from overlap_train.planning.choice import LONG_GEMM_US, choose
from overlap_train.planning.passes import SCATTER_AND_WGRAD
from overlap_train.planning.table import UNTUNED, Winner
from overlap_train.planning.tiling import tma_reads
from overlap_train.tools.plan.records import tuned

BENCHMARKS, GPU = Path(__file__).parents[2] / "benchmarks", torch.device("cuda")


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    tma_reads.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    yield
    tma_reads.cache_clear()


def cost(winner: Winner) -> float | None:
    """How much longer the untuned choice took than the best that was measured; None where its variant was not."""
    choice = choose("auto", winner.measured, GPU, UNTUNED)
    variant = choice.variant.named(choice.method)
    if winner.measured.kind == SCATTER_AND_WGRAD:  # every variant began with a barrier
        variant = variant.removesuffix(" barrier first")
    return winner.ms[variant] / min(winner.ms.values()) - 1 if variant in winner.ms else None


@pytest.mark.parametrize(("folder", "world"), [("h200x2", 2), ("h200x4", 4)])
def test_an_untuned_choice_costs_little(folder: str, world: int) -> None:
    """Long products are not looked at: their default is what is best in training, at the power limit, and not in bursts."""
    measured = tuned(BENCHMARKS / folder, world).winners.values()
    found = {f"{w.measured.kind} {w.measured}": cost(w) for w in measured if w.measured.gemm_us < LONG_GEMM_US}
    costs = {name: value for name, value in found.items() if value is not None}
    assert len(costs) > 15
    assert fmean(costs.values()) < 0.01
    assert max(costs.values()) < 0.04, costs
