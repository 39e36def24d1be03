"""Operators of groups that span nodes, on real CPU processes of one machine that are told where a node ends (node_ranks).

tests/nodes has nodes that really cannot map each other's memory.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from overlap_train import (
    OverlapConfig,
    OverlapTimeoutError,
    all_gather_linear,
    all_to_all_linear,
    check,
    linear_all_to_all,
    linear_reduce_scatter,
    shutdown,
)
from overlap_train.group.domain import barrier
from overlap_train.group.registry import domain_of, made_domain
from overlap_train.group.signals import Tag
from overlap_train.group.waits import next_epoch_on_host
from overlap_train.nodes import plan as nodes_plan
from overlap_train.nodes.connect import NodeWaits
from overlap_train.nodes.gloo import GlooTransport, HostEngine
from overlap_train.nodes.ops import InterNodeAllToAllGemm, InterNodeGemmAllToAll, InterNodeGemmReduceScatter
from overlap_train.ops.plan_cache import made_cache
from overlap_train.select.tiles import equal_chunks
from tests.linear_cases import OPERATORS, PAIRS, SHAPES, Case, bits_of_sums, error_of_a_sum
from tests.processes import Outcome, run_ranks, values

CPU = torch.device("cpu")
TIMEOUT_S = 2.0


def case_of(node_ranks: int, method: str = "chunked", **settings: Any) -> Case:
    return Case(dist.group.WORLD, CPU, OverlapConfig(method=method, node_ranks=node_ranks, **settings))


def _every_shape(rank: int, world: int, node_ranks: int, method: str) -> int:
    """All operators, forward and backward, exactly."""
    for number, shape in enumerate(SHAPES.values()):
        for operator in OPERATORS.values():
            operator(case_of(node_ranks, method), *shape, seed=number, bias=bool(number % 2))
    return world


@pytest.mark.parametrize(
    ("method", "world", "node_ranks"),
    [
        ("chunked", 4, 2), ("chunked", 6, 3), ("chunked", 2, 1), ("collective", 4, 2), ("auto", 4, 2),
        ("fused", 2, 1), ("fused", 4, 2), ("fused", 3, 1),
    ],
)  # fmt: skip
def test_every_shape(method: str, world: int, node_ranks: int) -> None:
    limit_s = 120 if method == "fused" else 60
    assert values(run_ranks(world, _every_shape, node_ranks, method, limit_s=limit_s)) == [world] * world


def _in_chunks(rank: int, world: int, node_ranks: int, chunks: int, method: str) -> list[int]:
    """Operators of tensor parallelism as if so many chunks had been measured as the fastest; how many each plan then has."""
    case, counts = case_of(node_ranks, method), []
    with mock.patch.object(nodes_plan, "network_chunks_of", lambda how, p, *rest: equal_chunks(p.m // p.world, chunks)):
        for number, shape in enumerate([*SHAPES.values(), ((6, 1), 24, 20)]):
            for operator in ("column", "row"):
                OPERATORS[operator](case, *shape, seed=number, bias=bool(number % 2))
        cache = made_cache(made_domain(case.group))
        assert cache is not None
        for planned in map(cache.plans.get, cache.plans):
            counts += [one.plan.fprop.chunks for one in planned.values()]
    return counts


@pytest.mark.parametrize(("world", "node_ranks", "method"), [(4, 2, "chunked"), (4, 2, "fused"), (3, 1, "chunked")])
def test_every_shape_in_chunks(world: int, node_ranks: int, method: str) -> None:
    for counts in values(run_ranks(world, _in_chunks, node_ranks, 4, method, limit_s=120)):
        assert set(counts) == {1, 2, 4}, "as many as cut the rows into equal chunks"


def _many_ways(rank: int, world: int) -> list[str]:
    """Kept inputs, half precision, memory that grows, two operators in a row that meet, and a second life after shutdown."""
    ran = []
    for settings in ({"gathered_input": "keep"}, {}):
        for operator in ("column", "to_rows"):
            OPERATORS[operator](case_of(2, **settings), (3, 5), 37, 29)
    for dtype in (torch.float16, torch.bfloat16):
        for operator in OPERATORS.values():
            operator(Case(dist.group.WORLD, CPU, case_of(2).config, dtype), (4, 2), 48, 24)
    for rows in (1, 40, 3):
        OPERATORS["column"](case_of(2), (rows, 2), 64, 32)
    domain = domain_of(dist.group.WORLD, case_of(2).config, CPU)
    ran.append(type(domain.engine).__name__)
    two_columns(case_of(2))
    shutdown()
    OPERATORS["row"](case_of(2), (2, 3), 33, 17)
    x, w = torch.ones(2, 8), torch.ones(8, 8)
    with torch.inference_mode():
        y = all_gather_linear(x, w, group=dist.group.WORLD, config=case_of(2).config)
    assert bool((y == 8).all())
    shutdown()
    return ran


def two_columns(case: Case) -> None:
    """Their backwards follow each other: there are too few slots for two, so ranks meet in between."""
    x = torch.ones(4, 8, requires_grad=True)
    w = torch.ones(8, 8, requires_grad=True)
    for _ in range(3):
        ys = [all_gather_linear(x, w, group=case.group, config=case.config) for _ in range(2)]
        torch.autograd.grad(ys[0].sum() + ys[1].sum(), (x, w))


def test_dtypes_kept_inputs_growing_memory_barriers_and_a_second_life() -> None:
    assert values(run_ranks(4, _many_ways, limit_s=60)) == [["HostEngine"]] * 4


def _meet(rank: int, world: int, fault: bool) -> list[tuple[float, float]]:
    """When this rank came to a barrier and when it left it, each rank being late once."""
    if fault:
        NodeWaits.barrier_in_two_steps = _meet_in_the_node  # type: ignore[method-assign] # of this process
    OPERATORS["row"](case_of(2), (3, 5), 37, 29)
    domain, times = made_domain(dist.group.WORLD), []
    assert domain is not None
    for late in range(world):
        time.sleep(0.2 * (rank == late))
        came = time.monotonic()  # of the whole machine
        barrier(domain, Tag(f"meet {late}", "barrier"))
        times.append((came, time.monotonic()))
    return times


def _meet_in_the_node(self: NodeWaits, call: Any) -> None:
    """Without the step in which rail peers meet."""
    next_epoch_on_host(call)
    beside = [rank for rank in self.topology.ranks_of(self.topology.node) if rank != self.rank]
    for rank in beside:
        call.slot.words[rank][self.rank, :1].copy_(call.slot.epoch)
    for rank in beside:
        self.on_host(call, rank, 1)


@pytest.mark.parametrize("fault", [False, True])
def test_nobody_leaves_a_barrier_before_all_have_come(fault: bool) -> None:
    times = values(run_ranks(6, _meet, fault, limit_s=60))
    early = [turn for turn in range(6) if max(t[turn][0] for t in times) > min(t[turn][1] for t in times)]
    assert bool(early) == fault


def _bits(rank: int, world: int, delays: bool) -> list[bytes]:
    if delays:
        _slow(rank)
    return bits_of_sums(rank, world, case_of(2).config)


def _slow(rank: int) -> None:
    """What arrives, and what is added, comes late, on each rank at other times."""
    put, arrive = GlooTransport.put, HostEngine.arrive

    def slow_put(self: GlooTransport, *arguments: Any) -> None:
        time.sleep(0.02 * rank)
        put(self, *arguments)

    def slow_arrive(self: HostEngine, exchange: Any) -> None:
        time.sleep(0.02 * (5 - rank))
        arrive(self, exchange)

    GlooTransport.put, HostEngine.arrive = slow_put, slow_arrive  # type: ignore[method-assign] # of this process


def test_the_same_bits_whoever_is_late() -> None:
    first, second = (values(run_ranks(6, _bits, delays, limit_s=60)) for delays in (False, True))
    assert first == second


def _events(rank: int, world: int) -> list[list[str]]:
    """What each engine does, in order, where the third product does not end before something was sent."""
    events: list[str] = []
    sent = threading.Event()
    put, mm = GlooTransport.put, torch.mm

    def told_put(self: GlooTransport, source: torch.Tensor, *arguments: Any) -> None:
        events.append("send")
        sent.set()
        put(self, source, *arguments)

    def told_mm(*arguments: Any, **settings: Any) -> torch.Tensor:
        if events.count("mm") == 2:
            sent.wait(20)
        events.append("mm")
        return mm(*arguments, **settings)

    x, w, wide, config = torch.ones(4, 8), torch.ones(8, 8), torch.ones(8, 8 * world), case_of(2).config
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: all_gather_linear(x, w, group=dist.group.WORLD, config=config),
        lambda: linear_reduce_scatter(x, w, group=dist.group.WORLD, config=config),
        lambda: linear_all_to_all(x, w, group=dist.group.WORLD, config=config),
        lambda: all_to_all_linear(x.bfloat16(), wide.bfloat16(), group=dist.group.WORLD, config=config),
    ]
    found = []
    for call in calls:
        call()
        dist.barrier()
        GlooTransport.put, torch.mm = told_put, told_mm  # type: ignore[method-assign, assignment]
        events.clear()
        sent.clear()
        call()
        GlooTransport.put, torch.mm = put, mm  # type: ignore[method-assign]
        found.append(list(events))
    return found


def test_sends_run_beside_products() -> None:
    """A gather sends before it multiplies. A scatter sends the sum for a far node while it multiplies for its own. All-to-alls
    send a block for each rank of the far node: after its product, or one before all (whose own is the only one with `mm`)."""
    for gather, scatter, out, back in values(run_ranks(4, _events, limit_s=60)):
        assert gather == ["send", "mm", "mm", "mm", "mm"]
        assert scatter == ["mm", "mm", "send", "mm", "mm"]
        assert out == ["mm", "send", "mm", "send", "mm", "mm"]
        assert back == ["send", "mm", "send"]


def test_random_numbers_stay_within_the_rounding_bound() -> None:
    """Partials and then sums of far nodes are rounded, each to eps/2 of a magnitude that is at most that of all."""
    worst = max(values(run_ranks(4, error_of_a_sum, OverlapConfig(method="chunked", node_ranks=2))))
    assert 0 < worst <= 1.5


def _idle(rank: int, world: int) -> int:
    """Evaluation, a checkpoint: nothing is sent for longer than any wait may take."""
    case = case_of(2, timeout_s=1.0)
    for _ in range(2):
        OPERATORS["row"](case, (3, 5), 37, 29)
        time.sleep(1.5)
        dist.barrier()
    return world


def test_a_network_that_is_idle_is_not_lost() -> None:
    assert values(run_ranks(4, _idle)) == [4] * 4


def _refused(rank: int, world: int) -> None:
    x, w, wide = torch.ones(4, 8), torch.ones(8, 8), torch.ones(8, 32)
    direct, other_nodes = case_of(2, "direct").config, OverlapConfig(node_ranks=4)
    for number, (operator, weight, config, said) in enumerate((
        (all_gather_linear, w, case_of(2, "low_latency").config, "method='low_latency' in a group of 2 nodes"),
        (all_gather_linear, w, direct, "method='direct' in a group of 2 nodes"),
        (all_to_all_linear, wide, direct, "method='direct' in a group of 2 nodes: its kernels send inside one node only"),
        (all_gather_linear, w, other_nodes, "node_ranks=4, but the group's domain was made with 2"),
    )):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            operator(x, weight, group=dist.group.WORLD, config=config, name=str(number))
    for each in OPERATORS.values():
        each(case_of(2, "auto"), (4, 2), 24, 16)


def test_what_does_not_cross_nodes_is_refused_and_auto_takes_what_does() -> None:
    values(run_ranks(4, _refused, limit_s=60))


def _uneven(rank: int, world: int) -> str:
    x, w = torch.ones(4, 8), torch.ones(8, 8)
    OPERATORS["column"](case_of(2, "collective"), (3, 5), 37, 29)  # which needs no nodes
    with pytest.raises(ValueError) as raised:
        all_gather_linear(x, w, group=dist.group.WORLD, config=case_of(2).config, name="fc1")
    return str(raised.value)


def test_a_group_that_does_not_fill_nodes_evenly_is_refused_but_for_collectives() -> None:
    said = values(run_ranks(3, _uneven))
    assert all("node_ranks=2 does not divide the group's 3 ranks" in text for text in said)


def _found(rank: int, world: int) -> int:
    OPERATORS["column"](case_of(0), (3, 5), 37, 29)
    domain = made_domain(dist.group.WORLD)
    assert domain is not None and not isinstance(domain.engine, HostEngine)
    return domain.topology.nodes


def test_processes_of_one_machine_are_one_node() -> None:
    """And use what one node uses."""
    assert values(run_ranks(3, _found)) == [1] * 3


class _Impatient:
    """Stands for a call whose waits are left out."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def wait(self, *_: int) -> None:
        pass

    wait_chunk = wait_for_all = wait

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


