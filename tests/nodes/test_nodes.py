"""Groups over nodes that really share no memory: found, right on a slow wire, and told when it is cut."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from overlap_train import (
    OverlapConfig,
    OverlapTimeoutError,
    all_gather_linear,
    check,
    linear_reduce_scatter,
)
from overlap_train.group.registry import made_domain
from overlap_train.nodes.gloo import HostEngine
from tests.linear_cases import OPERATORS, SHAPES, Case
from tests.nodes.network import Network, missing, running
from tests.nodes.ranks import started
from tests.processes import values

_MISSING = missing()
pytestmark = pytest.mark.skipif(bool(_MISSING), reason=_MISSING or "-")
TIMEOUT_S = 3.0
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with running(nodes=2) as found:
        yield found


def _found(rank: int, world: int) -> tuple[str, str, tuple[int, int, int]]:
    """Every shape by every method that crosses nodes; nobody has told it what a node is."""
    for method in ("chunked", "collective", "auto"):
        case = Case(dist.group.WORLD, CPU, OverlapConfig(method=method, timeout_s=30))
        for number, (rows, k, n) in enumerate(SHAPES.values()):
            for operator in OPERATORS.values():
                operator(case, rows, k, n, seed=number)
    for one, other in (("column", "row"), ("to_heads", "to_rows")):
        OPERATORS[one](case, (64, 8), 512, 64)  # takes a while on a slow wire
        OPERATORS[other](case, (64, 8), 64, 512)
    domain = made_domain(dist.group.WORLD)
    assert domain is not None and isinstance(domain.engine, HostEngine)
    found = domain.topology
    return socket.gethostname(), os.readlink("/proc/self/ns/pid"), (found.nodes, found.local, found.rank)


def test_two_nodes_of_two_ranks_are_found_and_right_on_a_slow_wire(network: Network, tmp_path: Path) -> None:
    for node in range(2):
        network.throttle(node, "50mbit")
    with started(network, tmp_path, (2, 2), _found) as ranks:
        told = values(ranks.outcomes(limit_s=150))
    hosts, namespaces, found = zip(*told, strict=True)
    assert len(set(hosts)) == 1, "the host name says nothing"
    assert len(set(namespaces)) == 2
    assert list(found) == [(2, 2, rank) for rank in range(4)]
    printed = re.findall("4 ranks on 2 nodes of 2, found by operating system: ranks 0-1, 2-3; gloo", ranks.errors())
    assert len(printed) == 1, "rank 0 says it once"


def _uneven(rank: int, world: int) -> str:
    x, w = torch.ones(4, 8), torch.ones(8, 8)
    with pytest.raises(ValueError) as raised:
        all_gather_linear(x, w, group=dist.group.WORLD, config=OverlapConfig(timeout_s=30))
    OPERATORS["column"](Case(dist.group.WORLD, CPU, OverlapConfig(method="collective", timeout_s=30)), (3, 5), 37, 29)
    return str(raised.value)


def test_nodes_of_unequal_size_are_refused_by_name(network: Network, tmp_path: Path) -> None:
    with started(network, tmp_path, (2, 1), _uneven) as ranks:
        told = values(ranks.outcomes(limit_s=150))
    assert all("unequal numbers of its ranks: ranks 0-1, 2; start as many on each node" in text for text in told)


def _until_it_fails(rank: int, world: int, folder: Path) -> tuple[str, float]:
    """Steps until a wait gives up: what it says, and how long the last step took."""
    options = dict(group=dist.group.WORLD, config=OverlapConfig(timeout_s=TIMEOUT_S))
    x, w = torch.ones(64, 256, requires_grad=True), torch.ones(256, 256, requires_grad=True)
    for step in range(10_000):
        begin = time.monotonic()
        try:
            linear_reduce_scatter(all_gather_linear(x, w, **options), w, **options).sum().backward()
        except OverlapTimeoutError as error:
            with pytest.raises(OverlapTimeoutError):
                check()  # and it stays raised
            return str(error), time.monotonic() - begin
        (folder / f"steps{rank}").write_text(str(step))
    return "no error", 0.0


def test_a_cut_wire_is_named_by_every_rank(network: Network, tmp_path: Path) -> None:
    for node in range(2):
        network.throttle(node, "20mbit")  # a step sends 128 KB each way, or more: it is nearly always under way
    with started(network, tmp_path, (2, 2), _until_it_fails, tmp_path) as ranks:
        _wait_for_steps(tmp_path, 3)
        network.cut(1)
        told = values(ranks.outcomes(limit_s=40 * TIMEOUT_S))
    network.mend(1)
    for rank, (message, seconds) in enumerate(told):
        assert f"rank {rank} " in message and (_names_the_wire(rank, message) or _waits_beside(rank, told)), message
        assert seconds < 10 * TIMEOUT_S


def _names_the_wire(rank: int, message: str) -> bool:
    here, there = rank // 2, 1 - rank // 2
    return "network" in message and f"of node {there}" in message and f"node {here}" in message


def _waits_beside(rank: int, told: list[tuple[str, float]]) -> bool:
    """Whether it had all that came from far, and waited for the other rank of its node, which had not and says why."""
    beside = rank ^ 1
    return f"of rank {beside} (of this node {rank // 2}," in told[rank][0] and _names_the_wire(beside, told[beside][0])


def _wait_for_steps(folder: Path, steps: int, limit_s: float = 150) -> None:
    end = time.monotonic() + limit_s
    files = [folder / f"steps{rank}" for rank in range(4)]
    while not all(file.exists() and int(file.read_text() or 0) >= steps for file in files):
        assert time.monotonic() < end, "no step"
        time.sleep(0.01)
