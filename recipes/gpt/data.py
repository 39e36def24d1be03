"""Samples of a corpus, and micro-batches of them: which bytes a rank reads at which step follows from the step's number."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from gpt.corpus import PARTS, Corpus, read_corpus
from gpt.settings import Settings
from gpt.world import on_every_rank

Batch = dict[str, torch.Tensor]
MOST_LENGTHS = 9


@dataclass(frozen=True)
class Samples:
    """Sample n: `seq_length` bytes of `text` (uint8 [bytes]) and the byte after each of them.

    With a seed the samples of each epoch are shuffled, and epochs follow one another without end. Without a seed they come once,
    in the order of the text.
    """

    text: np.ndarray
    seq_length: int
    seed: int | None = None

    def __len__(self) -> int:
        """Samples of one epoch. What is left at the end of the text is not read."""
        return (len(self.text) - 1) // self.seq_length

    def __getitem__(self, number: int) -> np.ndarray | None:
        """uint8 [seq_length + 1]; None after the last sample."""
        epoch, place = divmod(number, len(self))
        if self.seed is not None:
            place = _order(self.seed, epoch, len(self))[place]
        elif epoch:
            return None
        start = place * self.seq_length
        return self.text[start : start + self.seq_length + 1]


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(count)


@dataclass(frozen=True)
class Datasets:
    """The samples to train on and to validate on. key: names the text that both come from."""

    train: Samples
    valid: Samples
    key: str


@dataclass(frozen=True)
class Share:
    """Which part of a global batch a data-parallel rank reads: number `rank` of `size`. The ranks of a replica read the same."""

    rank: int
    size: int


def build_datasets(settings: Settings) -> Datasets:
    """Read the text on every rank; collective.

    Raises:
        RecipeError: on every rank, for a text that one of them cannot use.
    """
    corpus, length = _corpus(settings, PARTS), settings.seq_length
    return Datasets(Samples(corpus.train, length, settings.seed), Samples(corpus.valid, length), corpus.key)


def training_samples(settings: Settings) -> Samples:
    """The training samples of build_datasets, for a program that does not validate: its samples may be longer than that part."""
    return Samples(_corpus(settings, PARTS[:1]).train, settings.seq_length, settings.seed)


def _corpus(settings: Settings, used: tuple[str, ...]) -> Corpus:
    found: list[Corpus] = []
    on_every_rank(lambda: found.append(read_corpus(settings.text, settings.seq_length, used)))
    return found[0]


def batches(samples: Samples, first: int, settings: Settings, share: Share, device: torch.device) -> Iterator[Batch]:
    """Micro-batches of this share on `device`, from sample number `first` on, without end.

    With `variable_seq_length` each is cut to a length of its own, the same however many replicas there are. After the last
    sample come samples that do not count.
    """
    step = settings.micro_batch_size * share.size
    start = first + share.rank * settings.micro_batch_size
    while True:
        found = [samples[number] for number in range(start, start + settings.micro_batch_size)]
        nothing = np.zeros(samples.seq_length + 1, dtype=np.uint8)
        text = torch.from_numpy(np.stack([nothing if sample is None else sample for sample in found]))
        counts = torch.tensor([sample is not None for sample in found])
        length = length_of(settings, start // settings.micro_batch_size)
        yield batch_of(text[:, : length + 1].to(device), counts.to(device))
        start += step


def batch_of(text: torch.Tensor, counts: torch.Tensor) -> Batch:
    """A micro-batch of `text` [samples, length + 1], whose samples count where `counts` [samples] is true.

    Tokens, labels and position_ids are int64, loss_mask is fp32; each is [samples, length].
    """
    text = text.long()
    length = text.shape[1] - 1
    return {
        "tokens": text[:, :-1].contiguous(),
        "labels": text[:, 1:].contiguous(),
        "loss_mask": counts.float().unsqueeze(1).repeat(1, length),
        "position_ids": torch.arange(length, device=text.device).repeat(len(text), 1),
    }


def blank(settings: Settings, length: int, device: torch.device) -> Batch:
    """A micro-batch of zero bytes."""
    shape = settings.micro_batch_size, length + 1
    return batch_of(torch.zeros(shape, device=device), torch.ones(shape[0], dtype=torch.bool, device=device))


def lengths(settings: Settings) -> list[int]:
    """The lengths of micro-batches, the longest first.

    With `variable_seq_length` they are at most nine multiples of `sequence_parts`, from half of `seq_length` to all of it: few,
    because the operators prepare for each of them.
    """
    if not settings.variable_seq_length:
        return [settings.seq_length]
    longest = settings.seq_length // settings.sequence_parts
    shortest = -(-longest // 2)
    steps = {shortest + (longest - shortest) * i // (MOST_LENGTHS - 1) for i in range(MOST_LENGTHS)}
    return [settings.sequence_parts * step for step in sorted(steps, reverse=True)]


def length_of(settings: Settings, number: int) -> int:
    """The length of micro-batch `number`, counted over all replicas and steps: drawn from the seed and that number."""
    choices = lengths(settings)
    digest = hashlib.blake2b(f"{settings.seed} {number}".encode(), digest_size=8).digest()
    return choices[int.from_bytes(digest, "little") % len(choices)]
