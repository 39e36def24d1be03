"""Bytes as tokens: 0 to 255 are the bytes themselves, 256 ends a document, 257 fills up the last sample."""

from __future__ import annotations

import math
from typing import ClassVar

BYTES = 256
EOD = 256
PAD = 257


class ByteTokenizer:
    """The part of Megatron's tokenizer interface that GPTDataset reads."""

    vocab_size = PAD + 1
    eod = EOD
    pad = PAD
    unique_identifiers: ClassVar[dict[str, str]] = {"class": "ByteTokenizer"}


def padded_vocab_size(tp: int, vocab_size: int = 0) -> int:
    """Rows of the embedding: the vocabulary (0: of this tokenizer) rounded up to a multiple of 64 and of `tp`."""
    step = math.lcm(64, tp)
    return -(-(vocab_size or ByteTokenizer.vocab_size) // step) * step
