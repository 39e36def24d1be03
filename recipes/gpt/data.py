"""Real text as bytes, its samples and micro-batches, and a byte-bigram model as the yardstick.

Which bytes a rank reads at which step follows from the step's number, so a resumed run reads on where it was. Megatron's
GPTDataset is not used: it needs index files on a disk that all nodes share.
"""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from megatron.core import parallel_state

from gpt.program import RecipeError
from gpt.settings import Settings

Batch = dict[str, torch.Tensor]
BYTES = 256
BLOCK = 1024
VALIDATION_EVERY = 20  # of this many blocks one is held out
ADD_K = 0.1


def read_samples(settings: Settings, is_held_out: bool) -> np.ndarray:
    """uint8 [samples, seq_length + 1], each with the byte after it: of the file --text, or of the topics of Python's help().

    Every twentieth KiB is held out for validation, so that this part is like the training part. Raises RecipeError where the file
    cannot be read, or is too short for one sample.
    """
    name, length = f"--text {settings.text}" if settings.text else "pydoc_data.topics", settings.seq_length
    try:
        content = Path(settings.text).read_bytes() if settings.text else _help_topics()
    except OSError as error:
        raise RecipeError(f"{name} cannot be read: {error.strerror or error}") from error
    text = np.frombuffer(content, dtype=np.uint8)
    part = text[(np.arange(len(text)) // BLOCK % VALIDATION_EVERY == VALIDATION_EVERY // 2) == is_held_out]
    if len(part) <= length:
        raise RecipeError(
            f"--seq-length {length}: the {'validation' if is_held_out else 'training'} part of {name} has only {len(part)} "
            "bytes; give a longer text or a shorter --seq-length"
        )
    return np.lib.stride_tricks.sliding_window_view(part, length + 1)[::length]


def _help_topics() -> bytes:
    """The topics quote each other. A paragraph is taken once, lest validation repeat training."""
    paragraphs = "\n\n".join(pydoc_data.topics.topics.values()).split("\n\n")
    return "\n\n".join(dict.fromkeys(paragraphs)).encode()


def batches(
    samples: np.ndarray, first: int, settings: Settings, device: torch.device, is_trained: bool
) -> Iterator[Batch]:
    """This rank's micro-batches from sample `first` on, without end; each is tokens, labels, position_ids (int64) and loss_mask
    (fp32), all [micro_batch_size, seq_length / cp].

    Data-parallel ranks take micro-batches in turn. Training shuffles the samples of each epoch. For validation they come once, in
    the order of the text, and those after the last one do not count.
    """
    rows, shape = settings.micro_batch_size, (settings.micro_batch_size, settings.seq_length)
    start = first + rows * parallel_state.get_data_parallel_rank()
    while True:
        epochs, places = np.divmod(np.arange(start, start + rows), len(samples))
        if is_trained:
            numbers = zip(epochs.tolist(), places.tolist(), strict=True)
            places = np.array([_order(settings.seed, epoch, len(samples))[place] for epoch, place in numbers])
        text = torch.from_numpy(samples[places]).to(device).long()
        counts = torch.from_numpy(is_trained | (epochs == 0)).to(device).float()
        yield part_of_rank(
            {
                "tokens": text[:, :-1],
                "labels": text[:, 1:],
                "loss_mask": counts.unsqueeze(1).expand(shape),
                "position_ids": torch.arange(settings.seq_length, device=device).expand(shape),
            }
        )
        start += rows * parallel_state.get_data_parallel_world_size()


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(count)


def part_of_rank(batch: Batch) -> Batch:
    """The columns of this context-parallel rank, as Megatron cuts them: of 2 cp equal parts rank r has r and 2 cp - 1 - r."""
    ranks, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    parts = {name: x.chunk(2 * ranks, dim=1) for name, x in batch.items()}
    return {name: torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]), dim=1) for name, chunks in parts.items()}


def bigram_loss(train: np.ndarray, scored: np.ndarray) -> float:
    """Nats per byte of the samples `scored` by a byte-bigram model of the samples `train` with add-k smoothing:
    p(b | a) = (count(a, b) + k) / (count(a) + 256 k)."""
    pairs = train[:, :-1].astype(np.int64) * BYTES + train[:, 1:]
    smoothed = np.bincount(pairs.ravel(), minlength=BYTES * BYTES).reshape(BYTES, BYTES) + ADD_K
    log_p = np.log(smoothed) - np.log(smoothed.sum(axis=1, keepdims=True))
    return -float(log_p[scored[:, :-1], scored[:, 1:]].mean())
