"""Which ranks form a node, which groups are refused, and how memory of other hosts is tried."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from overlap_train.group import topology
from overlap_train.group.topology import (
    FabricMemory,
    GpuPlace,
    GpuSample,
    Nodes,
    NodeSettings,
    _Properties,
    find_nodes,
    nodes_error,
    read_token,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
Reached = list[tuple[int, ...]]


def found(agreement: Any, device: torch.device, node_ranks: int, network: str = "auto") -> Nodes:
    settings = NodeSettings(node_ranks, network, network_sms=4, reduce_sms=8)
    return find_nodes(agreement, device, settings, "find nodes", lambda nodes: None)[0]


@pytest.mark.parametrize(
    ("reached", "error"),
    [
        ([(0, 1), (0, 1)], None),
        ([(0, 1), (0, 1), (2, 3), (2, 3)], None),
        ([(0,), (1,), (2,)], None),
        ([(0, 1, 2), (0, 1, 2), (0, 1, 2), (3,)], "unequal numbers of its ranks: ranks 0-2, ranks 3; start as many"),
        ([(0, 2), (1, 3), (0, 2), (1, 3)], "not numbered node by node: ranks 0 2, ranks 1 3; make the group"),
        ([(0, 1), (1,)], "rank 0 of the group can map the memory of ranks 0-1, but rank 1 that of 1; in a node"),
        ([(0,), ()], "rank 1 of the group can map the memory of ranks none"),
    ],
)
def test_nodes_are_equal_and_of_ranks_that_follow_each_other(reached: Reached, error: str | None) -> None:
    for device in ("cpu", "cuda"):
        said = nodes_error(reached, device)
        assert said is None if error is None else error in said and "method='collective'" in said


class Told:
    """An agreement of 4 ranks in which all say what this one says, but for the settings of the others."""

    def __init__(self, rank: int, others: Sequence[tuple[int, int, int]]) -> None:
        self.rank, self.world_size, self._others = rank, len(others) + 1, others

    def exchange(self, value: Any, what: str, kind: str = "") -> list[Any]:
        if not isinstance(value[0], NodeSettings):
            return [value] * self.world_size
        others = [NodeSettings(ranks, value[0].network, *sms) for ranks, *sms in self._others]
        return [value, *((other, *value[1:]) for other in others)]


@pytest.mark.parametrize(
    ("others", "error"),
    [
        ([(2, 4, 8)] * 2, "node_ranks=2 does not divide the group's 3 ranks"),
        ([(0, 4, 8), (2, 4, 8), (2, 4, 8)], "node_ranks is 2, 0, 2, 2 on the ranks of the group"),
        ([(2, 4, 8), (2, 6, 8), (2, 4, 8)], "network_sms is 4, 4, 6, 4 on the ranks of the group"),
        ([(2, 4, 8), (2, 4, 9), (2, 4, 8)], "reduce_sms is 8, 8, 9, 8 on the ranks of the group"),
        ([(2, 4, 8)] * 3, None),
    ],
)
def test_settings_are_compared_and_rank_0_says_what_nodes_they_make(
    others: list[tuple[int, int, int]], error: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = found(Told(0, others), CPU, 2)
    assert (nodes.problem is None) if error is None else error in (nodes.problem or "")
    assert nodes.topology.nodes == (2 if error is None else 1)
    said = capsys.readouterr().err
    assert ("a group of 4 ranks on 2 nodes of 2, as node_ranks says: ranks 0-1, 2-3; gloo between" in said) != bool(
        error
    )
    found(Told(1, others), CPU, 2)
    assert capsys.readouterr().err == ""


class Fabric:
    """A stand-in for FabricMemory: of GPUs with the same first letter in their handles one can map the other's memory."""

    def __init__(self, handle: bytes | None) -> None:
        self.handle, self.open = handle, True

    def reaches(self, handle: bytes) -> bool:
        return self.handle is not None and self.handle[:1] == handle[:1]

    def close(self) -> None:
        self.open = False


class Hosts:
    """An agreement of GPUs: of each rank the boot id of its host and its fabric handle; this is rank 0."""

    def __init__(self, *places: GpuPlace) -> None:
        self.rank, self.world_size, self._places = 0, len(places), places

    def exchange(self, value: Any, what: str, kind: str = "") -> list[Any]:
        if isinstance(value[0], NodeSettings):
            return [(value[0], place) for place in self._places]
        samples = [sample_of(place) for place in self._places]
        return [(tuple(r for r, place in enumerate(self._places) if s.reaches(place)), None) for s in samples]


