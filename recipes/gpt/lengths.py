"""Lengths of micro-batches with --variable-seq-length 1: from half of --seq-length to all of it, drawn for each.

A draw depends on the seed, the number of the micro-batch since the start of training, --micro-batch-size, --seq-length and --tp,
so a run resumed with the same draws the same, and so do all ranks of a replica. There are few lengths, because operators prepare
for each of them.
"""

from __future__ import annotations

import hashlib

import torch

from gpt.settings import Settings

MOST = 9


def lengths(settings: Settings) -> list[int]:
    """All lengths that are drawn, at most MOST, each a multiple of `settings.tp`; the longest first."""
    longest = settings.seq_length // settings.tp
    shortest = -(-longest // 2)
    steps = {shortest + (longest - shortest) * i // (MOST - 1) for i in range(MOST)}
    return [settings.tp * step for step in sorted(steps, reverse=True)]


def length_of(settings: Settings, number: int) -> int:
    """The length of micro-batch `number`, counted over all replicas and steps."""
    if not settings.variable_seq_length:
        return settings.seq_length
    choices = lengths(settings)
    digest = hashlib.blake2b(f"{settings.seed} {number}".encode(), digest_size=8).digest()
    return choices[int.from_bytes(digest, "little") % len(choices)]


def blank(samples: int, length: int, device: torch.device) -> dict[str, torch.Tensor]:
    """A micro-batch [samples, length] of zero bytes."""
    zeros = torch.zeros(samples, length, dtype=torch.long, device=device)
    positions = torch.arange(length, device=device).expand(samples, -1)
    mask = torch.ones(samples, length, device=device)
    return {"tokens": zeros, "labels": zeros, "loss_mask": mask, "position_ids": positions}
