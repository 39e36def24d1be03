"""The simulator with one hardware queue for all streams: operators' orders, the model of test_turns.py, recorded profiles."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from overlap_train.planning.machines import SYSTEMS, System
from overlap_train.planning.table import UNTUNED
from overlap_train.schedule import inter_node as in_flight
from overlap_train.schedule.inter_node import crossings
from overlap_train.schedule.order import A2A_GEMM, GATHER, GEMM_A2A, SCATTER, Topology, sources
from overlap_train.schedule.transfers import legs
from overlap_train.select.passes import Pass
from overlap_train.tools.bench.timeline import last_call
from overlap_train.tools.plan.estimates import work_of
from overlap_train.tools.plan.simulation import backward, enqueued
from overlap_train.tools.plan.simulation.hardware_queue import HardwareQueue
from overlap_train.tools.plan.simulation.programs import forward, program
from overlap_train.tools.plan.simulation.simulate import simulate
from overlap_train.tools.plan.simulation.timeline import (
    GEMM,
    TO_NETWORK,
    Arrival,
    Kernel,
    Program,
    Send,
    Span,
    Timeline,
    arrived,
)
from overlap_train.tools.plan.simulation.work import Work
from tests.protocol.test_interleaving_nodes import GATHERED, IN, OUT, ROWS
from tests.unit.test_turns import gather_steps, scatter_steps, time_of

H200 = SYSTEMS["h200"]
KINDS = (GATHER, SCATTER, A2A_GEMM, GEMM_A2A)
RECORD = Path(__file__).parents[2] / "benchmarks" / "h200x2" / "hierarchical" / "waves" / "timeline.json"
# Nothing takes time but products and bytes; before Hopper products are not in clusters.
BARE = replace(H200, capability=(8, 0), gap_us=0.0, wait_us=0.0, nic_us=0.0, push_us=0.0, ramp_us=0.0, memory_gbs=1e12)


NO_POWER_LIMIT = {"burst_tflops": 2e3, "sustained_tflops": 2e3}  # products take their waves of tiles


def work(
    kind: str, system: System = H200, chunks: int = 4, method: str = "chunked", nodes: int = 2, local: int = 1
) -> Work:
    """8192 rows, and products as long as those of the record's profile."""
    world = nodes * local
    n, k = {GATHER: (65536, 4096), SCATTER: (4096, 65536), A2A_GEMM: (65536, 8192), GEMM_A2A: (8192, 65536)}[kind]
    made = work_of(system, Pass(kind, 8192, n, k, torch.bfloat16, world), method, UNTUNED, nodes=nodes)
    topology, tiled = Topology(nodes, local, 0), method == "fused"
    plan = replace(
        made.plan, chunks=chunks, legs=legs(kind, topology, chunks, tiled), sources=sources(topology, kind),
        crossings=crossings(kind, topology, chunks, tiled), together=1,
    )  # fmt: skip
    return replace(made, plan=plan, topology=topology)


def run(one: Program, system: System = H200) -> Timeline:
    return simulate([one], system.copy_gbs, system.nic_gbs)


def products_of(timeline: Timeline) -> list[Span]:
    return [span for span in timeline.spans if span.kind == GEMM]


# the queue


def test_nothing_starts_before_what_was_enqueued_earlier() -> None:
    queue, started = HardwareQueue(), list[str]()
    for name, place in (("third", 2), ("apart", None), ("second", 1)):
        queue.start(Kernel(name, GEMM, place=place), lambda name=name: started.append(name))  # type: ignore[misc]
    assert started == ["apart"]
    queue.start(Kernel("first", GEMM, place=0), lambda: started.append("first"))
    assert started == ["apart", "first", "second", "third"]


@pytest.mark.parametrize("chunks", [1, 2, 4, 8])
@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize("one_queue", [True, False])
@pytest.mark.parametrize("kind", [GATHER, SCATTER])
def test_it_takes_as_long_as_in_the_model_of_the_queue(kind: str, one_queue: bool, nodes: int, chunks: int) -> None:
    """Products of 0.5 to 2 times the network, in nodes of one rank."""
    for ratio in (0.5, 0.8, 1.0, 1.3, 2.0):
        made = work(kind, replace(BARE, connections=1 if one_queue else 8), chunks, nodes=nodes)
        product_us = made.chunk_us(chunks) * chunks * nodes
        gbs = (nodes - 1) * made.shard_bytes / (product_us / ratio) / 1e3
        system = replace(made.system, nic_gbs=gbs, burst_tflops=400.0, sustained_tflops=400.0)
        made = replace(made, system=system)
        product_us = made.part_us * nodes
        steps = (gather_steps if kind == GATHER else scatter_steps)(nodes, 1, chunks, 1.0)
        network_us = (nodes - 1) * made.shard_bytes / gbs / 1e3
        lengths = {"products": product_us, "network": network_us}
        modelled = time_of([replace(step, length=step.length * lengths[step.stream]) for step in steps], one_queue)
        assert run(program(made), system).us == pytest.approx(modelled, rel=1e-3), ratio


