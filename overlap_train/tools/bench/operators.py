"""The operator benchmark: each pass by each method, and its baselines, in the same interleaved rounds.

Across nodes the products take 0.5, 1 and 2 times as long as the network, which is measured first, in the same run: with what
crosses fixed, the other side of the weight decides the product's time.

    ag_gemm    weight [other, kept]    x [M, kept] is gathered
    gemm_rs    weight [kept, other]    y [M, kept] is scattered
    gemm_a2a   weight [kept, other]    y [M, kept] is exchanged
    a2a_gemm   weight [other, kept]    x [M, kept] is exchanged

Each other number of SMs that NCCL gets has a domain of the same ranks, with a process group of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ...group.domain import OverlapDomain
from ...group.slots import SLOTS
from ...ops.plan_cache import cache_of
from ...schedule.order import A2A_GEMM, GEMM_A2A
from ...select.choose import Choice, choose
from ...select.low_latency import serving
from ...ulysses.linears import all_to_all_linear, linear_all_to_all
from ..measure.cases import EXCHANGES, OPS, Case
from ..measure.pretended import pretends
from ..measure.results import Row
from ..measure.runs import Inputs, Run, Session, overlapped, problem_of
from ..measure.timing import Call, Timing
from .baselines import NodeGroups, baselines_of, node_baselines
from .output import label_of


@dataclass(frozen=True)
class Ours:
    """A method of ours as one domain runs it."""

    method: str
    domain: OverlapDomain
    choice: Choice


@dataclass(frozen=True)
class Domains:
    """The domains of a benchmark.

    own: the group's, in which NCCL has the SMs that the config names or the probe has found (symmetric/wire.py). others: those
    with other numbers of SMs. groups: for NCCL in two steps; None if that would be NCCL in one.
    """

    own: OverlapDomain
    others: tuple[OverlapDomain, ...]
    groups: NodeGroups | None

    @classmethod
    def of(cls, session: Session, received: Sequence[int], network_sms: Sequence[int]) -> Domains:
        """Make the domains, and print what the probe has found. Collective.

        received: how many bytes a rank receives of each shape. network_sms: the numbers of SMs to measure besides the own one.
        """
        own = session.domain(received)
        found = sms_of(own)
        others = tuple(_domain(session, received, sms) for sms in network_sms if sms != found)
        if found and own.device.type == "cuda":  # NVSHMEM takes none
            beside = f"; measured, too: {', '.join(str(sms_of(other)) for other in others)}" if others else ""
            session.world.say(f"NCCL has {found} SMs between nodes, by the probe{beside}")
        return cls(own, others, NodeGroups.of(own.topology, session.world.group))

    def ours(self, case: Case, session: Session) -> dict[str, Ours]:
        """The methods that serve a case, by the names of their times. NCCL alone is the same in every domain."""
        planned = case.planned(session.world.size, session.settings.dtype)
        found = {}
        for domain in (self.own, *self.others):
            table, suffix = cache_of(domain, case.name).table, "" if domain is self.own else f", {sms_of(domain)} SMs"
            for method in serving(session.settings.methods, planned):
                choice = choose(method, planned, domain.device, table, domain.topology.nodes)
                if domain is self.own or choice.method != "collective":
                    found[method + suffix] = Ours(method, domain, choice)
        return found

    def told(self, domain: OverlapDomain) -> dict[str, Any]:
        """What a row says about its domain. Nothing inside one node."""
        if self.own.topology.nodes == 1:
            return {}
        sums = domain.span.settled(domain.config).reduce_sms if domain.topology.local > 1 else 0
        sms = {"network_sms": sms_of(domain), "probe_sms": sms_of(self.own), "reduce_sms": sums}
        return sms | {"nodes": self.own.topology.nodes, "emulated": pretends()}


def sms_of(domain: OverlapDomain) -> int:
    """The SMs that the network of a domain may hold. Between CPU processes it is what was asked for, and has no meaning."""
    return domain.span.settled(domain.config).network_sms


def _domain(session: Session, received: Sequence[int], sms: int) -> OverlapDomain:
    """Another domain of the same ranks."""
    settings = replace(session.settings, config=replace(session.settings.config, network_sms=sms))
    world = replace(session.world, group=dist.new_group())
    return replace(session, settings=settings, world=world).domain(received)


# What is gathered: 64 MiB in bf16, of which each of two ranks sends half. What is exchanged has as many features for each node:
# so as many bytes of each rank cross.
ROWS, FEATURES = 8192, 4096
RATIOS = (0.5, 1.0, 2.0)  # product over network
_STEP = 256
_PRODUCT = 16384  # columns of the product that is timed
_TINY = {"rows": 16, "features": 32}


@dataclass(frozen=True)
class Shapes:
    """Which cases: operators, passes, products over network, ranks of a node. tiny: to try the code on CPU processes."""

    ops: tuple[str, ...]
    passes: tuple[str, ...]
    ratios: tuple[float, ...]
    node_ranks: int
    tiny: bool

    @property
    def rows(self) -> int:
        return _TINY["rows"] if self.tiny else ROWS

    def kept(self, op: str, world: int) -> int:
        """The features of what crosses the network."""
        return (_TINY["features"] if self.tiny else FEATURES) * (world // self.node_ranks if op in EXCHANGES else 1)

    def others(self, op: str, world: int, flops: float) -> list[int]:
        """The other features of the weight, for each length of the product. flops: of one rank, as long as the network takes."""
        if self.tiny:
            return [32 * world, 64 * world]
        steps = flops / (2 * self.rows * self.kept(op, world) * _STEP)
        return [world * _STEP * max(1, round(ratio * steps)) for ratio in self.ratios]


def hierarchical_cases(session: Session, shapes: Shapes) -> list[Case]:
    """The cases of all operators, for products of several lengths against the network. Collective."""
    world = session.world.size
    flops = dict.fromkeys(shapes.ops, 0.0) if shapes.tiny else _flops_beside_the_network(session, shapes)
    cases = []
    for op in shapes.ops:
        kept = shapes.kept(op, world)
        for other in shapes.others(op, world, flops[op]):
            weight = (other, kept) if op in ("ag_gemm", A2A_GEMM) else (kept, other)
            cases += [Case("", op, pass_, shapes.rows, *weight) for pass_ in shapes.passes]
    return cases


def _flops_beside_the_network(session: Session, shapes: Shapes) -> dict[str, float]:
    """By operator: the floating-point operations of a product of one rank that takes as long as the network. Collective."""
    world, found = session.world, dict[str, float]()
    left = torch.randn(ROWS, FEATURES, device=world.device, dtype=session.settings.dtype)
    right, flops = left.new_empty(FEATURES, _PRODUCT).normal_(), 2.0 * ROWS * FEATURES * _PRODUCT
    for ops, what in ((OPS, "gathered"), (EXCHANGES, "exchanged")):
        if not set(ops) & set(shapes.ops):
            continue
        wire, nbytes = _wire(session, shapes, ops[0])
        timings = session.time({"wire": wire, "gemm": lambda index: left @ right}, flops)
        world.say(f"the network takes {timings['wire'].ms:.2f} ms for {nbytes >> 20} MiB of each rank, {what}")
        found |= dict.fromkeys(ops, flops * timings["wire"].ms / timings["gemm"].ms)
    return found


def _wire(session: Session, shapes: Shapes, op: str) -> tuple[Call, int]:
    """What NCCL does for an operator, and the bytes that each rank has for it."""
    world, dtype, kept = session.world, session.settings.dtype, shapes.kept(op, session.world.size)
    whole = torch.zeros(ROWS, kept // (world.size if op in EXCHANGES else 1), device=world.device, dtype=dtype)
    if op in EXCHANGES:
        received = torch.empty_like(whole)
        return lambda index: dist.all_to_all_single(received, whole, group=world.group), whole.nbytes
    shard = torch.zeros(ROWS // world.size, kept, device=world.device, dtype=dtype)
    return lambda index: dist.all_gather_into_tensor(whole, shard, group=world.group), shard.nbytes


NEEDED = {"sequence", "gemm", "comm"}  # no row without them
TIMED_ONLY = ("gemm", "comm")


@torch.no_grad()
def run(cases: list[Case], session: Session, network_sms: Sequence[int] = ()) -> None:
    """Measure every case and add its rows to the session's results, which are saved after each of them. Collective.

    network_sms: numbers of SMs that the network between nodes gets, besides the own one.
    """
    domains = Domains.of(session, [_slot_bytes(case, session) for case in cases], network_sms)
    for number, case in enumerate(cases):
        rows = measure_case(case, domains, session)
        session.results.add(rows)
        session.world.say(f"[{number + 1}/{len(cases)}] {case.name}: {session.results.outcome(rows, label_of)}")


def measure_case(case: Case, domains: Domains, session: Session) -> list[Row]:
    """Check, then time, every method and baseline of one case; one row for each method that computes the right thing."""
    inputs, settings, world = inputs_of(case, session), session.settings, session.world
    if inputs is None:
        return []
    ours = domains.ours(case, session)
    runs = correct_runs(case, inputs, ours, domains, session)
    if not runs.keys() >= NEEDED:
        return []
    timings = session.time({name: inputs.call(run) for name, run in runs.items()}, case.flops(world.size))
    return [
        row(case, mine.method, timings | {mine.method: timings[name]}, world.size, settings.dtype)
        | domains.told(mine.domain)
        for name, mine in ours.items()
        if name in timings
    ]


def inputs_of(case: Case, session: Session) -> Inputs | None:
    """The inputs of a case and its exact result; None, with a note, where they do not fit into memory: other cases may.

    They are as large on all ranks, and so memory runs out on all.
    """
    made: list[Inputs] = []
    problem = session.world.attempt(lambda: made.append(Inputs(case, session)))
    if problem is None:
        return made[0]
    session.results.note(f"{case.name}: inputs: {problem}", failure=True)
    return None


def correct_runs(
    case: Case, inputs: Inputs, ours: Mapping[str, Ours], domains: Domains, session: Session
) -> dict[str, Run]:
    """Methods and baselines that gave the right result on every rank; notes about the others."""
    runs = {name: run_of(case, mine, inputs) for name, mine in ours.items()}
    correct = {}
    baselines = baselines_of(case, session.world, (*inputs.sets, inputs.decoy))
    baselines |= node_baselines(case, domains.groups, inputs.first)
    if domains.own.topology.nodes > 1:  # PyTorch's async-TP stays in a node
        baselines.pop("async_tp", None)
    for name, run in (runs | baselines).items():
        problem = problem_of(case.name, run, inputs, session.world, is_exact=name not in TIMED_ONLY)
        if problem is None:
            correct[name] = run
        else:
            session.results.note(f"{case.name}: {name}: {problem}", failure=name != "async_tp")
    return correct


def run_of(case: Case, mine: Ours, inputs: Inputs) -> Run:
    """A pass by one of our methods."""
    if case.op in EXCHANGES:
        return exchanged(case, mine)
    return overlapped(case, mine.domain, mine.choice, inputs.first)


def exchanged(case: Case, mine: Ours) -> Run:
    """A pass of Ulysses as users call it: long sequences in parts. The dgrad of one operator, without a weight gradient, runs as
    the other's forward pass does."""
    config, group = replace(mine.domain.config, method=mine.method), mine.domain.group
    operator = linear_all_to_all if case.kind == GEMM_A2A else all_to_all_linear
    return lambda o: operator(o.left, o.right.t(), group=group, config=config, name=f"{case.op}/{case.pass_}")


