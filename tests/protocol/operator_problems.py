"""Problems for `explore`: consecutive operator calls on simulated ranks, with exact results.

Inputs are small integers as fp32, so that products and sums are exact in any order, and differ in each call, so that a
stale block is a wrong result. They lie in one buffer per rank that is overwritten with NaN after each call, as is all
memory that the call allocated: a push that is still under way by then sends NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

from tests.protocol.explore import Build
from tests.protocol.interleaving import Scheduler
from tests.protocol.simulated_ranks import TILE, SimulatedDomain, Simulation, core

CALLS = 4  # two slots are used twice

Before = Callable[[SimulatedDomain], object]
Run = Callable[[SimulatedDomain, torch.Tensor, torch.Tensor], torch.Tensor]


def gathers(
    method: str,
    machine: Simulation,
    calls: int = CALLS,
    columns: int = TILE,
    before: Before | None = None,
    complete: bool = False,
) -> Build:
    """Calls of all_gather(x [TILE, TILE] of each rank, two chunks) @ b [TILE, columns] of this rank + bias [columns].

    complete: all of x is waited for before the product, as for the weight gradient of a row linear with frozen input.
    """
    x = integers(calls, machine.world_size, TILE, TILE, seed=1)
    b, bias = integers(machine.world_size, TILE, columns, seed=2), integers(columns, seed=9)

    def run(domain: SimulatedDomain, own: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
        plan = domain.plan(method, own, mine.t()).fprop
        gather = plan.start(domain, planned_tag(domain, "gather"), own)
        return gather.gathered_view() @ mine + bias if complete else gather.matmul(mine, bias)

    return _calls(machine, run, x, b, x.flatten(1, 2)[:, None] @ b + bias, before)


def announced(method: str, machine: Simulation, calls: int = CALLS) -> Build:
    """Calls of all_gather(x * f) @ b, as in fp8: f, the sum of a number of each rank, is exchanged first, in one operator with
    the gather. Before each is an operator of two gathers, as a column linear's backward: a wrong one makes y wrong."""
    world = machine.world_size
    x, b = integers(calls, world, TILE, TILE, seed=1), integers(world, TILE, TILE, seed=2)
    factors, right = x[:, :, 0, 0].sum(1), integers(world, TILE, TILE, seed=3)
    found = torch.empty(world, 2, world * TILE, TILE)

    def two_gathers(domain: SimulatedDomain) -> None:
        own = right[domain.rank]
        plan = domain.plan(method, own, own).fprop
        with domain.operator(tag_of("two"), slots=2):
            both = [plan.start(domain, planned_tag(domain, name), own) for name in ("first", "second")]
            for place, gather in zip(found[domain.rank], both, strict=True):
                place.copy_(gather.gathered_view())

    def run(domain: SimulatedDomain, own: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
        plan = domain.plan(method, own, mine.t(), fp8="tensorwise")
        op = core("ops.planned").PlannedOp(domain, plan, "announced", (), True)
        factor = op.of_all_ranks(own.new_empty(1).copy_(own[0, :1])).sum()
        y = plan.fprop.start(domain, op.tags.fprop, own.new_empty(own.shape).copy_(own * factor)).matmul(mine)
        return y + (found[domain.rank] - right.flatten(0, 1)).abs().sum()

    return _calls(machine, run, x, b, factors[:, None, None, None] * (x.flatten(1, 2)[:, None] @ b), two_gathers)


def scatters(
    method: str,
    machine: Simulation,
    calls: int = CALLS,
    columns: int = TILE,
    before: Before | None = None,
    split_reduction: bool = False,
    rows: int = TILE,
) -> Build:
    """Calls of reduce_scatter(a [W * rows, TILE] @ b [TILE, columns], two chunks a rank) + bias [columns], b by rank."""
    world, bias = machine.world_size, integers(columns, seed=9)
    a, b = integers(calls, world, world * rows, TILE, seed=3), integers(world, TILE, columns, seed=4)

    def run(domain: SimulatedDomain, own: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
        variant = core("select.method").Method("fused", split_reduction=split_reduction)
        plan = domain.plan(method, own, mine.t(), "LINEAR_REDUCE_SCATTER", variant).fprop
        return plan.start(domain, planned_tag(domain, "scatter"), own, mine, bias).finish()

    return _calls(machine, run, a, b, (a @ b).sum(1).unflatten(1, (world, rows)) + bias, before)


def all_reduces(
    shots: str | tuple[str, ...],
    machine: Simulation,
    calls: int = CALLS,
    columns: int = TILE,
    before: Before | None = None,
) -> Build:
    """Calls of all_reduce(a [TILE, TILE] @ b [TILE, columns]) + bias [columns], a and b by rank. shots: of all calls, or of each,
    see select/method.py."""
    world, bias = machine.world_size, integers(columns, seed=9)
    ways = (shots,) * calls if isinstance(shots, str) else shots
    a, b = integers(len(ways), world, TILE, TILE, seed=3), integers(world, TILE, columns, seed=4)

    def run(domain: SimulatedDomain, own: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
        tag, partial = planned_tag(domain, "all_reduce"), own.new_empty(TILE, columns).copy_(own @ mine)
        return core("ops.low_latency").all_reduce(domain, tag, partial, ways[domain.call], 0, bias)

    return _calls(machine, run, a, b, ((a @ b).sum(1, keepdim=True) + bias).expand(-1, world, -1, -1), before)


def to_heads(
    method: str,
    machine: Simulation,
    calls: int = CALLS,
    columns: int = TILE,
    before: Before | None = None,
    rows: int = TILE,
) -> Build:
    """Calls of all_to_all(a [rows, TILE] @ b [TILE, W * columns], two chunks a block); a, b differ by rank."""
    world = machine.world_size
    a, b = integers(calls, world, rows, TILE, seed=5), integers(world, TILE, world * columns, seed=6)

    def run(domain: SimulatedDomain, own: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
        plan = domain.plan(method, own, mine.t(), "LINEAR_ALL_TO_ALL").fprop
        exchange = plan.start(domain, planned_tag(domain, "to_heads"), own, mine)
        return exchange.received().flatten(0, 1).clone()

    sent = (a @ b).unflatten(3, (world, columns))  # [calls, from, rows, to, columns]
    return _calls(machine, run, a, b, sent.permute(0, 3, 1, 2, 4).flatten(2, 3).contiguous(), before)


def to_rows(
    method: str,
    machine: Simulation,
    calls: int = CALLS,
    columns: int = TILE,
    before: Before | None = None,
) -> Build:
    """Calls of all_to_all(x [W * TILE, TILE] of each rank, two chunks a block) @ b [W * TILE, columns] of this rank."""
    world = machine.world_size
    x, b = integers(calls, world, world * TILE, TILE, seed=7), integers(world, world * TILE, columns, seed=8)
    received = x.unflatten(2, (world, TILE)).permute(0, 2, 3, 1, 4).flatten(3)  # [calls, to, TILE, W * TILE]

    def run(domain: SimulatedDomain, own: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
        plan = domain.plan(method, own, mine.t(), "ALL_TO_ALL_LINEAR").fprop
        sent = own.unflatten(0, (world, -1))
        receiver = plan.start(domain, planned_tag(domain, "to_rows"), sent)
        y = receiver.matmul(mine, own.new_empty(TILE, columns))
        again = receiver.received_view().transpose(0, 1).flatten(1) @ mine  # as the weight gradient reads it
        return y.where(y == again, torch.nan)

    return _calls(machine, run, x, b, received @ b, before)


def dispatches(method: str, machine: Simulation, calls: int = CALLS, before: Before | None = None) -> Build:
    """Calls of dispatch(x [TILE, TILE] of each rank, a number for each row) @ the weights [TILE, TILE] of two experts a rank, and
    of the rows by themselves. Every call has another routing."""
    of_calls, world = routings(machine.world_size, calls), machine.world_size
    x, w = integers(calls, world, TILE, TILE, seed=11), integers(world, 2, TILE, TILE, seed=12)
    numbers = x[..., :1].expand(-1, -1, -1, 2 * world).contiguous()  # of each token, whichever expert it goes to
    expected = torch.zeros(calls, world, MOST_ROWS, TILE)
    for call, of_call in enumerate(of_calls):
        for rank in range(world):
            turns = [*range(rank, -1, -1), *range(world - 1, rank, -1)]
            rows = [(e, s, t) for e in (0, 1) for s in turns for t in _tokens(of_call[s], 2 * rank + e)]
            for at, (e, s, t) in enumerate(rows):
                expected[call, rank, at] = x[call, s, t] @ w[rank, e] + x[call, s, t, 0]

    def run(domain: SimulatedDomain, own: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
        routing, given = of_calls[domain.call][domain.rank], numbers[domain.call, domain.rank]
        product = core("ops.grouped").GroupedProduct(mine.unbind(0), transposed=False)
        gather = _expert_plan(domain, method, "DISPATCH_LINEAR").start(
            domain, planned_tag(domain, "dispatch"), routing, own, given, True
        )
        y = gather.matmul(product)
        again = own.new_empty(y.shape)  # as the weight gradient reads the rows
        product.into(again, routing.all_places, gather.rows)
        y = y.where(y == again, torch.nan) + gather.numbers[:, None]
        return torch.cat((y, torch.zeros(MOST_ROWS - len(y), TILE)))

    return _calls(machine, run, x, w, expected, before)


def combines(method: str, machine: Simulation, calls: int = CALLS, before: Before | None = None) -> Build:
    """Calls of the sum of each token's rows of a [R, TILE] @ the weights [TILE, TILE] of two experts a rank, and of the numbers
    that come with the rows. Every call has another routing."""
    of_calls, world = routings(machine.world_size, calls), machine.world_size
    a, w = integers(calls, world, MOST_ROWS, TILE, seed=13), integers(world, 2, TILE, TILE, seed=14)
    expected = torch.zeros(calls, world, TILE, TILE)
    for call, of_call in enumerate(of_calls):
        for rank in range(world):
            turns = [*range(rank, -1, -1), *range(world - 1, rank, -1)]
            rows = [(e, s, t) for e in (0, 1) for s in turns for t in _tokens(of_call[s], 2 * rank + e)]
            for at, (e, s, t) in enumerate(rows):
                expected[call, s, t] += a[call, rank, at] @ w[rank, e] + a[call, rank, at, 0]

    def run(domain: SimulatedDomain, own: torch.Tensor, mine: torch.Tensor) -> torch.Tensor:
        routing = of_calls[domain.call][domain.rank]
        product = core("ops.grouped").GroupedProduct(mine.unbind(0), transposed=False)
        rows = own[: routing.rows_received]
        plan = _expert_plan(domain, method, "LINEAR_COMBINE")
        sent = plan.start(domain, planned_tag(domain, "combine"), routing, rows, product, rows[:, 0])
        z = sent.finish()
        return z + routing.sum_of_tokens(sent.numbers[:, None])

    return _calls(machine, run, a, w, expected, before)


MOST_ROWS = 6 * TILE  # of one rank


@cache
def routings(world: int, calls: int) -> list[list[Any]]:
    """Of each call and rank: up to two experts a token, of two a rank. Rank 0 sends nothing in call 1, gets nothing in call 2."""
    generator = torch.Generator().manual_seed(15)
    found = []
    for call in range(calls):
        scores = torch.rand(world, TILE, 2 * world, generator=generator)
        scores[..., :2] -= float(call == 2)
        chosen = torch.zeros(scores.shape, dtype=torch.bool).scatter_(2, scores.topk(2).indices, True)
        chosen &= torch.rand(chosen.shape, generator=generator) < 0.8
        chosen[0] &= call != 1
        counts = chosen.sum(1)
        domains = [SimpleNamespace(rank=rank, on_gpu=False) for rank in range(world)]
        found.append([core("ops.routing").Routing(chosen[domain.rank], counts, domain) for domain in domains])
        for routing in found[-1]:
            routing.prepare()  # before an operator, as its call does
    return found


def _tokens(routing: Any, expert: int) -> list[int]:
    experts = len(routing.sent) * 2
    return [place // experts for place in routing.places_of_tokens.tolist() if place % experts == expert]


def planned_experts(domain: SimulatedDomain, spec: str) -> Any:
    """The planned call of an operator of experts, by chunks."""
    plan = _plan_of_experts(domain, "chunked", spec)
    return core("ops.planned").Planned(domain, plan).linear(spec)


def _expert_plan(domain: SimulatedDomain, method: str, spec: str) -> Any:
    return _plan_of_experts(domain, method, spec).fprop


def _plan_of_experts(domain: SimulatedDomain, method: str, spec: str) -> Any:
    request, config = (
        core("group.memory").Request(spec, "of simulated ranks"),
        core("config").OverlapConfig(method=method),
    )
    operator = getattr(core("ops.spec"), spec)
    return core("ops.experts").make_expert_plan(operator, config, domain.topology, torch.float32, request)


def _calls(
    machine: Simulation,
    run: Run,
    inputs: torch.Tensor,
    weights: torch.Tensor,
    expected: torch.Tensor,
    before: Before | None,
) -> Build:
    """Run on inputs [calls, W, ...] and weights [W, ...]; compare with expected [calls, W, ...]. before: each call."""

    def build(scheduler: Scheduler) -> Callable[[], None]:
        outputs = torch.full_like(expected, torch.nan)
        buffers = torch.empty_like(inputs[0])

        def host(domain: SimulatedDomain) -> None:
            own = buffers[domain.rank]
            for call in range(len(inputs)):
                own.copy_(inputs[call, domain.rank])
                domain.call = call
                if before is not None:
                    before(domain)
                with domain.operator(tag_of("call"), slots=1):
                    y = run(domain, own, weights[domain.rank])
                outputs[call, domain.rank] = y
                own.fill_(torch.nan)
                domain.memory.end_operator(keep=y)

        machine.spawn_hosts(scheduler, host)

        def check() -> None:
            right = (outputs == expected).flatten(2).all(2)
            assert right.all(), f"(call, rank) {torch.nonzero(~right).tolist()}"

        return check

    return build


@cache
def tag_of(op: str, what: str = "") -> Any:
    """How ranks know the call `op`. It is kept, as plans keep theirs: errors name what is still there."""
    return core("group.signals").Tag(op, what)


def planned_tag(domain: SimulatedDomain, op: str) -> Any:
    """`tag_of` a call that errors of the domain can name, as they can every call that ranks have planned."""
    domain.fault.register(tag_of(op))
    return tag_of(op)


def integers(*shape: int, seed: int) -> torch.Tensor:
    """Integers of -4..4 as fp32."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()
