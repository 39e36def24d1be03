"""The cases of `bench operators`, `ulysses` and `hierarchical`: each pass by each method, with its baselines.

Across nodes the products take 0.5, 1 and 2 times as long as the network, which is measured first, in the same run: with what
crosses fixed, the other side of the weight decides the product's time.

    ag_gemm    weight [other, kept]    x [M, kept] is gathered
    gemm_rs    weight [kept, other]    y [M, kept] is scattered
    gemm_a2a   weight [kept, other]    y [M, kept] is exchanged
    a2a_gemm   weight [other, kept]    x [M, kept] is exchanged

Each other number of SMs that NCCL gets has a domain of the same ranks, with a process group of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...group.domain import OverlapDomain
from ...group.slots import SLOTS
from ...ops.plan_cache import cache_of
from ...schedule.order import A2A_GEMM, EXCHANGES, GEMM_A2A
from ...select.choose import choose
from ...select.low_latency import serving
from ...ulysses.linears import all_to_all_linear, linear_all_to_all
from ..measure.cases import OPS, WEIGHTS, Case, cases_of, weight_of
from ..measure.models import MODELS
from ..measure.results import Row
from ..measure.runs import Inputs, Run, Session, inputs_of, overlapped
from ..measure.timing import Call
from ..measure.world import pretends
from .baselines import NodeGroups, baselines_of
from .turns import Contest, Way, Ways, note

TABLE_6 = "table6"


def cases(
    models: Sequence[str], ops: Sequence[str], passes: Sequence[str], ms: Sequence[int], world: int
) -> list[Case]:
    """Every combination, shape by shape, largest M first: buffers are allocated once. "all" names all published weights.

    Raises:
        ValueError: a size cannot be sharded over the ranks.
    """
    return [
        case
        for m in sorted(ms, reverse=True)
        for op in ops
        for name in (WEIGHTS if "all" in models else models)
        for weight in (weight_of(name) if op == "ag_gemm" else weight_of(name)[::-1],)
        for case in cases_of(name, op, weight, m, world, name, passes, "--rows")
    ]


def exchange_cases(models: Sequence[str], tokens: Sequence[int], passes: Sequence[str], world: int) -> list[Case]:
    """The projections of a Ulysses attention: of models, and of Table 6 of the Ditron paper, which has sequence lengths of
    its own, heads of 128 features each, and one of q, k and v.

    Raises:
        ValueError: a size cannot be shared by the ranks.
    """
    shapes = []
    for name in models:
        if name == TABLE_6:
            squares = [(m, (heads * 128, heads * 128)) for heads in (64, 32, 16) for m in (262144, 491520)]
            shapes += [(name, m, weight, weight) for m, weight in squares]
        else:
            shapes += [(name, m, MODELS[name].linears["qkv"], MODELS[name].linears["proj"]) for m in tokens]
    return [
        case
        for name, m, *weights in shapes
        for op, weight in zip((GEMM_A2A, A2A_GEMM), weights, strict=True)
        for case in cases_of(name, op, weight, m, world, name, passes)
    ]


# What is gathered: 64 MiB in bf16, of which each of two ranks sends half. What is exchanged has as many features for each node:
# so as many bytes of each rank cross.
ROWS, FEATURES = 8192, 4096
RATIOS = (0.5, 1.0, 2.0)  # product over network
_STEP = 256
_PRODUCT = 16384  # columns of the product that is timed


def hierarchical_cases(
    session: Session, ops: Sequence[str], passes: Sequence[str], ratios: Sequence[float], node_ranks: int, tiny: bool
) -> list[Case]:
    """The cases of all operators, for products of several lengths against the network. tiny: to try the code. Collective."""
    world, found = session.world.size, []
    rows, features = (16, 32) if tiny else (ROWS, FEATURES)
    flops = {} if tiny else _flops_beside_the_network(session, ops, node_ranks)
    for op in ops:
        kept = features * (world // node_ranks if op in EXCHANGES else 1)
        steps = [1] if tiny else [flops[op] / (2 * rows * kept * _STEP)]
        counts = [1, 2] if tiny else [max(1, round(ratio * steps[0])) for ratio in ratios]
        for other in (world * (32 if tiny else _STEP) * count for count in counts):
            weight = (other, kept) if op in ("ag_gemm", A2A_GEMM) else (kept, other)
            found += [Case("", op, pass_, rows, *weight) for pass_ in passes]
    return found


def _flops_beside_the_network(session: Session, ops: Sequence[str], node_ranks: int) -> dict[str, float]:
    """By operator: the floating-point operations of a product of one rank that takes as long as the network. Collective."""
    world, found = session.world, dict[str, float]()
    left = torch.randn(ROWS, FEATURES, device=world.device, dtype=session.settings.dtype)
    right, flops = left.new_empty(FEATURES, _PRODUCT).normal_(), 2.0 * ROWS * FEATURES * _PRODUCT
    whole, shard = torch.empty_like(left), torch.zeros_like(left[: ROWS // world.size])
    blocks = left.new_zeros(ROWS, FEATURES // node_ranks)
    wires: dict[str, tuple[Sequence[str], torch.Tensor, Call]] = {
        "gathered": (OPS, shard, lambda index: world.gather(shard, whole)),
        "exchanged": (EXCHANGES, blocks, lambda index: world.exchange(blocks)),
    }
    for what, (kinds, sent, wire) in wires.items():
        if set(kinds) & set(ops):
            timings = session.time({"wire": wire, "gemm": lambda index: left @ right}, flops)
            world.say(f"the network takes {timings['wire'].ms:.2f} ms for {sent.nbytes >> 20} MiB of each rank, {what}")
            found |= dict.fromkeys(kinds, flops * timings["wire"].ms / timings["gemm"].ms)
    return found


@dataclass(frozen=True)
class Domains:
    """own: the group's, in which NCCL has the SMs that the config names or the probe has found (symmetric/wire.py). others: those
    with other numbers of SMs. groups: for NCCL in two steps; None if that would be NCCL in one."""

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
        others = [session.beside(dist.new_group(), network_sms=sms) for sms in network_sms if sms != found]
        if found and own.device.type == "cuda":  # NVSHMEM takes none
            session.world.say(f"NCCL has {found} SMs between nodes, by the probe")
        groups = NodeGroups.of(own.topology, session.world.group)
        return cls(own, tuple(other.domain(received) for other in others), groups)

    def ways(self, case: Case, inputs: Inputs, session: Session) -> Ways:
        """The methods that serve a case, by the names of their times. NCCL alone is the same in every domain."""
        planned, found = case.planned(session.world.size, session.settings.dtype), {}
        for domain in (self.own, *self.others):
            table, suffix = cache_of(domain, case.name).table, "" if domain is self.own else f", {sms_of(domain)} SMs"
            for method in serving(session.settings.methods, planned):
                choice = choose(method, planned, domain.device, table, domain.topology.nodes)
                if domain is self.own or choice.method != "collective":
                    if case.op in EXCHANGES:
                        run = _exchanged(case, domain, method)
                    else:
                        run = overlapped(case, domain, choice, inputs.first)
                    found[method + suffix] = Way(run, method, self.told(domain))
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


def _exchanged(case: Case, domain: OverlapDomain, method: str) -> Run:
    """A pass of Ulysses as users call it: long sequences in parts. The dgrad of one operator, without a weight gradient, runs as
    the other's forward pass does."""
    operator = linear_all_to_all if case.kind == GEMM_A2A else all_to_all_linear
    settings: Any = {
        "group": domain.group,
        "config": replace(domain.config, method=method),
        "name": f"{case.op}/{case.pass_}",
    }
    return lambda o: operator(o.left, o.right.t(), **settings)


