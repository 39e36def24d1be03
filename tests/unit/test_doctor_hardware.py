"""The doctor's judgement of GPUs, links and ranks, each with a planted fault: right status, rank, host and fix."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from overlap_train.schedule.order import A2A_GEMM, GATHER, GEMM_A2A, SCATTER, Topology
from overlap_train.select.choose import untuned
from overlap_train.select.passes import SCATTER_AND_WGRAD, Pass
from overlap_train.select.system import SYSTEMS, System, system_of
from overlap_train.tools.doctor import gpus, links, network, operator
from overlap_train.tools.doctor.report import FAIL, OK, WARN, Finding
from overlap_train.tools.measure.models import MODELS
from overlap_train.tools.measure.timing import Call, Pace, Timing
from tests.unit.doctor_cases import only, world

H200 = SYSTEMS["h200"]


def gpu(**changed: object) -> gpus.Gpu:
    facts: dict[str, object] = {"index": 1, "name": "NVIDIA H200", "capability": (9, 0), "free_bytes": 139 << 30}
    facts |= {"total_bytes": 140 << 30, "uuid": "GPU-1", "peer_access": {0: True}, "nvlink": {0: True}}
    return gpus.Gpu(**{**facts, **changed})  # type: ignore[arg-type]


GOOD_SMI = gpus.Smi("Default", "Disabled", "0", 18)


def test_a_good_gpu() -> None:
    assert {f.status for f in gpus.check_gpus([gpu()], {"GPU-1": GOOD_SMI})} == {OK}
    assert {f.status for f in gpus.check_gpus([gpu()], {})} == {OK}


@pytest.mark.parametrize(
    ("changed", "status", "name", "fix"),
    [
        ({"peer_access": {0: True, 2: False}}, FAIL, "peer access", "topo -p2p"),
        ({"nvlink": {0: False}}, WARN, "peer access", "PCIe"),
        ({"free_bytes": 100 << 30}, WARN, "gpu", "end the other processes"),
        ({"capability": (7, 5)}, FAIL, "gpu", "newer GPU"),
    ],
)
def test_faults_of_a_gpu(changed: dict[str, object], status: str, name: str, fix: str) -> None:
    found = only(gpus.check_gpus([gpu(**changed)], {}), status)
    assert found.name == name and fix in found.fix and "GPU 1" in found.measured


@pytest.mark.parametrize(
    ("smi", "name"),
    [
        (gpus.Smi("Default", "Enabled", "0", 18), "gpu mig"),
        (gpus.Smi("Prohibited", "Disabled", "0", 18), "gpu mode"),
        (gpus.Smi("Default", "[N/A]", "3", 18), "gpu memory"),
        (gpus.Smi("Default", "[N/A]", "[N/A]", 17), "nvlink"),
    ],
)
def test_faults_that_nvidia_smi_tells(smi: gpus.Smi, name: str) -> None:
    assert only(gpus.check_gpus([gpu()], {"GPU-1": smi}), FAIL).name == name


def test_lanes_of_an_unknown_gpu_are_reported_and_not_judged() -> None:
    found = gpus.check_gpus([gpu(name="NVIDIA Z1")], {"GPU-1": gpus.Smi("Default", "Disabled", "0", 3)})
    assert {f.status for f in found} == {OK} and "GPU 1: 3 lanes active" in [f.measured for f in found]


def test_active_lanes_are_those_with_a_rate() -> None:
    text = """GPU 0: NVIDIA H200 (UUID: GPU-aa-01)
