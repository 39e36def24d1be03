"""System, strategy and model: by name, from JSON, refused by name; costs that follow from them."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_train.planning import cost
from overlap_train.planning.hardware import hardware_of
from overlap_train.planning.machines import NETWORK_SPEEDS, SPEEDS, SYSTEMS
from overlap_train.schedule.order import Topology
from overlap_train.tools.doctor import command as doctor
from overlap_train.tools.doctor import network
from overlap_train.tools.doctor.links import judge_links, judge_speed
from overlap_train.tools.doctor.report import Finding
from overlap_train.tools.doctor.system import probed, write_system
from overlap_train.tools.plan import command
from overlap_train.tools.plan.fits import check, hints
from overlap_train.tools.plan.inputs import (
    PLANNED_MODELS,
    STRATEGIES,
    Strategy,
    linears_of,
    read_model,
    read_strategy,
    read_system,
)
from overlap_train.tools.plan.tables import HOST_IS_FITTED, not_measured, notes

H200, LLAMA = SYSTEMS["h200"], PLANNED_MODELS["llama3-8b"]


@pytest.mark.parametrize(
    ("read", "value"),
    [
        *((read_system, system) for system in SYSTEMS.values()),
        (read_strategy, STRATEGIES["tp8"]), (read_strategy, Strategy(2, 4096, 3)),
        (read_model, LLAMA), (read_model, PLANNED_MODELS["gpt3-175b"]),
    ],
)  # fmt: skip
def test_what_is_written_is_read(read: Any, value: Any, tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    path.write_text(json.dumps(asdict(value)))
    assert read(str(path)) == value


def test_a_file_may_change_what_has_a_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"based_on": "h100", "name": "mine", "copy_gbs": 340, "measured": ["copy_gbs"]}))
    mine = read_system(str(path))
    assert mine == replace(SYSTEMS["h100"], name="mine", copy_gbs=340, measured=("copy_gbs",))
    assert "copy_gbs" not in mine.not_measured and "push_us" in mine.not_measured


@pytest.mark.parametrize(
    ("read", "document", "problem"),
    [
        (read_system, {"based_on": "h200", "nvlink": 3}, "unknown key 'nvlink' in the system"),
        (read_system, {"based_on": "v100"}, "based_on is 'v100'; it must be one of h200"),
        (read_system, {"name": "x"}, "source, capability, sms"),
        (read_system, {"based_on": "h200", "copy_gbs": 0}, "copy_gbs is 0; it must be float above 0"),
        (read_system, {"based_on": "h200", "copy_gbs": "fast"}, "copy_gbs is 'fast'; it must be float above 0"),
        (read_system, {"based_on": "h200", "sms": 131.5}, "sms is 131.5; it must be int above 0"),
        (read_system, {"based_on": "h200", "sms": True}, "sms is True; it must be int above 0"),
        (read_system, {"based_on": "h200", "name": 3}, "name is 3; it must be a str"),
        (read_system, {"based_on": "h200", "measured": "all"}, "measured is 'all'; it must be a list"),
        (read_system, [1], "holds a list; it must hold one JSON object"),
        (read_strategy, {"pp": 2}, "unknown key 'pp' in the strategy; known are tp, seq, micro_batch, nodes"),
        (read_strategy, {"seq": -1}, "seq is -1; it must be int above 0"),
        (read_model, {"based_on": "llama3-8b", "layers": 3}, "unknown key 'layers' in the model"),
        (read_model, {"based_on": "llama3-8b", "is_gated": 1}, "is_gated is 1; it must be a bool"),
    ],
)
def test_wrong_files_are_refused_by_name(read: Any, document: Any, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError) as refused:
        read(str(path))
    assert problem in str(refused.value) and "wrong.json" in str(refused.value)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    (tmp_path / "torn.json").write_text("{")
    for path in (tmp_path / "torn.json", tmp_path / "none.json"):
        with pytest.raises(ValueError, match=r"cannot be read .* it must be a JSON file"):
            read_system(str(path))
    with pytest.raises(ValueError, match=r"--system h300: it must be one of h200, a100, .*, or a \.json file"):
        read_system("h300")


@pytest.mark.parametrize(
    ("strategy", "problem"),
    [
        (Strategy(16), "--tp 16 with --nodes 1: nodes of 8 GPUs hold 8 ranks; set --nodes 2, or --tp to at most 8"),
        (Strategy(9), "set --nodes 3, or"),
        (Strategy(1, nodes=2, cp=32), "--cp 32 with --nodes 2: nodes of 8 GPUs hold 16 ranks; set --nodes 4, or --cp to"),
        (Strategy(8, nodes=1024), "--tp 8 with --nodes 1024: a group must have as many ranks on each node that it spans; leave "
                                  "out --nodes, .* or set --tp to a multiple of 1024, at most 8192"),
        (Strategy(10, nodes=4), "on each node that it spans; set --tp to a multiple of 4, at most 32"),
        (Strategy(8192, nodes=1024), "qkv: features: 6144 must .*: --tp 1024 or 2048 fits with --nodes 1024$"),
        (Strategy(12, nodes=3), "by the 12 ranks; .*: no --tp fits with --nodes 3$"),
        (Strategy(1, nodes=2, cp=6), "8192 must be divisible by the 6 ranks; .*: --cp 2 or 4 or 8 or 16 fits with --nodes 2$"),
        (Strategy(4, cp=4), "--tp 4 --cp 4 with --nodes 1: nodes of 8 GPUs hold 8 ranks; set --nodes 2, or --tp times --cp to at "
                            "most 8"),
        (Strategy(3, 12288, nodes=2, cp=8), "--tp 3 --cp 8 with --nodes 2: nodes of 8 GPUs hold 16 ranks; set --nodes 3, or"),
        (Strategy(4, nodes=2, cp=3), "each node has 6 ranks, and tensor-parallel groups of 4 neither fit into nodes nor fill "
                                     "them; set --tp to a divisor or a multiple of 6"),
        (Strategy(16, nodes=4, cp=2), "8 KV heads cannot be divided among 16 tensor-parallel ranks; Megatron then gathers the "
                                      "product before it exchanges, which is not planned: --cp 1 fits beside --tp 16 with"),
        (Strategy(2, 8, 2, cp=8, nodes=2), "seq: 8 must be divisible by the 16 ranks; .*: --cp 1 or 2 or 4 fits beside --tp 2 "),
        (Strategy(8, nodes=8, cp=8), "query=4 query heads cannot be divided among the 8 ranks .*: --cp 1 or 2 or 4 fits beside "
                                     "--tp 8 with --nodes 8$"),
        (Strategy(2, seq=6144, cp=3), "query=16 query heads cannot be divided among the 3 ranks .*: --cp 1 or 2 or 4 fits"),
        (Strategy(1, seq=8191, cp=2), "8191 must be divisible by the 2 ranks"),
        (Strategy(4, seq=8190), "seq times micro_batch: 8190 must be divisible by the 4 ranks"),
        (Strategy(7, seq=7 * 1024), "qkv: features: 6144 must be divisible by the 7 ranks; .*: --tp 1 or 2 or 4 or 8 fits$"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused(strategy: Strategy, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check(H200, strategy, LLAMA)


@pytest.mark.parametrize(
    ("strategy", "hint"),
    [
        (Strategy(4), None), (Strategy(16, nodes=2), None), (Strategy(1, nodes=2, cp=16), None),
        (Strategy(4, nodes=2), "--tp 4 fits in one node; --nodes 2 spreads it over 2 of 8 GPUs of each of 2. Without --nodes"),
        (Strategy(1, nodes=4, cp=8), "--cp 8 fits in one node; --nodes 4 spreads it over 2 of 8 GPUs of each of 4."),
        (Strategy(2, cp=4), None), (Strategy(8, nodes=2, cp=2), None), (Strategy(16, nodes=4, cp=1), None),
        (Strategy(2, nodes=2, cp=4), "--tp 2 --cp 4 fits in one node; --nodes 2 spreads it over 4 of 8 GPUs of each of 2."),
        (Strategy(64, nodes=8), "32 query heads and 8 KV heads cannot be divided among 64 ranks"),
    ],
)  # fmt: skip
def test_what_is_hardly_meant_is_planned_with_a_hint(strategy: Strategy, hint: str | None) -> None:
    check(H200, strategy, LLAMA)
    found = hints(H200, strategy, LLAMA)
    assert len(found) == bool(hint) and all(str(hint) in line for line in found)


def test_kv_heads_may_be_fewer_than_ranks_but_must_divide_or_be_divided() -> None:
    for groups, fits in ((8, True), (4, True), (2, True), (6, False)):
        model = replace(LLAMA, num_attention_heads=48, num_query_groups=groups)
        assert bool(hints(H200, Strategy(4), model)) != fits


def test_the_vocabulary_is_padded_as_megatron_does() -> None:
    output = linears_of(LLAMA, 4)[-1]
    assert (output.name, output.n, output.k, output.is_column) == ("output", 128512, 4096, True)
    assert [linear.name for linear in linears_of(replace(LLAMA, vocab_size=0), 4)] == ["qkv", "proj", "fc1", "fc2"]


def test_every_machine_has_all_figures() -> None:
    for name, system in SYSTEMS.items():
        assert system.name == name
        assert all(getattr(system, speed) > 0 for speed in SPEEDS)
        assert system.sustained_tflops <= system.burst_tflops <= system.tile_tflops < system.peak_tflops
        assert system.copy_gbs < system.nvlink_gbs
        sheet = hardware_of({"a100": "A100-SXM", "h100": "H100 80GB HBM3", "h800": ""}.get(name, name.upper()))
        if sheet is not None:
            assert sheet.peak_tflops == system.peak_tflops
    assert not H200.not_measured
    assert set(SPEEDS) <= set(asdict(H200))


def test_products_take_what_power_allows_or_their_waves() -> None:
    long, short = (2.0 * 8192 * n * 16384 for n in (53248, 64))
    assert long * 1e-6 / cost.power_us(H200, long) == pytest.approx(H200.sustained_tflops, rel=0.01)
    assert short * 1e-6 / cost.power_us(H200, short) == pytest.approx(H200.burst_tflops, rel=0.03)
    whole_wave = cost.library_gemm_us(H200, 128 * 12, 256 * 11, 4096)  # 132 tiles
    assert cost.library_gemm_us(H200, 128 * 12, 256 * 12, 4096) > 1.2 * whole_wave


def test_the_simulator_needs_no_torch() -> None:
    code = """
