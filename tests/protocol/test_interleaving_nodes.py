"""Groups of GPUs that span nodes, on simulated streams and NCCL: ordered by streams alone, also with one hardware queue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

pytest.importorskip("greenlet")

import torch

from tests.protocol.explore import Build, assert_passes, run_seed
from tests.protocol.interleaving import Scheduler
from tests.protocol.operator_problems import Before, gathers, integers, scatters, tag_of, to_heads, to_rows
from tests.protocol.simulated_gpu import Operation, SimulatedGpu
from tests.protocol.simulated_nodes import NodeSimulation, SimulatedNccl
from tests.protocol.simulated_ranks import TILE, SimulatedDomain, core

PROBLEMS = {"gather": gathers, "scatter": scatters, "to_heads": to_heads, "to_rows": to_rows}
METHODS = ("chunked", "fused")
MACHINES = [  # by NCCL and by NVSHMEM
    NodeSimulation(2), NodeSimulation(3, one_queue=True), NodeSimulation(4, node_ranks=2, one_queue=True),
    NodeSimulation(6, node_ranks=2), NodeSimulation(2, puts=True, one_queue=True), NodeSimulation(4, node_ranks=2, puts=True),
]  # fmt: skip
on_machines = pytest.mark.parametrize(
    "machine", MACHINES, ids=lambda m: f"{m.world_size}-{m.node_ranks}" + "-puts" * m.puts + "-one queue" * m.one_queue
)


@on_machines
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("operator", PROBLEMS)
def test_operators_pass(operator: str, method: str, machine: NodeSimulation) -> None:
    """Four calls: the fourth is the first that can take a slot too early."""
    assert_passes(PROBLEMS[operator](method, machine, 4), range(4 // machine.world_size or 1))


@pytest.fixture
def enqueued(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what rank 0 enqueues, as it does so."""
    names, enqueue = list[str](), SimulatedGpu.enqueued

    def note(gpu: SimulatedGpu, operation: Operation) -> None:
        if gpu.rank == 0:
            names.append("x" if operation.name.startswith("exchange") else operation.name)
        enqueue(gpu, operation)

    monkeypatch.setattr(SimulatedGpu, "enqueued", note)
    return names


IN, OUT = "x mm x x mm mm x mm mm", "mm x mm mm x mm mm x mm x mm mm"


@pytest.mark.parametrize(
    ("operator", "method", "order"),
    [
        ("gather", "chunked", IN), ("to_rows", "chunked", IN), ("scatter", "chunked", OUT), ("to_heads", "chunked", OUT),
        ("gather", "fused", "k x k x x k"),  # the epoch's kernel, and the product's for the own rows
    ],
)  # fmt: skip
def test_exchanges_are_enqueued_between_products(operator: str, method: str, order: str, enqueued: list[str]) -> None:
    """Two nodes of one rank, four chunks (schedule/inter_node.py). x: an exchange, mm: a product by the library, k: a kernel."""
    run_seed(PROBLEMS[operator](method, NodeSimulation(2, chunks=4), 1), 0)
    short = ["mm" if "mm" in name else {"kernel": "k", "x": "x"}.get(name, "") for name in enqueued]
    found = " ".join(name for name in short if name and (method == "fused" or name != "k"))
    assert found.startswith(order)


def test_exchanges_of_three_nodes_are_enqueued_ahead_of_a_gathers_products(enqueued: list[str]) -> None:
    """Of one rank, four chunks, each a product: a third of the product is the own rows', and three of eight exchanges come before
    the next."""
    run_seed(PROBLEMS["gather"]("chunked", NodeSimulation(3, chunks=4), 1), 0)
    found = " ".join("mm" if "mm" in name else "x" for name in enqueued if "mm" in name or name == "x")
    assert found.startswith("x mm x x mm x mm x mm mm x mm x mm x mm mm")


