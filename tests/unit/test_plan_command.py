"""`overlap-train plan`: tables, JSON, trace and pictures."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from overlap_train.flags import Parser, add_options, from_args
from overlap_train.planning.cost import communication_sms
from overlap_train.planning.machines import SYSTEMS
from overlap_train.tools.plan import command, picture
from overlap_train.tools.plan.estimates import COLLECTIVE, METHODS
from overlap_train.tools.plan.inputs import PLANNED_MODELS, Strategy, read_model
from overlap_train.tools.plan.prediction import Prediction, predict, total
from overlap_train.tools.plan.tables import linears_table, not_measured
from tests.unit.test_plan_check import part_of

SMALL = {"hidden_size": 1024, "ffn_hidden_size": 3584, "num_attention_heads": 8, "num_query_groups": 8, "num_layers": 2}


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "small.json"
    path.write_text(json.dumps({"source": "a test", **SMALL, "vocab_size": 1000}))
    return str(path)


def run(model: str, *arguments: str) -> int:
    return command.main(["--model", model, "--seq", "4096", *arguments])


def test_the_tables_fit_and_name_everything(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, "--tp", "2", "--system", "h100") == 0
    said = capsys.readouterr().out
    assert "for the network" not in said and "Note: " not in said
    assert all(len(line) <= 120 for line in said.splitlines())
    for name in ("qkv", "proj", "fc1", "fc2", "output", "layer", "forward", "backward", *METHODS, "bound", "exposed"):
        assert name in said
    assert "h100: scaled from the H200 by data sheets: tile_tflops" in said
    assert "A whole step gains less" in said
    assert [line.split()[0] for line in said.partition("Spans")[2].splitlines()[2:6]] == ["1", "2", "4", "8"]


@pytest.mark.parametrize(
    ("arguments", "first", "end"),
    [
        ("", "llama3-8b on 4 x h200", ""),
        ("--nodes 2 --model llama3-70b --seq 16384", "Spans of tensor parallelism", "\nNot measured"),
        ("--tp 2 --cp 4 --seq 32768", "The product of one part hides", "\nNot measured"),
    ],
)
def test_the_page_shows_what_is_printed(
    arguments: str, first: str, end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "planner.md").read_text()
    assert f"overlap-train plan {arguments}" in page and command.main(arguments.split()) == 0
    said = capsys.readouterr().out
    quoted = said[said.index(first) : said.index(end) if end else None]
    assert quoted in page, f"put the output of `overlap-train plan {arguments}` into docs/planner.md"


def test_what_is_written_can_be_read(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, trace = tmp_path / "plan.json", tmp_path / "plan.trace.json"
    assert run(model, "--json", str(results), "--trace", str(trace)) == 0
    document = json.loads(results.read_text())
    assert not {"network_sms", "reduce_sms"} & document.keys(), "of groups that span nodes only"
    assert document["strategy"] == {"tp": 4, "seq": 4096, "micro_batch": 1, "nodes": 1, "cp": 1}
    assert len(document["passes"]) == 10 and set(document["passes"][0]["methods"]) == set(METHODS)
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["tid"] for event in events} >= {"stream 0", "stream 1", "copies", "SM 0"}
    longest = max(event["ts"] + event["dur"] for event in events)
    most = max(way["device_us"] for one in document["passes"] for way in one["methods"].values())
    assert longest == pytest.approx(most, abs=0.01)


def test_the_pictures_are_drawn(model: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert run(model, "--plot", str(tmp_path / "plan.png")) == 0
    checked = tmp_path / "check.png"
    assert command.main(["--check", str(part_of("h200x2", tmp_path)), "--plot", str(checked)]) == 0
    assert (tmp_path / "plan.png").stat().st_size > 10_000 and checked.stat().st_size > 10_000


def test_only_direct_stores_at_the_peers_in_the_picture_which_has_one_unit(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[tuple[Any, ...]] = []
    monkeypatch.setattr(picture, "draw_lanes", lambda *arguments: drawn.append(arguments))
    assert run(model, "--plot", str(tmp_path / "plan.png")) == 0
    assert {title.split()[-1] for _, title, _, inside, _ in drawn if inside} == {"direct:"}
    assert len({unit for *_, unit in drawn}) == 1


def test_ulysses_is_named_and_its_linears_are_drawn(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """fc1 and fc2 communicate nothing there: a picture of them would show nothing."""
    pytest.importorskip("matplotlib")
    headers: list[tuple[str, ...]] = []
    canvas = picture.canvas
    monkeypatch.setattr(picture, "canvas", lambda *a, **k: headers.append(a[3]) or canvas(*a, **k))
    assert run(model, "--cp", "4", "--plot", str(tmp_path / "plan.png")) == 0
    assert "on 4 x h200 by Ulysses (cp 4), 4096 tokens" in capsys.readouterr().out
    ((title, shapes, _),) = headers
    assert "planned for 4 x H200" in title and "qkv: " in shapes and "proj: " in shapes and "fc1" not in shapes


def plan(system: str, tp: int, model: str = "llama3-8b", seq: int = 8192) -> list[Prediction]:
    return predict(SYSTEMS[system], Strategy(tp, seq), PLANNED_MODELS[model])


def test_where_nothing_is_won_it_says_so() -> None:
    alone = plan("h200", 1)
    assert all(p.chosen.method == COLLECTIVE and p.nccl_us == 0 for p in alone)
    assert all(line.split()[-2] == "-" for line in linears_table(alone, 32)[1:-4]), "nothing to hide"
    long = next(p for p in plan("h200", 2) if p.linear == "output" and p.direction == "backward")
    fastest = min(e.us for e in long.by_method.values())
    assert long.chosen.method == COLLECTIVE and fastest > 0.98 * long.chosen.us


def test_a_choice_never_loses() -> None:
    for system in ("a100", "h800", "h20"):
        for p in plan(system, 8):
            assert p.chosen.us <= p.by_method[COLLECTIVE].us
            assert p.chosen.us <= 1.02 * min(e.us for e in p.by_method.values())


def test_a_faster_wire_is_never_worse_and_a_slower_one_never_better() -> None:
    fast, slow = (total(plan(system, 8)) for system in ("h100", "h800"))
    assert slow.ours_us > fast.ours_us and slow.without_us > fast.without_us
    assert slow.gemm_us == pytest.approx(fast.gemm_us)


def test_few_rows_are_a_matter_of_the_host() -> None:
    first = plan("h200", 4, seq=512)[0]
    chunked = first.by_method["chunked"]
    assert chunked.us == chunked.host_us > chunked.device_us
    assert any("the host decides" in line for line in not_measured(SYSTEMS["h200"], Strategy(4, 512), {}))


def test_short_products_across_nodes_do_not_overlap_where_exchanges_keep_the_host(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A layer of Llama-3 8B on 2 x 8 H200, whose products take 20 to 330 microseconds: with 44 an exchange, as driver calls alone
    would take, it was planned 1.05 times as fast as NCCL and cuBLAS."""
    system = tmp_path / "fast.json"
    gains = []
    for us in (44, SYSTEMS["h200"].host_exchange_us):
        system.write_text(json.dumps({"based_on": "h200", "host_exchange_us": us}))
        assert command.main(["--system", str(system), "--nodes", "2"]) == 0
        words = (line.split() for line in capsys.readouterr().out.splitlines())
        gains.append(next(found[-1] for found in words if found[:2] == ["layer", "both"]))
    assert gains == ["1.05", "1.00"]


