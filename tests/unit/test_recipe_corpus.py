"""The recipe's text: nothing is lost or shared between the two parts, and what cannot be used is refused."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from gpt.corpus import BLOCK_BYTES, VALIDATION_EVERY, cut_blocks, read_corpus, split
from gpt.errors import RecipeError


def lines(length: int, longest: int) -> bytes:
    generator = random.Random(0)
    text = b""
    while len(text) < length:
        text += bytes(generator.randrange(97, 123) for _ in range(generator.randrange(longest))) + b"\n"
    return text[:length]


@pytest.mark.parametrize("longest", [2, 80, 700, 5000])
def test_blocks_join_to_the_text_and_end_with_a_line_where_one_ends_in_time(longest: int):
    text = lines(40_000, longest)
    blocks = cut_blocks(text)
    assert b"".join(blocks) == text
    for block in blocks[:-1]:
        assert block[-1:] == b"\n" or (len(block) == BLOCK_BYTES and b"\n" not in block[BLOCK_BYTES // 2 :])


def test_the_parts_are_the_text_every_twentieth_block_held_out():
    text = lines(100_000, 60)
    blocks = cut_blocks(text)
    corpus = split("text", text)
    assert list(corpus.valid) == [
        block for i, block in enumerate(blocks) if i % VALIDATION_EVERY == VALIDATION_EVERY // 2
    ]
    interleaved = [piece for pair in zip(corpus.train, corpus.valid, strict=False) for piece in pair]
    assert b"".join([*interleaved, *corpus.train[len(corpus.valid) :]]) == text


def test_a_text_that_ends_with_a_held_out_block_has_no_empty_document():
    blocks = VALIDATION_EVERY // 2 + 1 + VALIDATION_EVERY
    corpus = split("text", b"x" * (BLOCK_BYTES * blocks))
    assert all(corpus.train)
    assert len(corpus.train) == len(corpus.valid) == 2


def test_the_default_corpus_does_not_repeat_paragraphs():
    corpus = read_corpus("")
    text = b"".join(corpus.train)
    assert 300_000 < len(text) < 500_000
    for document in corpus.valid:
        inner = document.decode().split("\n\n")[1:-1]
        assert not [paragraph for paragraph in inner if f"\n\n{paragraph}\n\n".encode() in text]


def test_a_file_is_read_as_it_is(tmp_path: Path):
    content = bytes(range(256)) * 200
    (tmp_path / "bytes").write_bytes(content)
    corpus = read_corpus(str(tmp_path / "bytes"))
    assert sum(map(len, corpus.train + corpus.valid)) == len(content)


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot be read"), (b"", "is empty"), (b" \n\t\n", "is empty"), (b"short", "5 bytes are too short")],
)
def test_a_text_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, content: bytes | None, words: str):
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RecipeError, match=words) as refusal:
        read_corpus(str(path))
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_folder_is_refused(tmp_path: Path):
    with pytest.raises(RecipeError, match="cannot be read"):
        read_corpus(str(tmp_path))
