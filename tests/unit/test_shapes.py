"""The benchmark's shapes: sizes per rank, passes and the arguments that choose them."""

from __future__ import annotations

import pytest

from overlap_train.tools.measure.cases import OPS, PASSES, Case
from overlap_train.tools.measure.models import MODELS
from overlap_train.tools.measure.shapes import DEFAULT_LAYERS, LAYERS, TABLES_1_2, cases, layer_cases, weight_of


def test_the_default_models_give_the_ten_shapes_of_the_measurements() -> None:
    found = {(case.op, case.n, case.k) for case in cases(list(TABLES_1_2), list(OPS), ["fprop"], [8192], 4)}
    gathers = {(11008, 4096), (14336, 4096), (28672, 8192), (53248, 16384), (29568, 8192)}
    assert found == {("ag_gemm", n, k) for n, k in gathers} | {("gemm_rs", k, n) for n, k in gathers}


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("llama3-8b-qkv", (6144, 4096)), ("llama3-8b-proj", (4096, 4096)), ("llama3-70b-qkv", (10240, 8192)),
        ("qwen3-32b-proj", (8192, 5120)), ("gpt3-175b", (49152, 12288)), ("qwen3-32b", (25600, 5120)),
    ],
)  # fmt: skip
def test_weights_have_their_published_sizes(name: str, weight: tuple[int, int]) -> None:
    assert weight_of(name) == weight


def test_gated_mlps_have_two_products_in_fc1_and_others_one() -> None:
    assert MODELS["llama3-8b"].linears["fc1"] == (2 * 14336, 4096)
    assert MODELS["gpt3-175b"].linears["fc1"] == (49152, 12288)
    assert MODELS["llama3-405b"].linears["qkv"] == (18432, 16384)


def test_dgrad_runs_the_other_operators_engine() -> None:
    kinds = {(op, pass_): Case("", op, pass_, 8, 8, 8).kind for op in OPS for pass_ in PASSES}
    assert kinds == {
        ("ag_gemm", "fprop"): "gather",
        ("ag_gemm", "dgrad"): "scatter",
        ("gemm_rs", "fprop"): "scatter",
        ("gemm_rs", "dgrad"): "gather",
    }


def test_the_largest_m_comes_first() -> None:
    assert [case.m for case in cases(["llama3-8b"], ["ag_gemm"], ["fprop"], [256, 32768, 8192], 4)] == [
        32768,
        8192,
        256,
    ]


def test_flops_are_one_ranks_share() -> None:
    assert Case("", "ag_gemm", "fprop", 8192, 14336, 4096).flops(4) == 2 * 8192 * 3584 * 4096


def test_rows_that_cannot_be_sharded_are_refused() -> None:
    with pytest.raises(ValueError, match="8190 must be divisible by the 4 ranks"):
        cases(["llama3-8b"], list(OPS), ["fprop"], [8190], 4)


def test_the_layers_of_the_goals_are_the_default() -> None:
    assert [(layer.name, sequence) for layer, sequence in layer_cases([], [], 4)] == list(DEFAULT_LAYERS)


def test_layers_and_sequences_are_combined() -> None:
    found = layer_cases(["llama3-8b-mlp", "qwen3-32b-mlp"], [4096, 8192], 4)
    assert [(layer.name, sequence) for layer, sequence in found] == [
        ("llama3-8b-mlp", 4096), ("llama3-8b-mlp", 8192), ("qwen3-32b-mlp", 4096), ("qwen3-32b-mlp", 8192),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("layer", "sequence", "ms"),
    [
        ("llama3-8b-mlp", 8192, 2.98),
        ("llama3-70b-mlp", 8192, 13.06),
        ("llama3-8b-mlp", 4096, 1.54),
        ("llama3-8b-attn", 8192, 0.76),
        ("llama3-70b-attn", 8192, 2.60),
    ],
)
def test_the_six_gemms_fit_the_times_in_measurements_md(layer: str, sequence: int, ms: float) -> None:
    """At 650 to 750 TFLOP/s: gated MLPs have both of their first products, attention its q, k and v."""
    assert 650e12 < LAYERS[layer].flops(sequence, 4) / (ms * 1e-3) < 750e12
