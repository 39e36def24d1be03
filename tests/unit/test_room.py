"""How far symmetric memory grows for a request: with room for longer rows, but not beyond what exchanges may have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from overlap_train import OverlapConfig
from overlap_train.group.domain import OverlapDomain
from overlap_train.group.memory import Request, Room, room_of
from overlap_train.group.slots import SLOTS, Layout, with_room

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


def test_a_domain_knows_of_a_block_to_send_from() -> None:
    domain: Any = object.__new__(OverlapDomain)
    domain.heap, domain.captured, domain.world_size, domain.config = None, False, 2, OverlapConfig()
    domain.across_nodes = SimpleNamespace(staged_blocks=1)
    assert room_of(domain).staged_blocks == 1


SEVEN = (
    7 * MIB - 64 * 1024
)  # of a slot: three, with signals, take less than 21 MiB, and with a block of two less than 25


@pytest.mark.parametrize(("staged_blocks", "most_mib"), [(0, 21), (1, 25)])
def test_a_block_to_send_from_counts(staged_blocks: int, most_mib: int) -> None:
    """NVSHMEM's, between nodes."""
    request = Request("all_gather_linear", "x", SEVEN)
    enough, short = (Room(None, 2, most, 64, False, staged_blocks) for most in (most_mib, most_mib - 1))
    layout = enough.grown(request, "fc1")
    assert enough.may_hold(request) and layout.nbytes + staged_blocks * layout.block_bytes <= most_mib * MIB
    assert not short.may_hold(request)
    with pytest.raises(ValueError, match=f"needs {most_mib} MiB") as raised:
        short.grown(request, "fc1")
    assert ("3.5 MiB to send from" in str(raised.value)) == bool(staged_blocks)
