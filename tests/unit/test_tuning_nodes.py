"""Measurements of groups that span nodes: whose they are, what is tried, and what `auto` makes of them."""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_train import OverlapConfig
from overlap_train.ops import plan_cache as tuning_file
from overlap_train.ops.plan import planner_of
from overlap_train.planning.choice import Choice, choose, untuned
from overlap_train.planning.table import UNTUNED, Table, Winner, path_of, read, save
from overlap_train.planning.table_key import CROSSINGS, KERNELS, Key, key_of
from overlap_train.planning.variants import PLAIN, Variant
from overlap_train.schedule.order import A2A_GEMM, GATHER, GEMM_A2A, SCATTER, Topology
from overlap_train.select.passes import Pass
from overlap_train.select.tiling import equal_chunks
from overlap_train.tools.tune.candidates import candidates, variants_to_run

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ONE = Key("NVIDIA H200", "2.11.0", "3.6.0", "570.86.15", "0.1.0", 4)
TWO = replace(ONE, nodes=2)
FC1 = Pass(GATHER, 8192, 7168, 4096, torch.bfloat16, 4)  # blocks of 16 MiB
IN_ONE = Winner(FC1, "fused", {"fused": 1.0, "fused whole": 0.9, "collective": 2.0})
ACROSS = Winner(FC1, "chunked", {"chunked": 3.0, "chunked in 1": 4.0, "chunked in 2": 2.5, "collective": 5.0})


def engine_plan(
    choice: Choice, pass_: Pass, topology: Topology, device: torch.device, w: torch.Tensor, sms: int = 4, sums: int = 9,
    gbs: float = 0.0,
) -> Any:  # fmt: skip
    """The plan of a pass where NCCL has `sms`, the sum of a node `sums`, and the network carries `gbs` GB/s."""
    config = OverlapConfig(network_sms=sms, reduce_sms=sums)
    return planner_of(topology, config, gbs).plan(choice, pass_, device, w)


def table_of(winner: Winner, nodes: int) -> Table:
    return Table({winner.measured.bucket: winner}, nodes)


def test_one_node_and_two_have_files_of_their_own(tmp_path: Path) -> None:
    paths = {save(str(tmp_path), ONE, [IN_ONE]), save(str(tmp_path), TWO, [ACROSS])}
    assert len(paths) == 2 and "4-ranks-2-nodes-" in path_of(str(tmp_path), TWO).name
    assert read(str(tmp_path), ONE).find(FC1) == IN_ONE and read(str(tmp_path), TWO).find(FC1) == ACROSS
    assert read(str(tmp_path), replace(ONE, nodes=4)).find(FC1) is None
    assert key_of(CPU, 4, 2).nodes == 2 and key_of(CPU, 4).nodes == 1


