"""The kernels that work out which rows go where, run alone. What is made of tables: test_hopper_experts.py."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from overlap_train import OverlapTimeoutError
from overlap_train.ops.expert_tables import Tables, expert_tables_launch
from overlap_train.ops.routing import Routing
from tests.expert_cases import Experts
from tests.protocol.tables_of_experts import INTERPRETED, tables_of


def test_what_there_is_no_room_for_is_left_out() -> None:
    """Of pairs and pieces: nothing is written beyond. How many there are is said all the same."""
    counts, full = torch.full((2, 6), 300, dtype=torch.int32), tables_of(torch.full((2, 2, 3), 300), 1)
    short = Tables(*(torch.full_like(table, -7) for table in full))
    launch = expert_tables_launch(counts, short, 1, 20)
    replace(launch, arguments=launch.arguments | dict(most_pairs=7)).through_triton()
    for found, right, room in ((short.pairs, full.pairs, 7), (short.pieces, full.pieces, 20)):
        assert torch.equal(found[1 : 1 + room], right[1 : 1 + room]) and (found[1 + room :] == -7).all()
    assert full.pairs[0, :3].tolist() == short.pairs[0, :3].tolist() == [15, 1800, 2]
    assert full.pieces[0, 0] == short.pieces[0, 0] == len(full.pieces) - 1


@pytest.mark.parametrize(
    ("tokens", "top"), [((37, 37), 2), ((37, 37), 12), ((0, 300), 16), ((3, 1500), 2)], ids=lambda value: str(value)
)
def test_a_routing_on_a_gpu_has_room_for_what_comes(tokens: tuple[int, int], top: int) -> None:
    """Where what was begun before the host knew the counts does not suffice, it is made anew. Nothing is read before the wait."""
    masks = Experts(40, top, tokens).chosen(5)
    counts, waited = torch.stack([chosen.sum(0) for chosen in masks]).int(), list[int]()
    arrival = SimpleNamespace(synchronize=lambda: waited.append(1))
    with mock.patch("overlap_train.ops.routing._on_its_way", lambda counts: (counts, arrival)):
        for rank, chosen in enumerate(masks):
            fault = SimpleNamespace(check=lambda: waited.append(2))
            domain: Any = SimpleNamespace(rank=rank, launches=INTERPRETED, fault=fault, on_gpu=True)
            routing = Routing((chosen * torch.tensor(255, dtype=torch.uint8)).view(torch.bool), counts, domain)
            assert not waited
            expert, token = chosen.t().nonzero(as_tuple=True)
            assert torch.equal(routing.tokens, token) and waited == [1, 2]
            assert torch.equal(routing.places_of_tokens, token * 40 + expert)
            by_token, ends = routing._by_token
            assert torch.equal(by_token, torch.argsort(token, stable=True))
            assert ends.tolist() == [0, *chosen.sum(1).cumsum(0).tolist()]
            whole = tables_of(counts.view(2, 2, 20), rank)
            assert torch.equal(routing.tables.pairs[1 : len(whole.pairs)], whole.pairs[1:])
            assert torch.equal(routing.tables.pieces[1 : len(whole.pieces)], whole.pieces[1:])
            assert torch.equal(routing.all_places.ends, counts.view(2, 2, 20)[:, rank].sum(0).cumsum(0))
            waited.clear()


def test_counts_that_did_not_come_are_no_numbers() -> None:
    def failed() -> None:
        raise OverlapTimeoutError("rank 1 did not come")

    domain: Any = SimpleNamespace(rank=0, launches=INTERPRETED, fault=SimpleNamespace(check=failed), on_gpu=True)
    chosen, arrival = torch.ones(3, 4, dtype=torch.bool), SimpleNamespace(synchronize=lambda: None)
    counts = torch.full((2, 4), -1, dtype=torch.int32)
    with mock.patch("overlap_train.ops.routing._on_its_way", lambda counts: (counts, arrival)):
        routing = Routing(chosen, counts, domain)
    for _ in range(2):
        with pytest.raises(OverlapTimeoutError, match="rank 1 did not come"):
            _ = routing.rows_received


@pytest.mark.parametrize("world", [1, 3, 8])
def test_where_the_rows_of_each_expert_and_rank_lie(world: int) -> None:
    counts = torch.randint(0, 9, (world, world, 5), generator=torch.Generator().manual_seed(world))
    for rank in range(world):
        tables, here = tables_of(counts, rank), counts[:, rank].t()
        turns = (rank - torch.arange(world)) % world
        ends = here[:, turns].flatten().cumsum(0).view(5, world)[:, turns]
        assert torch.equal(tables.segments[..., 0], ends - here) and torch.equal(tables.segments[..., 1], ends)
        assert torch.equal(tables.ends.long(), here.sum(1).cumsum(0))
        sent = counts.flatten(1).cumsum(1).view(counts.shape) - counts
        assert torch.equal(tables.segments[..., 2], sent[:, rank].t() - (ends - here))
        received, sent_by = counts.sum((0, 2)), counts.sum((1, 2))
        assert torch.equal(tables.peers[:, :3].long(), torch.stack((received, sent_by, counts[:, rank].sum(1)), 1))