def _without_wait(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method of an engine, without the waits in it."""

    def impatient(self: Any, *arguments: Any) -> Any:
        patient, self._call = self._call, _Impatient(self._call)
        try:
            return method(self, *arguments)
        finally:
            self._call = patient

    return impatient


def _on_impatient(arrive: Callable[..., None]) -> Callable[..., None]:
    """What passes on, without its wait."""
    return lambda self, exchange: arrive(self, replace(exchange, call=_Impatient(exchange.call)))


def _reuses_its_sum(send: Callable[..., Any]) -> Callable[..., Any]:
    """A transport that lets its caller write into the source while it is under way."""

    def put(self: GlooTransport, source: torch.Tensor, place: Any, word: int) -> None:
        send(self, source, place, word)
        if source.numel():
            source.fill_(0)

    return put


def _signals_first(send: Callable[..., Any]) -> Callable[..., Any]:
    """A transport that says that a piece is there, and then brings it."""

    def put(self: GlooTransport, source: torch.Tensor, place: Any, word: int) -> None:
        send(self, source[:0], place, word)
        time.sleep(0.02)
        send(self, source, place, word)

    return put


def _for_the_receiver(send: Callable[..., Any]) -> Callable[..., Any]:
    """A transport whose receivers keep what they receive for the ranks beside them."""

    def put(self: GlooTransport, source: torch.Tensor, place: Any, word: int) -> None:
        send(self, source, replace(place, rank=place.receiver), word)

    return put


# What goes wrong, and in which method.
FAULTS_OF_SUMS = {
    "a block is passed on before it is there": (_on_impatient, HostEngine, "arrive"),
    "the sum is sent before the partials are there": (_without_wait, InterNodeGemmReduceScatter, "_make_sum"),
    "the result is complete before the sums of other nodes are there": (_without_wait, InterNodeGemmReduceScatter, "finish"),
    "a source is used again before it is sent": (_reuses_its_sum, GlooTransport, "put"),
}  # fmt: skip
FAULTS_OF_ALL_TO_ALLS = {
    "a far block is multiplied before it is there": (_without_wait, InterNodeAllToAllGemm, "matmul"),
    "far columns are read before they are there": (_without_wait, InterNodeGemmAllToAll, "received"),
    "a signal comes before its data": (_signals_first, GlooTransport, "put"),
    "a block stays with who takes it from the network": (_for_the_receiver, GlooTransport, "put"),
    "a source is used again before it is sent": (_reuses_its_sum, GlooTransport, "put"),
}


def _with_fault(rank: int, world: int, fault: str, operators: tuple[str, ...]) -> str:
    """What the exact cases say, with one fault and one slow rank."""
    if fault != "none":
        wrong, of, method = (FAULTS_OF_SUMS | FAULTS_OF_ALL_TO_ALLS)[fault]
        setattr(of, method, wrong(getattr(of, method)))  # of this process
    if rank == 1:
        push = HostEngine.push

        def slow_push(self: HostEngine, *arguments: Any) -> None:
            time.sleep(0.03)
            push(self, *arguments)

        HostEngine.push = slow_push  # type: ignore[method-assign]
    timeout_s = 10.0 if fault == "none" else 2.0  # some faults are found by what never comes
    try:
        for seed in range(4):
            for operator in operators:
                OPERATORS[operator](case_of(2, timeout_s=timeout_s), (8, 16), 64, 32, seed=seed)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.parametrize("fault", [*FAULTS_OF_SUMS, "none"])
def test_planted_fault_is_found(fault: str) -> None:
    _check_fault(fault, ("column", "row"))


@pytest.mark.parametrize("fault", [*FAULTS_OF_ALL_TO_ALLS, "none"])
def test_planted_fault_of_an_all_to_all_is_found(fault: str) -> None:
    _check_fault(fault, ("to_heads", "to_rows"))


def _check_fault(fault: str, operators: tuple[str, ...]) -> None:
    outcomes = run_ranks(4, _with_fault, fault, operators, limit_s=60, grace_s=10)
    said = [outcome.value or outcome.error for outcome in outcomes]
    found = any(text != "nothing" for text in said)
    assert found == (fault != "none"), said


def _victim(rank: int, world: int, how: str, operators: str) -> str:
    """Rank 3, of node 1, meets its end in the third step; the others tell what they saw."""
    step = partial(_step, case_of(2, timeout_s=TIMEOUT_S).config, *PAIRS[operators])
    step()
    step()
    if rank == 3:
        os.kill(os.getpid(), getattr(signal, how))
    try:
        for _ in range(3):
            step()
    except OverlapTimeoutError as error:
        with pytest.raises(OverlapTimeoutError):
            check()  # and it stays raised
        shutdown()  # returns, although the peer is gone
        return str(error)
    return "no error"


def _step(config: OverlapConfig, first: Callable[..., torch.Tensor], second: Callable[..., torch.Tensor]) -> None:
    """Of linears that each have as many outputs as inputs of a rank."""
    x, w = torch.ones(4, 8, requires_grad=True), torch.ones(8, 8, requires_grad=True)
    y = second(first(x, w, group=dist.group.WORLD, config=config), w, group=dist.group.WORLD, config=config)
    y.sum().backward()
    assert bool((y == 64 * (dist.get_world_size() if second is linear_reduce_scatter else 1)).all())


@pytest.mark.parametrize("operators", PAIRS)
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_dead_or_stopped_rank_of_another_node_is_named(how: str, operators: str) -> None:
    *outcomes, victim = run_ranks(4, _victim, how, operators, limit_s=40, grace_s=TIMEOUT_S + 6)
    assert victim.value is None and victim.exit_code == -signal.SIGKILL
    own, rail_peer, beside = map(_message, outcomes)
    if how == "SIGKILL":  # seen, where all nodes are one machine
        assert all("rank 3 of the group has ended" in said for said in (own, rail_peer, beside)), outcomes
        return
    assert (
        "of rank 3 (of node 1, over the network to this node 0" in rail_peer or "could not send to rank 3" in rail_peer
    )
    if operators == "tensor":
        assert "of rank" in own and "of rank 3" in beside, "rank 0 by way of rank 1, which gave up, too"
    else:
        assert "of rank 3 (of node 1, by way of rank 1 of this node 0; the network between them may be down)" in own
        assert "(of node 0, by way of rank 3 of this node 1" in beside or "of rank 3 (of this node 1" in beside


def _message(outcome: Outcome) -> str:
    assert outcome.value is not None, outcome.error
    return str(outcome.value)