@pytest.mark.parametrize(
    ("device", "nodes", "connections", "network", "told"),
    [
        (GPU, 2, "1", "auto", {}),
        (GPU, 2, "1", "nccl", {}),
        (GPU, 2, "1", "nvshmem", {"network": "nvshmem"}),
        (GPU, 2, "8", "auto", {"queues": "many"}),
        (GPU, 2, None, "auto", {"queues": "many"}),
        (GPU, 1, None, "nvshmem", {}),
        (CPU, 2, None, "nvshmem", {}),
    ],
)
def test_between_nodes_of_gpus_the_network_and_the_hardware_queues_count(
    device: torch.device, nodes: int, connections: str | None, network: str, told: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Files that were measured before with NCCL in one queue keep their names."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if connections is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    written = key_of(device, 4, nodes, network).as_dict()
    assert {name: written.get(name) for name in ("network", "queues") if name in written} == told


@pytest.mark.parametrize(("written", "wanted"), [(ONE, TWO), (TWO, ONE)])
def test_a_file_under_the_name_of_another_number_of_nodes_is_not_used(
    written: Key, wanted: Key, tmp_path: Path
) -> None:
    shutil.copy(save(str(tmp_path), written, [IN_ONE]), path_of(str(tmp_path), wanted))
    with pytest.warns(UserWarning, match="it was measured with"):
        assert not read(str(tmp_path), wanted).winners


def test_files_from_before_nodes_were_counted_mean_one(tmp_path: Path) -> None:
    older = {
        "gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "driver": "570.86.15", "overlap_train": "0.1.0",
        "world": 4, "kernels": KERNELS,
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps(older, sort_keys=True).encode()).hexdigest()[:12]
    entry = {"kind": "gather", "dtype": "bfloat16", "m": 8192, "n": 7168, "k": 4096, "method": "direct", "ms": {}}
    file = tmp_path / f"tuned-NVIDIA-H200-4-ranks-{digest}.json"
    file.write_text(json.dumps({"key": older, "winners": [entry]}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(str(tmp_path), ONE).find(FC1) == Winner(FC1, "direct", {})
        assert not read(str(tmp_path), TWO).winners
    save(str(tmp_path), ONE, [])
    assert json.loads(file.read_text())["key"] == older, "an older installation can still read it"


def test_a_schedule_across_nodes_counts_there_alone(tmp_path: Path) -> None:
    """Of one node the name stays. A file of an older schedule, which does not tell its number, is not used."""
    one, two = (key_of(CPU, 4, nodes) for nodes in (1, 2))
    assert "crossings" not in one.as_dict() and two.as_dict()["crossings"] == CROSSINGS
    older = replace(two, crossings=0)
    assert two.file_name != older.file_name
    shutil.copy(save(str(tmp_path), older, [ACROSS]), path_of(str(tmp_path), two))
    with pytest.warns(UserWarning, match="it was measured with"):
        assert not read(str(tmp_path), two).winners


@pytest.mark.parametrize("network", ["auto", "nvshmem"])
def test_a_domain_has_the_key_of_its_network(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    topology, config = Topology(2, 2, 0), OverlapConfig(network=network)
    domain: Any = SimpleNamespace(device=GPU, world_size=4, topology=topology, config=config)
    assert tuning_file.key_of(domain) == key_of(GPU, 4, 2, network)


def test_files_from_before_networks_and_queues_were_told_mean_nccl_in_one_queue(tmp_path: Path) -> None:
    path = save(str(tmp_path), TWO, [ACROSS])
    assert not {"network", "queues"} & set(json.loads(path.read_text())["key"]), "as such files are"
    assert read(str(tmp_path), TWO).find(FC1) == ACROSS
    for other in (replace(TWO, queues="many"), replace(TWO, network="nvshmem")):
        assert not read(str(tmp_path), other).winners


@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("device", [CPU, GPU])
def test_what_was_measured_across_nodes_is_taken_there_and_said(device: torch.device) -> None:
    choice = choose("auto", FC1, device, table_of(ACROSS, 2), nodes=2)
    assert (choice.method, choice.variant) == ("chunked", Variant(chunks=2))
    assert choice.reason == ("auto: tuned for M=8192 N=7168 K=4096; blocks in 2 chunks")
    named = choose("chunked", FC1, device, table_of(ACROSS, 2), nodes=2)
    assert (named.reason, named.variant.chunks) == ("asked for; blocks in 2 chunks", 2)
    whole = replace(ACROSS, ms={"chunked": 3.0, "chunked in 1": 2.0})
    assert choose("auto", FC1, device, table_of(whole, 2), nodes=2).reason.endswith("; whole blocks")
    slow = replace(ACROSS, method="collective")
    choice = choose("auto", FC1, device, table_of(slow, 2), nodes=2)
    assert choice == Choice("collective", "auto: tuned for M=8192 N=7168 K=4096")


@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("device", [CPU, GPU])
def test_a_row_of_another_number_of_nodes_is_never_taken(device: torch.device) -> None:
    for nodes, table in ((1, table_of(ACROSS, 2)), (2, table_of(IN_ONE, 1)), (4, table_of(ACROSS, 2))):
        choice = choose("auto", FC1, device, table, nodes)
        assert "not tuned" in choice.reason and not choice.variant.chunks
    assert choose("chunked", FC1, device, table_of(ACROSS, 2), nodes=4).variant == PLAIN


def engine(table: Table, pass_: Pass = FC1, device: torch.device = GPU, nodes: int = 2) -> Any:
    topology, weight = Topology(nodes, pass_.world // nodes, 0), torch.empty(8, 8, dtype=pass_.dtype)
    return engine_plan(choose("auto", pass_, device, table, nodes), pass_, topology, device, weight, 4, 0)


@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("device", [CPU, GPU])
@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
def test_blocks_are_cut_into_as_many_chunks_as_were_fastest(chunks: int, device: torch.device) -> None:
    table = table_of(replace(ACROSS, ms={"chunked": 3.0, f"chunked in {chunks}": 2.0}), 2)
    for pass_ in (FC1, replace(FC1, m=8000)):
        plan = engine(table, pass_, device)
        assert plan.chunks == chunks and len(plan.send_recvs) == chunks, "one far node"
    odd = engine(table, replace(FC1, m=4 * 2001), device)
    assert odd.chunks == 1, "rows of this bucket that cannot be cut"
    even = engine(table, replace(FC1, m=4 * 2002), device)
    assert even.chunks == min(2, chunks)
    assert odd.reason == f"auto: tuned for {FC1}; whole blocks", "the reason says what runs"
    assert even.reason == f"auto: tuned for {FC1}; " + ("whole blocks" if chunks == 1 else "blocks in 2 chunks")


def test_chunks_are_equal() -> None:
    assert [equal_chunks(rows, 8) for rows in (1, 2, 3, 4, 6, 8, 12, 24)] == [1, 2, 1, 4, 2, 8, 4, 8]
    assert [equal_chunks(24, most) for most in (1, 2, 4, 8)] == [1, 2, 4, 8]


@pytest.mark.usefixtures("hopper_gpu")
def test_what_is_measured_across_nodes() -> None:
    """No kernel that sends; what is untuned is always measured, with all other numbers of chunks."""
    asked = ("fused", "direct", "low_latency", "chunked", "collective")
    for pass_ in (FC1, FC1.dgrad):
        default = untuned(pass_, GPU, 2).method
        assert candidates(asked, default, pass_, 2) == ["fused", "chunked", "collective"]
    assert variants_to_run(FC1, "collective", GPU, 2) == [PLAIN]
    assert engine(UNTUNED).chunks == 2
    assert variants_to_run(FC1, "chunked", GPU, 2) == [PLAIN, Variant(chunks=1), Variant(chunks=4), Variant(chunks=8)]
    assert variants_to_run(FC1, "fused", GPU, 2) == variants_to_run(FC1, "chunked", GPU, 2)
    of_two = replace(FC1, world=2, n=8 * FC1.n)  # eight short chunks over a slow network
    for gbs, others in ((2.5, (1, 2, 4)), (50.0, (1, 2, 8))):
        assert variants_to_run(of_two, "chunked", GPU, 2, gbs) == [PLAIN, *(Variant(chunks=count) for count in others)]
    in_two = [PLAIN, Variant(chunks=2)]
    assert variants_to_run(replace(FC1, m=4 * 2002), "chunked", CPU, 2) == in_two, "rows that can be cut in two"
    short = replace(FC1, m=1024)  # 2 MiB
    assert variants_to_run(short, "chunked", GPU, 2) == in_two, "no chunk below a MiB"
    assert len(variants_to_run(short, "chunked", CPU, 2)) == 4
    assert variants_to_run(replace(FC1, kind=SCATTER, m=4), "chunked", CPU, 2) == [PLAIN]


@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("kind", [A2A_GEMM, GEMM_A2A])
def test_all_to_alls_of_gpus_go_in_chunks_and_those_of_cpu_processes_whole(kind: str) -> None:
    pass_ = replace(FC1, kind=kind, n=8192, k=8192)  # blocks of 8 MiB
    for device in (CPU, GPU):
        default = untuned(pass_, device, 2).method
        assert candidates(("chunked", "fused"), default, pass_, 2) == ["chunked", "fused", "collective"]
    assert variants_to_run(pass_, "chunked", CPU, 2) == [PLAIN]
    assert variants_to_run(pass_, "chunked", GPU, 2) == [PLAIN, *(Variant(chunks=count) for count in (2, 4, 8))]
    short = replace(pass_, m=2048)
    assert untuned(short, GPU, 2).method == "collective"
    assert candidates(("chunked",), "collective", short, 2) == ["chunked", "collective"], "it may win all the same"
