"""TransformerEngine's own linears under Megatron-Core, where it is installed: bf16 with our communication, fp8 left to it."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch

pytest.importorskip("transformer_engine.pytorch")
pytest.importorskip("megatron.core")

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.transformer_config import TransformerConfig

from overlap_train import OverlapConfig
from overlap_train.integrations.megatron import provide_accumulation_fusion, report
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


def test_fp8_with_one_scale_a_tensor_is_transformer_engines(
    layout: int, device: torch.device, provider: str, method: str, wait_s: float
) -> None:
    """Ours is nearer to TransformerEngine's fp8 than this is to bf16. Partial sums that are rounded in another place move numbers
    from one of fp8's few steps to the next."""
    fp8 = dict(fp8="hybrid", fp8_recipe="tensorwise")
    model = _gpt(layout, OverlapConfig(method=method, provider=provider, timeout_s=wait_s), **fp8)
    ours, theirs, bf16 = (
        reduced_gradients(each, device) for each in (model, _gpt(layout, None, **fp8), _gpt(layout, None))
    )
    for name, gradient in theirs.items():
        off, rounded = ((other[name] - gradient).norm() / gradient.norm() for other in (ours, bf16))
        assert off < max(rounded, 2**-5), f"{name}: {off:.4f}, bf16 {rounded:.4f}"
    ran = [linear for linear in report(model).linears if linear.slot not in (None, "output")]
    assert len(ran) == LINEARS - 1 and all("fp8 tensorwise" in linear.reason for linear in ran)


def test_other_fp8_is_refused_by_name_or_left_to_transformer_engine(
    layout: int, device: torch.device, provider: str
) -> None:
    with pytest.raises(ValueError, match="fp8='hybrid' in the model's config"):
        _gpt(layout, OverlapConfig(provider=provider), fp8="hybrid")
    with contextlib.redirect_stdout(io.StringIO()):
        model = _gpt(layout, OverlapConfig(provider=provider, on_unsupported="fallback"), fp8="hybrid")
    assert all(torch.isfinite(gradient).all() for gradient in reduced_gradients(model, device).values())
    assert {linear.method for linear in report(model).linears} == {"megatron"}
