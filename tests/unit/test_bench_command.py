"""The command line, and both benchmarks on two CPU processes with tiny shapes."""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from overlap_train import cli
from overlap_train.flags import from_args
from overlap_train.select.method import Method
from overlap_train.select.passes import Pass
from overlap_train.select.table import Winner, key_of, save
from overlap_train.tools.bench import command, kinds, layers, plots
from overlap_train.tools.measure import methods
from overlap_train.tools.measure.cases import EXCHANGES, OPS, PASSES
from overlap_train.tools.measure.pretended import pretend_nodes
from overlap_train.tools.measure.results import Results
from overlap_train.tools.measure.runs import Session
from overlap_train.tools.measure.world import World
from tests.script_server import ScriptServer

BENCH = ("-m", "overlap_train", "bench")


def parsed(line: str) -> Any:
    args = command.parser().parse_args(line.split())
    return from_args(kinds.KINDS[args.command](), args)


def test_defaults() -> None:
    bench = parsed("operators")
    assert bench == kinds.Operators()
    assert (bench.passes, bench.ops, bench.rows, bench.methods) == (("fprop", "dgrad"), ("ag_gemm", "gemm_rs"), (), ())
    assert (bench.connections, parsed("layers").connections) == (None, 1), "Megatron-Core's linears need 1"


def test_lists_are_separated_by_commas_and_sizes_by_blanks(tmp_path: Path) -> None:
    bench = parsed(
        f"operators --shapes llama3-8b,all --methods fused,auto --passes dgrad --rows 256 1024 --out {tmp_path}"
    )
    assert bench.shapes == ("llama3-8b", "all")
    assert (bench.methods, bench.passes, bench.rows, bench.out) == (
        ("fused", "auto"),
        ("dgrad",),
        (256, 1024),
        str(tmp_path),
    )
    assert parsed("layers --seq 4096 8192 --layers llama3-8b-mlp").seq == (4096, 8192)


def test_a_timeline_is_of_linears_a_ulysses_block_or_several_nodes() -> None:
    def read(line: str) -> command.Timeline:
        return from_args(command.Timeline(), command.parser().parse_args(line.split()))

    assert read("timeline") == command.Timeline(".", "linears")
    assert read("timeline --what ulysses --out runs/ulysses") == command.Timeline("runs/ulysses", "ulysses")
    assert read("timeline --what nodes") == command.Timeline(".", "nodes")
    assert read("timeline --what nodes --node-ranks 2").node_ranks == 2


@pytest.mark.parametrize(("line", "node_ranks"), [("", 1), ("--node-ranks 2", 2)])
def test_a_timeline_of_nodes_has_ranks_that_nccl_takes_for_several_hosts(
    monkeypatch: pytest.MonkeyPatch, line: str, node_ranks: int
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(command, "pretend_nodes", told.append)
    monkeypatch.setattr(command.world, "join", lambda start: "here")
    monkeypatch.setattr(command.timeline, "record", lambda *arguments: told.append(arguments))
    assert command.main(["timeline", "--what", "nodes", *line.split()]) == 0
    assert told == [node_ranks, (Path("."), "nodes", node_ranks, "here")]


def test_ranks_of_nodes_are_refused_where_there_are_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "timeline", "--node-ranks", "2"]) == 2
    assert "--node-ranks 2 with --what linears: only --what nodes has nodes; leave it out" in capsys.readouterr().err


def kept(folder: Path, world: int) -> str:
    """A folder with a winner, of CPU processes."""
    measured = Pass("gather", 16, 32, 32, torch.float32, world)
    save(
        str(folder), key_of(torch.device("cpu"), world), [Winner(measured, Method("chunked"), {Method("chunked"): 1.0})]
    )
    return str(folder)


def test_winners_are_those_of_the_folders_that_are_named(tmp_path: Path) -> None:
    """Of layers, `auto` is measured beside `auto` by other winners: in a group of its own, since a group goes by one table."""
    bench = parsed(f"layers --tuning-dir runs/none --tuned {kept(tmp_path, 2)}")
    settings = bench.settings(torch.device("cpu"))
    assert settings.config.tuning_dir == "runs/none"
    session = Session(settings, World(None, torch.device("cpu"), 0, 2), Results())  # type: ignore[arg-type]
    with (
        mock.patch("torch.distributed.new_group", return_value="its own"),
        mock.patch.object(World, "any", lambda self, here: here),
    ):
        maker = layers.tuned_auto(session, bench.tuned)
        with pytest.raises(ValueError, match=r"--tuned runs/none: rank 0 finds no winners there of this GPU, 2 ranks"):
            layers.tuned_auto(session, "runs/none")
    by_winners, method, apart = maker.args  # type: ignore[attr-defined]
    assert (by_winners.config.tuning_dir, method, apart.group) == (str(tmp_path), "auto", "its own")


@pytest.mark.parametrize(
    "line",
    [
        "operators --methods fast",
        "operators --passes forward",
        "operators --ops ,",
        "operators --shapes llama9",
        "layers --layers llama3-8b-moe",
        "rows",
        "timeline --what attention",
    ],
)
def test_unknown_words_are_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", *line.split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith("overlap-train bench: error: ") and said.count("\n") == 1
    assert "not one of" in said or "invalid choice" in said


