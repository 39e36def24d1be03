"""The check of a Ulysses attention block before it is timed: rounding passes; a wrong tile, and what a call left, do not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_train.tools.bench.attention_blocks import by_nccl, expected_of
from overlap_train.tools.bench.attention_data import Data, check_block, check_outcome, worst_tile
from overlap_train.tools.bench.attention_parts import in_torchs_words
from overlap_train.tools.measure.models import MODELS, Model
from overlap_train.tools.measure.world import World
from overlap_train.ulysses.layout import SequenceLayout
from tests.processes import run_ranks, values

CPU = torch.device("cpu")
TILE = 128  # rows and columns


def _results() -> tuple[torch.Tensor, torch.Tensor]:
    """(as it must be, rounded once more)"""
    exact = torch.randn(4 * TILE, 1, 40 * TILE, generator=torch.Generator().manual_seed(0)).bfloat16()
    return exact, exact * (1 + 2**-8 * torch.randn_like(exact))


@pytest.mark.parametrize("row", [0, 3 * TILE])
@pytest.mark.parametrize("column", [0, 39 * TILE])
def test_one_missing_tile_fails(row: int, column: int) -> None:
    """It is 0.08 of the norm of the whole here, and 0.03 where the whole has 4096 x 4096 elements."""
    exact, ours = _results()
    expected = (exact,) * 4
    check_outcome((ours,) * 4, expected)
    ours[row : row + TILE, :, column : column + TILE] = 0
    for place, name in enumerate(("y", "dx", "dw_qkv", "dw_proj")):
        outcome = tuple(ours if at == place else exact for at in range(4))
        with pytest.raises(RuntimeError, match=f"^{name} differs from torch's block by .* of the norm of a tile"):
            check_outcome(outcome, expected)


def test_each_tile_counts_however_many_there_are() -> None:
    ours = theirs = torch.ones(64 * TILE + 5, 3 * TILE + 2)
    assert worst_tile(ours, theirs) == 0
    ours = theirs.clone()
    ours[40 * TILE, TILE] = 1 + TILE / 2  # half of what a whole tile has
    assert worst_tile(ours, theirs) == pytest.approx(0.5)
    ours[-1, -1] = torch.nan
    assert not worst_tile(ours, theirs) <= 1e9


def test_small_numbers_are_held_to_an_average_tile() -> None:
    """Where results cancel, rounding is as large as elsewhere."""
    theirs = torch.ones(2 * TILE, TILE)
    theirs[:TILE] = 1e-3
    assert worst_tile(theirs + 1e-3, theirs) == pytest.approx(1e-3 * 2**0.5, rel=1e-3)


def _data(here: World, model: Model, tokens: int, dtype: torch.dtype) -> tuple[Data, Data]:
    data, decoy = (Data.make(model, tokens, here, dtype, seed) for seed in (0, 99))
    return data, decoy


def _verdicts(rank: int, world: int) -> Any:
    """What the check says of NCCL's block, and of one that leaves memory as the call before has left it."""
    here = World(dist.group.WORLD, CPU, rank, world)
    data, decoy = _data(here, MODELS["tiny"], 16, torch.float32)
    expected = expected_of(partial(in_torchs_words, here, SequenceLayout()), data)
    memory: list[torch.Tensor] = []

    def lazy(data: Data) -> torch.Tensor:
        """Only its first call puts all rows into the memory of its result."""
        y = by_nccl(here, data)
        memory.append(y.detach())
        return torch.cat((y[:1] + (memory[0] - y)[:1].detach(), y[1:]))

    said = []
    for block in (partial(by_nccl, here), lazy):
        try:
            said.append(check_block(block, data, decoy, expected))
        except RuntimeError as error:
            said.append(str(error).partition(" by ")[0])
    return said


def test_rows_that_a_call_does_not_write_are_found() -> None:
    assert values(run_ranks(2, _verdicts)) == [[None, "y differs from torch's block"]] * 2


def _in_bf16(rank: int, world: int) -> Any:
    here = World(dist.group.WORLD, CPU, rank, world)
    data, decoy = _data(here, Model("", 1, 256, 256, 4, 2), 512, torch.bfloat16)
    check_block(
        partial(by_nccl, here), data, decoy, expected_of(partial(in_torchs_words, here, SequenceLayout()), data)
    )
    return True


def test_rounding_of_bf16_passes() -> None:
    assert values(run_ranks(2, _in_bf16)) == [True, True]
