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

from overlap_train.integrations import megatron
from overlap_train.integrations.megatron import enabling, provide_accumulation_fusion
from overlap_train.integrations.megatron.main_grad import EXTENSION
from tests.megatron.linears import column_pair, integers, row_pair, run
from tests.megatron.test_path_matrix import column_input, row_input
from tests.megatron.workers import Workers


def apex_loads() -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, EXTENSION, raising=False)  # ours may be there
        try:
            return bool(importlib.import_module(EXTENSION))
        except ImportError:
            return False


without_apex = pytest.mark.skipif(apex_loads(), reason="Apex is installed")
START = 5.0


def import_enable_anew(patch: pytest.MonkeyPatch) -> None:
    """The first import of `enable` in a training script."""
    module = importlib.import_module(f"{enabling.__name__}.enable")
    patch.setattr(enabling, "enable", module)  # put back afterwards
    patch.delitem(sys.modules, module.__name__)
    assert callable(megatron.enable)


def refused_before_and_added_after(kind: str, by_import: bool) -> None:
    """In a process of its own, as after `pip install megatron-core`."""
    make, x = (column_pair, column_input()) if kind == "column" else (row_pair, row_input())
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, EXTENSION, raising=False)
        patch.setattr(layers, "_grad_accum_fusion_available", False)
        patch.setattr(layers, EXTENSION, None, raising=False)
        if kind == "column":  # Megatron does not look in row linears, and fails in their backward pass
            with pytest.raises(RuntimeError, match=EXTENSION):
                make(config_changes={"gradient_accumulation_fusion": True})
        if by_import:
            import_enable_anew(patch)
        else:
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
@pytest.mark.parametrize("by_import", [False, True], ids=["called", "by importing enable"])
def test_megatron_refuses_it_before_and_adds_into_main_grad_after(workers: Workers, kind: str, by_import: bool) -> None:
    workers.call(refused_before_and_added_after, kind, by_import)


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


@without_apex
def test_libraries_that_look_for_the_extension_find_it() -> None:
    provide_accumulation_fusion()
    spec = importlib.util.find_spec(EXTENSION)
    assert spec is not None and spec.name == EXTENSION


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