def _slot_bytes(case: Case, session: Session) -> int:
    """Bytes of a slot for the largest call of a case; long exchanges pass in parts."""
    needed = case.slot_bytes(session.world.size, session.settings.dtype)
    most = session.settings.config.exchange_mib * (1 << 20) // SLOTS
    return min(needed, most) if case.op in EXCHANGES else needed


def row(case: Case, method: str, timings: dict[str, Timing], world: int, dtype: torch.dtype) -> Row:
    """One line of operators.json; times in milliseconds of one run, host_us in microseconds."""
    async_tp = timings.get("async_tp")
    sequence, gemm = timings["sequence"].ms, timings["gemm"].ms
    comm, three_gemms = timings["comm"].ms, timings.get("three_gemms")
    by_nodes = {"by_nodes_ms": timings["by_nodes"].ms} if "by_nodes" in timings else {}
    return {
        "op": case.op, "pass": case.pass_, "world": world, "m": case.m, "n": case.n, "k": case.k,
        "dtype": str(dtype).removeprefix("torch."), "method": method, "ms": timings[method].ms,
        "host_us": timings[method].host_us, "sequence_ms": sequence, "async_tp_ms": async_tp and async_tp.ms,
        "gemm_ms": gemm, "comm_ms": comm, "bound": sequence / max(gemm, comm),
    } | by_nodes | ({"three_gemms_ms": three_gemms and three_gemms.ms} if case.op in EXCHANGES else {})  # fmt: skip
