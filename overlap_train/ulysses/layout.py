"""Who has which rows of a sequence, and which heads of an attention: what both projections of an attention go by.

`W` ranks exchange; `T` tensor-parallel ranks divide the weights (1: they are whole). Received rows come rank after rank;
attention wants them in the order of the sequence:

    contiguous   rank r holds the r-th of W parts, which are equal or of given lengths
    zigzag       the sequence is cut into 2 W chunks, and rank r holds chunks r and 2 W - 1 - r (Megatron's causal balance)
    documents    zigzag within each document of a packed sequence (Megatron with packed_seq_params)

Shards of different lengths are padded with zeros to the longest one; of q, k and v padding is -1 in `rows`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

Make = Callable[..., torch.Tensor]  # (device, what it depends on ...)


def kept(make: Make) -> Make:
    """`make` of index tensors, of which the last 32 are kept: 2 MB for 256 k rows. None is an inference tensor, which autograd
    would refuse later. A CUDA graph makes its own: what is made while it is captured is there only after a replay, and what
    was made before may be forgotten here while the graph still reads it."""
    make_ordinary = torch.inference_mode(False)(make)
    known = functools.lru_cache(maxsize=32)(make_ordinary)

    @functools.wraps(make)
    def answer(device: torch.device, *numbers: Any) -> torch.Tensor:
        return (make_ordinary if is_captured(device) else known)(device, *numbers)

    return answer


def is_captured(device: torch.device) -> bool:
    return device.type != "cpu" and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True)
class AttentionHeads:
    """The heads of an attention, whose QKV weight has Megatron's order: for each KV head its query heads, then k, then v. query,
    kv: numbers of heads (kv: Megatron's num_query_groups). dim: features of a head."""

    query: int
    kv: int
    dim: int

    @property
    def features(self) -> int:
        """N of the QKV weight [N, K]."""
        return (self.query + 2 * self.kv) * self.dim

    @property
    def per_group(self) -> int:
        """Query heads that share a KV head."""
        return self.query // self.kv

    def of_rank(self, world_size: int) -> AttentionHeads:
        """What each of `world_size` ranks has after the exchange: at least one KV head."""
        return AttentionHeads(self.query // world_size, max(1, self.kv // world_size), self.dim)

    def error(self, world_size: int, name: str) -> str | None:
        """Why the heads cannot be divided among so many ranks, or None."""
        if self.query < 1 or self.kv < 1 or self.dim < 1 or self.query % self.kv:
            return f"{name}: heads={self}: all must be at least 1, and query a multiple of kv"
        if self.query % world_size:
            return (
                f"{name}: heads.query={self.query} query heads cannot be divided among the {world_size} ranks of the "
                f"group; use a group whose size divides {self.query}"
            )
        if self.kv % world_size and world_size % self.kv:
            return (
                f"{name}: heads.kv={self.kv} KV heads and a group of {world_size} ranks: one number must divide the other; use "
                f"another group size"
            )
        return None

    def sent_rows(self, world_size: int, device: torch.device) -> torch.Tensor | None:
        """Rows of the weight [N, K] in the order in which their products are sent, rank after rank; None: as they lie. With fewer
        KV heads than ranks k and v of one head go to several ranks."""
        return None if self.kv % world_size == 0 else _sent_rows(device, self, world_size)


@kept
def _sent_rows(device: torch.device, heads: AttentionHeads, world_size: int) -> torch.Tensor:
    groups = torch.arange(heads.features, device=device).view(heads.kv, heads.per_group + 2, heads.dim)
    ranks_of_group = world_size // heads.kv
    queries = groups[:, :-2].reshape(world_size, -1)
    shared = groups[:, -2:].flatten(1).repeat_interleave(ranks_of_group, dim=0)
    return torch.cat((queries, shared), dim=1).flatten()


LAYOUTS = ("contiguous", "zigzag")


@dataclass(frozen=True)
class SequenceLayout:
    """Which rows of a sequence each rank of a context-parallel group holds.

    kind: contiguous or zigzag. document_starts: of a packed sequence, first row of each document, then the end of the last;
    zigzag is then within each. Padded lengths, since each is cut into 2 W chunks. lengths: of contiguous, how many rows each rank
    holds, where they differ; the same on every rank.
    """

    kind: str = "contiguous"
    document_starts: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Plain numbers, whose hash is the same on every rank. A tensor is read from its device; a list is better."""
        for field, given in (("document_starts", self.document_starts), ("lengths", self.lengths)):
            numbers = given.tolist() if isinstance(given, torch.Tensor) else map(int, given)
            object.__setattr__(self, field, tuple(numbers))

    @cached_property
    def meaning(self) -> str:
        """As ranks compare it."""
        if self.lengths:
            return f"{self.kind}, rows {' + '.join(map(str, self.lengths))}"
        return f"{self.kind} {hash(self.document_starts):x}" if self.document_starts else self.kind

    @property
    def is_in_turn(self) -> bool:
        """Whether the ranks' blocks, one after the other, are the sequence."""
        return self.kind == "contiguous" and len(set(self.lengths)) < 2

    def error(self, rows: int, world_size: int, name: str) -> str | None:
        """Why `rows` rows of all ranks cannot lie like this, or None."""
        if self.kind not in LAYOUTS:
            return f"{name}: layout.kind={self.kind!r} is not one of {', '.join(LAYOUTS)}"
        if self.lengths:
            return self._lengths_error(world_size, name)
        if self.kind == "contiguous":
            return None
        starts = self.document_starts or (0, rows)
        lengths, chunks = [end - first for first, end in pairwise(starts)], 2 * world_size
        if starts[0] != 0 or starts[-1] != rows:
            return (
                f"{name}: layout.document_starts={starts} must begin with 0 and end with the {rows} rows of all ranks"
            )
        if min(lengths) <= 0:
            return f"{name}: layout.document_starts={starts} must rise: leave out documents without rows"
        for length in lengths:
            if length % chunks:
                return (
                    f"{name}: a sequence or document of {length} rows cannot be cut into the {chunks} equal chunks of a zigzag "
                    f"over {world_size} ranks; pad it to a multiple of {chunks}"
                )
        return None

    def _lengths_error(self, world_size: int, name: str) -> str | None:
        said = f"{name}: layout.lengths={self.lengths}"
        if self.kind != "contiguous" or self.document_starts:
            return f"{said} must be without zigzag and document_starts, which cut a sequence into equal chunks"
        if len(self.lengths) != world_size:
            return f"{said} must be {world_size} numbers, the rows of each rank of the group"
        if min(self.lengths) < 0 or not any(self.lengths):
            return f"{said} must not be negative, nor all 0"
        return None

    def rows_of_ranks(self, rows: int, world_size: int, device: torch.device) -> torch.Tensor:
        """int64 [W, rows / W], or [W, longest] with lengths: which row of the sequence each row of each rank is; -1: padding."""
        return _rows_of_ranks(device, self, rows, world_size)


@kept
def _rows_of_ranks(device: torch.device, layout: SequenceLayout, rows: int, world_size: int) -> torch.Tensor:
    """Made on the device, so that nobody waits for it. That of documents is made on the CPU: the host waits for the device once,
    but a thousand documents would be four thousand launches. A captured graph has them: nothing can come from the CPU."""
    if layout.lengths:  # a launch or two a rank: the host would wait for the device if it sent a list
        of_ranks = torch.full((len(layout.lengths), max(layout.lengths)), -1, device=device)
        for of_rank, length, end in zip(of_ranks, layout.lengths, accumulate(layout.lengths), strict=True):
            of_rank[:length] = torch.arange(end - length, end, device=device)
        return of_ranks
    if layout.kind == "contiguous" or world_size == 1:
        return torch.arange(rows, device=device).view(world_size, -1)
    starts = layout.document_starts or (0, rows)
    where = torch.device("cpu") if len(starts) > 2 and not is_captured(device) else device
    parts = [_zigzag(first, end, world_size, where) for first, end in pairwise(starts)]
    return torch.cat(parts, dim=1).contiguous().to(device)


def _zigzag(first: int, end: int, world_size: int, device: torch.device) -> torch.Tensor:
    """[W, rows / W] of one sequence or document: of each rank r chunk r, then chunk 2 W - 1 - r."""
    chunks = torch.arange(first, end, device=device).view(2 * world_size, -1)
    return torch.cat((chunks[:world_size], chunks[world_size:].flip(0)), dim=1)


CONTIGUOUS = SequenceLayout()


@dataclass(frozen=True)
class SequenceShards:
    """Who has which rows of a sequence: of both projections of an attention, and mostly of all layers of a model.

    group: the W ranks that exchange, each with a shard of the rows. layout: which rows these are. tp_group: T tensor-parallel
    ranks that divide the weights, and have T equal parts of this rank's shard; None: weights are whole; group: ValueError.
    """

    group: dist.ProcessGroup
    layout: SequenceLayout = CONTIGUOUS
    tp_group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if self.tp_group is self.group and self.group is not None:
            raise ValueError(
                "SequenceShards: tp_group is group; they must be two groups: group exchanges, tp_group divides the weights. "
                "Leave tp_group out where each rank of group has whole weights"
            )

    @cached_property
    def ranks(self) -> int:
        """W."""
        return dist.get_world_size(self.group)

    @cached_property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @cached_property
    def tensor(self) -> int:
        """T."""
        return 1 if self.tp_group is None else dist.get_world_size(self.tp_group)

    @cached_property
    def longest(self) -> int:
        """Rows that a rank sends in a call with lengths; 0 without."""
        return max(self.layout.lengths, default=0) // self.tensor

    def error(self, x: torch.Tensor, is_whole: bool, name: str) -> str | None:
        """Why x [s, b, C] does not have the rows of the sequence (is_whole), or of this rank, or None."""
        layout, tensor = self.layout, self.tensor
        if x.dim() != 3:
            return f"{name}: the input has shape {tuple(x.shape)}; it must be [sequence, batch, features]"
        wrong = layout.error(self.length(x, is_whole), self.ranks, name)
        if wrong is not None or not layout.lengths:
            return wrong
        if any(length % tensor for length in layout.lengths):
            rule = f"must be divisible by the {tensor} ranks of tp_group, which have equal parts of a rank's rows"
            return f"{name}: layout.lengths={layout.lengths} {rule}"
        expected = sum(layout.lengths) if is_whole else layout.lengths[self.rank] // tensor
        whose = "all ranks together have" if is_whole else f"rank {self.rank} has"
        if x.shape[0] == expected:
            return None
        return f"{name}: the input has shape {tuple(x.shape)}; by layout.lengths={layout.lengths} {whose} {expected} rows in it"

    def length(self, x: torch.Tensor, is_whole: bool) -> int:
        """s, the rows of the sequence of which x has all (is_whole), or this rank's."""
        return sum(self.layout.lengths) or x.shape[:1].numel() * (1 if is_whole else self.ranks * self.tensor)

    def padded(self, x_shard_m: torch.Tensor) -> torch.Tensor:
        """x_shard_m [length, b, K], padded with zeros to [longest, b, K]."""
        missing = self.longest - len(x_shard_m)
        return F.pad(x_shard_m, (0, 0, 0, 0, 0, missing)) if missing > 0 else x_shard_m

    def cut(self, y_shard_m: torch.Tensor) -> torch.Tensor:
        """y_shard_m [longest, b, N], cut to this rank's rows [length, b, N]."""
        length = self.layout.lengths[self.rank] // self.tensor if self.layout.lengths else len(y_shard_m)
        return y_shard_m if length == len(y_shard_m) else y_shard_m[:length]

    def rows(self, s: int, device: torch.device) -> torch.Tensor:
        """int64 [W, positions], which row of the sequence each row of each rank is; [W, T, positions] with tensor parallelism."""
        ranks, tensor, lengths = self.ranks, self.tensor, self.layout.lengths
        if tensor == 1:
            return self.layout.rows_of_ranks(s, ranks, device)
        if not lengths:
            return self.layout.rows_of_ranks(s, ranks, device).unflatten(1, (tensor, -1))
        of_each = SequenceLayout(lengths=tuple(length // tensor for length in lengths for _ in range(tensor)))
        return of_each.rows_of_ranks(s, ranks * tensor, device).unflatten(0, (ranks, tensor))