def test_the_help_names_the_program_and_what_it_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["bench", "--help"])
    said = capsys.readouterr().out
    assert said.startswith("usage: overlap-train bench ")
    assert all(name in said for name in ("operators", "layers", "plot", "timeline"))


def test_without_torchrun_the_message_says_how_to_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert cli.main(["bench", "operators", "--tiny"]) == 2
    assert "torchrun --standalone --nproc-per-node 4 -m overlap_train bench operators" in capsys.readouterr().err


@pytest.mark.parametrize(("line", "is_warned"), [("operators", True), ("operators --tiny", False)])
def test_on_cpus_the_wait_is_announced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, is_warned: bool
) -> None:
    here = World(None, torch.device("cpu"), 0, 2)  # type: ignore[arg-type]
    monkeypatch.setattr(command.world, "join", lambda start: here)
    monkeypatch.setattr(kinds.Operators, "files", lambda self: [])
    monkeypatch.setattr(command, "shutdown", lambda: None)
    monkeypatch.setattr(command.dist, "destroy_process_group", lambda: None)
    assert command.main(line.split()) == 0
    assert ("a minute or more a row; --tiny" in capsys.readouterr().out) == is_warned


def test_operators_run_on_two_processes(script_server: ScriptServer, tmp_path: Path) -> None:
    arguments = ("--tiny", "--quick", "--out", str(tmp_path))
    status, said = script_server.run(*BENCH, "operators", *arguments, folder=tmp_path)
    assert status == 0, said
    rows = json.loads((tmp_path / "operators.json").read_text())["rows"]
    assert {(row["op"], row["pass"], row["method"]) for row in rows} == {
        (op, pass_, method) for op in OPS for pass_ in PASSES for method in ("chunked", "collective")
    }
    for row in rows:
        assert row["world"] == 2 and row["ms"] > 0 and row["sequence_ms"] > 0 and row["gemm_ms"] > 0
    assert "async-TP needs CUDA" in said and "async-TP needs CUDA" in (tmp_path / "operators.md").read_text()


def test_operators_across_nodes_run_on_two_processes(script_server: ScriptServer, tmp_path: Path) -> None:
    """Each a node of its own. All operators with the SMs that were found, and with 3, which CPU processes have no use for."""
    arguments = ("--tiny", "--quick", "--node-ranks", "1", "--network-sms", "3", "--out", str(tmp_path))
    status, said = script_server.run(*BENCH, "hierarchical", *arguments, folder=tmp_path)
    assert status == 0, said
    assert "a group of 2 ranks on 2 nodes of 1, as node_ranks says" in said
    rows = json.loads((tmp_path / "operators.json").read_text())["rows"]
    assert Counter((row["op"], row["pass"], row["method"], row["network_sms"]) for row in rows) == {
        (op, pass_, method, sms): 2
        for op in (*OPS, *EXCHANGES)
        for pass_ in PASSES
        for method, sms in (("chunked", 0), ("chunked", 3), ("collective", 0))
    }
    assert all(row["ms"] > 0 and row["async_tp_ms"] is None and row["probe_sms"] == 0 for row in rows)
    table = (tmp_path / "operators.md").read_text()
    assert "GEMM/comm" in table and "| SMs | by the probe |" in table
    assert "chunked, 3 SMs fprop: speed-up/bound" in table and "collective, 3" not in table
    pytest.importorskip("matplotlib")
    assert [path.name for path in plots.draw(tmp_path)] == ["speedup.png"]


def test_some_operators_and_lengths_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = parsed("hierarchical --ops gemm_a2a --ratios 0.5,1 --network-sms 2,16 --network nccl")
    assert (bench.ops, bench.ratios, bench.network_sms) == (("gemm_a2a",), (0.5, 1.0), (2, 16))
    assert bench.settings(torch.device("cpu")).config.network == "nccl"
    told: list[Any] = []
    monkeypatch.setattr(kinds.hierarchical, "hierarchical_cases", lambda session, shapes: told.append(shapes))
    monkeypatch.setattr(kinds.operators, "run", lambda cases, session, network_sms: told.append(network_sms))
    monkeypatch.setattr(kinds, "nodes_of", lambda session: 2)
    bench.files()[0].measure(None)
    assert told == [kinds.hierarchical.Shapes(("gemm_a2a",), PASSES, (0.5, 1.0), 1, tiny=False), (2, 16)]
    assert (parsed("hierarchical").ops, parsed("hierarchical").network_sms) == ((*OPS, *EXCHANGES), ())


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("chunked,direct", "--methods: 'direct' stays inside a node, and the ranks are on 2; leave it out"),
        ("auto,low_latency", "--methods: 'low_latency' stays inside a node, and the ranks are on 2; leave it out"),
        ("auto,chunked,fused,collective", None),
    ],
)
def test_a_method_that_stays_inside_a_node_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, asked: str, message: str | None
) -> None:
    measured: list[str] = []
    monkeypatch.setattr(kinds.hierarchical, "hierarchical_cases", lambda *arguments: measured.append("network"))
    monkeypatch.setattr(kinds.operators, "run", lambda *arguments: measured.append("operators"))
    monkeypatch.setattr(kinds, "nodes_of", lambda session: nodes)
    (file,) = parsed(f"hierarchical --methods {asked}").files()
    nodes = 2
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        file.measure(None)
    assert measured == ([] if message else ["network", "operators"])
    nodes, measured[:] = 1, []
    file.measure(None)
    assert measured == ["network", "operators"], "inside a node it runs"


