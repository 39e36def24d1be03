"""What carries data between the nodes of a group, and what symmetric memory it asks for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from overlap_train import OverlapConfig
from overlap_train.group.slots import Layout
from overlap_train.nodes import SeveralNodes, connect
from overlap_train.nodes.engines import InterNodeEngine
from overlap_train.schedule.order import Topology
from overlap_train.select.system import H200

GPU, TWO_BY_TWO = torch.device("cuda", 0), Topology(2, 2, 3)


def across(on_gpu: bool = True, **settings: Any) -> SeveralNodes:
    domain: Any = SimpleNamespace(
        topology=TWO_BY_TWO, rank=0, group="group", on_gpu=on_gpu, config=OverlapConfig(**settings), device=GPU,
        agreement=mock.Mock(), fault=mock.Mock(), launcher=mock.Mock() if on_gpu else None, engine=mock.Mock(),
        is_capturing=lambda: False,
    )  # fmt: skip
    return SeveralNodes(domain)


def test_nvshmem_needs_memory_of_the_whole_group_and_a_block_to_send_from() -> None:
    for where, ranks, staged in (
        (across(network="nvshmem"), None, 1),
        (across(network="nccl"), range(2, 4), 0),
        (across(on_gpu=False, network="nvshmem"), range(2, 4), 0),
    ):
        with mock.patch.object(connect, "resolve_provider", return_value="nvshmem") as resolve:
            where.provider()
        assert resolve.call_args.args[3] == ranks and where.staged_blocks == staged
    refused = pytest.raises(
        ValueError, match=r"network='nvshmem' with symmetric memory of torch.*--overlap-train-network"
    )
    with mock.patch.object(connect, "resolve_provider", return_value="torch"), refused:
        across(network="nvshmem").provider()


@pytest.mark.parametrize(("network", "staging"), [("nvshmem", 1000), ("nccl", 0)])
def test_the_engine_takes_new_memory_before_any_peer_sends(network: str, staging: int) -> None:
    layout, where = Layout(4, 4000), across(network=network)
    heap = mock.Mock(**{"view.return_value": "memory"})
    where.domain.engine = mock.Mock(spec=connect.NvshmemEngine if staging else connect.NcclEngine, network=mock.Mock())
    with (
        mock.patch.object(connect, "heap_by", return_value=heap) as heap_by,
        mock.patch.multiple(connect, NodeWaits=mock.Mock(), NodeWorkspace=mock.Mock()),
        mock.patch.object(SeveralNodes, "provider"),
    ):
        where.new_memory(layout, None, [])
    assert heap_by.call_args.args[2] == layout.nbytes + staging
    attach = where.domain.engine.network.attach
    assert attach.call_args_list == ([mock.call("memory", layout.nbytes)] if staging else [])


@pytest.mark.parametrize(
    ("name", "settings", "nccl", "sums"),
    [
        ("NcclEngine", {}, 6, 2), ("NcclEngine", {"reduce_sms": 7}, 6, 7),
        ("NvshmemEngine", {"network": "nvshmem"}, 0, 3),
    ],
)  # fmt: skip
def test_sums_get_the_sms_that_keep_up_with_the_network(
    name: str, settings: dict[str, Any], nccl: int, sums: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which is printed. NCCL carries 30 GB/s on six SMs. A rank without NVSHMEM is not stopped here: the others hear of it where
    ranks agree."""
    where = across(**settings)
    with (
        mock.patch.dict("sys.modules", {"nvshmem": None}),
        mock.patch.object(connect, name) as engine,
        mock.patch.object(connect, "connect", return_value=(mock.Mock(sms=6), 30.0)),
        mock.patch.multiple(connect, Blas=mock.DEFAULT, System=mock.Mock(of=lambda device: H200)),
    ):
        assert where.engine() is engine.return_value
    assert engine.call_args.args[5] == sums
    said = f"holds {nccl + sums + 1} SMs (at most 16): NCCL {nccl}, sums of a node {sums}, waits 1\n"
    assert capsys.readouterr().err == f"overlap_train: communication between nodes {said}"


@pytest.mark.parametrize("step", ["Blas", "NcclEngine"])
def test_nodes_are_disconnected_where_the_engine_cannot_be_made(step: str) -> None:
    where, nccl = across(), mock.Mock(sms=6)
    steps = {"Blas": mock.Mock(), "NcclEngine": mock.Mock(), "System": mock.Mock(of=lambda device: H200)}
    steps[step].side_effect = RuntimeError("rank 1")
    with (
        mock.patch.multiple(connect, connect=mock.Mock(return_value=(nccl, 30.0)), **steps),
        pytest.raises(RuntimeError, match="rank 1"),
    ):
        where.engine()
    assert nccl.close.call_args_list == [mock.call(orderly=False)]


def test_plans_know_the_sms_and_the_pace_of_the_connected_network() -> None:
    """Before the nodes are connected nothing is known; CPU processes have none."""
    config, where = OverlapConfig(), across()
    assert (where.is_connected, where.network_gbs) == (False, 0.0)
    assert across(on_gpu=False).settled(config) is config
    where.domain.engine = mock.Mock(spec=InterNodeEngine, network=SimpleNamespace(sms=8), reduce_sms=5, gbs=2.5)
    assert (where.is_connected, where.network_gbs) == (True, 2.5)
    assert where.settled(config) == OverlapConfig(network_sms=8, reduce_sms=5)
