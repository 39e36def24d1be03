"""What ranks conclude from the times of training's first calls."""

from __future__ import annotations

import pytest
import torch

from overlap_train.planning.passes import SCATTER_AND_WGRAD, Pass
from overlap_train.planning.schedule import GATHER
from overlap_train.planning.table import Table, Winner
from overlap_train.planning.trial import is_known, methods_to_try, winners

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
FPROP = Pass(GATHER, 64, 32, 16, torch.float32, 2)  # whose default on the CPU is chunked
UNTUNED = Table("", {})


def _table(*passes: Pass) -> Table:
    return Table("", {pass_.bucket: Winner(pass_, "collective", {}) for pass_ in passes})


def _times(**ms: float) -> dict[tuple[str, str], float]:
    return {(GATHER, method): time for method, time in ms.items()}


def _won(*of_all_ranks: dict[tuple[str, str], float], table: Table = UNTUNED) -> dict[str, str]:
    return {winner.measured.kind: winner.method for winner in winners(FPROP, of_all_ranks, table, CPU)}


def test_the_slowest_rank_counts() -> None:
    assert _won(_times(chunked=1.0, collective=0.5), _times(chunked=1.0, collective=1.5)) == {GATHER: "chunked"}
    (winner,) = winners(FPROP, [_times(chunked=1.0, collective=0.5), _times(chunked=0.9, collective=0.6)], UNTUNED, CPU)
    assert (winner.measured, winner.method, winner.ms) == (FPROP, "collective", {"chunked": 1.0, "collective": 0.6})


@pytest.mark.parametrize(("collective", "wins"), [(0.97, "collective"), (0.99, "chunked")])
def test_the_default_stays_within_noise(collective: float, wins: str) -> None:
    assert _won(_times(chunked=1.0, collective=collective)) == {GATHER: wins}


def test_what_some_rank_has_not_timed_is_left_out() -> None:
    all_three, two = _times(direct=0.1, chunked=1.0, collective=0.5), _times(chunked=1.0, collective=0.5)
    assert _won(all_three, two) == _won(two, all_three) == {GATHER: "collective"}
    assert _won(_times(chunked=1.0, collective=0.5), _times(chunked=1.0)) == {}, "one method is no measurement"


def test_what_was_tuned_stays() -> None:
    times = _times(chunked=1.0, collective=0.5) | {
        (SCATTER_AND_WGRAD, m): t for m, t in (("chunked", 1.0), ("fused", 0.5))
    }
    assert _won(times) == {GATHER: "collective", SCATTER_AND_WGRAD: "fused"}
    assert _won(times, table=_table(FPROP)) == {SCATTER_AND_WGRAD: "fused"}
    assert [is_known(FPROP, _table(*passes)) for passes in ((), (FPROP,), (FPROP, FPROP.dgrad))] == [False, False, True]


@pytest.mark.usefixtures("hopper_gpu")
def test_the_default_has_the_first_turn() -> None:
    assert methods_to_try(FPROP, CPU, False, 1) == ("chunked", "collective")
    assert set(methods_to_try(FPROP, CPU, True, 1)) == {"chunked", "collective", "fused", "direct", "low_latency"}
    many = Pass(GATHER, 8192, 4096, 4096, torch.bfloat16, 2)
    assert methods_to_try(Pass(GATHER, 256, 4096, 16384, torch.bfloat16, 2), CUDA, False, 1)[0] == "low_latency"
    assert "low_latency" not in methods_to_try(many, CUDA, False, 1), "it does not serve so many bytes"


@pytest.mark.usefixtures("hopper_gpu")
def test_across_nodes_no_kernels_of_ours_are_tried() -> None:
    assert methods_to_try(Pass(GATHER, 8192, 4096, 4096, torch.bfloat16, 4), CUDA, False, 2) == (
        "chunked",
        "collective",
    )
