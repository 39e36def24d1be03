"""Megatron's own linears with gradient accumulation fusion, without Apex."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from megatron.core.tensor_parallel import layers

from overlap_train.integrations.megatron import provide_accumulation_fusion
from overlap_train.integrations.megatron.main_grad import EXTENSION
from tests.megatron.linears import column_pair, row_pair, run
from tests.megatron.test_path_matrix import column_input, row_input
from tests.megatron.workers import on_ranks


def apex_loads() -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, EXTENSION, raising=False)  # ours may be there
        try:
            return bool(importlib.import_module(EXTENSION))
        except ImportError:
            return False


without_apex = pytest.mark.skipif(apex_loads(), reason="Apex is installed")
START = 5.0


@without_apex
@pytest.mark.parametrize("kind", ["column", "row"])
@on_ranks
def test_megatron_refuses_it_before_and_adds_into_main_grad_after(kind: str) -> None:
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
        spec = importlib.util.find_spec(EXTENSION)
        assert spec is not None and spec.name == EXTENSION, "libraries that look for it find it"
        patch.delitem(sys.modules, EXTENSION)


@pytest.mark.parametrize("megatron_first", [False, True], ids=["as under the launcher", "Megatron imported first"])
def test_an_extension_that_does_not_load_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, megatron_first: bool
) -> None:
    (tmp_path / f"{EXTENSION}.py").write_text("raise ImportError('undefined symbol: built for another torch')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, EXTENSION, raising=False)
    monkeypatch.setattr(layers, EXTENSION, None, raising=False)
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", not megatron_first)
    assert importlib.util.find_spec(EXTENSION) is not None, "it is there"
    assert provide_accumulation_fusion()
    serves = layers.fused_weight_gradient_mlp_cuda if megatron_first else importlib.import_module(EXTENSION)
    assert serves is sys.modules[EXTENSION] and callable(serves.wgrad_gemm_accum_fp32)
    assert layers._grad_accum_fusion_available


def test_an_extension_that_is_installed_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = ModuleType(EXTENSION)
    monkeypatch.setitem(sys.modules, EXTENSION, installed)
    monkeypatch.setattr(layers, "_grad_accum_fusion_available", True)
    assert not provide_accumulation_fusion()
    assert sys.modules[EXTENSION] is installed