def test_ulysses_exchanges_beside_the_projections_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--cp", "4", "--seq", "32768"]) == 0
    said = capsys.readouterr().out
    lines = [line for line in said.splitlines() if line[:4].strip() in ("qkv", "proj", "fc1", "fc2")]
    assert [line.split()[-2] == "-" for line in lines] == [False] * 4 + [True] * 4, "nothing to hide in the MLP"
    assert all(" 8192, " in line for line in lines), "rows of one of four ranks"
    assert "Spans of Ulysses (cp)" in said
    assert "the all-to-all operators: compared with runs of 2 H200, 4 % off in the mean" in said
    assert max(map(len, said.splitlines())) <= 120


WIDE = {"hidden_size": 4096, "ffn_hidden_size": 512, "num_attention_heads": 32, "num_query_groups": 8, "num_layers": 2}
GRIDS = ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4), (8, 1), (4, 2), (2, 4), (1, 8))


@pytest.fixture
def wide(tmp_path: Path) -> str:
    """Whose attention has long products beside a short MLP."""
    path = tmp_path / "wide.json"
    path.write_text(json.dumps({"source": "a test", **WIDE}))
    return str(path)


def plan_of_grid(model: str, *arguments: str) -> int:
    return command.main(["--model", model, "--cp", "2", *arguments])


