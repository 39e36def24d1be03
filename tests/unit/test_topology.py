"""Which ranks form a node, and which groups are refused."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from overlap_train import OverlapConfig
from overlap_train.group import topology
from overlap_train.group import topology as reach
from overlap_train.group.topology import (
    GpuPlace,
    GpuSample,
    NodeSettings,
    find_nodes,
    new_sample,
    nodes_error,
    read_token,
)
from overlap_train.ops.plan import why_not_across_nodes, why_not_together
from overlap_train.schedule.order import A2A_GEMM, GATHER

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
Reached = list[tuple[int, ...]]


def settings(node_ranks: int, network: str = "auto") -> NodeSettings:
    return NodeSettings(node_ranks, network, network_sms=4, reduce_sms=8)


@pytest.mark.parametrize("reached", [[(0, 1), (0, 1)], [(0, 1), (0, 1), (2, 3), (2, 3)], [(0,), (1,), (2,)]])
def test_equal_nodes_of_ranks_that_follow_each_other_will_do(reached: Reached) -> None:
    assert nodes_error(reached, "cpu") is None


@pytest.mark.parametrize(
    ("reached", "error"),
    [
        ([(0, 1, 2), (0, 1, 2), (0, 1, 2), (3,)], "unequal numbers of its ranks: ranks 0-2, ranks 3; start as many"),
        ([(0, 2), (1, 3), (0, 2), (1, 3)], "not numbered node by node: ranks 0 2, ranks 1 3; make the group"),
        ([(0, 1), (1,)], "rank 0 of the group can map the memory of ranks 0-1, but rank 1 that of 1; in a node"),
        ([(0,), ()], "rank 1 of the group can map the memory of ranks none"),
    ],
)
def test_other_nodes_are_refused_by_name(reached: Reached, error: str) -> None:
    for device in ("cpu", "cuda"):
        said = nodes_error(reached, device) or ""
        assert error in said and "method='collective'" in said


def test_ranks_that_do_not_map_each_other_are_told_what_helps_there() -> None:
    """GPUs are of one node by their host or by the fabric between hosts, whatever processes see of each other."""
    on_cpu, on_gpu = (nodes_error([(0, 1), (1,)], device) or "" for device in ("cpu", "cuda"))
    assert "PID namespace" in on_cpu and "nvidia-smi" not in on_cpu
    assert all(word in on_gpu for word in ("nvidia-smi -q", "IMEX", "--overlap-train-node-ranks"))
    assert "PID namespace" not in on_gpu


class Told:
    """An agreement in which all ranks say what this one says, but for node_ranks and, where more is given, network_sms and
    reduce_sms."""

    def __init__(self, rank: int, others: Sequence[int | tuple[int, int, int]]) -> None:
        self.rank, self.world_size, self._others = rank, len(others) + 1, others

    def exchange(self, value: Any, what: str) -> list[Any]:
        if not isinstance(value[0], NodeSettings):
            return [value] * self.world_size
        told = [other if isinstance(other, tuple) else (other, *value[0][2:]) for other in self._others]
        others = [NodeSettings(ranks, value[0].network, *sms) for ranks, *sms in told]
        return [value, *((other, *value[1:]) for other in others)]


@pytest.mark.parametrize(
    ("node_ranks", "others", "error"),
    [
        (2, [2, 2], "node_ranks=2 does not divide the group's 3 ranks"),
        (2, [0, 2, 2], "node_ranks is 2, 0, 2, 2 on the ranks of the group"),
        (2, [2, (2, 6, 8), 2], "network_sms is 4, 4, 6, 4 on the ranks of the group"),
        (2, [2, (2, 4, 9), 2], "reduce_sms is 8, 8, 9, 8 on the ranks of the group"),
        (2, [2, 2, 2], None),
    ],
)
def test_the_settings_are_checked(
    node_ranks: int, others: list[int | tuple[int, int, int]], error: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    agreement: Any = Told(0, others)
    found = find_nodes(agreement, CPU, settings(node_ranks))
    assert (found.problem is None) if error is None else error in (found.problem or "")
    assert found.topology.nodes == (2 if error is None else 1)
    printed = "4 ranks on 2 nodes of 2, as node_ranks says: ranks 0-1, 2-3; gloo between nodes\n"
    assert capsys.readouterr().err == (f"overlap_train: a group of {printed}" if error is None else "")


def test_rank_0_alone_prints(capsys: pytest.CaptureFixture[str]) -> None:
    agreement: Any = Told(1, [2, 2, 2])
    assert find_nodes(agreement, CPU, settings(2)).topology.nodes == 2
    assert capsys.readouterr().err == ""


def test_nothing_is_asked_of_one_rank() -> None:
    alone: Any = SimpleNamespace(rank=0, world_size=1)
    assert find_nodes(alone, CPU, settings(0)).topology.nodes == 1


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

    def exchange(self, value: Any, what: str) -> list[Any]:
        if isinstance(value[0], NodeSettings):
            return [(value[0], place) for place in self._places]
        samples = [sample_of(place) for place in self._places]
        reached = [tuple(r for r, place in enumerate(self._places) if s.reaches(place)) for s in samples]
        assert value == reached[0]
        return reached


def sample_of(place: GpuPlace) -> GpuSample:
    memory = mock.patch("overlap_train.group.topology.FabricMemory", return_value=Fabric(place.fabric))
    with memory, mock.patch.object(reach, "_boot", return_value=place.boot):
        return GpuSample(GPU)


@pytest.mark.parametrize(
    ("places", "nodes"),
    [
        ("a a a a", 1),
        ("a a b b", 2),
        ("a b c d", 4),
        ("a/X1 a/X2 b/X3 b/X4", 1),
        ("a/X b/X c/Y d/Y", 2),
        ("a/X a b b/X", 0),
        ("? ? ? ?", 1),
    ],
)
def test_gpus_of_one_operating_system_or_one_fabric_form_a_node(
    places: str, nodes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A letter: of the host; after a slash: of the fabric. 0 nodes: some map memory that others cannot."""
    told = [place.partition("/") for place in places.split()]
    hosts = [GpuPlace("" if host == "?" else host, fabric.encode() or None) for host, _, fabric in told]
    with mock.patch.object(topology, "new_sample", return_value=sample_of(hosts[0])):
        agreement: Any = Hosts(*hosts)
        found = find_nodes(agreement, GPU, settings(0))
    assert "PID namespace" not in (found.problem or "")
    assert (found.topology.nodes if found.problem is None else 0) == nodes
    ranks = {
        2: "2 nodes of 2, found by operating system and NVLink fabric: ranks 0-1, 2-3",
        4: "4 nodes of 1, found by operating system and NVLink fabric: ranks 0, 1, 2, 3",
    }
    said = f"overlap_train: a group of 4 ranks on {ranks[nodes]}; NCCL between nodes\n" if nodes > 1 else ""
    assert capsys.readouterr().err == said