import sys
sys.modules["torch"] = None
import overlap_train.planning.cost, overlap_train.planning.machines, overlap_train.tools.plan.simulation.simulate
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_what_the_doctor_measured_becomes_a_system(tmp_path: Path) -> None:
    found = measured_by_ranks([600.0] * 4, 342.0)
    system = probed("NVIDIA H200", found)
    assert system is not None
    assert (system.name, system.copy_gbs, system.source) == ("h200", 324.0, "overlap-train doctor on NVIDIA H200")
    flops = 2.0 * 8192**3
    assert flops * 1e-6 / cost.power_us(system, flops) == pytest.approx(600, rel=0.03)
    assert "copy_gbs" not in system.not_measured and "nccl_us" in system.not_measured
    (tmp_path / "here.json").write_text(json.dumps(asdict(system)))
    assert read_system(str(tmp_path / "here.json")) == system
    alone = probed("NVIDIA H200", found[:1])
    assert alone is not None and alone.copy_gbs == H200.copy_gbs
    assert probed("NVIDIA H200", []) is None and probed("Some GPU", found) is None


def a_device(monkeypatch: pytest.MonkeyPatch, name: str, sms: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda: SimpleNamespace(name=name, multi_processor_count=sms)
    )


FACTS = ("memory_gbs", "nvlink_gbs", "gpus_per_node")


