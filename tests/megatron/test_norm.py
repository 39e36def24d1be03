"""The norms against the formula in fp64, and their marks for sequence parallelism."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overlap_train.integrations.megatron import LayerNorm, Norm, RMSNorm
from tests.megatron.linears import model_config

HIDDEN, EPS = 64, 1e-5


def rms_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    assert bias is None
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight + bias


FORMULA = {"RMSNorm": rms_norm, "LayerNorm": layer_norm}


def build(normalization: str, **changes: Any) -> torch.nn.Module:
    """A norm with random parameters."""
    norm = Norm(model_config(normalization=normalization, **changes), HIDDEN, EPS)
    generator = torch.Generator().manual_seed(1)
    for parameter in norm.parameters():
        parameter.data.copy_(torch.randn(HIDDEN, generator=generator))
    return norm


@pytest.mark.parametrize("zero_centered", [False, True], ids=["scale", "one plus scale"])
@pytest.mark.parametrize("normalization", FORMULA)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values_and_gradients(normalization: str, zero_centered: bool, dtype: torch.dtype) -> None:
    norm = build(normalization, layernorm_zero_centered_gamma=zero_centered, params_dtype=dtype)
    x = torch.randn(6, 2, HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()
    dy = torch.randn(6, 2, HIDDEN, generator=torch.Generator().manual_seed(3)).to(dtype)
    norm(x).backward(dy)

    exact_x = x.detach().double().requires_grad_()
    exact = {name: parameter.detach().double().requires_grad_() for name, parameter in norm.named_parameters()}
    expected = FORMULA[normalization](exact_x, exact["weight"] + zero_centered, exact.get("bias"))
    expected.backward(dy.double())

    pairs = {"y": (norm(x), expected), "dx": (x.grad, exact_x.grad)}
    pairs.update({f"d{name}": (p.grad, exact[name].grad) for name, p in norm.named_parameters()})
    for name, (value, reference) in pairs.items():
        assert value.dtype == dtype
        # Rounding of the result, and of sums over up to HIDDEN terms of the same size in fp32.
        bound = (torch.finfo(dtype).eps + 4 * HIDDEN * torch.finfo(torch.float32).eps) * reference.abs().max()
        if name in ("dweight", "dbias"):
            bound += _of_sum_over_rows(FORMULA[normalization], name, exact_x, dy)
        assert (value.double() - reference).abs().max() <= bound, name


def _of_sum_over_rows(formula: Any, name: str, x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """What a parameter's gradient may lose if its rows are added in dy's dtype, as torch's CPU kernels do on some machines."""
    one, zero = torch.ones(HIDDEN).double(), torch.zeros(HIDDEN).double()
    factor = formula(x, one, zero if formula is layer_norm else None) if name == "dweight" else one
    terms = (dy.double() * factor).abs().flatten(0, -2)
    return len(terms) * torch.finfo(dy.dtype).eps / 2 * terms.sum(0).max()


@pytest.mark.parametrize("normalization", FORMULA)
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_parameters_are_marked(normalization: str, sequence_parallel: bool) -> None:
    norm = build(normalization, sequence_parallel=sequence_parallel)
    assert all(parameter.sequence_parallel is sequence_parallel for parameter in norm.parameters())
    fp32_residuals = build(normalization, params_dtype=torch.bfloat16)(torch.randn(4, 1, HIDDEN))
    assert fp32_residuals.dtype == torch.bfloat16, "the linear behind the norm needs bf16"


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize(
    ("normalization", "reference"), [("RMSNorm", torch.nn.RMSNorm), ("LayerNorm", torch.nn.LayerNorm)]
)
def test_starts_as_identity_scale_with_torchs_keys(
    normalization: str, reference: type[torch.nn.Module], zero_centered: bool
) -> None:
    norm = Norm(model_config(normalization=normalization, layernorm_zero_centered_gamma=zero_centered), HIDDEN, EPS)
    assert list(norm.state_dict()) == list(reference(HIDDEN).state_dict())
    x = torch.randn(3, HIDDEN)
    torch.testing.assert_close(norm(x), reference(HIDDEN, eps=EPS)(x), rtol=1e-5, atol=1e-6)


def test_choice_by_config() -> None:
    assert type(Norm(model_config(normalization="RMSNorm"), 8, eps=EPS)) is RMSNorm
    assert type(Norm(config=model_config(), hidden_size=8, eps=EPS)) is LayerNorm
    with pytest.raises(ValueError, match=r"config\.normalization='L2Norm'.*'RMSNorm' and 'LayerNorm'"):
        Norm(model_config(normalization="L2Norm"), 8)
