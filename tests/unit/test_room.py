"""How far symmetric memory grows for a request: with room for longer rows, but not beyond what exchanges may have."""

from __future__ import annotations

import pytest

from overlap_train.planning.arguments import Request
from overlap_train.protocol.layout import SLOTS, Layout, with_room
from overlap_train.runtime.room import Room

MIB = 1 << 20
NEEDED = 67 * MIB // 16  # three slots: 12.6 MiB; with room 13.5


def grown(exchange_mib: int, most_mib: int = 64) -> Layout:
    room = Room(None, 2, most_mib, exchange_mib, is_captured=False)
    return room.grown(Request("linear_all_to_all", "x", NEEDED), "qkv")


def test_there_is_room_for_longer_rows() -> None:
    assert with_room(NEEDED) > NEEDED
    assert grown(exchange_mib=64).slot_bytes == with_room(NEEDED)


@pytest.mark.parametrize("exchange_mib", [13, -(-SLOTS * NEEDED // MIB)])
def test_room_does_not_pass_what_exchanges_may_have(exchange_mib: int) -> None:
    """Parts were cut so that all slots fit. 8B's output projection of 43008 tokens had 528 MiB where 512 were allowed."""
    assert grown(exchange_mib).slot_bytes == NEEDED


def test_a_linear_that_is_larger_than_any_exchange_has_room() -> None:
    assert grown(exchange_mib=12).slot_bytes == with_room(NEEDED)


def test_room_does_not_pass_symmetric_mib() -> None:
    assert grown(exchange_mib=64, most_mib=13).slot_bytes == NEEDED
