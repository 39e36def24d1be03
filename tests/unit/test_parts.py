"""How a long sequence is cut into the parts that pass through symmetric memory."""

from __future__ import annotations

import pytest

from overlap_train.config import OverlapConfig
from overlap_train.group.slots import SLOTS
from overlap_train.ulysses.parts import cut, cut_exchange, parts_that_hide

MIB = 1 << 20


@pytest.mark.parametrize("positions", [1, 5, 127, 128, 1000, 4096, 65536, 131071])
@pytest.mark.parametrize("bytes_of_position", [1, 512, 12288, 40960])
@pytest.mark.parametrize("limit_mib", [0.001, 1, 16, 512])
def test_parts_cover_all_positions_and_fit(positions: int, bytes_of_position: int, limit_mib: float) -> None:
    parts = cut(positions, bytes_of_position, limit_mib)  # type: ignore[arg-type]
    assert [first for first, _ in parts] == [0, *(last for _, last in parts[:-1])] and parts[-1][1] == positions
    longest = max(last - first for first, last in parts)
    assert SLOTS * longest * bytes_of_position <= limit_mib * MIB or longest == 1
    assert {last - first for first, last in parts[:-1]} <= {longest}, "they share a plan"


def test_a_sequence_that_fits_stays_whole() -> None:
    assert cut(4096, 12288, 144) == [(0, 4096)]
    assert cut(4096, 12288, 143) == [(0, 2048), (2048, 4096)]


def test_parts_hold_eight_chunks_of_whole_tiles_where_that_fits() -> None:
    """Of 128 rows a tile: an odd number of tiles would be sent in one piece, for which the product waits."""
    parts = cut(65536, 12288, 512)
    assert len(parts) == 5 and all((last - first) % 1024 == 0 for first, last in parts)
    assert cut(1000, 12288, 10)[0] == (0, 256), "284 positions fit: two tiles"
    assert cut(300, 12288, 3) == [(0, 75), (75, 150), (150, 225), (225, 300)], "less than a tile fits: equal parts"


def test_an_exchange_is_cut_by_the_memory_that_the_group_may_have() -> None:
    """symmetric_mib may be less than exchange_mib. All rows of a position count."""
    assert cut_exchange(65536, 2, 12288, OverlapConfig()) == cut(65536, 2 * 12288, 512, 2)
    assert cut_exchange(65536, 2, 12288, OverlapConfig(symmetric_mib=256)) == cut(65536, 2 * 12288, 255, 2)


def test_where_not_even_one_position_fits_each_is_a_part() -> None:
    assert cut(3, 10 * MIB, 1) == [(0, 1), (1, 2), (2, 3)]


@pytest.mark.parametrize("batch", [2, 4, 6, 64])
def test_parts_are_whole_tiles_of_rows_whatever_the_batch(batch: int) -> None:
    """Of 64 rows each, 227 positions fit: 1024 of them never do."""
    parts = cut(65536 // batch, 12288 * batch, 512, batch)
    rows = [batch * (last - first) for first, last in parts]
    assert all(count % 512 == 0 for count in rows[:-1]) and SLOTS * max(rows) * 12288 <= 512 * MIB
    assert len(parts) <= len(cut(65536, 12288, 512)) + 1, "and as few as without a batch"


@pytest.mark.parametrize(
    ("rows", "n", "k", "parts"),
    [(8192, 3072, 4096, 2), (4096, 3072, 4096, 1), (32768, 3072, 4096, 4), (8192, 64, 64, 1), (2047, 65536, 8192, 1)],
)
def test_products_are_cut_where_each_part_is_long_enough_to_hide_an_exchange(
    rows: int, n: int, k: int, parts: int
) -> None:
    """Llama-3 8B's QKV on two tensor-parallel ranks takes 0.32 ms for 8192 rows. Few rows, or short products, stay whole."""
    assert parts_that_hide(rows, n, k) == parts


def test_more_parts_than_fit_may_be_wanted() -> None:
    assert cut(4096, 12288, 512, 2, wanted=2) == [(0, 2048), (2048, 4096)]
    assert cut(4096, 12288, 512, 2, wanted=1) == [(0, 4096)]
    assert len(cut(4096, 12288, 36, 2, wanted=2)) == 4, "no more than fits"
