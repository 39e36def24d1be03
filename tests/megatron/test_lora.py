"""LoRA around a model's linears, before enable() and after it, gives Megatron's gradients, and the frozen linears overlap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import mappings

from overlap_train import OverlapConfig
from overlap_train.integrations.megatron import report
from tests.megatron import ulysses
from tests.megatron.linears import integers
from tests.megatron.models import LLAMA, Recipe, gpt, quietly_enable
from tests.megatron.test_training import assert_close
from tests.megatron.workers import on_ranks

LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")


class LoRA(torch.nn.Module):
    """y = W x + B A x with a frozen W, as the wrappers of Megatron-Bridge and PEFT. within: what they call W."""

    def __init__(self, linear: Any, within: str) -> None:
        super().__init__()
        self.within, self.is_row = within, hasattr(linear, "input_is_parallel")
        setattr(self, within, linear.requires_grad_(False))
        features_out, features_in = linear.weight.shape
        self.linear_in, self.linear_out = torch.nn.Linear(features_in, 4), torch.nn.Linear(4, features_out)
        for parameter in (*self.linear_in.parameters(), *self.linear_out.parameters()):
            parameter.data = integers(*parameter.shape, seed=6) / 8

    @property
    def weight(self) -> torch.Tensor:  # PEFT's have it
        return getattr(self, self.within).weight

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        y, bias = getattr(self, self.within)(x)
        exchanges = getattr(self, self.within).sequence_parallel
        x = mappings.gather_from_sequence_parallel_region(x) if exchanges and not self.is_row else x
        added = self.linear_out(self.linear_in(x))
        return y + (
            mappings.reduce_scatter_to_sequence_parallel_region(added) if exchanges and self.is_row else added
        ), bias


def adapted(model: Any, within: str) -> Any:
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name in LINEARS:
            if name in module._modules:
                setattr(module, name, LoRA(getattr(module, name), within))
    return model


def gradients(model: Any) -> dict[str, torch.Tensor]:
    tokens, positions = torch.arange(32).reshape(2, 16), torch.arange(16).expand(2, -1)
    model(tokens, positions, None, labels=tokens).mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("within", ["to_wrap", "base_layer"])
@pytest.mark.parametrize("enabled_first", [False, True])
@on_ranks
def test_wrapped_linears_overlap(within: str, enabled_first: bool) -> None:
    expected = gradients(adapted(gpt(Recipe(LLAMA)), within))
    model = gpt(Recipe(LLAMA))
    if enabled_first:
        quietly_enable(model, OverlapConfig())
    adapted(model, within)
    if not enabled_first:
        quietly_enable(model, OverlapConfig())
    actual = gradients(model)
    assert len(actual) == 2 * 4 * 4
    assert_close(actual, expected)
    rows = report(model).linears
    assert [row.calls for row in rows] == ["overlapped 1"] * 9, "adapters are no rows"
    assert {row.slot: row.name for row in rows}["qkv"] == f"decoder.layers.1.self_attention.linear_qkv.{within}"


@pytest.mark.parametrize("enabled_first", [False, True])
@on_ranks
def test_around_the_projections_of_ulysses_a_collective_exchanges(enabled_first: bool) -> None:
    found = []
    for overlap in (None, OverlapConfig(method="chunked")):
        model = ulysses.gpt(ulysses.Run(context_parallel=2, overlap=overlap if enabled_first else None))
        adapted(model, "to_wrap")
        if overlap is not None and not enabled_first:
            quietly_enable(model, overlap)
        attention, x = model.decoder.layers[0].self_attention, integers(8, 1, 32, seed=9)
        y = attention(x, None)[0]
        y.square().sum().backward()
        found.append({"y": y, **{name: p.grad for name, p in attention.named_parameters() if p.grad is not None}})
    assert_close(*found)
    wrapped, alone = "wrapped, as by LoRA", "tensor-parallel size 1: nothing to communicate"
    beside = f"all-to-all over 2 CP ranks not overlapped: {wrapped}; {alone}"
    rows = [row for row in report(model).linears if row.slot in ("qkv", "proj")]
    assert {(row.method, row.fprop, row.reason) for row in rows} == {("megatron", "-", beside)}
    assert [row.calls for row in rows] == [f"{wrapped} 1" * enabled_first] * 2 + [""] * 2, "one layer ran"
