"""TransformerEngine's own linears under Megatron-Core, where it is installed: bf16 with our communication, fp8 left to it."""

from __future__ import annotations

import contextlib
import io
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("transformer_engine.pytorch")
pytest.importorskip("megatron.core")

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from overlap_train import OverlapConfig
from overlap_train.gpu.launch import LaunchCache
from overlap_train.integrations.megatron import provide_accumulation_fusion, report
from overlap_train.ops import blocks
from tests.gpu.test_megatron import MICROBATCHES, layout, model_config, reduced_gradients, wrapped_gpt

__all__ = ["layout"]  # a fixture
LINEARS = 3 * 4 + 1  # of three layers, and the output layer


def _spec(config: TransformerConfig) -> Any:
    return get_gpt_layer_with_transformer_engine_spec()


def _gpt(layout: int, overlap: OverlapConfig | None, **changes: Any) -> Any:
    """Not deterministic: TransformerEngine's attention would need an environment variable for that."""
    config = model_config(layout, deterministic_mode=False, **changes)
    return wrapped_gpt(config, overlap, shard_gradients=False, spec=_spec)[0]


@pytest.mark.parametrize("fused", [False, True], ids=["returned", "main_grad"])
def test_gradients_are_transformer_engines(
    layout: int, device: torch.device, provider: str, method: str, wait_s: float, fused: bool
) -> None:
    """Of its norms, too; with gradient accumulation fusion the weight's are added into main_grad by both, without Apex."""
    provide_accumulation_fusion()
    model = _gpt(
        layout, OverlapConfig(method=method, provider=provider, timeout_s=wait_s), gradient_accumulation_fusion=fused
    )
    own = _gpt(layout, None, gradient_accumulation_fusion=fused)
    assert list(model.state_dict()) == list(own.state_dict())
    ours, theirs = reduced_gradients(model, device), reduced_gradients(own, device)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        # bf16 rounds activations and partial sums some dozens of times on the way; errors of 2^-9 add up like noise
        error = (ours[name] - gradient).norm() / gradient.norm()
        assert error < 2**-5, f"{name}: {error:.4f}"
    ran = [linear for linear in report(model).linears if linear.slot]
    assert len(ran) == LINEARS
    assert all(linear.overlapped_calls == MICROBATCHES and not linear.fallback_calls for linear in ran)


def _scales(model: Any) -> dict[str, torch.Tensor]:
    """Of TransformerEngine's linears, for their next pass: of input, weight and output; of the output's gradient and another."""
    linears = {
        name: module.fp8_meta
        for name, module in model.named_modules()
        if hasattr(module, "fp8_meta") and "linear" in name
    }
    found = {
        f"{name} {way}": meta[way].scale for name, meta in linears.items() for way in ("scaling_fwd", "scaling_bwd")
    }
    assert len(found) == 2 * (LINEARS - 1)
    return found


@pytest.mark.parametrize(("format", "recipe"), [("hybrid", "tensorwise"), ("hybrid", "delayed"), ("e4m3", "blockwise")])
def test_fp8_is_transformer_engines(
    layout: int, device: torch.device, provider: str, method: str, wait_s: float, format: str, recipe: str
) -> None:
    """Ours is nearer to TransformerEngine's fp8 than this is to bf16. Partial sums that are rounded in another place move numbers
    from one of fp8's few steps to the next. In a second step, since delayed scales are 1 in the first, and work out alike."""
    fp8 = dict(fp8=format, fp8_recipe=recipe)
    model = _gpt(layout, OverlapConfig(method=method, provider=provider, timeout_s=wait_s), **fp8)
    own = _gpt(layout, None, **fp8)
    ours, theirs, bf16 = (
        [reduced_gradients(each, device) for _ in range(2)][1] for each in (model, own, _gpt(layout, None))
    )
    for name, gradient in theirs.items():
        off, rounded = ((other[name] - gradient).norm() / gradient.norm() for other in (ours, bf16))
        assert off < max(rounded, 2**-5), f"{name}: {off:.4f}, bf16 {rounded:.4f}"
    if recipe == "delayed":
        for name, scales in _scales(own).items():
            found = _scales(model)[name]
            assert bool((scales[: 1 + name.endswith("fwd")] != 1).all()), f"{name}: {scales}"
            assert bool(((found / scales - 1).abs() < 2**-2).all()), f"{name}: {found}, TransformerEngine's {scales}"
            assert name.endswith("bwd") or found[1] == scales[1], f"{name}: of the same weight"
    ran = [linear for linear in report(model).linears if linear.slot not in (None, "output")]
    ours_is = "fp8 tensorwise, scales of TransformerEngine" if recipe == "delayed" else f"fp8 {recipe}"
    assert len(ran) == LINEARS - 1 and all(ours_is in linear.reason for linear in ran)


@pytest.mark.parametrize(("m", "k"), [(256, 384), (1024, 4096)])
def test_blocks_are_transformer_engines(device: torch.device, m: int, k: int) -> None:
    """By rows, by columns and in squares, numbers and scales, to the bit; also of blocks of zeros and of infinite elements."""
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    domain: Any = SimpleNamespace(on_gpu=True, device=device, launches=LaunchCache(None, 0))
    x = torch.randn(m, k, device=device) * torch.randn(m, k // 32, device=device).mul(4).exp().repeat_interleave(32, 1)
    x[5, :128], x[:, 7], x[130, 130], x[131] = 0.0, 0.0, torch.inf, 1e-38
    x = x.bfloat16()
    e4m3 = sys.modules["transformer_engine_torch"].DType.kFloat8E4M3
    pieces, squares = (
        Float8BlockQuantizer(e4m3, rowwise=True, columnwise=True, block_scaling_dim=dim)(x) for dim in (1, 2)
    )
    packed, rows, columns = blocks.new_packed(x), blocks.new_rows(x), blocks.new_columns(x)
    blocks.write_pieces(domain, x, packed, None)
    blocks.write_pieces(domain, x, rows, columns)
    w8 = blocks.squares(domain, x, True, True)
    for ours, theirs in (
        (packed[:, :k], pieces._rowwise_data), (rows.numbers, pieces._rowwise_data), (columns.numbers, pieces._columnwise_data),
        (w8.rows, squares._rowwise_data), (w8.columns, squares._columnwise_data),
    ):  # fmt: skip
        assert torch.equal(ours.view(torch.uint8), theirs)
    for ours, theirs, count in (
        (blocks.tails(packed, k).t(), pieces._rowwise_scale_inv, m), (rows.inverse, pieces._rowwise_scale_inv, m),
        (columns.inverse, pieces._columnwise_scale_inv, k),
        (w8.inverse, squares._rowwise_scale_inv, k // 128), (w8.inverse_of_columns, squares._columnwise_scale_inv, m // 128),
    ):  # fmt: skip
        assert torch.equal(ours[:, :count], theirs[:, :count])


def test_other_fp8_is_refused_by_name_or_left_to_transformer_engine(
    layout: int, device: torch.device, provider: str
) -> None:
    fp8 = dict(fp8="hybrid", fp8_recipe="blockwise")  # ours is in e4m3
    with pytest.raises(ValueError, match="fp8='hybrid' in the model's config"):
        _gpt(layout, OverlapConfig(provider=provider), **fp8)
    with contextlib.redirect_stdout(io.StringIO()):
        model = _gpt(layout, OverlapConfig(provider=provider, on_unsupported="fallback"), **fp8)
    assert all(torch.isfinite(gradient).all() for gradient in reduced_gradients(model, device).values())
    assert {linear.method for linear in report(model).linears} == {"megatron"}
