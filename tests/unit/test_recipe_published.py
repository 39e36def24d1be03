"""The table of models: their sizes as published, and what --model and compare_mfu's flags make of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpt.program import RecipeError
from gpt.rules import resolve
from gpt.settings import MODELS, SMALL, Settings, defaults, named_model
from mfu.flops import step_flops

# Parameters in all, in billions, as the model cards say.
PUBLISHED = {"llama3-8b": 8.03, "llama3-70b": 70.6, "qwen3-32b": 32.8, "mixtral-8x7b": 46.7}


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_published_model_has_as_many_parameters_as_published(model: str) -> None:
    assert defaults(True, model).parameters / 1e9 == pytest.approx(PUBLISHED[model], rel=2e-3)


@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("model", PUBLISHED)
def test_a_published_model_obeys_the_rules(model: str, tp: int) -> None:
    settings = resolve(defaults(True, model), tp)
    assert settings.tp == tp
    assert settings == replace(defaults(True, model), tp=tp)


def test_the_small_model_is_the_default() -> None:
    assert Settings().model == SMALL
    assert named_model(["--train-iters", "3"]) == SMALL
    assert Settings(tp=2).vocabulary_rows == 256


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("model", MODELS)
def test_the_embedding_holds_the_vocabulary_and_divides_over_the_ranks(model: str, tp: int) -> None:
    settings = replace(defaults(True, model), tp=tp)
    assert settings.vocabulary_rows >= settings.vocab_size
    assert settings.vocabulary_rows % tp == 0


@pytest.mark.parametrize("arguments", [["--model", "llama3-70b", "--tp", "4"], ["--tp", "4", "--model=llama3-70b"]])
def test_the_model_is_found_among_other_flags(arguments: list[str]) -> None:
    assert defaults(True, named_model(arguments)).num_layers == 80


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RecipeError, match=r"--model gpt5 is not one of small, llama3-8b"):
        defaults(True, "gpt5")
    with pytest.raises(RecipeError, match=r"--model gpt5 is not one of small, llama3-8b"):
        resolve(replace(Settings(), model="gpt5"), 2)


def test_an_unknown_kind_of_recomputation_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"--recompute half is not one of none, selective, full"):
        resolve(replace(Settings(), recompute="half"), 2)


# What Megatron-LM's num_floating_point_operations (megatron/training of core 0.19.2) returned for 3 samples of 8192 tokens.
MEGATRONS = {
    "llama3-8b": 1264936588148736,
    "llama3-70b": 11040093175283712,
    "qwen3-32b": 5349482698899456,
    "mixtral-8x7b": 2038030701428736,
}


@pytest.mark.parametrize("model", MEGATRONS)
def test_flops_are_counted_as_megatron_counts_them(model: str) -> None:
    settings = replace(defaults(True, model), seq_length=8192, global_batch_size=3, tp=4)
    assert step_flops(settings) == MEGATRONS[model]
