"""The kernels that work out which rows go where, run alone. What is made of tables: test_hopper_experts.py."""

from __future__ import annotations

import pytest
import torch

from overlap_train.ops.expert_tables import count_rows, expert_tables, place_rows
from tests.protocol.tables_of_experts import INTERPRETED, tables_of


@pytest.mark.parametrize(("experts", "share"), [(2, 0.5), (8, 0.3), (40, 0.0), (40, 0.1), (128, 1.0)])
@pytest.mark.parametrize("tokens", [0, 1, 64, 150, 2100])  # the last more than blocks of tokens that are read at once
def test_rows_are_placed_by_expert_then_token(tokens: int, experts: int, share: float) -> None:
    chosen = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(1)) < share
    of_blocks = count_rows(INTERPRETED, chosen)
    assert torch.equal(of_blocks.sum(0), chosen.sum(0))
    expert, token = chosen.t().nonzero(as_tuple=True)
    for room in (0, 100):
        rows = place_rows(INTERPRETED, chosen, of_blocks, len(token) + room)
        assert torch.equal(rows.tokens[: len(token)], token)
        assert torch.equal(rows.places, torch.cat((token * experts + expert, torch.zeros(room, dtype=torch.int64))))
        assert torch.equal(rows.by_token[: len(token)], torch.argsort(token, stable=True))
        assert rows.ends.tolist() == [0, *chosen.sum(1).cumsum(0).tolist()]


def test_what_there_is_no_room_for_is_left_out() -> None:
    """Of rows and of pairs: nothing is written beyond. How many there are is said all the same."""
    chosen = torch.ones(100, 4, dtype=torch.bool)
    rows = place_rows(INTERPRETED, chosen, count_rows(INTERPRETED, chosen), 150)
    assert torch.equal(rows.tokens, torch.arange(150) % 100) and rows.ends.tolist() == [*range(0, 401, 4)]
    counts = torch.full((2, 6), 300, dtype=torch.int32)
    full, short = tables_of(counts.view(2, 2, 3), 1), expert_tables(INTERPRETED, counts, 1, 1800, 7)
    assert full.pairs[0].tolist()[:3] == short.pairs[0].tolist()[:3] == [15, 1800, 2]
    assert torch.equal(short.pairs[1:], full.pairs[1:8])
    assert torch.equal(short.pieces[: len(full.pieces), 1:][1:], full.pieces[1:, 1:])
    assert torch.equal(short.segments[..., :3], full.segments[..., :3])


@pytest.mark.parametrize("world", [1, 3, 8])
def test_where_the_rows_of_each_expert_and_rank_lie(world: int) -> None:
    counts = torch.randint(0, 9, (world, world, 5), generator=torch.Generator().manual_seed(world))
    for rank in range(world):
        tables, here = tables_of(counts, rank), counts[:, rank].t()
        ends = here.flatten().cumsum(0).view(5, world)
        assert torch.equal(tables.segments[..., 0], ends - here) and torch.equal(tables.segments[..., 1], ends)
        assert torch.equal(tables.ends.long(), ends[:, -1])
        sent = counts.flatten(1).cumsum(1).view(counts.shape) - counts
        assert torch.equal(tables.segments[..., 2], sent[:, rank].t() - (ends - here))
        received, sent_by = counts.sum((0, 2)), counts.sum((1, 2))
        assert torch.equal(tables.peers[:, :3].long(), torch.stack((received, sent_by, counts[:, rank].sum(1)), 1))
