"""Real text as bytes, its samples and micro-batches, and a byte-bigram model as the yardstick.

Which bytes a rank reads at which step follows from the step's number, so a resumed run reads on where it was. Megatron's
GPTDataset is not used: it needs index files on a disk that all nodes share.
"""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterator
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Samples:
    """Sample n: `length` bytes of `text` (uint8 [bytes]) and the byte after each of them.

    With a seed the samples of each epoch are shuffled, and epochs follow one another without end. Without a seed they come once,
    in the order of the text.
    """

    text: np.ndarray
    length: int
    seed: int | None = None

    def __len__(self) -> int:
        """Samples of one epoch. What is left at the end of the text is not read."""
        return (len(self.text) - 1) // self.length

    def __getitem__(self, number: int) -> np.ndarray | None:
        """uint8 [length + 1]; None after the last sample."""
        epoch, place = divmod(number, len(self))
        if self.seed is not None:
            place = _order(self.seed, epoch, len(self))[place]
        elif epoch:
            return None
        return self.text[place * self.length : (place + 1) * self.length + 1]


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(count)


def read_samples(settings: Settings, is_validated: bool = True) -> tuple[Samples, Samples]:
    """The samples to train on and to validate on: of the file --text, or of the topics of Python's help().

    Every twentieth KiB is for validation, so that this part is like the training part.

    Raises:
        RecipeError: the file cannot be read, or is too short for one sample of each part (is_validated False: to train on).
    """
    name = f"--text {settings.text}" if settings.text else "pydoc_data.topics"
    try:
        content = Path(settings.text).read_bytes() if settings.text else _help_topics()
    except OSError as error:
        raise RecipeError(f"{name} cannot be read: {error.strerror or error}") from error
    text = np.frombuffer(content, dtype=np.uint8)
    held_out = np.arange(len(text)) // BLOCK % VALIDATION_EVERY == VALIDATION_EVERY // 2
    train = Samples(text[~held_out], settings.seq_length, settings.seed)
    valid = Samples(text[held_out], settings.seq_length)
    for part, samples in (("training", train), ("validation", valid))[: 1 + is_validated]:
        if len(samples.text) <= settings.seq_length:
            raise RecipeError(
                f"--seq-length {settings.seq_length}: the {part} part of {name} has only {len(samples.text)} bytes; give a "
                "longer text or a shorter --seq-length"
            )
    return train, valid


def _help_topics() -> bytes:
    """The topics quote each other. A paragraph is taken once, lest validation repeat training."""
    paragraphs = "\n\n".join(pydoc_data.topics.topics.values()).split("\n\n")
    return "\n\n".join(dict.fromkeys(paragraphs)).encode()


def batches(samples: Samples, first: int, settings: Settings, device: torch.device) -> Iterator[Batch]:
    """This rank's micro-batches from sample `first` on, without end; each is tokens, labels, position_ids (int64) and loss_mask
    (fp32), all [micro_batch_size, seq_length / cp].

    Data-parallel ranks take micro-batches in turn. After the last sample come samples that do not count.
    """
    rows, nothing = settings.micro_batch_size, np.zeros(samples.length + 1, dtype=np.uint8)
    start = first + rows * parallel_state.get_data_parallel_rank()
    while True:
        found = [samples[number] for number in range(start, start + rows)]
        text = torch.from_numpy(np.stack([nothing if sample is None else sample for sample in found])).to(device).long()
        counts = torch.tensor([[float(sample is not None)] for sample in found], device=device)
        yield part_of_rank(
            {
                "tokens": text[:, :-1],
                "labels": text[:, 1:],
                "loss_mask": counts.expand(rows, samples.length),
                "position_ids": torch.arange(samples.length, device=device).expand(rows, -1),
            }
        )
        start += rows * parallel_state.get_data_parallel_world_size()


def part_of_rank(batch: Batch) -> Batch:
    """The columns of this context-parallel rank, as Megatron cuts them: of 2 cp equal parts rank r has r and 2 cp - 1 - r."""
    ranks, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    parts = {name: x.chunk(2 * ranks, dim=1) for name, x in batch.items()}
    return {name: torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]), dim=1) for name, chunks in parts.items()}


def bigram_loss(train: np.ndarray, scored: np.ndarray) -> float:
    """Nats per byte of `scored` but for its first one, by a byte-bigram model of `train` with add-k smoothing:
    p(b | a) = (count(a, b) + k) / (count(a) + 256 k)."""
    pairs = train[:-1].astype(np.int64) * BYTES + train[1:]
    smoothed = np.bincount(pairs, minlength=BYTES * BYTES).reshape(BYTES, BYTES) + ADD_K
    log_p = np.log(smoothed) - np.log(smoothed.sum(axis=1, keepdims=True))
    return -float(log_p[scored[:-1], scored[1:]].mean())