def sample_of(place: GpuPlace) -> GpuSample:
    memory = mock.patch.object(topology, "FabricMemory", return_value=Fabric(place.fabric))
    with memory, mock.patch.object(topology, "_boot", return_value=place.boot):
        return GpuSample(GPU)


@pytest.mark.parametrize(
    ("places", "nodes"),
    [
        ("a a a a", 1), ("a a b b", 2), ("a b c d", 4), ("a/X1 a/X2 b/X3 b/X4", 1), ("a/X b/X c/Y d/Y", 2), ("a/X a b b/X", 0),
        ("? ? ? ?", 1),
    ],
)  # fmt: skip
def test_gpus_of_one_operating_system_or_one_fabric_form_a_node(
    places: str, nodes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A letter: of the host; after a slash: of the fabric. 0 nodes: some map memory that others cannot."""
    told = [place.partition("/") for place in places.split()]
    hosts = [GpuPlace("" if host == "?" else host, fabric.encode() or None) for host, _, fabric in told]
    sample: Any = sample_of(hosts[0])
    with mock.patch.object(topology, "new_sample", return_value=sample):
        nodes_found = found(Hosts(*hosts), GPU, 0)
    assert not sample._memory.open, "given back"
    assert "PID namespace" not in (nodes_found.problem or "")
    assert (nodes_found.topology.nodes if nodes_found.problem is None else 0) == nodes
    assert ("found by operating system and NVLink fabric" in capsys.readouterr().err) == (nodes > 1)


def test_the_file_of_another_process_is_neither_waited_for_nor_taken() -> None:
    """In another PID namespace a number is somebody else's: a pipe, which would never end an open or a read."""
    reading, writing = os.pipe()
    own = os.memfd_create(topology._NAME)
    os.write(own, b"0123456789abcdef")
    try:
        for number in (reading, writing, 1 << 20):
            assert read_token(os.getpid(), number) is None
        assert read_token(os.getpid(), own) == b"0123456789abcdef"
        assert read_token(1 << 30, own) is None
    finally:
        for number in (reading, writing, own):
            os.close(number)


class Driver:
    """CUDA's, on hosts that are joined by NVLink."""

    def __init__(self) -> None:
        self.made, self.freed = [], []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: getattr(Driver, f"of_{name}")(self, *arguments)

    def of_cuMemGetAllocationGranularity(self, size: Any, properties: Any, option: int) -> int:
        size._obj.value = 2 << 20
        return option

    def of_cuMemCreate(self, memory: Any, size: Any, properties: Any, flags: Any) -> int:
        asked = properties._obj
        self.made.append((size.value, asked.type, asked.handle_types, asked.location.type, asked.location.id))
        memory._obj.value = 70 + len(self.made)
        return int(flags.value)

    def of_cuMemExportToShareableHandle(self, handle: Any, memory: Any, kind: int, flags: Any) -> int:
        handle._obj[:] = bytes([memory.value, kind]) + bytes(62)
        return int(flags.value)

    def of_cuMemImportFromShareableHandle(self, memory: Any, handle: Any, kind: int) -> int:
        memory._obj.value = 1000 + handle._obj[0]
        return 0 if handle._obj[1] == kind else 1

    def of_cuMemRelease(self, memory: Any) -> int:
        self.freed.append(memory.value)
        return 0


def test_fabric_memory_is_made_offered_taken_in_and_given_back() -> None:
    driver = Driver()
    memory = FabricMemory(torch.device("cuda", 3), driver)
    assert driver.made == [(2 << 20, 1, 8, 1, 3)]  # pinned, with a fabric handle, on device 3
    assert memory.reaches(bytes([5, 8]) + bytes(62)) and not memory.reaches(bytes(64)) and driver.freed == [1005]
    memory.close()
    memory.close()
    assert driver.freed == [1005, 71]
    # CUmemAllocationProp in cuda.h: two enums, {type, id}, a pointer, eight bytes of flags.
    offsets = [getattr(_Properties, name).offset for name, _ in _Properties._fields_]
    assert offsets == [0, 4, 8, 16, 24] and ctypes.sizeof(_Properties) == 32
