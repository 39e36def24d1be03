"""The cases of `bench operators`, `ulysses` and `hierarchical`: each pass by each method, with its baselines.

Across nodes the products take 0.5, 1 and 2 times as long as the network, which is measured first, in the same run: what crosses
has a fixed number of features, and the other side of the weight decides the product's time. Each other number of SMs that NCCL
gets has a domain of the same ranks, with a process group of its own. Beside our methods stand, by name:

    sequence    NCCL (or gloo) and cuBLAS, one after the other; of an exchange with the copy that puts each rank's part together
    async_tp    PyTorch's async-TP
    three_gemms the asynchronous scheme: three GEMMs, each exchange under the GEMM of the next (of q under k's, of k under v's).
                Gives q, k and v as three tensors, as the models do that work like this
    by_nodes    the same as sequence with NCCL in two steps (two_steps.py)
    gemm, comm  each half of the work alone; only timed
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...group.domain import OverlapDomain
from ...group.slots import SLOTS
from ...nodes.plan import sms_of_network, sms_of_sums
from ...ops.plan_cache import cache_of
from ...schedule.kinds import Kind
from ...select.choose import choose
from ...select.cost import reach_of
from ...select.method import serving
from ...ulysses.linears import all_to_all_linear, linear_all_to_all
from ..measure.cases import EXCHANGES, OPERATORS, OPS, WEIGHTS, Case, cases_of, weight_of
from ..measure.models import MODELS
from ..measure.runs import Inputs, Operands, Run, Session, inputs_of, overlapped, side_by_side
from ..measure.timing import Call
from ..measure.world import World, pretends
from .async_tp import async_all_gather_matmul, async_matmul_reduce_scatter
from .turns import Contest, Way, Ways, note
from .two_steps import TwoSteps

Names = Sequence[str]
TABLE_6 = "table6"
# What is gathered: 64 MiB in bf16, of which each of two ranks sends half. What is exchanged has as many features for each node:
# so as many bytes of each rank cross.
ROWS, FEATURES, RATIOS = 8192, 4096, (0.5, 1.0, 2.0)  # ratios: product over network
_STEP, _PRODUCT = 256, 16384  # columns of the smallest product, and of the one that is timed


def cases(models: Names, ops: Names, passes: Names, ms: Sequence[int], world: int) -> list[Case]:
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


def exchange_cases(models: Names, tokens: Sequence[int], passes: Names, world: int) -> list[Case]:
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
        for op, weight in zip(EXCHANGES, weights, strict=True)
        for case in cases_of(name, op, weight, m, world, name, passes)
    ]


def hierarchical_cases(
    session: Session, ops: Names, passes: Names, ratios: Sequence[float], node_ranks: int, tiny: bool
) -> list[Case]:
    """The cases of all operators, for products of several lengths against the network. tiny: to try the code. Collective."""
    world, found = session.world.size, []
    rows, features, step = (16, 32, 32) if tiny else (ROWS, FEATURES, _STEP)
    flops = {} if tiny else _flops_beside_the_network(session, ops, node_ranks)
    for op in ops:
        kept = features * (world // node_ranks if OPERATORS[op].exchanges else 1)
        steps = [1, 2] if tiny else [round(ratio * flops[op] / (2 * rows * kept * step)) for ratio in ratios]
        for other in (world * step * max(1, count) for count in steps):
            weight = (other, kept) if OPERATORS[op].receives else (kept, other)
            found += [Case("", op, pass_, rows, *weight) for pass_ in passes]
    return found


def _flops_beside_the_network(session: Session, ops: Names, node_ranks: int) -> dict[str, float]:
    """By operator: the floating-point operations of a product of one rank that takes as long as the network. Collective."""
    world, found = session.world, dict[str, float]()
    left = torch.randn(ROWS, FEATURES, device=world.device, dtype=session.settings.dtype)
    right, flops = left.new_empty(FEATURES, _PRODUCT).normal_(), 2.0 * ROWS * FEATURES * _PRODUCT
    whole, shard = torch.empty_like(left), torch.zeros_like(left[: ROWS // world.size])
    blocks = left.new_zeros(ROWS, FEATURES // node_ranks)
    wires: list[tuple[str, Names, torch.Tensor, Call]] = [
        ("gathered", OPS, shard, lambda index: world.gather(shard, whole)),
        ("exchanged", EXCHANGES, blocks, lambda index: world.exchange(blocks)),
    ]
    for what, kinds, sent, wire in wires:
        if set(kinds) & set(ops):
            timings = session.time({"wire": wire, "gemm": lambda index: left @ right}, flops)
            world.say(f"the network takes {timings['wire'].ms:.2f} ms for {sent.nbytes >> 20} MiB of each rank, {what}")
            found |= dict.fromkeys(kinds, flops * timings["wire"].ms / timings["gemm"].ms)
    return found


def contests(cases: Sequence[Case], session: Session, network_sms: Sequence[int] = ()) -> Iterator[Contest]:
    """Every case, one after the other; a note about one whose inputs do not fit into memory: others may. Collective.

    network_sms: numbers of SMs that the network between nodes gets, besides the one that the config names.
    """
    received = [_slot_bytes(case, session) for case in cases]
    own = session.domain(received)
    others = [sms for sms in network_sms if sms != sms_of(own)]
    domains = [own, *(session.domain(received, dist.new_group(), network_sms=sms) for sms in others)]
    groups = TwoSteps.of(own.topology, session.world)
    for case in cases:
        inputs, problem = session.world.result_of(partial(inputs_of, case, session))  # memory runs out on all ranks
        if inputs is None or problem is not None:
            note(f"{case.name}: inputs: {problem}", session, failure=True)
            continue
        yield contest_of(case, inputs, domains, groups, session)
        del inputs  # before the next come


def _slot_bytes(case: Case, session: Session) -> int:
    """Bytes of a slot for the largest call of a case; long exchanges pass in parts."""
    needed = case.slot_bytes(session.world.size, session.settings.dtype)
    most = session.settings.config.exchange_mib * (1 << 20) // SLOTS
    return min(needed, most) if case.kind.exchanges else needed


def contest_of(
    case: Case, inputs: Inputs, domains: Sequence[OverlapDomain], groups: TwoSteps | None, session: Session
) -> Contest:
    """All methods and baselines of one pass. domains: the group's own one first."""
    world, dtype, own = session.world, str(session.settings.dtype).removeprefix("torch."), domains[0]
    ways = {name: way for domain in domains for name, way in ours(case, inputs, domain, own, session).items()}
    baselines = baselines_of(case, world, (*inputs.sets, inputs.decoy), groups)
    if not reach_of(own.topology.nodes).may_choose("direct"):  # PyTorch's async-TP, too, stays in a node
        baselines.pop("async_tp", None)
    names = ["sequence", "async_tp", "gemm", "comm"]
    names += ["three_gemms"] * case.kind.exchanges + ["by_nodes"] * bool(groups)
    head = {"op": case.op, "pass": case.pass_, "m": case.m, "n": case.n, "k": case.k, "dtype": dtype}
    ways |= {name: Way(run) for name, run in baselines.items()}
    return Contest(case.name, head | {"world": world.size}, case.flops(world.size), inputs, ways, tuple(names))


