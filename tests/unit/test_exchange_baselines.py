"""The rivals of Ulysses' projections do no work that a model which uses them would not do."""

from __future__ import annotations

import torch

from overlap_train.tools.bench.exchange_baselines import ThreeWeights


def test_weights_are_cut_once_and_into_each_ranks_columns() -> None:
    """Cut in every call, the copies of the whole weight would be timed with the rival."""
    right = torch.arange(2.0 * 24).view(24, 2).t()  # [K, F], two ranks with 8 columns of q, 2 of k and 2 of v each
    weights = ThreeWeights(2)
    q, k, v = weights.of(right)
    assert q[0].tolist() == [2.0 * n for n in (*range(8), *range(12, 20))]
    assert k[0].tolist() == [2.0 * n for n in (8, 9, 20, 21)] and v[1].tolist() == [
        2.0 * n + 1 for n in (10, 11, 22, 23)
    ]
    assert all(again is part for again, part in zip(weights.of(right), (q, k, v), strict=True))