def test_everything_that_is_enqueued_has_a_place() -> None:
    """But copies inside a node."""
    made = work(GATHER, replace(BARE, nic_gbs=10.0), chunks=8)
    many = replace(made, system=replace(made.system, connections=8))
    assert program(many).arrivals == () and program(made).arrivals
    assert {item.place for item in (*program(many).kernels, *program(many).sends)} == {None}
    items = sorted(
        (*program(made).kernels, *program(made).sends, *program(made).arrivals), key=lambda item: item.place or 0
    )
    assert [item.place for item in items] == list(range(len(items)))
    inside = program(work_of(H200, made.pass_, "chunked", UNTUNED))
    assert {item.place for item in (*inside.kernels, *inside.sends)} == {None}, "nothing crosses"


def test_a_schedule_that_waits_for_its_turn_in_vain_is_an_error() -> None:
    with pytest.raises(ValueError, match="rank 0 waits for what never comes: its turn; the schedule is wrong"):
        simulate([Program(0, 2, (Kernel("late", GEMM, place=1),))], 1.0)


# orders

NAMES = {"library gemm": "mm", "library wgrad gemm": "dw", "next_epoch_kernel": "k", "node sum": "s"}


def order_of(items: list[enqueued.Item]) -> str:
    """x: an exchange, a: its arrival, mm and dw: products by the library, s: sums of a node, k: kernels that matter."""

    def short(item: enqueued.Item) -> str:
        if isinstance(item, Kernel):
            return "k" if item.tiles else NAMES.get(item.name, "")
        return "x" if isinstance(item, Send) else "a"

    return " ".join(name for item in items if (name := short(item)))


def without(order: str, *names: str) -> str:
    return " ".join(name for name in order.split() if name not in names)


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_is_that_of_the_operators(kind: str) -> None:
    """test_interleaving_nodes.py holds the operators to the same: two nodes of one rank, four chunks."""
    found = without(order_of(forward(work(kind))[0]), "a", "k", "s")
    assert found.startswith({GATHER: GATHERED, A2A_GEMM: IN}.get(kind, OUT))


def test_the_order_of_products_by_rows_is_that_of_the_operator() -> None:
    made = work(A2A_GEMM)
    found = order_of(forward(replace(made, plan=replace(made.plan, by_rows=True)))[0])
    assert without(found, "a", "k") == ROWS


def test_fused_kernels_stand_between_exchanges() -> None:
    gather = order_of(forward(work(GATHER, method="fused"))[0])
    assert without(gather, "a").startswith("k x k x x k")
    assert gather == "k x k x a x k a k x a k a k"
    assert order_of(forward(work(A2A_GEMM, method="fused"))[0]) == "k x x a k x a k x a k a k"
    assert order_of(forward(work(SCATTER, method="fused"))[0]) == "k k s x s x s x s x a a a a"
    assert order_of(forward(work(GEMM_A2A, method="fused"))[0]) == "k k x x a x a x a a", "two are under way"


@pytest.mark.parametrize(
    ("kind", "method", "order"),
    [
        (SCATTER, "fused", "k x k a s x dw s x s x s x a a a a"),
        (GEMM_A2A, "fused", "k x k a x dw x a x a x a a"),
        (SCATTER, "chunked", f"k x {8 * 'mm '}a s x dw s x s x s x a a a a"),
        (GEMM_A2A, "chunked", f"k x {8 * 'mm '}a x dw x a x a x a a"),
        (GATHER, "chunked", "k x mm x a x a mm x a mm a mm dw"),
    ],
)
def test_a_weight_gradient_stands_where_the_operators_have_it(kind: str, method: str, order: str) -> None:
    """Behind the first exchange of dx, as x was sent again. test_interleaving_nodes.py holds the operators to it."""
    made = work(kind, method=method)
    assert order_of(backward.whole(made)[0]).startswith(order)


def test_what_is_sent_again_is_enqueued_between_the_products_of_dx() -> None:
    """Of three nodes: the second exchange of x behind half of them."""
    order = order_of(backward.whole(work(SCATTER, nodes=3))[0])
    assert order.startswith(f"k x {6 * 'mm '}x {6 * 'mm '}a a s x dw s x")


def test_sums_are_enqueued_before_the_exchange_that_sends_them() -> None:
    for method in ("fused", "chunked"):
        items = forward(work(SCATTER, method=method, local=2))[0]
        pairs = [(one, two) for one, two in pairwise(items) if isinstance(two, Send)]
        assert len(pairs) == 4 and all(one.ends == two.ready for one, two in pairs if isinstance(one, Kernel))


def test_what_lands_and_what_arrives_is_let_in_by_name() -> None:
    """Of two nodes of two; what is for the other rank of the node lands here."""
    items = forward(work(A2A_GEMM, chunks=1, local=2))[0]
    tokens = [item.token for item in items if isinstance(item, Arrival)]
    assert tokens == [("landed", "call", 1, 2, 0), arrived("call", 2, 0)]
    made = replace(work(A2A_GEMM, chunks=1, local=2), system=BARE)
    whole = program(made)
    assert [arrival.token for arrival in whole.arrivals] == tokens
    reached = [token for _, token, _ in run(whole, BARE).tokens]
    assert all(reached.index(("crossed", *token)) < reached.index(token) for token in tokens)


