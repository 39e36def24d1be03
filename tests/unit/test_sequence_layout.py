"""Which rows each rank holds, against a definition that names the rows of every rank."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from overlap_train import SequenceLayout


def held(rank: int, world: int, rows: int, layout: SequenceLayout) -> list[int]:
    """Rows of the sequence in the order in which a rank has them: of each document an early and a late chunk, as Megatron's
    batches are cut for context parallelism, or one part of everything."""
    if layout.kind == "contiguous":
        return list(range(rank * rows // world, (rank + 1) * rows // world))
    mine: list[int] = []
    for first, end in pairwise(layout.document_starts or (0, rows)):
        chunks = torch.arange(first, end).view(2 * world, -1)
        mine += chunks[[rank, 2 * world - 1 - rank]].flatten().tolist()
    return mine


LAYOUTS = [
    SequenceLayout(),
    SequenceLayout("zigzag"),
    SequenceLayout("zigzag", (0, 48)),
    SequenceLayout("zigzag", (0, 24, 48)),
    SequenceLayout("zigzag", (0, 12, 36, 48)),
]


@pytest.mark.parametrize("world", [1, 2, 3, 6])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_hold_what_the_definition_says(layout: SequenceLayout, world: int) -> None:
    assert layout.error(48, world, "qkv") is None
    rows = layout.rows_of_ranks(48, world, torch.device("cpu"))
    assert rows.dtype == torch.int64
    assert rows.tolist() == [held(rank, world, 48, layout) for rank in range(world)]


@pytest.mark.parametrize(
    ("layout", "rows", "error"),
    [
        (SequenceLayout("striped"), 16, "layout.kind='striped' is not one of contiguous, zigzag"),
        (
            SequenceLayout("zigzag"),
            12,
            "12 rows cannot be cut into the 8 equal chunks of a zigzag over 4 ranks; pad it to",
        ),
        (SequenceLayout("zigzag", (0, 8)), 16, "document_starts=(0, 8) must begin with 0 and end with the 16 rows"),
        (SequenceLayout("zigzag", (8, 16)), 16, "document_starts=(8, 16) must begin with 0 and end with the 16 rows"),
        (SequenceLayout("zigzag", (0, 12, 16)), 16, "document of 12 rows cannot be cut"),
        (SequenceLayout("zigzag", (0, 8, 8, 16)), 16, "document_starts=(0, 8, 8, 16) must rise"),
        (SequenceLayout("zigzag", (0, 16, 8, 16)), 16, "document_starts=(0, 16, 8, 16) must rise"),
        (SequenceLayout(lengths=(5, 3)), 8, "layout.lengths=(5, 3) must be 4 numbers, the rows of each rank"),
        (SequenceLayout(lengths=(5, 3, -1, 1)), 8, "layout.lengths=(5, 3, -1, 1) must not be negative"),
        (SequenceLayout(lengths=(0, 0, 0, 0)), 0, "layout.lengths=(0, 0, 0, 0) must not be negative, nor all 0"),
        (SequenceLayout("zigzag", lengths=(4, 4, 4, 4)), 16, "lengths=(4, 4, 4, 4) must be without zigzag"),
        (SequenceLayout("contiguous", (0, 16), (4, 4, 4, 4)), 16, "lengths=(4, 4, 4, 4) must be without zigzag"),
    ],
)
def test_rows_that_cannot_lie_so_say_why(layout: SequenceLayout, rows: int, error: str) -> None:
    said = layout.error(rows, 4, "qkv")
    assert said is not None and said.startswith("qkv: ") and error in said


def test_ranks_hold_as_many_rows_as_lengths_say() -> None:
    layout = SequenceLayout(lengths=(3, 0, 1, 4))
    assert layout.error(8, 4, "qkv") is None
    rows = layout.rows_of_ranks(8, 4, torch.device("cpu"))
    assert rows.dtype == torch.int64
    assert rows.tolist() == [[0, 1, 2, -1], [-1, -1, -1, -1], [3, -1, -1, -1], [4, 5, 6, 7]]


def test_ranks_compare_lengths() -> None:
    layouts = [SequenceLayout(lengths=lengths) for lengths in ((), (5, 3), (3, 5))]
    assert len({layout.meaning for layout in layouts}) == 3


def test_blocks_in_turn_are_the_sequence_where_none_is_padded() -> None:
    for layout in (SequenceLayout(), SequenceLayout(lengths=(4, 4))):
        assert layout.is_in_turn
    for layout in (SequenceLayout(lengths=(4, 3)), SequenceLayout("zigzag")):
        assert not layout.is_in_turn


@pytest.mark.parametrize("layout", [SequenceLayout(), SequenceLayout("zigzag"), SequenceLayout(lengths=(31, 33))])
def test_rows_that_inference_has_made_are_for_training_too(layout: SequenceLayout) -> None:
    """Autograd keeps the indices of a selection, and refuses inference tensors."""
    with torch.inference_mode():
        made = layout.rows_of_ranks(64, 2, torch.device("cpu"))
    assert layout.rows_of_ranks(64, 2, torch.device("cpu")) is made and not made.is_inference()


@pytest.mark.parametrize("kind", ["list", "tensor", "elements"])
def test_document_starts_may_be_a_list_or_a_tensor(kind: str) -> None:
    """Ranks compare `meaning`: elements of a tensor have another hash in every process."""
    starts = torch.tensor([0, 24, 48], dtype=torch.int32)
    given = {"list": starts.tolist(), "tensor": starts, "elements": tuple(starts)}[kind]
    layout, same = SequenceLayout("zigzag", given), SequenceLayout("zigzag", (0, 24, 48))
    assert layout == same and layout.meaning == same.meaning and layout.error(48, 2, "qkv") is None
    assert layout.rows_of_ranks(48, 2, torch.device("cpu")).shape == (2, 24)
    assert SequenceLayout(lengths=given) == SequenceLayout(lengths=(0, 24, 48))
