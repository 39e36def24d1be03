"""Whole models: the overlapped linears give the losses and gradients that Megatron's own give, step after step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

from overlap_train import OverlapConfig, blockwise
from overlap_train.integrations.megatron import report
from tests.megatron import layout, models
from tests.megatron.linears import OFFLOADED
from tests.megatron.models import (
    FULL_RECOMPUTE,
    GPT2,
    LLAMA,
    Recipe,
    assert_in_fp8,
    gpt,
    gradients,
    quietly_enable,
    three_steps,
    train,
    wrap,
)
from tests.megatron.workers import on_ranks

SELECTIVE_RECOMPUTE = dict(recompute_granularity="selective")

RECIPES = {
    "llama, grouped queries": Recipe(LLAMA),
    "gpt2, biases, learned positions": Recipe(GPT2, positions="learned_absolute"),
    "tied embeddings": Recipe(LLAMA, tied=True),
    "query and key norms": Recipe({**LLAMA, "qk_layernorm": True}),
    "no sequence parallelism": Recipe({**LLAMA, "sequence_parallel": False}),
    "no sequence parallelism, biases, recomputation": Recipe(
        {**GPT2, **FULL_RECOMPUTE, "sequence_parallel": False}, positions="learned_absolute", overlap_grad_reduce=True
    ),
    "full recomputation": Recipe({**LLAMA, **FULL_RECOMPUTE}),
    "selective recomputation": Recipe({**LLAMA, **SELECTIVE_RECOMPUTE}),
    "overlapped gradient reduction": Recipe(LLAMA, overlap_grad_reduce=True),
    "tied, overlapped reduction, recomputation": Recipe(
        {**LLAMA, **FULL_RECOMPUTE}, tied=True, overlap_grad_reduce=True, microbatches=3
    ),
}


def check_gradients(recipe: Recipe, overlap: OverlapConfig) -> None:
    expected_loss, expected = gradients(recipe)
    loss, actual = gradients(replace(recipe, overlap=overlap))
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert_close(actual, expected)


def assert_close(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        # fp32 sums of at most 64 terms, in another order: 64 roundings of the largest term.
        bound = 64 * torch.finfo(torch.float32).eps * gradient.abs().max().item()
        torch.testing.assert_close(actual[name], gradient, rtol=0, atol=max(bound, 1e-9), msg=lambda t, n=name: n + t)


@pytest.mark.parametrize("name", RECIPES)
@on_ranks
def test_gradients_are_those_of_megatrons_linears(name: str) -> None:
    check_gradients(RECIPES[name], OverlapConfig())


@pytest.mark.parametrize(
    "changes", [{"method": "collective"}, {"gathered_input": "keep"}, {"main_grad": "off"}], ids=str
)
@on_ranks
def test_gradients_under_other_settings(changes: dict[str, Any]) -> None:
    check_gradients(Recipe(LLAMA, overlap_grad_reduce=True), OverlapConfig(**changes))


@on_ranks
def test_ten_steps_follow_one_rank() -> None:
    """TP 2 overlapped against TP 1: fp32 rounding differs by the order of sums, and Adam carries it along."""
    alone, _ = train(Recipe(LLAMA, tensor_parallel=1), steps=10)
    for method in ("chunked", "collective"):
        losses, _ = train(Recipe(LLAMA, overlap=OverlapConfig(method=method)), steps=10)
        assert losses[-1] < losses[0], "it learns"
        assert losses == pytest.approx(alone, rel=2e-6)


@on_ranks
def test_ten_steps_in_fp8_follow_those_without() -> None:
    """Also with recomputation; the output layer stays as it is, and the table says what is in fp8."""
    config = OverlapConfig(fp8="tensorwise")
    for settings in (LLAMA, {**LLAMA, **FULL_RECOMPUTE}):
        own, _ = train(Recipe(settings, overlap=OverlapConfig()), steps=10)
        losses, model = train(Recipe(settings, overlap=config), steps=10)
        assert losses == pytest.approx(own, rel=0.02) and losses != pytest.approx(own, rel=1e-5)
        assert_in_fp8(model, "fp8 tensorwise")
        assert "not in fp8: the output layer" in {row.slot: row.reason for row in report(model).linears}["output"]


@on_ranks
def test_steps_in_fp8_with_scales_of_blocks_follow_those_without() -> None:
    """Of a model that is large enough for blocks of 128. A step makes the eight weights of its layers once."""
    of_blocks = {**LLAMA, "hidden_size": 256, "ffn_hidden_size": 256, "kv_channels": 64}
    with patch.object(models, "SEQUENCE", 128):
        own, _ = train(Recipe(of_blocks, overlap=OverlapConfig()), steps=3)
        with patch.object(blockwise, "squares", side_effect=blockwise.squares) as made:
            losses, model = train(Recipe(of_blocks, overlap=OverlapConfig(fp8="blockwise")), steps=3)
    assert losses == pytest.approx(own, rel=0.02) and losses != pytest.approx(own, rel=1e-5)
    assert_in_fp8(model, "fp8 blockwise")
    assert made.call_count == 3 * 8


@pytest.mark.parametrize("fp8", ["tensorwise", "blockwise"])
@on_ranks
def test_rows_that_fp8_does_not_take_are_refused_or_megatrons(fp8: str) -> None:
    for on_unsupported in ("error", "fallback"):
        model = gpt(Recipe(LLAMA, overlap=OverlapConfig(fp8=fp8, on_unsupported=on_unsupported)))
        text, positions = torch.zeros(1, 6, dtype=torch.long), torch.arange(6)[None]
        if on_unsupported == "error":
            with pytest.raises(ValueError, match="fp8 with 6 rows of all ranks"):
                model(text, positions, None)
            continue
        model(text, positions, None)
        reasons = {row.reason for row in report(model).linears if row.slot != "output"}
        assert all("fp8 with 6 rows" in reason for reason in reasons), reasons


@pytest.mark.parametrize(
    ("settings", "microbatches", "made"),
    [({}, 4, 8), ({}, 1, 8), (FULL_RECOMPUTE, 4, 40), (FULL_RECOMPUTE, 1, 16)],
)
@on_ranks
def test_a_step_makes_each_weight_in_fp8_once(settings: dict[str, Any], microbatches: int, made: int) -> None:
    """Of two layers with four linears. Layers that are recomputed run without gradients first, as evaluation does, and
    then make each weight once more."""
    found = []
    for keeps in (True, False):
        recipe = Recipe({**LLAMA, **settings}, overlap=OverlapConfig(fp8="tensorwise"), microbatches=microbatches)
        found.append(three_steps(recipe, wrap(recipe, gpt(recipe)), ((True, False), (False, True)), keeps=keeps))
    (results, counts), (expected, none) = found
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True)) and none == [0] * 3
    assert counts == [made] * 3, counts


@on_ranks
def test_a_step_that_falls_back_first_makes_its_weights_anew() -> None:
    recipe, found = Recipe(LLAMA, overlap=OverlapConfig(fp8="tensorwise")), []
    for keeps in (True, False):
        model = wrap(recipe, gpt(recipe))
        found.append(three_steps(recipe, model, (), falls_back=(2, 5), keeps=keeps)[0])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert {linear.calls for linear in report(model).linears} == {f"overlapped 4, {OFFLOADED} 2"}


@on_ranks
def test_partial_gradients_of_norms_and_row_biases_are_summed() -> None:
    """Each rank sees its own rows only; without the `sequence_parallel` mark these gradients would be half sums."""
    recipe = Recipe({**GPT2, "qk_layernorm": True}, overlap=OverlapConfig())
    alone, shared = (
        {name: x for name, x in gradients(one)[1].items() if "norm" in name or name.endswith("proj.bias")}
        for one in (replace(recipe, tensor_parallel=1, overlap=None), recipe)
    )
    # Two layers: two norms and those of q and k, weights and biases; row biases. The final norm.
    assert len(alone) == 2 * (2 + 2 + 2 + 2 + 1) + 2
    assert_close(shared, alone)


@on_ranks
def test_evaluation_between_steps() -> None:
    """Evaluation overlaps, without gradients, and must not disturb what training has saved or marked."""
    recipe = Recipe(LLAMA, overlap=OverlapConfig())
    _, model = train(recipe, steps=1)
    model.eval()
    tokens = torch.zeros(2, 16, dtype=torch.long)
    with torch.no_grad():
        logits = model(tokens, torch.arange(16).expand(2, -1), None)
    own = gpt(Recipe(LLAMA)).eval()
    own.load_state_dict(model.module.state_dict())
    torch.testing.assert_close(logits, own(tokens, torch.arange(16).expand(2, -1), None), rtol=1e-5, atol=1e-6)
    full = gather_from_tensor_model_parallel_region(logits, group=layout.use())
    assert full.shape == (2, 16, 48)
    assert {linear.calls for linear in report(model).linears} == {"overlapped 3"}


@on_ranks
def test_frozen_layers() -> None:
    """Parameter-efficient tuning: all weights of the first layer frozen before DDP."""
    found = []
    for overlap in (None, OverlapConfig()):
        recipe = Recipe(LLAMA, overlap=overlap)
        model = gpt(recipe)
        model.decoder.layers[0].requires_grad_(False)
        found.append(gradients(recipe, model)[1])
    assert_close(*reversed(found))
    assert {x.calls for x in report(model).linears} == {"overlapped 2"}


@on_ranks
def test_a_weight_that_two_modules_share_gets_both_gradients() -> None:
    """A weight that is tied by hand, before or after enable(), without Megatron's knowing."""
    found = []
    for enabled, fusion in (("never", False), ("first", False), ("first", True), ("last", False), ("last", True)):
        recipe = Recipe({**LLAMA, "gradient_accumulation_fusion": fusion}, overlap_grad_reduce=True)
        model = gpt(recipe)
        if enabled == "first":
            quietly_enable(model, OverlapConfig())
        model.output_layer.weight = model.embedding.word_embeddings.weight
        if enabled == "last":
            quietly_enable(model, OverlapConfig())
        found.append(gradients(recipe, model)[1])
    for each in found[1:]:
        assert_close(each, found[0])
