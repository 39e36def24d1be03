"""What the Hopper kernels compute piece by piece: each tile once, and never in more time than whole tiles take."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from overlap_train.kernels.tiles import WHOLE, first_cut, tile_and_side

SMS = 132


@triton.jit
def list_pieces_kernel(halved_ptr, pieces_ptr, total, programs):
    """pieces [2 * total, 2]: (tile, side) of each piece."""
    halved = first_cut(total, programs)
    tl.store(halved_ptr, halved)
    for index in range(2 * total - halved):
        tile, side = tile_and_side(index, halved)
        tl.store(pieces_ptr + 2 * index, tile)
        tl.store(pieces_ptr + 2 * index + 1, side)


def pieces_of(total: int, programs: int) -> list[tuple[int, int]]:
    halved, pieces = torch.zeros(1, dtype=torch.int64), torch.zeros(2 * total, 2, dtype=torch.int64)
    list_pieces_kernel[(1,)](halved, pieces, total, programs)
    return [(int(tile), int(side)) for tile, side in pieces[: 2 * total - int(halved)]]


@pytest.mark.parametrize("sms", [SMS, 114, 1])
@pytest.mark.parametrize("total", [1, 12, 65, 66, 67, 131, 132, 133, 192, 198, 199, 264])
def test_every_tile_is_computed_once(total: int, sms: int) -> None:
    pieces = pieces_of(total, min(2 * total, sms))  # as many as are launched
    whole = [tile for tile, side in pieces if side == WHOLE.value]
    halves = [piece for piece in pieces if piece[1] != WHOLE.value]
    cut = sorted({tile for tile, _ in halves})
    assert sorted(whole + cut) == list(range(total))
    assert sorted(halves) == [(tile, side) for tile in cut for side in (0, 1)]
    assert [tile for tile, _ in pieces] == sorted(tile for tile, _ in pieces), "in the order of arrival"


@pytest.mark.parametrize(
    ("total", "halves"), [(66, 132), (67, 0), (132, 0), (133, 2), (132 + 66, 132), (132 + 67, 0), (704, 88)]
)
def test_tiles_are_cut_where_half_of_the_last_wave_would_stand_idle(total: int, halves: int) -> None:
    pieces = pieces_of(total, SMS)
    assert sum(side != WHOLE.value for _, side in pieces) == halves
    assert halves <= SMS, "the last wave must not become two"
