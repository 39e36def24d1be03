"""All-to-alls of GPUs across nodes, on simulated streams and NCCL: what lands beside a slot, parts, two exchanges at once.

test_interleaving_nodes.py runs the same operators without these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

pytest.importorskip("greenlet")

import torch

from tests.protocol.explore import Build, assert_passes, run_seed
from tests.protocol.interleaving import Scheduler
from tests.protocol.operator_problems import Before, integers, tag_of
from tests.protocol.simulated_nodes import NodeSimulation, SimulatedNccl
from tests.protocol.simulated_ranks import TILE, SimulatedDomain, core
from tests.protocol.test_interleaving_nodes import (
    METHODS,
    has_taken_a_tile,
    on_machines,
    until_the_second_exchange,
)
from tests.protocol.test_interleaving_nodes import backward as column_backward
from tests.protocol.test_interleaving_parts import passes


def exchanged_backward(machine: NodeSimulation, calls: int = 2, first: Before | None = None) -> Build:
    """Of Ulysses' output projection: x is sent again for the weight gradient while dx leaves block by block.

    first: what the caller's stream is given between the two.
    """
    world = machine.world_size
    x, dy = integers(calls, world, world * TILE, TILE, seed=1), integers(calls, world, TILE, TILE, seed=2)
    w = integers(TILE, world * TILE, seed=3)
    received = x.unflatten(2, (world, TILE)).transpose(1, 2)  # [calls, to, from, TILE, TILE]
    sent = (dy @ w).unflatten(3, (world, TILE)).permute(0, 3, 1, 2, 4)

    def build(scheduler: Scheduler) -> Any:
        blocks, dx = (torch.full((calls, world, world, TILE, TILE), torch.nan) for _ in range(2))
        operands = x.clone(), dy.clone()

        def host(domain: SimulatedDomain) -> None:
            rank = domain.rank
            for call in range(calls):
                (own, own_dy) = (operand[call, rank] for operand in operands)
                plan = domain.plan(machine.method, own, w, "ALL_TO_ALL_LINEAR")
                with domain.operator(tag_of("backward"), slots=2):
                    receiver = plan.wgrad.start(domain, tag_of("x"), own.unflatten(0, (world, TILE)))
                    if first is not None:
                        first(domain)
                    exchange = plan.dgrad.start(domain, tag_of("dx"), own_dy, w)
                    blocks[call, rank] = receiver.received_view()
                    dx[call, rank] = exchange.received()
                for operand in (own, own_dy):
                    operand.fill_(torch.nan)

        machine.spawn_hosts(scheduler, host)

        def check() -> None:
            assert (blocks == received).all(), "x"
            assert (dx == sent).all(), "dx"

        return check

    return build


@on_machines
@pytest.mark.parametrize("method", METHODS)
def test_a_backward_with_two_exchanges_passes(method: str, machine: NodeSimulation) -> None:
    assert_passes(exchanged_backward(replace(machine, method=method)), range(4 // machine.world_size or 1))


def test_what_is_sent_again_crosses_before_dx() -> None:
    """All of it: the weight gradient, which hides the exchanges of dx, waits for its last block."""
    machine = NodeSimulation(4, node_ranks=2)
    assert_passes(exchanged_backward(machine, calls=1, first=until_the_second_exchange(machine)), range(2))


@pytest.mark.parametrize("of_a_pass", [column_backward, exchanged_backward])
def test_a_kernel_runs_beside_what_is_sent_again(
    of_a_pass: Callable[..., Build], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one hardware queue: the second exchange of x takes so long that it ends only once the kernel of dx has taken a tile."""
    machine, slots, run = NodeSimulation(3, one_queue=True, method="fused"), {}, SimulatedNccl._run

    def slow(network: Any, number: int, *what: Any) -> None:
        gpu = network._gpu
        if number == 2:
            gpu.scheduler.wait_until(partial(has_taken_a_tile, slots[gpu.rank]), "the kernel to take a tile")
        run(network, number, *what)

    def found(domain: SimulatedDomain) -> None:
        slots[domain.rank] = domain.workspace.slots

    monkeypatch.setattr(SimulatedNccl, "_run", slow)
    assert_passes(of_a_pass(machine, calls=1, first=found), range(2))


