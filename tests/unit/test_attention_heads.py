"""Which rows of a QKV weight are sent to which rank."""

from __future__ import annotations

import re

import pytest
import torch

from overlap_train import AttentionHeads

CPU = torch.device("cpu")
DIVIDED = [(8, 8, 2), (8, 4, 4), (8, 2, 2), (8, 2, 4), (8, 1, 8), (12, 2, 6), (6, 3, 3), (4, 1, 1)]  # query, kv, ranks


def rows_of(rank: int, world: int, heads: AttentionHeads) -> list[int]:
    """Head by head: each KV head that this rank's query heads belong to, with those of its query heads that are this rank's."""
    mine = range(rank * heads.query // world, (rank + 1) * heads.query // world)
    rows: list[int] = []
    for group in dict.fromkeys(head // heads.per_group for head in mine):
        first = group * (heads.per_group + 2)
        own = [first + head % heads.per_group for head in mine if head // heads.per_group == group]
        for head in (*own, first + heads.per_group, first + heads.per_group + 1):
            rows += range(head * heads.dim, (head + 1) * heads.dim)
    return rows


@pytest.mark.parametrize(("query", "kv", "world"), DIVIDED)
def test_each_rank_gets_its_query_heads_and_their_kv_heads(query: int, kv: int, world: int) -> None:
    heads = AttentionHeads(query, kv, dim=3)
    assert heads.error(world, "qkv") is None
    rows, of_rank = heads.sent_rows(world, CPU), heads.of_rank(world)
    expected = [rows_of(rank, world, heads) for rank in range(world)]
    assert [len(part) for part in expected] == [of_rank.features] * world
    flat = [row for part in expected for row in part]
    assert (list(range(heads.features)) if rows is None else rows.tolist()) == flat
    assert (rows is None) == (kv % world == 0), "a weight whose rows lie as they are sent is not copied"


def test_sent_rows_are_made_once_and_also_for_training() -> None:
    heads = AttentionHeads(16, 1, 5)
    with torch.inference_mode():
        rows = heads.sent_rows(4, CPU)
    assert rows is not None and not rows.is_inference()
    assert heads.sent_rows(4, CPU) is rows and heads.sent_rows(2, CPU) is not rows


@pytest.mark.parametrize(
    ("heads", "world", "error"),
    [
        (AttentionHeads(6, 4, 8), 2, r"heads=AttentionHeads\(query=6, kv=4, dim=8\): .* query a multiple of kv"),
        (AttentionHeads(0, 1, 8), 1, "all must be at least 1"),
        (AttentionHeads(4, 0, 8), 1, "all must be at least 1"),
        (AttentionHeads(4, 2, 0), 1, "all must be at least 1"),
        (AttentionHeads(6, 3, 8), 4, r"heads\.query=6 query heads cannot be divided among the 4 ranks .* divides 6"),
        (AttentionHeads(12, 3, 8), 2, r"heads\.kv=3 KV heads and a group of 2 ranks: one number must divide the other"),
        (AttentionHeads(12, 4, 8), 6, r"heads\.kv=4 KV heads and a group of 6 ranks: one number must divide the other"),
    ],
)
def test_heads_that_cannot_be_divided_say_why(heads: AttentionHeads, world: int, error: str) -> None:
    assert re.search(f"^qkv: .*{error}", heads.error(world, "qkv") or "")
