"""The recipe's yardstick, against counts made by hand."""

from __future__ import annotations

from math import log

import numpy as np
import pytest

from gpt.bigram import ADD_K, Bigram
from gpt.tokenizer import BYTES, EOD, ByteTokenizer, padded_vocab_size


def tokens(text: bytes) -> np.ndarray:
    return np.append(np.frombuffer(text, dtype=np.uint8).astype(np.uint16), np.uint16(EOD))


def probability(count: int, total: int) -> float:
    return (count + ADD_K) / (total + BYTES * ADD_K)


@pytest.mark.parametrize(
    ("before", "byte", "count", "total"),
    [
        (ord("a"), ord("b"), 2, 3),  # "ab", "ab", and "aa"
        (ord("a"), ord("a"), 1, 3),
        (ord("b"), ord("a"), 1, 1),  # the b at the end has no byte behind it
        (ord("c"), ord("a"), 0, 0),
        (EOD, ord("a"), 1, 2),  # two documents, one begins with a
        (EOD, ord("z"), 1, 2),
    ],
)
def test_a_probability_is_the_smoothed_share(before: int, byte: int, count: int, total: int):
    bigram = Bigram([tokens(b"abaab"), tokens(b"z")])
    nats = bigram.nats(np.array([before]), np.array([byte]))
    assert nats == pytest.approx(-log(probability(count, total)), rel=1e-12)


def test_probabilities_behind_a_byte_sum_to_one():
    bigram = Bigram([tokens(b"the cat and the hat")])
    for before in (ord("t"), ord("q"), EOD):
        one_each = [np.exp(-bigram.nats(np.array([before]), np.array([byte]))) for byte in range(BYTES)]
        assert sum(one_each) == pytest.approx(1.0, rel=1e-12)


def test_documents_do_not_reach_into_each_other():
    apart = Bigram([tokens(b"xy"), tokens(b"yx")])
    assert apart.nats(np.array([ord("y")]), np.array([ord("y")])) == pytest.approx(-log(probability(0, 1)))


def test_nats_add_up_over_any_shape():
    bigram = Bigram([tokens(b"abaab")])
    before, after = np.array([[97, 98], [97, EOD]]), np.array([[98, 97], [97, 97]])
    single = [bigram.nats(a, b) for a, b in zip(before.flat, after.flat, strict=True)]
    assert bigram.nats(before, after) == pytest.approx(sum(single))


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 6, 8])
def test_the_embedding_holds_every_token_and_divides_over_the_ranks(tp: int):
    rows = padded_vocab_size(tp)
    assert rows >= ByteTokenizer.vocab_size
    assert rows % tp == 0


def test_the_embedding_does_not_depend_on_the_usual_tensor_parallel_sizes():
    assert len({padded_vocab_size(tp) for tp in (1, 2, 4, 8)}) == 1
