"""A zigzag is what Megatron gives each context-parallel rank of a batch."""

from __future__ import annotations

import inspect

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.utils import get_batch_on_this_cp_rank

from overlap_train import SequenceLayout


@pytest.mark.parametrize("world", [2, 4])
def test_a_zigzag_is_megatrons(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the function that cuts its batches, which asks torch or parallel_state for the rank, as its version has it."""
    plain = {"is_hybrid_cp": False} if "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters else {}
    received = []
    for rank in range(world):
        for owner, names in (
            (torch.distributed, ("get_world_size", "get_rank")),
            (parallel_state, ("get_context_parallel_world_size", "get_context_parallel_rank")),
        ):
            for name, number in zip(names, (world, rank), strict=True):
                monkeypatch.setattr(owner, name, lambda *args, number=number: number)
        received.append(get_batch_on_this_cp_rank({"tokens": torch.arange(32)[None]}, **plain)["tokens"][0])
    rows = SequenceLayout("zigzag").rows_of_ranks(32, world, torch.device("cpu"))
    assert rows.tolist() == [part.tolist() for part in received]
