"""Sequences in parts, one a context-parallel rank, as Megatron cuts them: of 2 cp equal parts rank r has r and 2 cp - 1 - r."""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from overlap_train import SequenceLayout

Batch = dict[str, torch.Tensor]


def part_of_rank(batch: Batch) -> Batch:
    """The columns of [samples, length] tensors that this rank has; without context parallelism all."""
    ranks = parallel_state.get_context_parallel_world_size()
    if ranks == 1:
        return batch
    rank = parallel_state.get_context_parallel_rank()
    parts = {name: x.chunk(2 * ranks, dim=1) for name, x in batch.items()}
    return {name: torch.cat((chunks[rank], chunks[-1 - rank]), dim=1) for name, chunks in parts.items()}


def row_of_all(part: torch.Tensor, place: int) -> torch.Tensor:
    """Row `place` of a sequence [s, ...], of which each rank has `part` [s / cp, ...]; the same on every rank."""
    ranks = parallel_state.get_context_parallel_world_size()
    if ranks == 1:
        return part[place]
    of_ranks = SequenceLayout("zigzag").rows_of_ranks(ranks * len(part), ranks, torch.device("cpu"))
    owner, local = divmod(int((of_ranks.flatten() == place).nonzero()), len(part))
    mine = owner == parallel_state.get_context_parallel_rank()
    row = part[local].clone() if mine else torch.zeros_like(part[local])
    dist.all_reduce(row, group=parallel_state.get_context_parallel_group())
    return row
