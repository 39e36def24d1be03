"""Which provider of symmetric memory serves which device and group."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overlap_train.symmetric import nvshmem, resolve_provider

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The ranks of NVSHMEM's one world; groups are their ranks here, and nvshmem4py is installed."""
    ranks: list[tuple[int, ...]] = []
    monkeypatch.setattr(nvshmem, "_world_ranks", ranks)
    monkeypatch.setattr(
        nvshmem, "_ranks", lambda group, ranks: group if ranks is None else group[ranks.start : ranks.stop]
    )
    monkeypatch.setattr(nvshmem, "is_installed", lambda: True)
    return ranks


def test_nvshmem_serves_the_group_of_its_world_only(world: list[tuple[int, ...]]) -> None:
    group: Any = (0, 1)
    assert resolve_provider(group, "auto", GPU) == "nvshmem"
    world.append((0, 1))
    assert resolve_provider(group, "auto", GPU) == "nvshmem"
    other: Any = (2, 3)
    assert resolve_provider(other, "auto", GPU) == "torch"


def test_nvshmem_serves_the_node_of_its_world(world: list[tuple[int, ...]]) -> None:
    group: Any = (4, 5, 6, 7)
    world.append((6, 7))
    assert resolve_provider(group, "auto", GPU, range(2, 4)) == "nvshmem"
    assert resolve_provider(group, "auto", GPU, range(2)) == resolve_provider(group, "auto", GPU) == "torch"


def test_without_nvshmem4py_torch_serves(world: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvshmem, "is_installed", lambda: False)
    group: Any = (0, 1)
    assert resolve_provider(group, "auto", GPU) == "torch"
    with pytest.raises(ValueError, match="nvshmem4py is not installed"):
        resolve_provider(group, "nvshmem", GPU)


def test_cpus_are_served_by_host_and_gpus_are_not(world: list[tuple[int, ...]]) -> None:
    group: Any = (0, 1)
    assert resolve_provider(group, "auto", CPU) == resolve_provider(group, "host", CPU) == "host"
    assert resolve_provider(group, "torch", GPU) == "torch"
    for provider, device in (("host", GPU), ("torch", CPU), ("nvshmem", CPU)):
        with pytest.raises(ValueError, match=f"provider='{provider}' with tensors on {device}"):
            resolve_provider(group, provider, device)
