"""The layout of the symmetric heap: nothing overlaps, everything is aligned, growing keeps what fits."""

from __future__ import annotations

import itertools

import pytest

from overlap_train.group.slots import BARRIER, Layout, with_room


@pytest.mark.parametrize("world", [1, 2, 3, 8, 72, 600])
@pytest.mark.parametrize("slot_bytes", [1, 24, 4096, 4097, 10_000_000])
def test_regions_do_not_overlap_and_fill_the_heap(world: int, slot_bytes: int) -> None:
    layout = Layout(world, slot_bytes)
    regions = []
    for slot in range(BARRIER + 1):
        words = layout.signals_offset(slot)
        regions.append((words, words + layout.signals_bytes))
        assert layout.signals_bytes >= 8 * world
        start = layout.offset(slot)
        assert start % 512 == 0  # what TMA and 16-byte copies need, and more
        regions.append((start, start + layout.size(slot)))
    regions.sort()
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(regions))
    assert regions[-1][1] <= layout.nbytes


def test_covering_grows_and_never_shrinks() -> None:
    layout = Layout(2, 5000)
    assert layout.covering(50) == layout
    assert layout.covering(6000) == Layout(2, 6000)


def test_memory_is_three_activations_and_little_more() -> None:
    activation = 8192 * 4096 * 2
    assert 3 * activation < Layout(8, activation).nbytes < 3 * activation + (1 << 20)


def test_room_for_longer_rows_is_an_eighth_at_most_and_none_for_usual_sizes() -> None:
    for slot_bytes in [*range(1, 300), 8200 * 4096 * 2]:
        assert slot_bytes <= with_room(slot_bytes) < slot_bytes * 9 / 8
    assert all(with_room(m << 20) == m << 20 for m in range(1, 17))
    assert len({with_room(slot_bytes) for slot_bytes in range((1 << 12) + 1, (1 << 13) + 1)}) == 8
