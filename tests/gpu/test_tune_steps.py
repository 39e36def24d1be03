"""tune_steps on GPUs: every method takes its turn, is timed by events and exact, and ranks agree on the fastest."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import overlap_train
from overlap_train import OverlapConfig
from overlap_train.group.registry import made_domain
from overlap_train.ops.plan_cache import made_cache
from tests.linear_cases import OPERATORS, Case

STEPS = 10


@pytest.fixture
def tuned_case(
    group: dist.ProcessGroup, device: torch.device, provider: str, wait_s: float, tmp_path: Path
) -> Iterator[Case]:
    """A domain of its own: which folder of measurements it reads is settled at its first call."""
    overlap_train.shutdown()
    config = OverlapConfig(
        provider=provider, timeout_s=wait_s, symmetric_mib=2048, tune_steps=STEPS, tuning_dir=str(tmp_path)
    )
    yield Case(group, device, config, torch.bfloat16)
    overlap_train.shutdown()


@pytest.mark.parametrize("operator", ["column", "row", "to_heads", "to_rows"])
def test_methods_take_turns_and_are_exact(tuned_case: Case, operator: str) -> None:
    case, said = tuned_case, io.StringIO()
    with contextlib.redirect_stderr(said):
        for seed in range(1 + 3 * 5 + 1):  # the first is untuned; then of each method two calls count, beside its first
            OPERATORS[operator](case, (512, 1), 1024, 768, seed=seed)
    cache = made_cache(made_domain(case.group))
    assert cache is not None
    winners = cache.table.values()
    assert len(winners) == 2
    for winner in winners:
        tried = {how.name for how in winner.ms}
        assert {"fused", "direct", "chunked", "collective"} <= tried and min(winner.ms.values()) > 0
    assert (f"in {STEPS} calls, kept in" in said.getvalue()) == (dist.get_rank() == 0)