def test_kernels_are_refused_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Triton's interpreter, in which other tests of this process may run them."""
    monkeypatch.setattr(methods, "is_interpreted", lambda: False)
    bench = parsed("operators --methods auto,direct")
    with pytest.raises(ValueError, match="--methods: 'direct' is not one of chunked, collective, which run on CPU"):
        bench.settings(torch.device("cpu"))
    assert bench.settings(torch.device("cuda", 0)).methods == ("auto", "direct")
    possible = ("auto", "chunked", "collective")
    assert parsed(f"operators --methods {','.join(possible)}").settings(torch.device("cpu")).methods == possible


def test_nccl_in_two_steps_is_a_baseline_where_nodes_have_several_ranks(
    script_server: ScriptServer, tmp_path: Path
) -> None:
    """Its results are checked before it is timed, as all are."""
    arguments = ("--tiny", "--quick", "--methods", "collective", "--node-ranks", "2", "--out", str(tmp_path))
    status, said = script_server.run(*BENCH, "hierarchical", *arguments, folder=tmp_path, world=4)
    assert status == 0 and "by_nodes: " not in said, said
    rows = json.loads((tmp_path / "operators.json").read_text())["rows"]
    assert {row["op"] for row in rows} == {*OPS, *EXCHANGES}
    assert len(rows) == 16 and all(row["by_nodes_ms"] > 0 for row in rows)
    assert "NCCL by nodes" in (tmp_path / "operators.md").read_text()


@pytest.mark.parametrize(("ranks", "told"), [("2", "node1"), ("1", None)])
def test_ranks_of_one_machine_are_told_apart(monkeypatch: pytest.MonkeyPatch, ranks: str, told: str | None) -> None:
    """Only where there are more than a node has: on real nodes NCCL finds its own way."""
    names = ("NCCL_HOSTID", "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD", "NCCL_SOCKET_IFNAME", "NCCL_IB_DISABLE")
    for name in names:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("LOCAL_RANK", str(int(ranks) - 1))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    pretend_nodes(1)
    assert os.environ.get("NCCL_HOSTID") == told and ("NCCL_IB_DISABLE" in os.environ) == (told is not None)
    for name in names:
        os.environ.pop(name, None)


@pytest.mark.slow
def test_layers_run_on_two_processes(script_server: ScriptServer, tmp_path: Path) -> None:
    arguments = ("--tiny", "--quick", "--methods", "chunked", "--out", str(tmp_path), "--tuned", kept(tmp_path, 2))
    status, said = script_server.run(*BENCH, "layers", *arguments, folder=tmp_path)
    assert status == 0, said
    (row,) = json.loads((tmp_path / "layers.json").read_text())["rows"]
    assert (row["layer"], row["method"], row["seq"], row["async_tp_ms"]) == ("tiny-mlp", "chunked", 16, None)
    assert row["tuned_ms"] > 0
    assert said.count("te: RuntimeError: transformer_engine is not installed") == 1
    pytest.importorskip("megatron.core")
    assert row["megatron_ms"] > 0


def test_ulysses_runs_on_two_processes(script_server: ScriptServer, tmp_path: Path) -> None:
    """Projections alone, and whole attention blocks."""
    arguments = ("--tiny", "--quick", "--out", str(tmp_path))
    status, said = script_server.run(*BENCH, "ulysses", *arguments, folder=tmp_path)
    assert status == 0, said
    rows = json.loads((tmp_path / "operators.json").read_text())["rows"]
    assert {(row["op"], row["pass"], row["method"]) for row in rows} == {
        (op, pass_, method) for op in EXCHANGES for pass_ in PASSES for method in ("chunked", "collective")
    }
    sends_columns = [(row["op"], row["pass"]) for row in rows if row["three_gemms_ms"] is not None]
    assert set(sends_columns) == {("gemm_a2a", "fprop"), ("a2a_gemm", "dgrad")}
    blocks = json.loads((tmp_path / "layers.json").read_text())["rows"]
    assert [(row["layer"], row["method"]) for row in blocks] == [
        ("tiny-ulysses", "chunked"),
        ("tiny-ulysses", "collective"),
    ]
    pytest.importorskip("matplotlib")
    assert [path.name for path in plots.draw(tmp_path)] == ["speedup.png", "layers.png"]


def test_a_shape_that_does_not_exist_ends_with_status_2_and_one_line(
    script_server: ScriptServer, tmp_path: Path
) -> None:
    status, said = script_server.run(*BENCH, "operators", "--shapes", "llama9", folder=tmp_path)
    assert status == 2
    assert said.count("overlap-train bench: error: argument --shapes: 'llama9' is not one of") == 1
