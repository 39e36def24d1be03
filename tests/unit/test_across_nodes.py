"""What carries data between the nodes of a domain, and what symmetric memory it asks for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from overlap_train import OverlapConfig
from overlap_train.group.slots import Layout
from overlap_train.nodes import connect as across_nodes
from overlap_train.nodes.connect import AcrossNodes
from overlap_train.schedule.order import Topology

GPU, TWO_BY_TWO = torch.device("cuda", 0), Topology(2, 2, 3)


def across(topology: Topology = TWO_BY_TWO, on_gpu: bool = True, **settings: Any) -> AcrossNodes:
    agreement: Any = SimpleNamespace(rank=0, group="group", barrier=lambda what: None)
    launcher: Any = object() if on_gpu else None
    fault: Any = object()
    return AcrossNodes(OverlapConfig(**settings), GPU, topology, agreement, fault, launcher)


@pytest.mark.parametrize(
    ("where", "by_nvshmem"),
    [
        (across(network="nvshmem"), True),
        (across(network="nccl"), False),
        (across(), False),
        (across(Topology(1, 4, 3), network="nvshmem"), False),
        (across(on_gpu=False, network="nvshmem"), False),
    ],
)
def test_nvshmem_carries_where_it_is_asked_for_between_nodes_of_gpus(where: AcrossNodes, by_nvshmem: bool) -> None:
    assert where.by_nvshmem == by_nvshmem and where.staged_blocks == int(by_nvshmem)


def asked(where: AcrossNodes, provider: str = "nvshmem") -> Any:
    """Of which ranks the provider is asked for."""
    with mock.patch.object(across_nodes, "resolve_provider", return_value=provider) as resolve:
        where.provider()
    return resolve.call_args.args[3]


def test_its_world_is_the_whole_group() -> None:
    assert asked(across(network="nvshmem")) is None
    assert asked(across(network="nccl")) == range(2, 4)
    assert asked(across(Topology(1, 4, 3), network="nvshmem"), "torch") is None


def test_other_memory_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"network='nvshmem' with symmetric memory of torch.*--overlap-train-network"):
        asked(across(network="nvshmem"), "torch")


@pytest.mark.parametrize(("network", "staging"), [("nvshmem", 1000), ("nccl", 0)])
def test_a_block_more_is_held_to_send_from(network: str, staging: int) -> None:
    layout, where = Layout(4, 4000), across(network=network)
    heap = mock.Mock(**{"view.return_value": "memory"})
    engine = mock.Mock(spec=across_nodes.NvshmemEngine if staging else across_nodes.NcclEngine)
    engine.network = mock.Mock()
    with (
        mock.patch.object(across_nodes, "open_heap", return_value=heap) as open_heap,
        mock.patch.object(across_nodes, "NodeWaits"),
        mock.patch.object(across_nodes, "NodeWorkspace"),
    ):
        where.new_memory(layout, engine)
    assert open_heap.call_args.args[1] == layout.nbytes + staging
    assert open_heap.call_args.kwargs == {"carries": bool(staging)}
    assert engine.network.attach.call_args_list == ([mock.call("memory", layout.nbytes)] if staging else [])


def test_a_rank_without_nvshmem_is_not_stopped_before_the_others_know() -> None:
    """The engine is made before ranks agree on the first call; what is missing is said there."""
    with mock.patch.dict("sys.modules", {"nvshmem": None}):
        engine, _ = made_engine("NvshmemEngine", network="nvshmem")
    assert engine.called


def made_engine(name: str, **settings: Any) -> tuple[Any, Any]:
    """The class of the engine that is made, and what settled the SMs of sums: 5 of them. NCCL carries 30 GB/s on
    six."""
    where = across(**settings)
    object.__setattr__(where, "launcher", mock.Mock())
    with (
        mock.patch.object(across_nodes, name) as engine,
        mock.patch.object(across_nodes, "connect", return_value=(mock.Mock(sms=6), 30.0)),
        mock.patch.object(across_nodes, "Blas"),
        mock.patch.object(across_nodes, "settle", return_value=5) as settle,
    ):
        assert where.new_engine() is engine.return_value
    return engine, settle


@pytest.mark.parametrize(
    ("name", "settings", "gbs", "asked", "most"),
    [
        ("NcclEngine", {}, 30.0, 0, 9), ("NcclEngine", {"reduce_sms": 7}, 30.0, 7, 7),
        ("NvshmemEngine", {"network": "nvshmem"}, 50.0, 0, 15),
    ],
)  # fmt: skip
def test_sums_get_the_sms_that_keep_up_with_the_network(
    name: str, settings: dict[str, Any], gbs: float, asked: int, most: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what NCCL leaves of what communication may hold, which is printed."""
    engine, settle = made_engine(name, **settings)
    found = (5, gbs) if name == "NcclEngine" else (5,)  # NVSHMEM's network is not measured
    assert engine.call_args.args[5:] == found and settle.call_args.args[1:] == (TWO_BY_TWO, GPU, gbs, asked, most)
    nccl = 6 if name == "NcclEngine" else 0
    said = f"holds {nccl + 5 + 1} SMs (at most 16): NCCL {nccl}, sums of a node 5, waits 1\n"
    assert capsys.readouterr().err == f"overlap_train: communication between nodes {said}"


@pytest.mark.parametrize("step", ["settle", "Blas", "NcclEngine"])
def test_nodes_are_disconnected_where_the_engine_cannot_be_made(step: str) -> None:
    where, nccl = across(), mock.Mock(sms=6)
    object.__setattr__(where, "launcher", mock.Mock())
    steps = {name: mock.Mock() for name in ("settle", "Blas", "NcclEngine")}
    steps["settle"].return_value = 5
    steps[step].side_effect = RuntimeError("rank 1")
    with (
        mock.patch.multiple(across_nodes, connect=mock.Mock(return_value=(nccl, 30.0)), **steps),
        pytest.raises(RuntimeError, match="rank 1"),
    ):
        where.new_engine()
    assert nccl.close.call_args_list == [mock.call(orderly=False)]


def test_nodes_stay_connected_where_the_engine_is_made() -> None:
    engine, _ = made_engine("NcclEngine")
    assert not engine.call_args.args[2].close.called