def ours(case: Case, inputs: Inputs, domain: OverlapDomain, own: OverlapDomain, session: Session) -> Ways:
    """The methods that serve a case in a domain, by the names of their times. NCCL alone is the same in every domain."""
    planned, nodes, found = case.planned(session.world.size, session.settings.dtype), domain.topology.nodes, {}
    suffix, told = "" if domain is own else f", {sms_of(domain)} SMs", dict[str, Any]()
    if not reach_of(nodes).has_rules:
        sums = sms_of_sums(domain.config, domain.device) if domain.topology.local > 1 else 0
        told = {"network_sms": sms_of(domain), "probe_sms": sms_of(own), "reduce_sms": sums}
        told |= {"nodes": nodes, "emulated": pretends()}
    for method in serving(session.settings.methods, planned):
        choice = choose(method, planned, domain.device, cache_of(domain, case.name).table, nodes)
        if domain is own or choice.method != "collective":
            run = (
                exchanged(case, domain, method)
                if case.kind.exchanges
                else overlapped(case, domain, choice, inputs.first)
            )
            found[method + suffix] = Way(run, method, told)
    return found


def sms_of(domain: OverlapDomain) -> int:
    """The SMs that the network of a domain may hold. Between CPU processes it is what was asked for, and has no meaning."""
    return sms_of_network(domain.config, domain.device)


