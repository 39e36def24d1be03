"""Megatron's own linears with gradient accumulation fusion, without Apex."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest
import torch
from megatron.core.tensor_parallel import layers

from overlap_train.integrations.megatron import provide_accumulation_fusion
from overlap_train.integrations.megatron.linears.accumulation_fusion import EXTENSION
from tests.megatron.linears import column_pair, integers, row_pair, run
from tests.megatron.test_path_matrix import column_input, row_input
from tests.megatron.workers import Workers

without_apex = pytest.mark.skipif(importlib.util.find_spec(EXTENSION) is not None, reason="Apex is installed")
START = 5.0


def refused_before_and_added_after(kind: str) -> None:
    """In a process of its own, as after `pip install megatron-core`."""
    make, x = (column_pair, column_input()) if kind == "column" else (row_pair, row_input())
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, EXTENSION, raising=False)
        patch.setattr(layers, "_grad_accum_fusion_available", False)
        patch.setattr(layers, EXTENSION, None, raising=False)
        if kind == "column":  # Megatron does not look in row linears, and fails in their backward pass
            with pytest.raises(RuntimeError, match=EXTENSION):
                make(config_changes={"gradient_accumulation_fusion": True})
        assert provide_accumulation_fusion()
        assert provide_accumulation_fusion(), "a second time"
        plain, fused = make().own, make(config_changes={"gradient_accumulation_fusion": True}).own
        for dtype in (torch.float32, torch.bfloat16):
            weight = fused.to(dtype).weight
            weight.main_grad = torch.full_like(weight, START, dtype=torch.float32)
            expected = run(plain.to(dtype), x.to(dtype))["grad of weight"]
            assert run(fused, x.to(dtype))["grad of weight"] is None
            assert torch.equal(weight.main_grad, START + expected.float())
            plain.weight.grad = None
        patch.delitem(sys.modules, EXTENSION)


@without_apex
@pytest.mark.parametrize("kind", ["column", "row"])
def test_megatron_refuses_it_before_and_adds_into_main_grad_after(workers: Workers, kind: str) -> None:
    workers.call(refused_before_and_added_after, kind)


def test_an_extension_that_is_installed_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = ModuleType(EXTENSION)
    monkeypatch.setitem(sys.modules, EXTENSION, installed)
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)
    assert not provide_accumulation_fusion()
    assert sys.modules[EXTENSION] is installed


@without_apex
def test_what_the_extension_would_add_is_added_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product of 16-bit numbers that bf16 could not hold beside what is there."""
    monkeypatch.delitem(sys.modules, EXTENSION, raising=False)
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)
    assert provide_accumulation_fusion()
    main_grad, x, dy = (
        torch.full((2, 3), 216.0),
        integers(4, 3).bfloat16() / 64,
        torch.ones(4, 2, dtype=torch.bfloat16) / 64,
    )
    sys.modules[EXTENSION].wgrad_gemm_accum_fp32(x, dy, main_grad)
    assert torch.equal(main_grad, 216 + dy.float().t() @ x.float())