def test_what_was_tried_is_given_back() -> None:
    sample = sample_of(GpuPlace("a", b"X"))
    memory: Any = sample._memory
    agreement: Any = Hosts(GpuPlace("a", b"X"), GpuPlace("a", b"X"))
    with mock.patch.object(topology, "new_sample", return_value=sample):
        find_nodes(agreement, GPU, settings(0))
    assert not memory.open


def test_an_operating_system_that_does_not_say_which_it_is_has_no_name(tmp_path: Path) -> None:
    assert len(reach._boot()) == 36
    with mock.patch.object(reach, "_BOOT", str(tmp_path / "none")):
        assert reach._boot() == ""


def test_gpus_form_the_nodes_that_they_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    agreement: Any = Told(0, [2, 2, 2])
    with mock.patch.object(topology, "new_sample", side_effect=lambda device: new_sample(CPU)):
        found = find_nodes(agreement, GPU, settings(2))
        assert found.problem is None and (found.topology.nodes, found.topology.local) == (2, 2)
        assert capsys.readouterr().err.endswith("ranks 0-1, 2-3; NCCL between nodes\n")
        assert find_nodes(agreement, GPU, settings(2, "nvshmem")).problem is None
        assert capsys.readouterr().err.endswith("ranks 0-1, 2-3; NVSHMEM between nodes\n")
        agreement = Told(0, [4])
        assert "node_ranks is 2, 4 on the ranks" in (find_nodes(agreement, GPU, settings(2)).problem or "")


def test_the_file_of_another_process_is_neither_waited_for_nor_taken() -> None:
    """In another PID namespace a number is somebody else's: a pipe, which would never end an open or a read."""
    reading, writing = os.pipe()
    own = os.memfd_create(reach._NAME)
    os.write(own, b"0123456789abcdef")
    try:
        for number in (reading, writing, 1 << 20):
            assert read_token(os.getpid(), number) is None
        assert read_token(os.getpid(), own) == b"0123456789abcdef"
        assert read_token(1 << 30, own) is None
    finally:
        for number in (reading, writing, own):
            os.close(number)


def plan(method: str, kind: str = GATHER, nodes: int = 2) -> Any:
    engine = SimpleNamespace(method=method, kind=kind, nodes=nodes, slots=int(method != "collective"))
    config, spec = OverlapConfig(method=method), SimpleNamespace(name="a linear")  # type: ignore[arg-type]
    return SimpleNamespace(config=config, fprop=engine, dgrad=engine, spec=spec)


def test_what_does_not_cross_nodes_is_refused_by_name() -> None:
    assert why_not_across_nodes(plan("chunked"), None) is None
    assert why_not_across_nodes(plan("fused", nodes=1), None) is None
    assert why_not_across_nodes(plan("fused"), None) is None
    for method in ("low_latency", "direct"):
        refused = why_not_across_nodes(plan(method), None) or ""
        assert f"method='{method}' in a group of 2 nodes" in refused
    assert why_not_across_nodes(plan("chunked", nodes=1), "unequal") == "unequal"
    for problem in (None, "unequal"):
        assert why_not_across_nodes(plan("collective", A2A_GEMM), problem) is None
    assert why_not_across_nodes(plan("chunked", A2A_GEMM), None) is None
    assert "its kernels send" in (why_not_across_nodes(plan("direct", A2A_GEMM), None) or "")


def test_two_groups_of_gpus_across_nodes_together_are_refused_by_name() -> None:
    """On all ranks alike: also on one whose own groups could, where a peer's cannot."""
    for exchange_nodes, product_nodes in itertools.product((1, 2), (1, 4)):
        exchange, product = plan("chunked", A2A_GEMM, exchange_nodes), plan("fused", nodes=product_nodes)
        assert "group and tp_group span 2 and 4 nodes" in (why_not_together(exchange, product, (2, 4)) or "")
        for one in ((1, 1), (2, 1), (1, 4)):
            assert why_not_together(exchange, product, one) is None
        for method in ("auto", "collective"):
            assert why_not_together(plan(method, A2A_GEMM, exchange_nodes), product, (2, 4)) is None
        assert why_not_together(exchange, plan("collective", nodes=product_nodes), (2, 4)) is None


@pytest.mark.parametrize("value", [-1, True, 1.5, "2"])
def test_a_wrong_number_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"node_ranks=.* must be a number of ranks, or 0"):
        OverlapConfig(node_ranks=value)
