"""The layout of the symmetric heap: nothing overlaps, everything is aligned, growing keeps what fits."""

from __future__ import annotations

import itertools

import pytest

from overlap_train.layout import SLOTS, Layout


@pytest.mark.parametrize("world", [1, 2, 3, 8, 72])
@pytest.mark.parametrize(("gather", "scatter"), [(1, 1), (4096, 4097), (10_000_000, 24)])
def test_regions_do_not_overlap_and_fill_the_heap(world: int, gather: int, scatter: int) -> None:
    layout = Layout(world, gather, scatter)
    regions = []
    for channel in ("gather", "scatter"):
        for slot in range(SLOTS):
            words = layout.signals_offset(channel, slot)
            regions.append((words, words + layout.signals_bytes))
            assert layout.signals_bytes >= 8 * world
            start = layout.offset(channel, slot)
            assert start % 512 == 0  # what TMA and 16-byte copies need, and more
            regions.append((start, start + layout.slot_bytes(channel)))
    regions.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(regions))
    assert regions[-1][1] <= layout.nbytes


def test_covering_grows_and_never_shrinks() -> None:
    layout = Layout(2, 100, 5000)
    assert layout.covering(50, 5000) == layout
    assert layout.covering(200, 10) == Layout(2, 200, 5000)
