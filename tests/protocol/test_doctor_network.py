"""What the doctor finds between nodes: pieces that are whole when their signals come, and transports that signal too early."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlap_train import shutdown
from overlap_train.nodes.gloo import GlooTransport
from overlap_train.nodes.slots import Place
from overlap_train.schedule.order import Topology
from overlap_train.tools.doctor import gathers, network
from overlap_train.tools.doctor.report import FAIL, OK, WARN, Finding
from overlap_train.tools.measure.world import World
from tests.processes import run_ranks, values
from tests.script_server import ScriptServer

CPU = torch.device("cpu")
DOCTOR = ("-m", "overlap_train", "doctor", "--seconds", "0.2")
Put = Callable[[GlooTransport, torch.Tensor, Place, int], None]


def test_the_line_names_the_transport_the_pieces_and_the_bandwidth(script_server: ScriptServer, tmp_path: Path) -> None:
    arguments = ("--node-ranks", "1", "--json", str(tmp_path / "r.json"))
    status, said = script_server.run(*DOCTOR, *arguments, folder=tmp_path)
    assert status == 0, said
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    lines = [row for row in rows if row["name"].startswith("network")]
    assert [(line["name"], line["status"], line["rank"]) for line in lines] == [
        ("network gloo", OK, 0),
        ("network gloo", OK, 1),
    ]
    for line in lines:
        told = re.fullmatch(
            r"proved between 2 nodes of 1: (\d+) pieces of 256 KiB were whole when their signals came; ([\d.e+-]+) GB/s out of "
            r"each rank",
            line["measured"],
        )
        assert told is not None and int(told[1]) >= gathers.ROUNDS * gathers.CHUNKS and float(told[2]) > 0
        assert line["figure"] == pytest.approx(float(told[2]), rel=0.01), "what the planner reckons with"


def test_a_transport_that_cannot_run_is_a_warning_that_says_why(script_server: ScriptServer, tmp_path: Path) -> None:
    arguments = ("--node-ranks", "1", "--network", "nvshmem", "--json", str(tmp_path / "r.json"))
    status, said = script_server.run(*DOCTOR, *arguments, folder=tmp_path)
    assert status == 0, said
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    told = "cannot run here: nvshmem carries data between GPUs, and these ranks have none"
    lines = [(row["name"], row["status"], row["measured"]) for row in rows if row["name"].startswith("network")]
    assert lines == [("network nvshmem", WARN, told)] * 2


def test_ranks_of_one_node_have_no_such_line(script_server: ScriptServer, tmp_path: Path) -> None:
    status, _ = script_server.run(*DOCTOR, "--json", str(tmp_path / "r.json"), folder=tmp_path)
    assert status == 0
    assert not [
        row for row in json.loads((tmp_path / "r.json").read_text())["rows"] if row["name"].startswith("network")
    ]


def checked(rank: int, world: int, node_ranks: int, fault: str, seconds: float = 0.2) -> list[Finding]:
    """The findings of this rank. As if each rank were on a host of its own."""
    if fault:
        FAULTS[fault](rank)
    here = World(dist.group.WORLD, CPU, rank, world, tuple(f"node{r}" for r in range(world)))
    found = network.check_network(here, "gloo", network.Settings(node_ranks, "auto", "auto", seconds))
    if not fault:  # else a peer that has found it ends, while pieces are on their way to it
        shutdown()
    return found


def signals_first(rank: int, early: int) -> None:
    """Of rank `early`: its pieces are said to be there, and then brought."""
    send = GlooTransport.put

    def put(self: GlooTransport, source: torch.Tensor, place: Place, word: int) -> None:
        if rank == early:
            send(self, source[:0], place, word)
        send(self, source, place, word)

    GlooTransport.put = put  # type: ignore[method-assign]


def misplaced(rank: int) -> None:
    """All rows of a piece arrive, each where the one before it belongs."""
    send = GlooTransport.put

    def put(self: GlooTransport, source: torch.Tensor, place: Place, word: int) -> None:
        send(self, source.roll(-1, 0) if source.numel() else source, place, word)

    GlooTransport.put = put  # type: ignore[method-assign]


def breaks(rank: int) -> None:
    """Rank 1 cannot send."""

    def put(self: GlooTransport, source: torch.Tensor, place: Place, word: int) -> None:
        raise RuntimeError("no route to host")

    network._TIMEOUT_S = 2.0
    if rank == 1:
        GlooTransport.put = put  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[int], None]] = {
    "rank 1 signals first": partial(signals_first, early=1), "rank 2 signals first": partial(signals_first, early=2),
    "in the wrong place": misplaced, "breaks": breaks,
}  # fmt: skip


@pytest.mark.parametrize(("world", "node_ranks"), [(2, 1), (4, 2), (3, 1)])
def test_pieces_are_whole_when_their_signals_are_there(world: int, node_ranks: int) -> None:
    for found in values(run_ranks(world, checked, node_ranks, "", limit_s=90)):
        (finding,) = found
        assert finding.status == OK, finding
        assert f"proved between {world // node_ranks} nodes of {node_ranks}: " in finding.measured


@pytest.mark.parametrize(("world", "node_ranks", "early"), [(2, 1, 1), (4, 2, 2)])
def test_a_signal_before_its_data_is_found_and_its_rank_named(world: int, node_ranks: int, early: int) -> None:
    """Also by rank 1 of four, to which the pieces of rank 2 come by way of rank 0."""
    outcomes = run_ranks(world, checked, node_ranks, f"rank {early} signals first", 30.0, limit_s=90)
    found = [finding for some in values(outcomes) for finding in some]
    assert found and {(finding.name, finding.status) for finding in found} == {("network gloo", FAIL)}
    for finding in found:
        assert re.search(
            rf"^failed: [1-9]\d* of \d+ pieces of 256 KiB were not whole when their signals came, from rank {early} on "
            rf"node{early}$",
            finding.measured,
        )
        assert "collective" in finding.fix


def test_a_piece_in_the_wrong_place_is_found() -> None:
    found = [finding for some in values(run_ranks(2, checked, 1, "in the wrong place", limit_s=90)) for finding in some]
    assert len(found) == 2 and all("were not whole" in finding.measured for finding in found)


def test_a_transport_that_breaks_is_an_error_of_its_rank() -> None:
    outcomes = values(run_ranks(2, checked, 1, "breaks", limit_s=90))
    messages = [finding.measured for some in outcomes for finding in some]
    assert any("RuntimeError: no route to host" in message for message in messages)
    assert {finding.status for some in outcomes for finding in some} == {FAIL}


def test_nodes_that_cannot_be_formed_are_a_warning() -> None:
    for found in values(run_ranks(4, checked, 3, "", limit_s=90)):
        (finding,) = found
        assert (finding.name, finding.status) == ("network gloo", WARN)
        assert "cannot run here: node_ranks=3 does not divide the group's 4 ranks" in finding.measured
        assert "collective" in finding.fix


def test_what_comes_from_other_nodes_is_counted() -> None:
    made = gathers.Gathers.__new__(gathers.Gathers)
    made.topology = Topology(3, 2, 1)
    assert made.far_pieces == 4 * gathers.CHUNKS


def test_every_round_has_other_numbers_everywhere() -> None:
    """So that what is left of any of the last rounds is wrong in every element."""
    made = gathers.Gathers.__new__(gathers.Gathers)
    made._numbers = (torch.arange(8 * gathers.FEATURES + gathers.NUMBERS) % gathers.NUMBERS + 1).float()
    seen: list[Any] = [made.numbers(3, turn) for turn in range(12)]
    for turn, later in enumerate(seen):
        assert later.shape == (8, gathers.FEATURES) and later.min() >= 1 and later.max() <= gathers.NUMBERS
        assert all((later != earlier).all() for earlier in seen[:turn])
        assert all((later != made.numbers(other, turn)).all() for other in range(3))
