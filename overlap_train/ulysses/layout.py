"""Index tensors that depend on nothing but numbers and a device: made once, and kept.

Which rows of an attention's QKV weight each rank of a Ulysses group needs.

Which rows of a sequence each rank of a context-parallel group holds, and where they lie after an all-to-all.

`W` ranks. Received rows come rank after rank; attention wants them in the order of the sequence:

    contiguous   rank r holds the r-th of W parts, which are equal or of given lengths
    zigzag       the sequence is cut into 2 W chunks, and rank r holds chunks r and 2 W - 1 - r (Megatron's causal balance)
    documents    zigzag within each document of a packed sequence (Megatron with packed_seq_params)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch

Make = Callable[..., torch.Tensor]  # (device, what it depends on ...)


def kept(make: Make) -> Make:
    """`make`, of which the last 32 answers are kept: 2 MB for 256 k rows.

    None is an inference tensor, which autograd would refuse in later calls. A CUDA graph makes its own: what is made while it is
    captured is there only after a replay, and what was made before may be forgotten here, and its memory used for something
    else, while the graph still reads it.
    """
    make_ordinary = torch.inference_mode(False)(make)
    known = functools.lru_cache(maxsize=32)(make_ordinary)

    @functools.wraps(make)
    def answer(device: torch.device, *numbers: Any) -> torch.Tensor:
        return (make_ordinary if is_captured(device) else known)(device, *numbers)

    return answer


def is_captured(device: torch.device) -> bool:
    """Whether what is enqueued on a device now becomes part of a CUDA graph, in which nothing can come from the CPU."""
    return device.type != "cpu" and torch.cuda.is_current_stream_capturing()


@dataclass(frozen=True)
class AttentionHeads:
    """The heads of an attention, whose QKV weight has Megatron's order: for each KV head its query heads, then k, then v.

    query, kv: numbers of heads (kv: Megatron's num_query_groups). dim: features of a head.
    """

    query: int
    kv: int
    dim: int

    @property
    def features(self) -> int:
        """N of the QKV weight [N, K]."""
        return (self.query + 2 * self.kv) * self.dim

    @cached_property
    def meaning(self) -> str:
        """The heads in words, as ranks compare them."""
        return str(self)

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
        """Rows of the weight [N, K] in the order in which their products are sent, rank after rank; None: as they lie.

        Where there are fewer KV heads than ranks, k and v of one head go to several ranks.
        """
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
        """Turn lists and tensors into tuples of plain numbers. A layout with a list would have no hash, and each element of a
        tensor has one of its own, which ranks would take for another layout. A tensor is read from its device, so a list is
        better in every step."""
        for field, given in (("document_starts", self.document_starts), ("lengths", self.lengths)):
            numbers = given.tolist() if isinstance(given, torch.Tensor) else map(int, given)
            object.__setattr__(self, field, tuple(numbers))

    @cached_property
    def meaning(self) -> str:
        """The layout in words, as ranks compare it. The same numbers have the same hash in every process."""
        if self.lengths:
            return f"{self.kind}, rows {' + '.join(map(str, self.lengths))}"
        return f"{self.kind} {hash(self.document_starts):x}" if self.document_starts else self.kind

    @property
    def is_in_turn(self) -> bool:
        """Whether the ranks' blocks, one after the other, are the sequence."""
        return self.kind == "contiguous" and len(set(self.lengths)) < 2

    def divided(self, shards: int) -> SequenceLayout:
        """The layout of W x shards ranks, where `shards` of them share the rows of one equally. This layout has lengths."""
        return replace(self, lengths=tuple(length // shards for length in self.lengths for _ in range(shards)))

    def error(self, rows: int, world_size: int, name: str) -> str | None:
        """Why `rows` rows of all ranks cannot lie like this, or None."""
        if self.kind not in LAYOUTS:
            return f"{name}: layout.kind={self.kind!r} is not one of {', '.join(LAYOUTS)}"
        if self.lengths:
            return self._lengths_error(world_size, name)
        if self.kind == "contiguous":
            return None
        starts = self.document_starts or (0, rows)
        if starts[0] != 0 or starts[-1] != rows:
            return (
                f"{name}: layout.document_starts={starts} must begin with 0 and end with the {rows} rows of all ranks"
            )
        lengths = [after - before for before, after in pairwise(starts)]
        if min(lengths) <= 0:
            return f"{name}: layout.document_starts={starts} must rise: leave out documents without rows"
        wrong = next((length for length in lengths if length % (2 * world_size)), None)
        if wrong is None:
            return None
        return (
            f"{name}: a sequence or document of {wrong} rows cannot be cut into the {2 * world_size} equal chunks of a "
            f"zigzag over {world_size} ranks; pad it to a multiple of {2 * world_size}"
        )

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
        """int64 [W, rows / W]: which row of the sequence each row of each rank is. With lengths [W, longest], -1 beyond a rank's
        length."""
        return _rows_of_ranks(device, self, rows, world_size)


@kept
def _rows_of_ranks(device: torch.device, layout: SequenceLayout, rows: int, world_size: int) -> torch.Tensor:
    """Made on the device, so that nobody waits for it. That of documents is made on the CPU: the host waits for the device once,
    but a thousand documents would be four thousand launches. A captured graph has these launches."""
    if layout.lengths:
        return _one_after_another(layout.lengths, device)
    if layout.kind == "contiguous" or world_size == 1:
        return torch.arange(rows, device=device).view(world_size, -1)
    starts = layout.document_starts or (0, rows)
    if len(starts) > 2 and not is_captured(device):
        return _zigzag_of_documents(starts, world_size).to(device)
    parts = [_zigzag(first, end, world_size, device) for first, end in pairwise(starts)]
    return torch.cat(parts, dim=1).contiguous()


def _one_after_another(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """A launch or two a rank, but no list that the host would have to send: it would wait for the device."""
    rows = torch.full((len(lengths), max(lengths)), -1, device=device)
    for of_rank, length, end in zip(rows, lengths, accumulate(lengths), strict=True):
        of_rank[:length] = torch.arange(end - length, end, device=device)
    return rows


def _zigzag(first: int, end: int, world_size: int, device: torch.device) -> torch.Tensor:
    """The rows [W, rows / W] of each rank in one sequence or document: those of chunk r, then those of chunk 2 W - 1 - r."""
    chunks = torch.arange(first, end, device=device).view(2 * world_size, -1)
    return torch.cat((chunks[:world_size], chunks[world_size:].flip(0)), dim=1)


def _zigzag_of_documents(starts: tuple[int, ...], world_size: int) -> torch.Tensor:
    """The same for all documents, in as many operations as for two."""
    bounds, ranks = torch.tensor(starts, device="cpu"), torch.arange(world_size, device="cpu")[:, None]
    first, length = bounds[:-1], bounds.diff() // (2 * world_size)  # of a document; of one of its chunks
    chunks = torch.stack((first + ranks * length, first + (2 * world_size - 1 - ranks) * length), dim=-1).flatten(1)
    lengths = length.repeat_interleave(2)
    before = lengths.cumsum(0) - lengths  # rows of a rank in front of the chunk
    return (chunks - before).repeat_interleave(lengths, dim=1) + torch.arange(int(lengths.sum()), device="cpu")
