"""The yardstick: a byte-bigram model with add-k smoothing, p(b | a) = (count(a, b) + k) / (count(a) + 256 k)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from gpt.tokenizer import BYTES, EOD

ADD_K = 0.1


class Bigram:
    """log p of a byte after the byte before it; the first byte of a document comes after EOD. Natural logarithms."""

    def __init__(self, documents: Iterable[np.ndarray]) -> None:
        """Count pairs in `documents`, each an integer array of byte values that may end in EOD."""
        counts = np.zeros((EOD + 1) * BYTES, dtype=np.int64)
        for document in documents:
            tokens = np.concatenate([[EOD], document[document < BYTES].astype(np.int64)])
            counts += np.bincount(tokens[:-1] * BYTES + tokens[1:], minlength=counts.size)
        smoothed = counts.reshape(EOD + 1, BYTES) + ADD_K
        self._log_p = np.log(smoothed) - np.log(smoothed.sum(axis=1, keepdims=True))

    def nats(self, tokens: np.ndarray, labels: np.ndarray) -> float:
        """-Σ log p(label | token) over equally shaped integer arrays; tokens 0..256, labels 0..255."""
        return -float(self._log_p[tokens, labels].sum())
