"""What kernels are told about time, counters and the rows that they poison."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_train.group.signals import Tag
from overlap_train.group.waits import BoundedWaits, _next_epoch_launch
from overlap_train.kernels.signal_words import FIRST_COUNTERS, MAX_CHUNKS
from overlap_train.ops.launch import GatherOperands, grid_size, protocol_arguments, receiving_arguments
from overlap_train.schedule.order import Topology

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
WORLD, RANK, LIMIT_S = 3, 1, 2.5


def call_of(rank: int = RANK) -> Any:
    counters = SimpleNamespace(claimed="claimed", complete="complete", left="left", sent="sent", here="here")
    direct = SimpleNamespace(claimed="d claimed", complete="d complete", left="d left", sent="d sent")
    slot = SimpleNamespace(
        signals="signals", epoch="epoch", outgoing_at="outgoing", memory_at="memory", counters=counters, direct_counters=direct
    )  # fmt: skip
    return SimpleNamespace(slot=slot, chunks=2, tag=Tag("fc1", ""), blocks=torch.arange(12.0).view(WORLD, 2, 2))


def waits(rank: int = RANK) -> BoundedWaits:
    fault: Any = SimpleNamespace(abort="abort", record="record", know=None)
    return BoundedWaits(rank, WORLD, LIMIT_S, fault, SimpleNamespace())  # type: ignore[arg-type]


def test_waiting_kernels_count_nanoseconds() -> None:
    for launch in (waits()._wait_launch(call_of(), 0, WORLD), waits()._barrier_launch(call_of())):
        assert launch.arguments["limit"] == 2_500_000_000 and launch.constants["TIMED"] is True


@pytest.mark.parametrize(("first", "count", "poisoned"), [(0, 3, 0), (2, 1, 2), (1, 2, 2)])
def test_a_wait_poisons_a_block_that_comes_from_a_peer(first: int, count: int, poisoned: int) -> None:
    launch = waits()._wait_launch(call_of(), first, count)
    assert launch.arguments["row_ptr"].flatten()[0] == 4.0 * poisoned and launch.arguments["row_size"] == 2
    assert (launch.arguments["first"], launch.arguments["count"], launch.constants["CHUNKS"]) == (first, count, 2)


def test_the_own_block_goes_to_its_place_beside_the_wait() -> None:
    launch = waits()._receive_launch(call_of(), torch.zeros(2, 2))
    told = launch.arguments
    assert told["kept_ptr"].tolist() == [[4.0, 5.0], [6.0, 7.0]] and told["size"] == 4 and told["count"] == WORLD
    assert told["row_ptr"].flatten()[0] == 0.0 and told["limit"] == 2_500_000_000
    assert launch.grid == (2,), "one program waits, one copies"
    assert waits()._receive_launch(call_of(), torch.zeros(1 << 22)).grid == (1 + 1056,)


def domain_on(device: torch.device) -> Any:
    fault = SimpleNamespace(abort="abort", record="record")
    return SimpleNamespace(
        rank=RANK,
        world_size=WORLD,
        topology=Topology(1, WORLD, RANK),
        device=device,
        fault=fault,
        config=SimpleNamespace(timeout_s=LIMIT_S),
    )


@pytest.mark.parametrize(("device", "limit"), [(GPU, 2_500_000_000), (CPU, 25_000)])
def test_multiplying_kernels_count_nanoseconds_or_polls(device: torch.device, limit: int) -> None:
    assert protocol_arguments(domain_on(device), call_of(), direct=False).arguments["limit"] == limit


def operands(sends: bool, leaves: bool = False) -> GatherOperands:
    nothing = torch.empty(0)
    return GatherOperands(nothing, nothing, nothing, sends, leaves)


def test_kernels_that_send_themselves_have_counters_of_their_own() -> None:
    """Those of the others are reset before each call by the host, these by the kernel at its end."""
    for direct, prefix in ((False, ""), (True, "d ")):
        told = protocol_arguments(domain_on(GPU), call_of(), direct).arguments
        assert [told[f"{name}_ptr"] for name in ("counter", "complete", "left")] == [
            prefix + name for name in ("claimed", "complete", "left")
        ]
        assert receiving_arguments(domain_on(GPU), call_of(), operands(direct)).arguments["sent_ptr"] == "d sent"


@pytest.mark.parametrize("leaves", [False, True])
def test_a_kernel_is_told_whether_it_leaves(leaves: bool) -> None:
    assert receiving_arguments(domain_on(GPU), call_of(), operands(False, leaves)).arguments["leaves"] == leaves
    assert receiving_arguments(domain_on(GPU), call_of(), operands(False, leaves)).arguments["here_ptr"] == "here"


@pytest.mark.parametrize("world", [2, 127, 128, 1024])
def test_every_counter_of_a_slot_is_reset(world: int) -> None:
    """By one CTA, with one binary for groups of up to 127 ranks."""
    control, tag = torch.zeros(1 + FIRST_COUNTERS + world * MAX_CHUNKS), SimpleNamespace(word=1)
    launch = _next_epoch_launch(SimpleNamespace(slot=SimpleNamespace(control=control), tag=tag))  # type: ignore[arg-type]
    block = launch.constants["BLOCK"]
    assert block >= launch.arguments["count"] == len(control) - 1
    assert (block == 1024) == (world < 128) and block.bit_count() == 1


def test_a_grid_has_a_cta_per_sm_or_per_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("overlap_train.ops.launch.multiprocessors", lambda device: 132)
    assert (grid_size(1000, GPU, 0), grid_size(7, GPU, 0), grid_size(1000, CPU, 0)) == ((132,), (7,), (1,))
    assert (grid_size(1000, GPU, 9), grid_size(125, GPU, 9), grid_size(7, GPU, 9)) == ((123,), (123,), (7,))
    assert grid_size(1000, GPU, 140) == (1,)
