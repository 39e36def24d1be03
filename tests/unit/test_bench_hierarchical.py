"""What the benchmark of several nodes measures: sizes against the network, numbers of SMs. GPUs are stand-ins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from overlap_train import OverlapConfig
from overlap_train.schedule.order import Topology
from overlap_train.select.table import UNTUNED
from overlap_train.tools.bench import hierarchical, node_domains, operators, output, plots
from overlap_train.tools.bench.hierarchical import Shapes, hierarchical_cases
from overlap_train.tools.bench.node_domains import Domains
from overlap_train.tools.measure.cases import EXCHANGES, OPS, Case
from overlap_train.tools.measure.results import Results
from overlap_train.tools.measure.runs import Session, Settings
from overlap_train.tools.measure.timing import Call, Timing
from overlap_train.tools.measure.world import World
from tests.processes import run_ranks, values

CPU = torch.device("cpu")
SHAPES = Shapes((*OPS, *EXCHANGES), ("fprop",), (0.5, 1.0, 2.0), 1, tiny=False)


def session(size: int, *methods: str) -> Session:
    settings = Settings(methods, torch.bfloat16, True, OverlapConfig(node_ranks=1))
    return Session(settings, World(None, CPU, 0, size), Results())  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "node_ranks"), [(2, 1), (4, 2), (8, 2)])
def test_as_many_bytes_of_each_rank_cross_whatever_the_operator_is(size: int, node_ranks: int) -> None:
    """A rank sends its shard to each far twin, and a block to each far rank."""
    shapes, far_nodes = replace(SHAPES, node_ranks=node_ranks), size // node_ranks - 1
    shard = shapes.rows // size * shapes.kept("ag_gemm", size)
    block = shapes.rows // size * shapes.kept("gemm_a2a", size) // size
    assert far_nodes * shard == (size - node_ranks) * block


def test_products_take_their_ratio_of_the_networks_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network takes 2 ms to gather and 4 to exchange; a product of 2 x 64 x 32 x 16384 operations takes 1."""
    monkeypatch.setattr(hierarchical, "ROWS", 64)
    monkeypatch.setattr(hierarchical, "FEATURES", 32)
    sizes: list[int] = []

    def time(self: Session, calls: Mapping[str, Call], flops: float) -> dict[str, Timing]:
        sizes.append(len(sizes))
        return {"wire": Timing(2.0 * len(sizes), 0.0), "gemm": Timing(1.0, 0.0)}

    monkeypatch.setattr(Session, "time", time)
    found = hierarchical_cases(session(2), SHAPES)
    cases = {op: [case for case in found if case.op == op] for op in SHAPES.ops}
    assert [(case.n, case.k) for case in cases["ag_gemm"]] == [(n, 32) for n in (32768, 65536, 131072)]
    assert [(case.n, case.k) for case in cases["gemm_rs"]] == [(32, k) for k in (32768, 65536, 131072)]
    # the network takes twice as long, and what is kept has twice the features
    assert [(case.n, case.k) for case in cases["gemm_a2a"]] == [(64, k) for k in (32768, 65536, 131072)]
    assert [(case.n, case.k) for case in cases["a2a_gemm"]] == [(n, 64) for n in (32768, 65536, 131072)]


def _measured(rank: int, world: int) -> list[Case]:
    """Cases by what gloo and this machine take for small sizes."""
    hierarchical.ROWS, hierarchical.FEATURES, hierarchical._PRODUCT = 64, 32, 64  # this process ends after it
    here = session(world)
    settings = replace(here.settings, dtype=torch.float32)
    there = World(dist.group.WORLD, CPU, rank, world)
    return hierarchical_cases(replace(here, settings=settings, world=there), replace(SHAPES, ratios=(1.0,)))


def test_the_network_is_measured_by_what_each_operator_sends() -> None:
    first, second = values(run_ranks(2, _measured))
    assert first == second and [case.op for case in first] == list(SHAPES.ops)
    assert [min(case.n, case.k) for case in first] == [32, 32, 64, 64]
    assert all(max(case.n, case.k) % 512 == 0 for case in first)


def domains(monkeypatch: pytest.MonkeyPatch, found: int, asked: tuple[int, ...], here: Session) -> Domains:
    """The domains where the probe finds so many SMs."""

    def domain(self: Session, received: Any) -> Any:
        config = self.settings.config
        settled = replace(config, network_sms=config.network_sms or found)
        return SimpleNamespace(
            config=config, settled=lambda config: settled, topology=Topology(2, 1, 0), device=torch.device("cuda"),
            group=self.world.group,
        )  # fmt: skip

    monkeypatch.setattr(Session, "domain", domain)
    monkeypatch.setattr(dist, "new_group", mock.Mock(side_effect="abcdef"))
    monkeypatch.setattr(node_domains, "cache_of", lambda domain, name: SimpleNamespace(table=UNTUNED))
    return Domains.of(here, [64], asked)


