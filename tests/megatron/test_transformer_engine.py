"""Models of Megatron's TransformerEngine spec (over a stand-in) train the same with overlap and without, and over Ulysses."""

from __future__ import annotations

from typing import Any

import pytest

from tests.megatron import te_stand_in
from tests.processes import run_ranks, values

ARCHITECTURES = ("rms", "zero-centered", "qkv-bias")


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What `everything` found in each of two fresh processes: TransformerEngine must be there before Megatron is."""
    return values(run_ranks(2, everything, limit_s=250.0))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_training_with_overlap_is_training_without(ranks: list[dict[str, Any]], architecture: str):
    for facts in (rank[architecture] for rank in ranks):
        assert facts["overlapped"] == pytest.approx(facts["own"], rel=1e-5)
        assert facts["keys"] and facts["sharded keys"] and facts["parameters"]
        assert facts["methods"] == {"chunked"}
        assert facts["calls"] == {"overlapped 6"}
        assert facts["norm calls"] == 2 * 2 * 6  # layers, norms, microbatches of three steps
        assert facts["gradients"] < 1e-5


def test_a_second_enable_changes_nothing_and_evaluation_is_transformer_engines(ranks: list[dict[str, Any]]):
    for facts in (rank["evaluate"] for rank in ranks):
        assert facts["calls"] == {"overlapped 1, evaluation mode 1"}
        assert facts["same output"]


def test_the_weight_gradient_goes_into_main_grad_only_where_transformer_engine_adds_there_too(
    ranks: list[dict[str, Any]],
):
    for facts in (rank["main_grad"] for rank in ranks):
        assert facts == {"unfused": (False, True), "fused": (True, False), "same": True}


def test_calls_that_fall_back_do_as_overlapped_ones(ranks: list[dict[str, Any]]):
    for facts in (rank["mixed"] for rank in ranks):
        assert facts == {
            (False, "accumulate", "float32"): pytest.approx(0, abs=1e-6),
            (True, "accumulate", "float32"): pytest.approx(0, abs=1e-6),
            (True, "accumulate", "bfloat16"): pytest.approx(0, abs=2**-7),
            (True, "off", "float32"): pytest.approx(0, abs=1e-6),
        }


def test_what_cannot_overlap_stays_transformer_engines(ranks: list[dict[str, Any]]):
    for facts in (rank["refusals"] for rank in ranks):
        assert facts["delayed"] == {"output_layer"}
        assert "use_transformer_engine_op_fuser=True" in facts["fuser"]
        assert "TEFusedMLPWithGroupedLinear in the model" in facts["fused by its spec"]


def test_training_is_that_of_one_rank(ranks: list[dict[str, Any]]):
    for facts in ranks:
        assert facts["losses"] == pytest.approx(facts["alone"], rel=2e-6)
        assert facts["losses"][-1] < facts["losses"][0]


def test_qkv_and_projection_exchange_and_everything_keeps_its_name(ranks: list[dict[str, Any]]):
    for facts in ranks:
        assert facts["rows"]["qkv"] == ("GEMM + A2A (CP 2)", "chunked", "overlapped 6")
        assert facts["rows"]["proj"] == ("A2A(x) + GEMM (CP 2)", "chunked", "overlapped 6")
        assert facts["keys"] and facts["parameters"] and facts["classes"]


def test_norms_of_query_and_key_are_within_the_exchanges_pass(ranks: list[dict[str, Any]]):
    for facts in ranks:
        assert facts["normed losses"] == pytest.approx(facts["normed alone"], rel=2e-6)
        assert facts["norms"] == [("RMSNorm", True)] * 2, "zero-centered weights"


def test_rows_between_documents_are_zeros_whatever_the_core_attention_leaves_there(ranks: list[dict[str, Any]]):
    for facts in ranks:
        assert facts["padding"] == (True, True), "results of documents, all others zero; no gradient is NaN"


def test_other_layers_are_left_to_their_core_attention(ranks: list[dict[str, Any]]):
    if "p2p layer" not in ranks[0]:
        pytest.skip("Megatron-Core 0.16 looks one layer too far in a list of cp_comm_type")
    for facts in ranks:
        assert "context parallelism: cp_comm_type='p2p' is left to the core attention" in facts["p2p layer"]
        assert facts["a2a layer"] == "not called yet"
        assert facts["core attentions"] == (True, False)


def test_what_ulysses_cannot_do_where_transformer_engine_would_have_to_do_is_refused(ranks: list[dict[str, Any]]):
    for facts in ranks:
        assert "attention_output_gate=True" in facts["gate"]
        assert "tensor_model_parallel_size=1" in facts["ring"] and "--cp-comm-type a2a" in facts["ring"]
        assert facts["left alone"] == "SelfAttention"


def test_calls_of_a_ulysses_attention_that_fall_back_add_to_the_same_gradient(ranks: list[dict[str, Any]]):
    for facts in ranks:
        assert facts["two kinds of call"] == {
            (False, "accumulate", "float32"): pytest.approx(0, abs=1e-6),
            (True, "accumulate", "float32"): pytest.approx(0, abs=1e-6),
            (True, "accumulate", "bfloat16"): pytest.approx(0, abs=2**-7),
            (True, "off", "float32"): pytest.approx(0, abs=1e-6),
        }


def everything(rank: int, world: int) -> dict[str, Any]:
    te_stand_in.install()
    from tests.megatron import te_models

    return te_models.everything()