@pytest.mark.parametrize("world", [2, 4])
def test_products_of_several_chunks_pass_in_one_hardware_queue(world: int) -> None:
    """All of these chunks are let arrive before the product waits for them."""
    assert_passes(
        PROBLEMS["gather"]("chunked", NodeSimulation(world, node_ranks=world // 2, chunks=8, one_queue=True), 2),
        range(2),
    )


@pytest.mark.parametrize("chunks", [1, 8])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("operator", PROBLEMS)
def test_every_number_of_chunks_that_the_tuner_may_find_passes(operator: str, method: str, chunks: int) -> None:
    machine = NodeSimulation(4, node_ranks=2, chunks=chunks)
    assert_passes(PROBLEMS[operator](method, machine, 2), range(1))


def backward(machine: NodeSimulation, calls: int = 2, first: Before = lambda domain: None) -> Build:
    """A column linear's: x is gathered for the weight gradient while partial sums of dx are scattered; then the ranks meet.

    first: what the caller's stream is given between the two.
    """
    world = machine.world_size
    x, dy = integers(calls, world, TILE, TILE, seed=1), integers(calls, world, world * TILE, TILE, seed=2)
    w = integers(world, TILE, TILE, seed=3)

    def build(scheduler: Scheduler) -> Any:
        gathered = torch.full((calls, world, world * TILE, TILE), torch.nan)
        dx = torch.full((calls, world, TILE, TILE), torch.nan)
        operands = x.clone(), dy.clone()  # they outlive the streams, which know only where they lie

        def host(domain: SimulatedDomain) -> None:
            rank = domain.rank
            for call in range(calls):
                own, own_dy = (operand[call, rank] for operand in operands)
                plan = domain.plan(machine.method, own, w[rank].t())
                with domain.operator(tag_of("backward"), slots=2):
                    gather = plan.fprop.start(domain, tag_of("x"), own)
                    first(domain)
                    scatter = plan.dgrad.start(domain, tag_of("dx"), own_dy, w[rank])
                    gathered[call, rank] = gather.gathered_view()
                    dx[call, rank] = scatter.finish()

        machine.spawn_hosts(scheduler, host)

        def check() -> None:
            assert (gathered == x.flatten(1, 2)[:, None]).all(), "x"
            assert (dx == (dy @ w).sum(1).unflatten(1, (world, TILE))).all(), "dx"

        return check

    return build


@on_machines
@pytest.mark.parametrize("method", METHODS)
def test_a_backward_that_gathers_and_scatters_passes(method: str, machine: NodeSimulation) -> None:
    """Two calls each, so that there are too few slots and a barrier comes between."""
    assert_passes(backward(replace(machine, method=method)), range(4 // machine.world_size or 1))


def until_the_second_exchange(machine: NodeSimulation) -> Before:
    """A product of the caller's stream that ends when its rank has begun to exchange for the second time."""

    def enqueue(domain: SimulatedDomain) -> None:
        posted = Operation("a long product", lambda: None, lambda: (domain.rank, 2) in machine.posted)
        machine.gpus[domain.rank].current.enqueue(posted)

    return enqueue


def in_one_pass(machine: NodeSimulation, run: Callable[[SimulatedDomain], object]) -> Build:
    """What each rank does once."""

    def build(scheduler: Scheduler) -> Any:
        machine.spawn_hosts(scheduler, run)
        return lambda: None

    return build


def dx_of_a_frozen_column(machine: NodeSimulation) -> Build:
    """A column linear's backward without a weight gradient."""

    def run(domain: SimulatedDomain) -> None:
        x, dy, w = torch.ones(TILE, TILE), torch.ones(machine.world_size * TILE, TILE), torch.ones(TILE, TILE)
        linear = core("ops.planned").Planned(domain, domain.plan(machine.method, x, w)).linear("linear")
        core("linear").column_backward(linear, dy, None, w, None, True)

    return in_one_pass(machine, run)


def dx_of_a_frozen_projection(machine: NodeSimulation) -> Build:
    """The same of Ulysses' output projection."""

    def run(domain: SimulatedDomain) -> None:
        world, exchange, parts = machine.world_size, core("ulysses.exchange"), core("ulysses.parts")
        dx, dy, w = (torch.ones(rows * TILE, TILE * columns) for rows, columns in ((world, 1), (1, 1), (1, world)))
        plan = domain.plan(machine.method, dx, w, "ALL_TO_ALL_LINEAR", main_grad="off")
        linear = core("ops.planned").Planned(domain, plan).linear("linear")
        whole = exchange.Linear((parts.Part(0, TILE, linear),), w, w, None, 1)
        whole.rows_backward(None, dy, core("ulysses.exchange").RankRows(dx, world, 1))

    return in_one_pass(machine, run)


def dx_alone(machine: NodeSimulation) -> Build:
    """What a column linear's backward sends, where x was kept."""

    def run(domain: SimulatedDomain) -> None:
        x, dy, w = torch.ones(TILE, TILE), torch.ones(machine.world_size * TILE, TILE), torch.ones(TILE, TILE)
        plan = domain.plan(machine.method, x, w).dgrad
        with domain.operator(tag_of("backward"), slots=1):
            plan.start(domain, tag_of("dx"), dy, w).finish()

    return in_one_pass(machine, run)


@pytest.mark.parametrize(
    ("method", "build", "node_ranks", "order"),
    [
        ("fused", partial(backward, calls=1), 1, "x x x x x end x x x"),
        ("fused", dx_alone, 1, "x x end x x"),
        ("fused", lambda machine: scatters("fused", machine, 1), 2, "x x x x end"),
        ("chunked", partial(backward, calls=1), 1, "x mm mm x mm mm x mm mm x mm mm x end x x x"),
        ("chunked", dx_alone, 1, f"mm x mm mm x {5 * 'mm '}end x x"),
        ("chunked", lambda machine: scatters("chunked", machine, 1), 1, f"{OUT} end"),
        ("chunked", dx_of_a_frozen_column, 1, f"{OUT} end"),
        ("chunked", dx_of_a_frozen_projection, 1, OUT),
    ],
)  # fmt: skip
def test_a_weight_gradient_stands_between_exchanges_of_dx(
    method: str, build: Callable[[NodeSimulation], Build], node_ranks: int, order: str, enqueued: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of two nodes, in four chunks: behind what is sent again, and the first of dx; or behind half of dx. No other operator holds
    anything back, nor a backward without a weight gradient. Behind what is sent again, all products of dx (mm, by the library)
    come before the exchanges of dx (x).

    end: `finish` begins, before which the weight gradient comes.
    """
    scatter = core("nodes.ops").InterNodeGemmReduceScatter
    finish = scatter.finish

    def noted_finish(one: Any) -> Any:
        enqueued.extend(["end"] * (one._domain.rank == 0))
        return finish(one)

    monkeypatch.setattr(scatter, "finish", noted_finish)
    run_seed(build(NodeSimulation(2 * node_ranks, node_ranks=node_ranks, chunks=4, method=method)), 0)
    short = ["mm" if "mm" in name and method == "chunked" else name for name in enqueued]
    assert " ".join(name for name in short if name in ("x", "mm", "end")).startswith(order)


def in_turns(machine: NodeSimulation, order: str) -> Build:
    """Operators of all kinds, which share slots and streams: g, s, h, r for gather, scatter, to_heads, to_rows."""
    world = machine.world_size
    x = integers(len(order), world, world, TILE, TILE, seed=1)  # by step, rank and block

    def run(domain: SimulatedDomain, kind: str, own: torch.Tensor) -> torch.Tensor:
        eye, tag = torch.eye(TILE), tag_of(kind)
        if kind == "g":
            plan = domain.plan(machine.method, own[0], eye).fprop
            return plan.start(domain, tag, own[0]).matmul(eye)
        if kind == "s":
            plan = domain.plan(machine.method, own.flatten(0, 1), eye, "LINEAR_REDUCE_SCATTER").fprop
            return plan.start(domain, tag, own.flatten(0, 1), eye).finish()
        if kind == "r":
            plan = domain.plan(
                machine.method, own.flatten(0, 1), torch.ones(TILE, world * TILE), "ALL_TO_ALL_LINEAR"
            ).fprop
            return plan.start(domain, tag, own).received_view().clone()
        columns = own.transpose(0, 1).flatten(1)  # block d for rank d
        plan = domain.plan(machine.method, eye, columns.t(), "LINEAR_ALL_TO_ALL").fprop
        return plan.start(domain, tag, eye, columns).received().clone()

    def expected(kind: str, rank: int, all_ranks: torch.Tensor) -> torch.Tensor:
        if kind == "g":
            return all_ranks[:, 0].flatten(0, 1)
        return all_ranks[:, rank].sum(0) if kind == "s" else all_ranks[:, rank]

    def build(scheduler: Scheduler) -> Any:
        found: dict[tuple[int, int], torch.Tensor] = {}

        def host(domain: SimulatedDomain) -> None:
            for step, kind in enumerate(order):
                with domain.operator(tag_of("call"), slots=1):
                    found[step, domain.rank] = run(domain, kind, x[step, domain.rank])

        machine.spawn_hosts(scheduler, host)

        def check() -> None:
            wrong = [key for key, y in found.items() if not torch.equal(y, expected(order[key[0]], key[1], x[key[0]]))]
            assert not wrong and len(found) == len(order) * world, f"(step, rank) {sorted(wrong)}"

        return check

    return build


@pytest.mark.parametrize(("method", "puts"), [("chunked", False), ("fused", False), ("chunked", True)])
def test_operators_of_all_kinds_follow_each_other(method: str, puts: bool) -> None:
    for order in ("rghrs", "hshrgr"):
        machine = NodeSimulation(4, node_ranks=2, one_queue=order == "rghrs", method=method, puts=puts)
        assert_passes(in_turns(machine, order), range(2))


def started(
    domain: SimulatedDomain, operator: str, own: torch.Tensor, method: str = "chunked"
) -> Callable[[], torch.Tensor]:
    """A call under way; what it returns multiplies by ones of the diagonal: two blocks [2, TILE, TILE]."""
    if operator == "gather":
        shard = own[:TILE]
        plan = domain.plan(method, shard, shard).fprop
        gather = plan.start(domain, tag_of("call"), shard)
        return lambda: gather.matmul(torch.eye(TILE)).unflatten(0, (2, TILE))
    plan = domain.plan(method, own, own.new_empty(2 * TILE, 2 * TILE), "ALL_TO_ALL_LINEAR").fprop
    receiver = plan.start(domain, tag_of("call"), own.unflatten(0, (2, TILE)))
    y = own.new_empty(TILE, 2 * TILE)
    return lambda: receiver.matmul(torch.eye(2 * TILE), y).unflatten(1, (2, TILE)).transpose(0, 1)


@pytest.mark.parametrize("operator", ["gather", "to_rows"])
def test_a_kernel_runs_beside_its_exchanges(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one hardware queue: the second exchange takes so long that it ends only once the kernel has taken a tile."""
    machine, slots, run = NodeSimulation(2, one_queue=True), {}, SimulatedNccl._run

    def slow(network: Any, number: int, *what: Any) -> None:
        gpu = network._gpu
        if number == 2:
            has_begun = partial(has_taken_a_tile, slots[gpu.rank])
            gpu.scheduler.wait_until(has_begun, "the kernel to take a tile")
        run(network, number, *what)

    def build(scheduler: Scheduler) -> Any:
        x, y = integers(2, 2 * TILE, TILE, seed=1), torch.full((2, 2, TILE, TILE), torch.nan)

        def host(domain: SimulatedDomain) -> None:
            slots[domain.rank] = domain.workspace.slots
            with domain.operator(tag_of("call"), slots=1):
                y[domain.rank] = started(domain, operator, x[domain.rank], "fused")()

        machine.spawn_hosts(scheduler, host)

        def check() -> None:
            halves = x.unflatten(1, (2, TILE))
            assert (y == (halves[:, 0] if operator == "gather" else halves.transpose(0, 1))).all()

        return check

    monkeypatch.setattr(SimulatedNccl, "_run", slow)
    assert_passes(build, range(4))


def has_taken_a_tile(slots: Any) -> bool:
    return any(int(slot.counters.claimed) > 0 for slot in slots)


def test_a_sum_holds_as_many_sms_as_its_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products spare them, and those of NCCL. Sums of a node have 16 tiles here. The last one, beside which nothing runs, has a
    program for each of its tiles."""
    kernel, streams = core("kernels.add_blocks"), core("nodes.engines")
    for bytes_of_a_tile in ("ON_FEW_SMS", "ON_ALL_SMS"):
        monkeypatch.setattr(kernel, bytes_of_a_tile, TILE * TILE * 4 // 2 // 16)
    grids, spared, launch = Counter[tuple[int, int]](), set[int](), streams.Launch

    def recorded(kernel: Any, grid: tuple[int], arguments: Any, constants: Any, replaced: Any) -> Any:
        grids[constants["COUNT"], grid[0]] += 1
        return launch(kernel, grid, arguments, constants, replaced)

    def products(engine: Any, sms: int) -> Any:
        spared.add(sms)
        return nullcontext()

    monkeypatch.setattr(streams, "Launch", recorded)
    monkeypatch.setattr(core("nodes.engines").StreamEngine, "products", products)
    machine = NodeSimulation(4, node_ranks=2, send_sms=2, reduce_sms=3)
    assert_passes(PROBLEMS["scatter"]("chunked", machine, 1), range(2))
    assert spared == {2 + 3} and set(grids) == {(1, 3), (2, 32)}
    assert grids[1, 3] == 2 * grids[2, 32], "two chunks for the far node"


def test_a_graph_of_calls_that_cross_nodes_is_refused_by_name() -> None:
    """Not of collectives, whose brackets enqueue nothing, as long as they are connected."""
    machine = NodeSimulation(2)

    def build(scheduler: Scheduler) -> Any:
        def host(domain: SimulatedDomain) -> None:
            domain.is_capturing = domain.engine._driver.is_capturing = lambda: True  # type: ignore[method-assign]
            with pytest.raises(RuntimeError, match="a group that spans nodes"):
                domain.check_usable(tag_of("call"), slots=1)
            with domain.operator(tag_of("collective"), slots=0):
                pass

        machine.spawn_hosts(scheduler, host)
        return lambda: None

    assert_passes(build, range(1))


def wrong_calls(machine: NodeSimulation, op_of: Callable[[int], str]) -> tuple[Build, dict[int, Any]]:
    """A gather in which ranks may be in different calls, and the records of their waits."""
    faults: dict[int, Any] = {}

    def build(scheduler: Scheduler) -> Any:
        def host(domain: SimulatedDomain) -> None:
            faults[domain.rank] = domain.fault
            x = integers(TILE, TILE, seed=1)
            plan, tag = domain.plan("chunked", x, x), tag_of(op_of(domain.rank))
            with domain.operator(tag, slots=1):
                plan.fprop.start(domain, tag, x).matmul(x)

        machine.spawn_hosts(scheduler, host)
        return lambda: None

    return build, faults


@pytest.mark.parametrize("puts", [False, True])
def test_a_twin_in_another_call_is_named(puts: bool) -> None:
    """The word crosses with its data, so that rule 9 holds between nodes."""
    build, faults = wrong_calls(NodeSimulation(2, timeout_s=3e-7, puts=puts), lambda rank: f"layer {rank}")
    run_seed(build, 0, spin=True)
    for rank, fault in faults.items():
        with pytest.raises(core("group.signals").OverlapMismatchError, match=f"rank {rank} is in layer {rank}"):
            fault.check()


def test_what_is_passed_on_names_the_call_that_it_is_of() -> None:
    """Rank 3 is in another call. Its shard comes to rank 0 by way of rank 1, which is in the right one."""
    build, faults = wrong_calls(NodeSimulation(4, node_ranks=2, timeout_s=3e-7), lambda rank: f"layer {rank // 3}")
    run_seed(build, 0, spin=True)
    for rank in (0, 1, 2):
        with pytest.raises(core("group.signals").OverlapMismatchError, match="but rank 3 is in"):
            faults[rank].check()