def exchanged(case: Case, domain: OverlapDomain, method: str) -> Run:
    """A pass of Ulysses as users call it: long sequences in parts. The dgrad of one operator, without a weight gradient, runs as
    the other's forward pass does."""
    operator = linear_all_to_all if case.kind.splits_columns else all_to_all_linear
    config, name = replace(domain.config, method=method), f"{case.op}/{case.pass_}"
    return lambda o: operator(o.left, o.right.t(), group=domain.group, config=config, name=name)


def baselines_of(case: Case, world: World, sets: Sequence[Operands], groups: TwoSteps | None) -> dict[str, Run]:
    """The baselines of a pass; `sets` are all inputs that they will get. Buffers that a framework would reuse are reused."""
    like, kind, found = sets[0], case.kind, dict[str, Run]()
    buffer = torch.empty_like(like.whole) if kind.gathers else like.whole
    if kind.gathers:
        found["async_tp"] = lambda o: async_all_gather_matmul(o.left, o.right, world.group)[1]
        found["comm"] = lambda o: world.gather(o.left, buffer)
    elif kind.reduces:
        found["async_tp"] = lambda o: async_matmul_reduce_scatter(o.left, o.right, world.group)
        found["comm"] = lambda o: world.scatter(o.whole)
    elif kind.sums_blocks:
        found["comm"] = lambda o: world.exchange(o.left)
    else:
        blocks = like.left.new_zeros(len(like.whole), like.right.shape[1] // world.size)
        found |= {"comm": lambda o: world.exchange(blocks), "three_gemms": three_gemms(world, sets)}
    if groups is not None:
        found["by_nodes"] = one_after_the_other(kind, groups, buffer)
    gemm: Run = (lambda o: o.whole @ o.right) if kind.receives else (lambda o: o.left @ o.right)
    return found | {"sequence": one_after_the_other(kind, world, buffer), "gemm": gemm}


def one_after_the_other(kind: Kind, by: World | TwoSteps, buffer: torch.Tensor) -> Run:
    """The communication of a pass, in one step or in two, and its GEMM. buffer: for what is gathered."""
    if kind.gathers:
        return lambda o: by.gather(o.left, buffer) @ o.right
    if kind.reduces:
        return lambda o: by.scatter(o.left @ o.right)
    if kind.sums_blocks:
        return lambda o: side_by_side(by.size, by.exchange(o.left)) @ o.right
    return lambda o: by.exchange(blocks_for(by.size, o.left @ o.right))


def blocks_for(ranks: int, y: torch.Tensor) -> torch.Tensor:
    """y [M/W, F] as W blocks of rows [M, F/W], one after the other: block d has the columns for rank d."""
    return y.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous().flatten(0, 1)


def three_gemms(world: World, sets: Sequence[Operands]) -> Run:
    """y [M, F/W] = this rank's columns of what all ranks' left @ right give, as q, k and v."""
    weights = {id(o): three_weights(o.right, world.size) for o in sets}  # cut before anything is timed

    def run(o: Operands) -> tuple[torch.Tensor, ...]:
        parts, works = [], []
        for right in weights[id(o)]:
            part = blocks_for(world.size, o.left @ right)
            parts.append(torch.empty_like(part))
            works.append((dist.all_to_all_single(parts[-1], part, group=world.group, async_op=True), part))
        for work, _ in works:
            work.wait()
        return tuple(parts)

    return run


def three_weights(right: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """right [K, F] as three weights [K, a third of F], contiguous as in a model with three parameters.

    Cuts are at whole heads of 128 where there are so many columns: rows that begin between 16 bytes keep cuBLAS from TMA.
    """
    rows = right.t().unflatten(0, (ranks, -1))
    head = 128 if rows.shape[1] >= 6 * 128 else 1
    third = max(1, round(rows.shape[1] / 3 / head)) * head
    return [cut.flatten(0, 1).t() for cut in rows.split((rows.shape[1] - 2 * third, third, third), dim=1)]
