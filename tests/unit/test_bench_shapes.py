"""The benchmark's shapes: sizes per rank, passes and the arguments that choose them."""

from __future__ import annotations

import pytest

from overlap_train.bench.shapes import DEFAULT_LAYERS, LAYERS, OPS, PASSES, TABLES_1_2, Case, cases, layer_cases


def test_the_default_models_give_the_ten_shapes_of_the_measurements() -> None:
    found = {(case.op, case.n, case.k) for case in cases(list(TABLES_1_2), list(OPS), ["fprop"], [8192], 4)}
    gathers = {(11008, 4096), (14336, 4096), (28672, 8192), (53248, 16384), (29568, 8192)}
    assert found == {("ag_gemm", n, k) for n, k in gathers} | {("gemm_rs", k, n) for n, k in gathers}


def test_dgrad_runs_the_other_operators_engine() -> None:
    kinds = {(op, pass_): Case("", op, pass_, 8, 8, 8).kind for op in OPS for pass_ in PASSES}
    assert kinds == {
        ("ag_gemm", "fprop"): "gather",
        ("ag_gemm", "dgrad"): "scatter",
        ("ag_gemm", "wgrad"): "weight",
        ("gemm_rs", "fprop"): "scatter",
        ("gemm_rs", "dgrad"): "gather",
        ("gemm_rs", "wgrad"): "weight",
    }


def test_the_largest_m_comes_first() -> None:
    assert [case.m for case in cases(["llama3-8b"], ["ag_gemm"], ["fprop"], [256, 32768, 8192], 4)] == [
        32768,
        8192,
        256,
    ]


def test_flops_are_one_ranks_share() -> None:
    assert Case("", "ag_gemm", "fprop", 8192, 14336, 4096).flops(4) == 2 * 8192 * 3584 * 4096


@pytest.mark.parametrize(
    ("models", "m", "message"),
    [(["llama9"], 8192, "llama9.* is not one of"), (["llama3-8b"], 8190, "8190 must be divisible by the 4 ranks")],
)
def test_what_cannot_be_measured_is_refused(models: list[str], m: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cases(models, list(OPS), ["fprop"], [m], 4)


def test_the_layers_of_the_goals_are_the_default() -> None:
    assert [(layer.name, sequence) for layer, sequence in layer_cases([], [], 4)] == list(DEFAULT_LAYERS)


def test_layers_and_sequences_are_combined() -> None:
    found = layer_cases(["llama3-8b-mlp", "qwen3-32b-mlp"], [4096, 8192], 4)
    assert [(layer.name, sequence) for layer, sequence in found] == [
        ("llama3-8b-mlp", 4096), ("llama3-8b-mlp", 8192), ("qwen3-32b-mlp", 4096), ("qwen3-32b-mlp", 8192),
    ]  # fmt: skip


def test_a_layer_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"llama3-8b-moe.* is not one of"):
        layer_cases(["llama3-8b-moe"], [], 4)


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
