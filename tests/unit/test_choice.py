"""Which method runs, and that it always says why."""

from __future__ import annotations

import pytest
import torch

from overlap_train import choose

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("method", ["fused", "chunked", "collective"])
@pytest.mark.parametrize("device", [CPU, GPU])
def test_a_named_method_is_taken(method: str, device: torch.device) -> None:
    assert choose(method, 8192, device).method == method


def test_auto_follows_device_and_rows() -> None:
    assert choose("auto", 8192, CPU).method == "chunked"
    assert choose("auto", 256, GPU).method == "collective"
    assert choose("auto", 8192, GPU).method != "collective"


@pytest.mark.parametrize("rows", [None, 1, 1024, 1025, 1 << 20])
def test_every_choice_has_a_reason(rows: int | None) -> None:
    for device in (CPU, GPU):
        for method in ("auto", "fused", "chunked", "collective"):
            assert choose(method, rows, device).reason
