"""Which ranks form a node, and which groups are refused."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from overlap_train.config import OverlapConfig
from overlap_train.group import topology
from overlap_train.group.topology import Nodes, find_nodes, nodes_error

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("places", "error"),
    [
        ("aa", None),
        ("aabb", None),
        ("abc", None),
        ("aaab", "unequal numbers of its ranks: ranks 0-2, 3; start as many"),
        ("abab", "not numbered node by node: ranks 0 2, 1 3; make the group"),
    ],
)
def test_nodes_are_equal_and_of_ranks_that_follow_each_other(places: str, error: str | None) -> None:
    said = nodes_error(places)
    assert said is None if error is None else error in said and "method='collective'" in said


class Told:
    """An agreement in which all say what this rank says, but for the settings, or the places, of the others."""

    def __init__(self, rank: int, others: Any, places: str = "") -> None:
        self.rank, self.world_size, self._others, self._places = rank, len(others) + 1, others, places

    def exchange(self, value: Any, what: str, kind: str = "") -> list[Any]:
        names = ("node_ranks", "network_sms", "reduce_sms")
        settings = [value[0], *({**value[0], **dict(zip(names, other, strict=True))} for other in self._others)]
        return list(zip(settings, self._places or [value[1]] * self.world_size, strict=True))


def found(agreement: Any, device: torch.device, node_ranks: int) -> Nodes:
    config = OverlapConfig(node_ranks=node_ranks, network_sms=4, reduce_sms=8)
    return find_nodes(agreement, device, config, "find nodes")


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


@pytest.mark.parametrize(("places", "nodes"), [("aaaa", 1), ("aabb", 2), ("abcd", 4)])
def test_ranks_of_one_place_form_a_node(places: str, nodes: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert found(Told(0, [(0, 4, 8)] * 3, places), GPU, 0).topology.nodes == nodes
    assert ("found by operating system" in capsys.readouterr().err) == (nodes > 1)


def test_containers_of_one_host_share_gpus_and_not_their_processes() -> None:
    with mock.patch.object(topology, "machine", return_value="boot/pid:[1]"):
        assert (topology._place(CPU), topology._place(GPU)) == ("boot/pid:[1]", "boot")
    with mock.patch.object(topology, "machine", return_value=""):
        assert topology._place(CPU) == topology._place(GPU) == ""