# beside a recorded profile: the last call of each operator


def recorded(title: str) -> list[dict[str, Any]]:
    return last_call(json.loads(RECORD.read_text())["calls"][title])


def at_its_clock(operator: str) -> System:
    """H200 as that profile had it: the rate of the library's product, the network of NCCL alone."""
    spans = {span["kind"]: span["end"] - span["start"] for span in recorded(f"{operator} collective")}
    rate = 2e-6 * 8192 * 65536 * 4096 / spans["gemm"]
    return replace(H200, burst_tflops=rate, sustained_tflops=rate, tile_tflops=1.1 * rate, nic_gbs=33.55e6 / 13.65e6)


def test_products_behind_an_exchange_take_one_wave_more() -> None:
    """A scatter in two chunks, of two waves each: 1.33 ms alone, 1.89 behind an exchange."""
    measured = [one["end"] - one["start"] for one in recorded("linear_reduce_scatter chunked") if one["kind"] == "gemm"]
    system = at_its_clock("linear_reduce_scatter")
    first, *others = measured
    assert len(others) == 3 and min(others) > 1.4 * first
    planned = [span.end - span.start for span in products_of(run(program(work(SCATTER, system, 2)), system))]
    assert planned == pytest.approx(measured, rel=0.03)


def test_a_gathers_products_take_one_wave_more_while_the_network_is_busy() -> None:
    """Nine waves instead of eight, until the last exchange has ended. In that profile a product took one chunk; today the first
    ones take four and two."""
    measured = [one["end"] - one["start"] for one in recorded("all_gather_linear chunked") if one["kind"] == "gemm"]
    *busy, last = measured[1:]
    assert len(busy) == 7 and all(us / last == pytest.approx(9 / 8, rel=0.02) for us in busy)
    system = replace(at_its_clock("all_gather_linear"), **NO_POWER_LIMIT)
    *planned, alone = [s.end - s.start for s in products_of(run(program(work(GATHER, system, 8)), system))][1:]
    assert [us / alone for us in planned] == pytest.approx([4 + 1 / 8, 2 + 1 / 8, 1 + 1 / 8], rel=0.02)


def test_a_launch_takes_what_has_been_let_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks that each launch of the gather's kernel took. When the second one began four had crossed; one was not let arrive. At
    that time one exchange more was enqueued ahead."""
    monkeypatch.setattr(
        in_flight, "exchanges_ahead", lambda count, done, parts: min(count, 1 - (-count * done // parts))
    )
    measured = [one["end"] - one["start"] for one in recorded("all_gather_linear fused") if one["kind"] == "gemm"]
    taken = [round(us / measured[-1]) for us in measured[1:]]
    assert taken == [3, 1, 0, 1, 0, 1, 1, 1]
    system = at_its_clock("all_gather_linear")
    planned = [s.end - s.start for s in products_of(run(program(work(GATHER, system, 8, "fused")), system))]
    assert [round(us / planned[-1]) for us in planned[1:]] == taken


# who comes first to the SMs


def late(made: Work) -> list[bool]:
    """Whether each product by the library takes longer than alone."""
    whole = program(made)
    alone = [kernel.us for kernel in whole.kernels if kernel.kind == GEMM]
    spans = products_of(run(whole, made.system))
    return [span.end - span.start > us + 1e-6 for span, us in zip(spans, alone, strict=True)]


def test_with_a_queue_for_each_stream_the_next_product_comes_first() -> None:
    slow = replace(H200, nic_gbs=2.5, **NO_POWER_LIMIT)
    assert late(work(SCATTER, slow, 2)) == [False, True, True, True]
    assert late(work(SCATTER, replace(slow, connections=8), 2)) == [False] * 4
    assert late(work(SCATTER, replace(slow, capability=(8, 0)), 2)) == [False] * 4, "no clusters"
    # The second exchange begins while the product of the own rows runs.
    assert late(work(GATHER, replace(slow, nic_gbs=12.0), 2)) == [True, False, False]
    assert late(work(GATHER, replace(slow, nic_gbs=12.0, connections=8), 2)) == [False] * 3


def test_a_product_is_late_only_while_that_exchange_runs() -> None:
    fast = replace(H200, nic_gbs=1000.0)
    assert late(work(SCATTER, fast, 2)) == [False, True, True, False]
    sent = [span for span in run(program(work(SCATTER, fast, 2)), fast).spans if span.lane == TO_NETWORK]
    assert len(sent) == 2


def test_blackwells_streams_have_queues_of_their_own() -> None:
    """Megatron-Core asks for one before Blackwell only."""
    assert {name: system.connections for name, system in SYSTEMS.items()} == {
        **dict.fromkeys(("h200", "a100", "h100", "h800", "h20"), 1), "b200": 8,
    }  # fmt: skip
