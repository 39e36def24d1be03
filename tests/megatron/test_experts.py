"""Models with experts train the same with overlap and without, by each of Megatron's schedules, over a stand-in for
TransformerEngine."""

from __future__ import annotations

import pytest

from tests.megatron import te_stand_in
from tests.processes import failed_checks, run_ranks, values

NAMES = (
    "mixtral_trains_by_all_schedules",
    "qwen3_trains_by_all_schedules",
    "deepseek_trains_by_all_schedules",
    "shared_experts_that_hide_the_exchange_of_others_stay_megatrons",
)


@pytest.fixture(scope="module")
def failures() -> list[dict[str, str]]:
    """Check -> its traceback, of those that failed in each of two fresh processes: TE must be there before Megatron is."""
    return values(run_ranks(2, everything, limit_s=250.0))


@pytest.mark.parametrize("name", NAMES)
def test_models_with_experts(failures: list[dict[str, str]], name: str):
    for failed in failures:
        assert failed.get(name) is None, failed[name]


def everything(rank: int, world: int) -> dict[str, str]:
    te_stand_in.install()
    from tests.megatron import expert_models

    return failed_checks({name: getattr(expert_models, name) for name in NAMES})
