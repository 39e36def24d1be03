"""Models of Megatron's TransformerEngine spec (over a stand-in) train the same with overlap and without, over Ulysses, and with
experts by each of Megatron's schedules."""

from __future__ import annotations

import pytest

from tests.megatron import te_stand_in
from tests.processes import failed_checks, run_ranks, values

DENSE = (
    "training_with_overlap_is_training_without",
    "fp8_with_one_scale_a_tensor_is_ours_and_other_recipes_are_transformer_engines",
    "fp8_with_scales_of_blocks_is_ours_where_blocks_fit",
    "delayed_scales_are_transformer_engines",
    "delayed_scales_of_layers_that_are_recomputed_are_those_of_the_first_time",
    "a_step_of_delayed_scaling_makes_each_weight_in_fp8_once",
    "a_weight_that_is_kept_in_fp8_is_multiplied_as_it_is",
    "a_step_makes_each_weight_in_fp8_once",
    "transformer_engine_makes_its_own_copies_anew_after_overlapped_calls",
    "evaluation_overlaps_and_a_second_enable_changes_nothing",
    "the_norms_output_comes_with_the_product_where_lora_asks_for_it",
    "the_weight_gradient_goes_into_main_grad_only_where_transformer_engine_adds_there_too",
    "calls_that_fall_back_do_as_overlapped_ones",
    "what_cannot_overlap_stays_transformer_engines",
    "ulysses_trains_as_one_rank_and_everything_keeps_its_name",
    "rows_between_documents_are_zeros_whatever_the_core_attention_leaves_there",
    "other_layers_are_left_to_their_core_attention",
)
EXPERTS = (
    "mixtral_trains_by_all_schedules",
    "qwen3_trains_by_all_schedules",
    "deepseek_trains_by_all_schedules",
    "experts_overlap_as_sequential_and_as_grouped_linears",
    "experts_in_transformer_engines_fp8_are_as_in_ours",
    "shared_experts_that_hide_the_exchange_of_others_stay_megatrons",
)


@pytest.fixture(scope="module")
def failures() -> list[dict[str, str]]:
    """Check -> its traceback, of those that failed in each of two fresh processes: TE must be there before Megatron is."""
    return values(run_ranks(2, everything, limit_s=250.0))


@pytest.mark.parametrize("name", DENSE + EXPERTS)
def test_models_of_transformer_engine(failures: list[dict[str, str]], name: str):
    for failed in failures:
        assert failed.get(name) is None, failed[name]


def everything(rank: int, world: int) -> dict[str, str]:
    te_stand_in.install()
    from tests.megatron import expert_models, te_models

    checks = {name: getattr(te_models, name) for name in DENSE}
    return failed_checks(checks | {name: getattr(expert_models, name) for name in EXPERTS})