@pytest.mark.parametrize("one_queue", [False, True])
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_parts_of_a_long_sequence_pass(method: str, backward: bool, one_queue: bool) -> None:
    """Each is sent before the one before it is multiplied: more of them than there are slots."""
    four = method == "chunked" and one_queue != backward
    machine = NodeSimulation(4, node_ranks=2, one_queue=one_queue) if four else NodeSimulation(2, one_queue=one_queue)
    assert_passes(passes(method, machine, backward), range(1))


def test_a_part_ends_when_it_has_crossed_though_nobody_reads_it() -> None:
    """The next part has begun by then. The caller writes over what it has sent."""
    machine = NodeSimulation(4, node_ranks=2)

    def build(scheduler: Scheduler) -> Any:
        x, seen = integers(4, 4, TILE, TILE, seed=1), torch.full((4, 4, TILE, TILE), torch.nan)

        def host(domain: SimulatedDomain) -> None:
            first, second = x[domain.rank].clone(), x[domain.rank].clone()
            plan = domain.plan("chunked", first.flatten(0, 1), torch.ones(TILE, 4 * TILE), "ALL_TO_ALL_LINEAR").fprop
            with domain.operator(tag_of("first"), slots=1):
                receiver = plan.start(domain, tag_of("first"), first)
                domain.begin_ahead()
                following = plan.start(domain, tag_of("second"), second)
                if domain.rank % 2:
                    seen[domain.rank] = receiver.received_view()
            first.fill_(torch.nan)
            with domain.operator(tag_of("second"), slots=1):
                following.received_view()

        machine.spawn_hosts(scheduler, host)

        def check() -> None:
            assert (seen[1::2] == x.transpose(0, 1)[1::2]).all()

        return check

    assert_passes(build, range(4))


def test_memory_of_what_landed_is_held_until_it_is_passed_on() -> None:
    """Whoever asked for the exchange may be gone by then, and the allocator would give it to the caller's stream."""
    machine, held = NodeSimulation(4, node_ranks=2), {}

    def build(scheduler: Scheduler) -> Any:
        def host(domain: SimulatedDomain) -> None:
            x = integers(4, TILE, TILE, seed=domain.rank)
            plan = domain.plan("chunked", x.flatten(0, 1), torch.ones(TILE, 4 * TILE), "ALL_TO_ALL_LINEAR").fprop
            landings = []
            with domain.operator(tag_of("call"), slots=1):
                receiver = plan.start(domain, tag_of("call"), x)
                landings += [exchange.buffer for exchange in receiver._exchanges._under_way]
                receiver.received_view()
                addresses = {tensor.data_ptr() for tensor in domain.engine._held}
            held[domain.rank] = {landing.data_ptr() for landing in landings} <= addresses, len(landings)

        machine.spawn_hosts(scheduler, host)

        def check() -> None:
            assert held == dict.fromkeys(range(4), (True, 1))

        return check

    assert_passes(build, range(1))


def test_what_lands_names_the_call_that_it_is_of() -> None:
    """Rank 3 is in another call. Its block for rank 0 lands at rank 1, which does not look into it."""
    faults: dict[int, Any] = {}
    machine = NodeSimulation(4, node_ranks=2, timeout_s=3e-7)

    def build(scheduler: Scheduler) -> Any:
        def host(domain: SimulatedDomain) -> None:
            faults[domain.rank] = domain.fault
            x, w = integers(4, TILE, TILE, seed=1), torch.ones(TILE, 4 * TILE)
            plan, tag = (
                domain.plan("chunked", x.flatten(0, 1), w, "ALL_TO_ALL_LINEAR"),
                tag_of(f"layer {domain.rank // 3}"),
            )
            with domain.operator(tag_of("call"), slots=1):
                plan.fprop.start(domain, tag, x).received_view()

        machine.spawn_hosts(scheduler, host)
        return lambda: None

    run_seed(build, 0, spin=True)
    for rank in (0, 1, 2):
        with pytest.raises(core("group.signals").OverlapMismatchError, match="but rank 3 is in"):
            faults[rank].check()