@pytest.mark.usefixtures("hopper_gpu")
def test_each_number_of_sms_has_a_domain_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """But for the one that the probe has found: the own domain has it. NCCL alone is measured once."""
    here = session(2, "chunked", "collective", "auto")
    made = domains(monkeypatch, 4, (2, 4, 16), here)
    assert [(other.group, other.config.network_sms) for other in made.others] == [("a", 2), ("b", 16)]
    assert capsys.readouterr().out == "NCCL has 4 SMs between nodes, by the probe; measured, too: 2, 16\n"
    ours = made.ours(Case("", "ag_gemm", "fprop", 8192, 65536, 4096), here)
    told = {name: (mine.method, made.told(mine.domain)["network_sms"]) for name, mine in ours.items()}
    assert told == {
        "chunked": ("chunked", 4), "collective": ("collective", 4), "auto": ("auto", 4),
        "chunked, 2 SMs": ("chunked", 2), "auto, 2 SMs": ("auto", 2),
        "chunked, 16 SMs": ("chunked", 16), "auto, 16 SMs": ("auto", 16),
    }  # fmt: skip
    assert {made.told(mine.domain)["probe_sms"] for mine in ours.values()} == {4}
    assert {made.told(mine.domain)["reduce_sms"] for mine in ours.values()} == {0}, "nodes of one rank"
    assert {made.told(mine.domain)["nodes"] for mine in ours.values()} == {2}
    assert {made.told(mine.domain)["emulated"] for mine in ours.values()} == {False}
    monkeypatch.setenv("NCCL_HOSTID", "node0")
    assert {made.told(mine.domain)["emulated"] for mine in ours.values()} == {True}
    short = made.ours(Case("", "gemm_a2a", "fprop", 64, 64, 4096), here)
    assert "auto, 2 SMs" not in short, "auto takes NCCL there, which is the same"


@pytest.mark.parametrize(("topology", "told"), [(Topology(2, 4, 0), {"nodes": 2}), (Topology(1, 4, 0), {})])
def test_a_row_counts_nodes_where_there_are_several(topology: Topology, told: dict[str, int]) -> None:
    settled = SimpleNamespace(network_sms=2, reduce_sms=4)
    own: Any = SimpleNamespace(topology=topology, config=None, settled=lambda config: settled)
    found = Domains(own, (), None).told(own)
    assert {name: value for name, value in found.items() if name == "nodes"} == told


@pytest.mark.usefixtures("hopper_gpu")
def test_a_row_has_the_time_of_its_own_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    here = session(2, "chunked")
    made, case = domains(monkeypatch, 4, (16,), here), Case("", "ag_gemm", "fprop", 8192, 65536, 4096)
    names = ("chunked", "chunked, 16 SMs", "sequence", "gemm", "comm")
    monkeypatch.setattr(operators, "inputs_of", lambda case, session: SimpleNamespace(call=lambda run: run))
    monkeypatch.setattr(operators, "correct_runs", lambda *arguments: dict.fromkeys(names))
    times = {name: Timing(float(turn), 1.0) for turn, name in enumerate(names, start=1)}
    monkeypatch.setattr(Session, "time", lambda self, calls, flops: times)
    rows = operators.measure_case(case, made, here)
    assert [(row["method"], row["network_sms"], row["ms"]) for row in rows] == [
        ("chunked", 4, 1.0),
        ("chunked", 16, 2.0),
    ]
    assert all((row["probe_sms"], row["sequence_ms"]) == (4, 3.0) for row in rows)


def test_a_case_that_does_not_fit_into_memory_is_noted_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def inputs(case: Case, session: Session) -> Any:
        if case.n > 4096:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return SimpleNamespace(call=lambda run: run)

    here, names = session(2, "chunked"), ("chunked", *operators.NEEDED)
    domain = SimpleNamespace(ours=lambda case, session: {"chunked": SimpleNamespace(method="chunked", domain=None)})
    domain.told = lambda domain: {}
    monkeypatch.setattr(operators, "Inputs", inputs)
    monkeypatch.setattr(World, "any", lambda self, failed: failed)
    monkeypatch.setattr(Domains, "of", lambda *arguments: domain)
    monkeypatch.setattr(operators, "_slot_bytes", lambda *arguments: 0)
    monkeypatch.setattr(operators, "correct_runs", lambda *arguments: dict.fromkeys(names))
    monkeypatch.setattr(Session, "time", lambda *arguments: dict.fromkeys(names, Timing(2.0, 1.0)))
    operators.run([Case("", "ag_gemm", "fprop", 64, n, 4096) for n in (8192, 4096)], here)
    no_memory = "ag_gemm fprop  M=64 N=8192 K=4096: inputs: OutOfMemoryError: CUDA out of memory"
    assert here.results.notes == [f"FAILED {no_memory}"] and here.results.failed
    assert [row["n"] for row in here.results.rows] == [4096]
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("[1/2]") and first.endswith(f"no result; FAILED {no_memory}")
    assert second == "[2/2] ag_gemm fprop  M=64 N=4096 K=4096: chunked 2.000 ms"


def test_what_the_probe_finds_is_said_also_where_nothing_else_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    domains(monkeypatch, 8, (), session(2))
    assert capsys.readouterr().out == "NCCL has 8 SMs between nodes, by the probe\n"
    domains(monkeypatch, 0, (), session(2))
    assert capsys.readouterr().out == "", "NVSHMEM takes none"


def test_tables_tell_numbers_of_sms_apart_and_pictures_have_what_was_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = {
        "method": "auto", "op": "ag_gemm", "pass": "fprop", "m": 8192, "ms": 2.0, "sequence_ms": 3.0, "bound": 1.5,
        "network_sms": 4, "probe_sms": 4,
    }  # fmt: skip
    rows = [row, row | {"network_sms": 16, "ms": 4.0}]
    assert [line.partition(":")[0] for line in output.summary(rows)] == ["auto fprop", "auto, 16 SMs fprop"]
    assert output.label_of({"method": "auto"}) == "auto", "inside one node"
    drawn: list[Any] = []
    monkeypatch.setattr(plots, "load", lambda: None)
    monkeypatch.setattr(plots, "draw_speed_up", lambda rows, record, path: drawn.extend(rows) or path)
    (tmp_path / "operators.json").write_text(json.dumps({"rows": rows}))
    plots.draw(tmp_path)
    assert drawn == [row]