def test_tp_and_ulysses_together_say_what_hides_which_and_which_spans_pay(
    wide: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, trace = tmp_path / "plan.json", tmp_path / "plan.trace.json"
    files = ("--json", str(results), "--trace", str(trace))
    assert plan_of_grid(wide, "--tp", "2", "--seq", "16384", *files) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 120
    assert "on 4 x h200 by tensor parallelism (tp 2) and Ulysses (cp 2), 16384 tokens" in said
    assert "The product of one part hides the all-to-all of another: qkv in 2 parts." in said
    assert "Too short for parts, so only TP is overlapped, and the all-to-all is NCCL's: proj." in said
    table = said.partition("Spans of tensor parallelism (tp) and Ulysses (cp)")[2].splitlines()
    assert [line.split()[:2] for line in table[1:12]] == [["tp", "cp"], *([str(tp), str(cp)] for tp, cp in GRIDS)]
    assert "- TP x Ulysses: training steps were timed on GPUs, no passes." in said
    document = json.loads(results.read_text())
    assert tuple((span["tp"], span["cp"]) for span in document["spans"]) == GRIDS
    assert "network_sms" not in document
    qkv, fc1 = (document["passes"][number] for number in (0, 4))
    assert (qkv["parts"], fc1["parts"]) == (2, 1)
    assert set(qkv["methods"]) == set(fc1["methods"]) == set(METHODS)
    here = next(span for span in document["spans"] if (span["tp"], span["cp"]) == (2, 2))
    assert here["ours_us"] == document["layer"]["ours_us"]
    lanes = {event.get("tid") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"copies", "exchanges", "stream 0"} <= lanes


def test_short_sequences_and_nodes_hide_no_all_to_all(wide: str, capsys: pytest.CaptureFixture[str]) -> None:
    apart = "so only TP is overlapped, and the all-to-all is NCCL's: qkv, proj."
    assert plan_of_grid(wide, "--tp", "2", "--seq", "4096") == 0
    short = capsys.readouterr().out
    assert f"Too short for parts, {apart}" in short
    assert "hides" not in short and "for the network" not in short
    assert plan_of_grid(wide, "--tp", "4", "--nodes", "2", "--seq", "16384") == 0
    across = capsys.readouterr().out
    assert f"Ulysses' ranks are on several nodes, {apart}" in across
    assert "not estimated" not in across and "for the network" not in across, "each product is inside a node"
    spans = [line.split()[:3] for line in across.partition("Spans")[2].splitlines()]
    assert spans[12:15] == [["8", "1", "2"], ["4", "2", "2"], ["2", "4", "2"]]
    assert plan_of_grid(wide, "--tp", "4", "--nodes", "4", "--seq", "4096") == 0
    filled, sums = capsys.readouterr().out, communication_sms(SYSTEMS["h200"], 2)[1]
    assert "not estimated" in filled and f"6 SMs for the network, and {sums} for sums of a node." in filled


def test_across_nodes_it_says_what_is_not_estimated_and_which_span_pays(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "plan.json"
    assert run(model, "--nodes", "2", "--system", "h20", "--json", str(results)) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 120
    assert "on 16 x h20 on 2 nodes" in said and "The kernels of direct send inside one node only" in said
    fc1 = next(line.split() for line in said.splitlines() if line.startswith("fc1"))
    assert fc1[9] == "-" and float(fc1[8]) > 0 and float(fc1[10]) > 0, "direct, between fused and chunked"
    spans = [line.split()[:2] for line in said.partition("Spans")[2].splitlines()[2:7]]
    assert spans == [["1", "1"], ["2", "1"], ["4", "1"], ["8", "1"], ["16", "2"]]
    assert "across nodes: nic_gbs, nic_us, host_exchange_us, sum_sm_gbs of h20" in said
    assert said.splitlines()[1].startswith("Note: 8 query heads and 8 KV heads cannot be divided among 16 ranks.")
    document = json.loads(results.read_text())
    sms, sums = communication_sms(SYSTEMS["h20"], 8)
    assert f"Reckons with {sms} SMs for the network, and {sums} for sums of a node." in said.splitlines()
    assert (document["network_sms"], document["reduce_sms"]) == (sms, sums) == (4, 4)
    assert [(span["tp"], span["nodes"]) for span in document["spans"]][-2:] == [(8, 1), (16, 2)]
    assert set(document["passes"][0]["methods"]) == {"fused", "chunked", COLLECTIVE}


@pytest.mark.parametrize(("name", "said"), [("h20", "All streams share one"), ("b200", "Each stream has a")])
def test_across_nodes_it_says_how_many_queues_there_are(
    name: str, said: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model, "--nodes", "2", "--system", name) == 0
    assert f"{said} hardware queue" in capsys.readouterr().out


def test_too_many_tiles_are_not_simulated_one_by_one_in_a_plan_across_nodes(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results, small = tmp_path / "plan.json", read_model(model)
    tiles = [command.count_tiles(Strategy(tp, 4096), small) for tp in (1, 2, 4, 8)]
    assert tiles[0] == 0 and tiles[1] > tiles[2] > tiles[3] > 0
    for most, coarse in ((tiles[1], []), (tiles[2], [2]), (tiles[2] - 1, [2, 4])):
        monkeypatch.setattr(command, "MOST_TILES", most)
        assert run(model, "--nodes", "2", "--json", str(results)) == 0
        said, spans = capsys.readouterr().out, json.loads(results.read_text())["spans"]
        assert [span["tp"] for span in spans if span["is_coarse"]] == coarse
        named = f"- spans of {', '.join(map(str, coarse))} ranks by fused and direct: "
        assert said.count(named) == bool(coarse)
    assert run(model, "--tp", "8", "--json", str(results)) == 0
    one_node = json.loads(results.read_text())["spans"]
    assert not any(span["is_coarse"] for span in one_node), "of a plan of one node all are simulated"
    assert spans[1]["ours_us"] > one_node[1]["ours_us"] and spans[3]["ours_us"] == one_node[3]["ours_us"]


def test_tiles_are_about_those_that_are_simulated() -> None:
    strategy, llama = Strategy(8), PLANNED_MODELS["llama3-8b"]
    simulated = [p.by_method["fused"].timeline.tiles for p in predict(SYSTEMS["h200"], strategy, llama)]
    assert command.count_tiles(strategy, llama) == pytest.approx(sum(map(len, simulated)), rel=0.05)


def test_python_collects_as_before_afterwards(model: str) -> None:
    before = gc.get_threshold()
    run(model)
    assert gc.get_threshold() == before


@pytest.mark.parametrize(
    ("arguments", "spans"),
    [
        (["--nodes", "2"], (16, 1, 2)), (["--nodes", "2", "--tp", "4"], (4, 1, 2)), (["--nodes", "2", "--cp", "16"], (1, 16, 2)),
        (["--nodes", "2", "--strategy", "cp8"], (1, 8, 2)), (["--nodes", "1"], (4, 1, 1)), (["--tp", "8"], (8, 1, 1)),
    ],
)  # fmt: skip
def test_nodes_alone_are_filled(arguments: list[str], spans: tuple[int, int, int]) -> None:
    asked = from_args(command.Asked(), _parser().parse_args(arguments))
    strategy = command._strategy(asked, SYSTEMS["h200"])
    assert (strategy.tp, strategy.cp, strategy.nodes) == spans


def test_what_is_hardly_meant_is_said_below_the_title(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(model, "--nodes", "2", "--tp", "4", "--json", str(tmp_path / "plan.json")) == 0
    _, note, *_ = capsys.readouterr().out.splitlines()
    assert note.startswith("Note: --tp 4 fits in one node; --nodes 2 spreads it")
    (kept,) = json.loads((tmp_path / "plan.json").read_text())["notes"]
    assert kept.startswith("--tp 4 fits in one node")


def test_nodes_leave_the_ranks_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "eight.json"
    path.write_text(json.dumps({"tp": 8}))
    asked = replace(command.Asked(), strategy=str(path), nodes=2)
    assert command._strategy(asked, SYSTEMS["h200"]) == Strategy(8, nodes=2)


def _parser() -> Parser:
    parser = Parser("plan")
    add_options(parser, command.Asked)
    return parser


def test_as_many_ranks_cost_more_across_nodes_than_inside_one() -> None:
    inside, across = (
        total(predict(SYSTEMS["h200"], Strategy(8, nodes=nodes), PLANNED_MODELS["llama3-8b"])) for nodes in (1, 2)
    )
    assert across.ours_us > inside.ours_us and across.nccl_us > inside.nccl_us
    assert across.gemm_us == pytest.approx(inside.gemm_us)


def test_ulysses_across_nodes_is_by_what_crosses_them() -> None:
    found = predict(SYSTEMS["h200"], Strategy(1, 16384, nodes=2, cp=16), PLANNED_MODELS["llama-7b"])
    assert {tuple(p.by_method) for p in found if p.nccl_us} == {("fused", "chunked", COLLECTIVE)}
    assert {tuple(p.by_method) for p in found if not p.nccl_us} == {METHODS}, "the MLP is whole on every rank"


@pytest.mark.parametrize("flag", ["--json", "--trace", "--plot"])
def test_a_file_that_cannot_be_written_is_said_before_anything_is_planned(flag: str) -> None:
    with pytest.raises(ValueError, match=f"{flag} /nowhere/out: there is no folder /nowhere"):
        command.main([flag, "/nowhere/out"])
