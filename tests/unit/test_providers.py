"""Which provider of symmetric memory serves which device and group."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overlap_train.ranks.agreement import allocated
from overlap_train.ranks.bounded import Callers
from overlap_train.symmetric import nvshmem, resolve_provider

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
TWO: Any = (0, 1)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> list[Callers]:
    """The ranks of NVSHMEM's one world; groups are their ranks here, and nvshmem4py is installed."""
    worlds: list[Callers] = []
    monkeypatch.setattr(nvshmem, "_worlds", worlds)
    monkeypatch.setattr(
        nvshmem, "_ranks", lambda group, ranks: group if ranks is None else group[ranks.start : ranks.stop]
    )
    monkeypatch.setattr(nvshmem, "is_installed", lambda: True)
    return worlds


def test_nvshmem_serves_the_group_of_its_world_only(world: list[Callers]) -> None:
    assert resolve_provider(TWO, "auto", GPU) == "nvshmem"
    world.append(Callers(0, (0, 1), 60.0))
    assert resolve_provider(TWO, "auto", GPU) == "nvshmem"
    other: Any = (2, 3)
    assert resolve_provider(other, "auto", GPU) == "torch"


def test_nvshmem_serves_the_node_of_its_world(world: list[Callers]) -> None:
    group: Any = (4, 5, 6, 7)
    world.append(Callers(6, (6, 7), 60.0))
    assert resolve_provider(group, "auto", GPU, range(2, 4)) == "nvshmem"
    assert resolve_provider(group, "auto", GPU, range(2)) == resolve_provider(group, "auto", GPU) == "torch"


def test_without_nvshmem4py_torch_serves(world: list[Callers], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvshmem, "is_installed", lambda: False)
    assert resolve_provider(TWO, "auto", GPU) == "torch"
    with pytest.raises(ValueError, match="nvshmem4py is not installed"):
        resolve_provider(TWO, "nvshmem", GPU)


def test_cpus_are_served_by_host_and_gpus_are_not(world: list[Callers]) -> None:
    assert resolve_provider(TWO, "auto", CPU) == resolve_provider(TWO, "host", CPU) == "host"
    assert resolve_provider(TWO, "torch", GPU) == "torch"
    for provider, device in (("host", GPU), ("torch", CPU), ("nvshmem", CPU)):
        with pytest.raises(ValueError, match=f"provider='{provider}' with tensors on {device}"):
            resolve_provider(TWO, provider, device)


class Ranks:
    """A stand-in for the Agreement of two ranks, of which the other one has room or not."""

    def __init__(self, theirs: str | None) -> None:
        self.theirs, self.asked = theirs, 0

    def all_succeed(self, error: str | None, what: str) -> None:
        self.asked += 1
        if error or self.theirs:
            raise RuntimeError(f"{what}: {error or self.theirs}")


def test_memory_is_allocated_by_all_ranks_or_by_none() -> None:
    memory, here, there = torch.zeros(8), Ranks(None), Ranks("rank 1: no room")
    assert allocated(lambda: memory, 32, here, "allocate") is memory and here.asked == 1  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="allocate: rank 1: no room"):
        allocated(lambda: memory, 32, there, "allocate")  # type: ignore[arg-type]


def test_a_rank_without_room_tells_the_others_why_and_the_way_out() -> None:
    """Whatever the provider raises: a rank that left alone would keep its peers waiting."""

    class OwnError(Exception):
        pass

    def make() -> torch.Tensor:
        raise OwnError("out of memory")

    ranks = Ranks(None)
    with pytest.raises(
        RuntimeError, match=r"32 bytes: out of memory; leave more room on its GPU.*exchange-mib.*provider"
    ):
        allocated(make, 32, ranks, "allocate")  # type: ignore[arg-type]
    assert ranks.asked == 1
