"""What ranks conclude from the times of training's first calls."""

from __future__ import annotations

import pytest
import torch

from overlap_train.methods import TRAITS
from overlap_train.planning.table import Table, Winner
from overlap_train.planning.trial import is_known, key_of, methods_to_try, winners
from overlap_train.schedule.order import GATHER, SCATTER
from overlap_train.select.passes import SCATTER_AND_WGRAD, Pass

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
FPROP = Pass(GATHER, 64, 32, 16, torch.float32, 2)  # whose default on the CPU is chunked
UNTUNED = Table({})


def _table(*passes: Pass) -> Table:
    return Table({pass_.bucket: Winner(pass_, "collective", {}) for pass_ in passes})


def _times(**ms: float) -> dict[tuple[str, str], float]:
    return {(GATHER, method): time for method, time in ms.items()}


def _won(*of_all_ranks: dict[tuple[str, str], float], table: Table = UNTUNED) -> dict[str, str]:
    return {winner.measured.kind: winner.method for winner in winners(FPROP, of_all_ranks, table, CPU, 1)}


def test_the_slowest_rank_counts() -> None:
    assert _won(_times(chunked=1.0, collective=0.5), _times(chunked=1.0, collective=1.5)) == {GATHER: "chunked"}
    ranks = [_times(chunked=1.0, collective=0.5), _times(chunked=0.9, collective=0.6)]
    (winner,) = winners(FPROP, ranks, UNTUNED, CPU, 1)
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
    assert [is_known(FPROP, _table(*passes), CPU, 1) for passes in ((), (FPROP,), (FPROP, FPROP.dgrad))] == [
        False,
        False,
        True,
    ]


def test_a_default_that_was_not_timed_does_not_lose() -> None:
    assert _won(_times(collective=1.0, direct=0.5)) == {}


@pytest.mark.usefixtures("hopper_gpu")
def test_the_default_has_the_first_turn() -> None:
    assert methods_to_try(FPROP, CPU, 1)[0] == "chunked"
    assert set(methods_to_try(FPROP, CPU, 1)) == set(TRAITS)
    assert methods_to_try(Pass(GATHER, 256, 4096, 16384, torch.bfloat16, 2), CUDA, 1)[0] == "low_latency"
    many = methods_to_try(Pass(GATHER, 8192, 4096, 4096, torch.bfloat16, 2), CUDA, 1)
    assert set(many) == set(TRAITS) - {"low_latency"}, "it does not serve so many bytes"


@pytest.mark.usefixtures("hopper_gpu")
def test_across_nodes_no_kernels_that_send_are_tried() -> None:
    for pass_ in (Pass(kind, 8192, 4096, 4096, torch.bfloat16, 4) for kind in (GATHER, SCATTER)):
        assert methods_to_try(pass_, CUDA, 2) == ("fused", "chunked", "collective")


@pytest.mark.usefixtures("hopper_gpu")
def test_linears_of_other_kernels_have_another_trial() -> None:
    """4095 features are in the bucket of 4096, but TMA cannot read them."""
    served, other, near = (
        Pass(GATHER, 8192, n, k, torch.bfloat16, 2) for n, k in ((1536, 4096), (1535, 4095), (1528, 4088))
    )
    assert served.bucket == other.bucket == near.bucket
    assert key_of(served, CUDA) == key_of(near, CUDA) != key_of(other, CUDA)
    tuned = _table(served, served.dgrad)
    assert [is_known(pass_, tuned, CUDA, 1) for pass_ in (served, near, other)] == [True, True, False]