@pytest.mark.parametrize(
    ("name", "sms", "called", "peak", "assumed"),
    [
        ("NVIDIA H100 80GB HBM3", 132, "h100", 989.4, ()), ("NVIDIA H200", 132, "h200", 989.4, ()),
        ("NVIDIA H20", 78, "h20", 148.0, ()), ("NVIDIA H800", 132, "h800", 989.4, ()),
        ("NVIDIA A100-SXM4-80GB", 108, "a100", 312.0, ()), ("NVIDIA B200", 148, "b200", 2250.0, ()),
        ("NVIDIA H100 PCIe", 114, "h100 pcie", 756.0, FACTS), ("NVIDIA A100-PCIE-40GB", 108, "a100-pcie-40gb", 312.0, FACTS),
        ("NVIDIA H200 NVL", 132, "h200 nvl", 835.5, FACTS), ("NVIDIA GB200", 152, "gb200", 2500.0, FACTS),
        ("NVIDIA A100-SXM4-40GB", 108, "a100-sxm4-40gb", 312.0, FACTS),
        ("NVIDIA H800 PCIe", 114, "h800 pcie", 989.4, ("peak_tflops", *FACTS)),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 60, "h100 80gb hbm3 mig 3g.40gb", 989.4, FACTS),
    ],
)  # fmt: skip
def test_other_cards_are_not_taken_for_those_whose_facts_are_known(
    name: str,
    sms: int,
    called: str,
    peak: float,
    assumed: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device says how many SMs it has. What is not known of it a plan lists."""
    a_device(monkeypatch, name, sms)
    said = write_system(tmp_path / "here.json", measured_by_ranks([430.0] * 2, 20.0), plays_nodes=True)
    system = read_system(str(tmp_path / "here.json"))
    assert (system.name, system.sms, system.peak_tflops, system.assumed) == (called, sms, peak, assumed)
    assert ("are those of another card" in said) == bool(assumed)
    listed = [line for line in not_measured(system, Strategy(2), {}) if "another card" in line]
    expected = f"{called}: assumed from another card of its family: {', '.join(assumed)}"
    assert listed == ([expected] if assumed else [])


def test_without_the_device_its_sms_are_assumed_too() -> None:
    system = probed("NVIDIA H100 PCIe", measured_by_ranks([430.0] * 2, 20.0))
    assert system is not None and system.assumed == ("sms", *FACTS)


def crossed(gbs: float, ranks: int = 4) -> list[Finding]:
    """What ranks of two nodes find who have sent 32 MiB at gbs, as JSON."""
    topology = Topology(2, ranks // 2, 0)
    gathers: Any = SimpleNamespace(topology=topology, block_bytes=32 << 20, far_pieces=4)
    trial: Any = SimpleNamespace(gathers=gathers, rounds=5, counts=torch.zeros(ranks))
    here: Any = SimpleNamespace(device=torch.device("cuda"))
    found = network.judge(here, network.name_of("nccl"), trial, (32 << 20) / gbs / 1e6) * ranks
    return [Finding(**finding) for finding in json.loads(json.dumps([asdict(finding) for finding in found]))]


@pytest.mark.parametrize(("plays_nodes", "gbs"), [(False, 23.5), (True, H200.nic_gbs)])
def test_the_measured_network_is_what_plans_reckon_with(
    plays_nodes: bool, gbs: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not what went between ranks of one machine that were told to be nodes."""
    here, results = tmp_path / "here.json", tmp_path / "plan.json"
    a_device(monkeypatch, "NVIDIA H200", 132)
    said = write_system(here, [*measured_by_ranks([640.0] * 4, 380.0), *crossed(23.5)], plays_nodes)
    monkeypatch.undo()
    assert ("nic_gbs" in said) != plays_nodes
    system = read_system(str(here))
    assert system.nic_gbs == pytest.approx(gbs) and ("nic_gbs" in system.measured) != plays_nodes
    assert command.main(["--system", str(here), "--nodes", "2", "--tp", "2", "--json", str(results)]) == 0
    planned = capsys.readouterr().out
    assert ("- across nodes: nic_us, host_exchange_us, sum_sm_gbs of h200" in planned) != plays_nodes
    assert json.loads(results.read_text())["system"]["nic_gbs"] == pytest.approx(gbs)
    assert f"Reckons with {cost.communication_sms(system, 1)[0]} SMs for the network" in planned


@pytest.mark.parametrize(
    ("gbs", "strategy", "reckons", "needs"),
    [
        (100.0, Strategy(16, nodes=2), "8 SMs for the network, and 7 for", "10 and 15"),
        (60.0, Strategy(16, nodes=2), "6 SMs for the network, and 9 for", ""),
        (66.0, Strategy(16, nodes=2), "8 SMs for the network, and 7 for", "8 and 10"),
        (70.0, Strategy(1, cp=16, nodes=2), "8 SMs for the network, and 0 for", ""),
        (1000.0, Strategy(2, nodes=2), "14 SMs for the network, and 0 for", "100 and 0"),
    ],
)
def test_it_says_where_communication_has_fewer_sms_than_the_nic_needs(
    gbs: float, strategy: Strategy, reckons: str, needs: str
) -> None:
    said = notes(replace(H200, nic_gbs=gbs), strategy, [])
    assert any(reckons in line for line in said)
    lines = [f"The NIC needs {needs}; communication holds 16 SMs at most."] if needs else []
    assert [line for line in said if "at most" in line] == lines


@pytest.mark.parametrize(("word", "connections"), [("8", 8), ("1", 1), (None, 1), ("0", 1), ("all", 1)])
def test_streams_share_queues_as_in_training(
    word: str | None, connections: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CUDA_DEVICE_MAX_CONNECTIONS where the doctor runs; else what the named GPU trains with."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if word is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", word)
    a_device(monkeypatch, "NVIDIA H200", 132)
    write_system(tmp_path / "here.json", measured_by_ranks([640.0] * 4, 380.0), plays_nodes=False)
    assert read_system(str(tmp_path / "here.json")).connections == connections


@pytest.mark.parametrize("node_ranks", [0, 2])
def test_what_node_ranks_plays_is_no_network(node_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bool] = []
    monkeypatch.setattr(doctor, "write_system", lambda path, findings, plays_nodes: written.append(plays_nodes))
    doctor.report(doctor.Doctor(system_json="here.json", node_ranks=node_ranks), [], ["host"])
    assert written == [node_ranks > 0]


def test_a_network_of_which_all_was_measured_is_not_listed() -> None:
    strategy, known = Strategy(2, nodes=2), replace(H200, measured=(*SPEEDS, *NETWORK_SPEEDS))
    assert any(
        line == "across nodes: nic_gbs, nic_us, host_exchange_us, sum_sm_gbs of h200"
        for line in not_measured(H200, strategy, {})
    )
    assert HOST_IS_FITTED in not_measured(H200, strategy, {})
    said = not_measured(known, strategy, {})
    assert HOST_IS_FITTED not in said and not any(line.startswith("across nodes") for line in said)


def measured_by_ranks(tflops: list[float], gbs: float) -> list[Finding]:
    """What the doctor finds, and sends as JSON, where all copies go at gbs."""
    speeds = dict.fromkeys(permutations(range(len(tflops)), 2), gbs)
    model = hardware_of("NVIDIA H200")
    found = [
        finding
        for rank, speed in enumerate(tflops)
        for finding in (judge_speed(speed, model), *judge_links(rank, "rank {}".format, speeds, model))
    ]
    return [Finding(**finding) for finding in json.loads(json.dumps([asdict(finding) for finding in found]))]


@pytest.mark.parametrize("gbs", [360.0, 250.0, 150.0], ids=["OK", "WARN", "FAIL"])
def test_slow_links_are_planned_with_as_slow_as_they_are(gbs: float) -> None:
    system = probed("NVIDIA H200", measured_by_ranks([640.0] * 4, gbs))
    assert system is not None and system.copy_gbs == pytest.approx(gbs * 360 / 380, abs=0.1)


def test_a_rank_copies_as_fast_as_over_its_slowest_link() -> None:
    """One of three ranks has two slow links, one has a slower one, and one has links that are all well."""
    speeds = dict.fromkeys(permutations(range(3), 2), 380.0) | {(0, 1): 190.0, (0, 2): 180.0, (1, 2): 310.0}
    model = hardware_of("NVIDIA H200")
    found = [judge_speed(640.0, model)]
    for rank in range(3):
        found += judge_links(rank, "rank {}".format, speeds, model)
    system = probed("NVIDIA H200", found)
    assert system is not None and system.copy_gbs == pytest.approx(310 * 360 / 380, abs=0.1)


def test_slow_products_are_planned_with_as_slow_as_they_are() -> None:
    fast, slow = (probed("NVIDIA H200", measured_by_ranks([tflops] * 4, 380.0)) for tflops in (640.0, 320.0))
    assert fast is not None and slow is not None
    assert slow.sustained_tflops == pytest.approx(fast.sustained_tflops / 2, rel=0.01)