\t Link 0: 26.562 GB/s
\t Link 1: <inactive>
GPU 1: NVIDIA H200 (UUID: GPU-bb-02)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
GPU 2: NVIDIA H200 (UUID: GPU-cc-03)
GPU 3: NVIDIA H200 (UUID: GPU-dd-04)
\t Link 0: <inactive>"""
    assert gpus.active_lanes(text.splitlines()) == {"GPU-aa-01": 1, "GPU-bb-02": 2, "GPU-dd-04": 0}


def test_a_driver_that_torch_cannot_use_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only([gpus.without_gpu()], WARN).fix
    monkeypatch.setattr(os.path, "exists", lambda path: True)
    assert "sees no GPU" in only([gpus.without_gpu()], FAIL).measured


def fake_measure(gbs: Mapping[tuple[int, int], float], nbytes: int) -> tuple[links.Measure, list[tuple[int, int]]]:
    """A timer by whose clock the pairs, in the order in which they are measured, have these bandwidths; 380 where not given."""
    pairs = [(s, t) for s in range(4) for t in range(4) if s != t]
    left = list(pairs)

    def measure(calls: Mapping[str, Call], pace: Pace, group: object, device: object) -> dict[str, Timing]:
        for call in calls.values():
            call(0)
        return {name: Timing(nbytes / gbs.get(left.pop(0), 380.0) / 1e6, 1.0) for name in calls}

    return measure, left


def speeds_with(gbs: Mapping[tuple[int, int], float]) -> links.Speeds:
    here, nbytes = world(device="cpu"), 1 << 10
    views = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(4)]
    measure, left = fake_measure(gbs, nbytes)
    speeds = links.link_speeds(here, views, measure)
    assert not left and [int(view.sum()) for view in views] == [nbytes, 0, nbytes, nbytes]  # it copied to all peers
    return speeds


def judged(rank: int, speeds: links.Speeds, model: System | None) -> list[Finding]:
    return links.judge_links(rank, world(rank).who, speeds, model)


def test_a_link_at_half_bandwidth_fails_at_its_source() -> None:
    speeds = speeds_with({(1, 3): 190.0})
    slow = only(judged(1, speeds, H200), FAIL)
    assert slow.measured == "190 GB/s from rank 5 on node1 to rank 7 on node1" and "nvlink -s" in slow.fix
    assert only(judged(0, speeds, H200), OK)
    assert only(judged(1, speeds_with({(1, 3): 290.0}), H200), WARN)


def test_links_of_an_unknown_gpu_are_compared_with_each_other_only() -> None:
    assert only(judged(1, dict.fromkeys(speeds_with({}), 20.0), None), OK)
    assert "median" in only(judged(1, speeds_with({(1, 3): 190.0}), None), WARN).expected


def test_the_slow_rank_is_named_by_itself_and_by_nobody_else() -> None:
    tflops = {0: 660.0, 1: 655.0, 2: 400.0, 3: 650.0}
    (slow,) = links.slow_ranks(world(2), speeds_with({}), tflops)
    assert (slow.status, slow.name) == (WARN, "slow rank") and "nvidia-smi" in slow.fix
    assert "rank 6 on node1" in slow.measured and "400 TFLOP/s" in slow.measured
    assert links.slow_ranks(world(0), speeds_with({}), tflops) == []
    assert only(links.slow_ranks(world(0), speeds_with({}), dict.fromkeys(range(4), 650.0)), OK)


@pytest.mark.parametrize("way", [0, 1], ids=["out of", "into"])
def test_a_rank_with_slow_links_only_is_slow(way: int) -> None:
    speeds = speeds_with({(s, t): 200.0 for s in range(4) for t in range(4) if s != t and (s, t)[way] == 2})
    (slow,) = links.slow_ranks(world(2), speeds, dict.fromkeys(range(4), 650.0))
    assert "every link " + ("out of", "into")[way] in slow.measured
    assert links.slow_ranks(world(1), speeds, dict.fromkeys(range(4), 650.0)) == []


def test_a_gpu_below_the_model_is_a_warning() -> None:
    assert links.judge_speed(400.0, H200).status == WARN
    assert links.judge_speed(640.0, H200).status == OK
    for unknown in (None, SYSTEMS["a100"]):
        assert "not judged" in only([links.judge_speed(4.0, unknown)], OK).expected


@pytest.mark.parametrize(
    ("name", "peak", "is_judged"),
    [
        ("NVIDIA H200", 989.4, True), ("NVIDIA H100 80GB HBM3", 989.4, True), ("NVIDIA H100 PCIe", 756.0, False),
        ("NVIDIA H200 NVL", 835.5, False),  ("NVIDIA H20", 148.0, False), ("NVIDIA A100-SXM4-80GB", 312.0, False),
        ("NVIDIA GB200", 2500.0, False),
    ],
)  # fmt: skip
def test_only_what_was_measured_is_judged(name: str, peak: float, is_judged: bool) -> None:
    figures = system_of(name)
    assert figures is not None
    assert (figures.peak_tflops, figures.is_measured) == (peak, is_judged)


def test_a_gpu_that_is_not_in_the_table_has_no_figures() -> None:
    assert system_of("NVIDIA Z1") is None


def test_overlap_that_does_not_pay_is_a_warning_on_known_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    times = {"chunked": Timing(0.6, 1.0), "fused": Timing(0.7, 1.0), "sequence": Timing(0.5, 1.0)}
    assert only(operator.judge_times(world(0), times), WARN).fix
    assert operator.judge_times(world(1), times) == []  # one rank speaks for all
    with mock.patch.dict(os.environ, NCCL_HOSTID="node0"):
        assert "not judged: NCCL goes over sockets" in only(operator.judge_times(world(0), times), OK).expected
    assert only(operator.judge_times(world(0), {**times, "fused": Timing(0.4, 1.0)}), OK).measured.endswith("by fused")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Z1")
    assert "not judged" in only(operator.judge_times(world(0), times), OK).expected


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_the_trials_sizes_are_divisible(hopper_gpu: pytest.MonkeyPatch, size: int) -> None:
    trial = operator.trial_of(world(0, size), 30.0, "auto")
    assert trial.m % size == trial.n % size == trial.few_rows % size == 0 and trial.m > 7000 and trial.n > 14000


@pytest.mark.parametrize("size", [2, 8])
@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
def test_the_trial_has_every_method_that_untuned_auto_takes(
    hopper_gpu: pytest.MonkeyPatch, capability: tuple[int, int], size: int
) -> None:
    hopper_gpu.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    name = "NVIDIA H200" if capability == (9, 0) else "NVIDIA A100-SXM4-80GB"
    card = SimpleNamespace(name=name, multi_processor_count=108)
    hopper_gpu.setattr(torch.cuda, "get_device_properties", lambda device: card)
    trial = operator.trial_of(world(0, size), 30.0, "auto")
    passes = [
        Pass(kind, m, n // size, k, torch.bfloat16, size)
        for kind in (GATHER, SCATTER, SCATTER_AND_WGRAD, A2A_GEMM, GEMM_A2A)
        for m in (16 * size, 512, 1024, 8192, 131072)
        for n, k in MODELS["llama3-70b"].linears.values()
    ]
    taken = {untuned(pass_, torch.device("cuda")).method for pass_ in passes} - {"collective"}
    on_hopper = {"fused", "direct"} if capability == (9, 0) else set()
    assert taken == {"chunked", "low_latency"} | on_hopper
    assert set(trial.methods) == taken | {"fused"}


def test_the_line_of_gpus_across_nodes_names_the_transport() -> None:
    gathers = SimpleNamespace(topology=Topology(2, 2, 1), block_bytes=32 << 20, far_pieces=8)
    trial: Any = SimpleNamespace(gathers=gathers, rounds=10, counts=torch.zeros(4, dtype=torch.int64))
    (good,) = network.judge(world(), "network nccl", trial, 0.8)
    assert (good.status, good.name) == (OK, "network nccl") and good.measured == (
        "proved between 2 nodes of 2: 80 pieces of 8192 KiB were whole when their signals came; 41.9 GB/s out of each rank"
    )
    assert network.judge(world(), "network nccl", trial, None) == [], "another rank has found something"
    trial.counts[2] = 3
    (wrong,) = network.judge(world(), "network nccl", trial, None)
    assert wrong.status == FAIL and wrong.measured == (
        "failed: 3 of 80 pieces of 8192 KiB were not whole when their signals came, from rank 6 on node1"
    )
