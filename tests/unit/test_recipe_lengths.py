"""Lengths of micro-batches with --variable-seq-length 1: which there are, and that a draw depends on seed and number only."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from gpt.data import MOST_LENGTHS, blank, length_of, lengths
from gpt.settings import Settings

SEVERAL = replace(Settings(), variable_seq_length=1, tp=2)


@pytest.mark.parametrize(("seq_length", "tp"), [(128, 2), (4096, 8), (96, 8), (24, 8), (8, 8), (6, 2), (1, 1)])
def test_lengths_are_multiples_of_tp_from_half_to_all(seq_length: int, tp: int) -> None:
    found = lengths(replace(SEVERAL, seq_length=seq_length, tp=tp))
    assert found[0] == seq_length and found == sorted(set(found), reverse=True)
    assert len(found) <= MOST_LENGTHS and all(length % tp == 0 for length in found)
    assert seq_length <= 2 * found[-1] < seq_length + 2 * tp


def test_each_length_is_drawn_about_as_often_as_the_others() -> None:
    counts = Counter(length_of(SEVERAL, number) for number in range(9000))
    assert set(counts) == set(lengths(SEVERAL))
    assert all(850 < count < 1150 for count in counts.values())  # five standard deviations


def test_a_draw_depends_on_seed_and_number() -> None:
    first = [length_of(SEVERAL, number) for number in range(50)]
    assert first == [length_of(replace(SEVERAL, global_batch_size=64, lr=1.0), number) for number in range(50)]
    assert first != [length_of(replace(SEVERAL, seed=1), number) for number in range(50)]
    assert len(set(first)) > 1


def test_without_the_setting_every_length_is_the_full_one() -> None:
    assert {length_of(replace(SEVERAL, variable_seq_length=0), number) for number in range(50)} == {128}


def test_a_blank_batch_has_what_a_batch_has() -> None:
    batch = blank(Settings(micro_batch_size=3), 8, torch.device("cpu"))
    assert batch.keys() == {"tokens", "labels", "loss_mask", "position_ids"}
    assert float(batch["loss_mask"].sum()) == 24.0
    assert {tuple(value.shape) for value in batch.values()} == {(3, 8)}
    assert batch["position_ids"][2].tolist() == list(range(8))
