"""The recipe's yardstick, against counts made by hand."""

from __future__ import annotations

from math import log

import numpy as np
import pytest

from gpt.corpus import ADD_K, BYTES, Bigram


def text(words: bytes) -> np.ndarray:
    return np.frombuffer(words, dtype=np.uint8)


def probability(count: int, total: int) -> float:
    return (count + ADD_K) / (total + BYTES * ADD_K)


@pytest.mark.parametrize(
    ("pair", "count", "total"),
    [
        (b"ab", 2, 3),  # of "abaab": "ab" twice, "aa" once
        (b"aa", 1, 3),
        (b"ba", 1, 1),  # the b at the end has no byte after it
        (b"ca", 0, 0),
    ],
)
def test_a_probability_is_the_smoothed_share(pair: bytes, count: int, total: int):
    nats = Bigram(text(b"abaab")).nats(text(pair))
    assert nats == pytest.approx(-log(probability(count, total)), rel=1e-12)


@pytest.mark.parametrize("before", b"tq")
def test_probabilities_after_a_byte_sum_to_one(before: int):
    bigram = Bigram(text(b"the cat and the hat"))
    one_each = [np.exp(-bigram.nats(text(bytes([before, byte])))) for byte in range(BYTES)]
    assert sum(one_each) == pytest.approx(1.0, rel=1e-12)


def test_nats_add_up_over_a_text():
    bigram = Bigram(text(b"abaab"))
    assert bigram.nats(text(b"abca")) == pytest.approx(sum(bigram.nats(text(pair)) for pair in (b"ab", b"bc", b"ca")))