def contests(cases: Sequence[Case], session: Session, network_sms: Sequence[int] = ()) -> Iterator[Contest]:
    """Every case, one after the other; a note about one whose inputs do not fit into memory: others may. Collective.

    network_sms: numbers of SMs that the network between nodes gets, besides the own one.
    """
    domains = Domains.of(session, [_slot_bytes(case, session) for case in cases], network_sms)
    for case in cases:
        inputs, problem = session.world.result_of(partial(inputs_of, case, session))  # memory runs out on all ranks
        if inputs is None or problem is not None:
            note(f"{case.name}: inputs: {problem}", session, failure=True)
            continue
        contest = contest_of(case, inputs, domains, session)
        del inputs
        yield contest
        del contest


def contest_of(case: Case, inputs: Inputs, domains: Domains, session: Session) -> Contest:
    """All methods and baselines of one pass, and its rows in operators.json."""
    world, dtype = session.world, str(session.settings.dtype).removeprefix("torch.")
    baselines = baselines_of(case, world, (*inputs.sets, inputs.decoy), domains.groups)
    if domains.own.topology.nodes > 1:  # PyTorch's async-TP stays in a node
        baselines.pop("async_tp", None)
    known = ["sequence", "async_tp", "gemm", "comm", *["three_gemms"] * (case.op in EXCHANGES)]

    def row(ms: Mapping[str, float]) -> Row:
        columns = dict.fromkeys([*known, *({"by_nodes"} & ms.keys())])
        bound = ms["sequence"] / max(ms["gemm"], ms["comm"])
        return {f"{name}_ms": ms.get(name) for name in columns} | {"bound": bound}

    head = {
        "op": case.op,
        "pass": case.pass_,
        "world": world.size,
        "m": case.m,
        "n": case.n,
        "k": case.k,
        "dtype": dtype,
    }
    ways = domains.ways(case, inputs, session) | {name: Way(run) for name, run in baselines.items()}
    return Contest(case.name, head, case.flops(world.size), inputs, ways, row)


def _slot_bytes(case: Case, session: Session) -> int:
    """Bytes of a slot for the largest call of a case; long exchanges pass in parts."""
    needed = case.slot_bytes(session.world.size, session.settings.dtype)
    most = session.settings.config.exchange_mib * (1 << 20) // SLOTS
    return min(needed, most) if case.op in EXCHANGES else needed
