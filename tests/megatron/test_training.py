"""Whole models: the overlapped linears give the losses and gradients that Megatron's own give, step after step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

from overlap_train import OverlapConfig
from overlap_train.integrations.megatron import report
from tests.megatron import layout
from tests.megatron.models import (
    GPT2,
    LLAMA,
    Recipe,
    batches,
    forward_backward,
    gpt,
    gradients,
    quietly_enable,
    train,
    wrap,
)
from tests.megatron.workers import Workers, on_ranks

FULL_RECOMPUTE = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
SELECTIVE_RECOMPUTE = dict(recompute_granularity="selective")

RECIPES = {
    "llama, grouped queries": Recipe(LLAMA),
    "gpt2, biases, learned positions": Recipe(GPT2, positions="learned_absolute"),
    "tied embeddings": Recipe(LLAMA, tied=True),
    "query and key norms": Recipe({**LLAMA, "qk_layernorm": True}),
    "full recomputation": Recipe({**LLAMA, **FULL_RECOMPUTE}),
    "selective recomputation": Recipe({**LLAMA, **SELECTIVE_RECOMPUTE}),
    "overlapped gradient reduction": Recipe(LLAMA, overlap_grad_reduce=True),
    "tied, overlapped reduction, recomputation": Recipe(
        {**LLAMA, **FULL_RECOMPUTE}, tied=True, overlap_grad_reduce=True, microbatches=3
    ),
}


def agreement_of_gradients(recipe: Recipe, overlap: OverlapConfig) -> None:
    expected_loss, expected = gradients(recipe)
    loss, actual = gradients(replace(recipe, overlap=overlap))
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        # fp32 sums of at most 64 terms, in another order: 64 roundings of the largest term.
        bound = 64 * torch.finfo(torch.float32).eps * gradient.abs().max().item()
        torch.testing.assert_close(actual[name], gradient, rtol=0, atol=max(bound, 1e-9), msg=lambda t, n=name: n + t)


@pytest.mark.parametrize("name", RECIPES)
def test_gradients_are_those_of_megatrons_linears(workers: Workers, name: str) -> None:
    workers.call(agreement_of_gradients, RECIPES[name], OverlapConfig())


@pytest.mark.parametrize(
    "changes", [{"method": "collective"}, {"gathered_input": "keep"}, {"main_grad": "off"}], ids=str
)
def test_gradients_under_other_settings(workers: Workers, changes: dict[str, Any]) -> None:
    workers.call(agreement_of_gradients, Recipe(LLAMA, overlap_grad_reduce=True), OverlapConfig(**changes))


def losses(recipe: Recipe) -> list[float]:
    return train(recipe, steps=10)[0]


@pytest.mark.parametrize("method", ["chunked", "collective"])
def test_ten_steps_follow_one_rank(workers: Workers, method: str) -> None:
    """TP 2 overlapped against TP 1: fp32 rounding differs by the order of sums, and Adam carries it along."""
    alone = workers.call(losses, Recipe(LLAMA, tensor_parallel=1))
    overlapped = workers.call(losses, Recipe(LLAMA, overlap=OverlapConfig(method=method)))
    assert overlapped[0] == overlapped[1], "both ranks see the same loss"
    assert overlapped[0][-1] < overlapped[0][0], "it learns"
    torch.testing.assert_close(torch.tensor(overlapped[0]), torch.tensor(alone[0]), rtol=2e-6, atol=0)


def norm_gradients(recipe: Recipe) -> dict[str, torch.Tensor]:
    _, grads = gradients(recipe)
    return {name: grad for name, grad in grads.items() if "norm" in name or name.endswith("proj.bias")}


def test_partial_gradients_of_norms_and_row_biases_are_summed(workers: Workers) -> None:
    """Each rank sees its own rows only; without the `sequence_parallel` mark these gradients would be half sums."""
    recipe = Recipe({**GPT2, "qk_layernorm": True}, overlap=OverlapConfig())
    alone = workers.call(norm_gradients, replace(recipe, tensor_parallel=1, overlap=None))[0]
    shared = workers.call(norm_gradients, recipe)
    assert len(alone) == 2 * (2 + 2 + 2 + 2 + 1) + 2, (
        "two layers: 2 norms and q, k norms, weights and biases; row biases"
    )
    for ranks in shared:
        for name, gradient in alone.items():
            torch.testing.assert_close(ranks[name], gradient, rtol=1e-4, atol=1e-7, msg=lambda t, n=name: f"{n}: {t}")


@on_ranks
def test_evaluation_between_steps() -> None:
    """Evaluation falls back and must not disturb what training has saved or marked."""
    recipe = Recipe(LLAMA, overlap=OverlapConfig())
    _, model = train(recipe, steps=1)
    model.eval()
    tokens = torch.zeros(2, 16, dtype=torch.long)
    with torch.no_grad():
        logits = model(tokens, torch.arange(16).expand(2, -1), None)
    group = layout.use()
    full = gather_from_tensor_model_parallel_region(logits, group=group)
    assert full.shape == (2, 16, 48)
    assert full.isfinite().all()
    assert all(dict(linear.fallback_calls) == {"evaluation mode": 1} for linear in report(model).linears)


def partly_frozen(recipe: Recipe) -> dict[str, torch.Tensor]:
    """Parameter-efficient tuning: all weights of the first layer frozen before DDP."""
    model = gpt(recipe)
    model.decoder.layers[0].requires_grad_(False)
    model = wrap(recipe, model)
    model.zero_grad_buffer()
    forward_backward(recipe, model, batches())
    if recipe.overlap is not None:
        frozen = {x.name for x in report(model).linears if x.reason == "frozen weight" and x.overlapped_calls == 0}
        assert frozen == {x.name for x in report(model).linears if "layers.0" in x.name}
    return {name: p.main_grad.clone() for name, p in model.module.named_parameters() if p.requires_grad}


def test_frozen_layers(workers: Workers) -> None:
    recipe = Recipe(LLAMA)
    expected = workers.call(partly_frozen, recipe)[0]
    actual = workers.call(partly_frozen, replace(recipe, overlap=OverlapConfig()))[0]
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-6, msg=lambda t, n=name: f"{n}: {t}")


def tied_by_hand(overlap: OverlapConfig | None, fusion: bool) -> dict[str, torch.Tensor]:
    """A weight that two modules have, without Megatron's knowing."""
    recipe = Recipe({**LLAMA, "gradient_accumulation_fusion": fusion}, overlap_grad_reduce=True)
    model = gpt(recipe)
    model.output_layer.weight = model.embedding.word_embeddings.weight
    if overlap is not None:
        quietly_enable(model, overlap)
    wrapped = wrap(recipe, model)
    wrapped.zero_grad_buffer()
    forward_backward(recipe, wrapped, batches())
    return {name: p.main_grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("fusion", [False, True], ids=["unfused", "fused"])
def test_a_weight_that_two_modules_share_gets_both_gradients(workers: Workers, fusion: bool) -> None:
    expected = workers.call(tied_by_hand, None, False)[0]
    actual = workers.call(tied_by_hand, OverlapConfig(), fusion)[0]
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-4, atol=1e-6, msg=lambda t, n=name: f"{n}: {t}")
