"""The cases of `bench operators`, `ulysses` and `hierarchical`: each pass by each method, with its baselines.

Beside our methods stand, by name:

    sequence    NCCL (or gloo) and cuBLAS, one after the other; of an exchange with the copy that puts each rank's part together;
                of a column linear's backward that all-reduces with the weight gradient, which `gemm` has, too
    async_tp    PyTorch's async-TP, inside a node
    gemm, comm  each half of the work alone; only timed

Across nodes the products take 0.5, 1 and 2 times as long as the network, which is measured first, in the same run: what crosses
has a fixed number of features, and the other side of the weight decides the product's time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...group.domain import OverlapDomain
from ...nodes.plan import sms_of_network
from ...ops.gemm_ar import all_reduced
from ...ops.plan_cache import cache_of, op_of
from ...ops.product import product
from ...ops.spec import LINEAR_ALL_REDUCE, LINEAR_DGRAD_ALL_REDUCE, misfit_in_fp8
from ...select.choose import choose
from ...select.cost import reach_of
from ...select.method import serving
from ...ulysses.linears import all_to_all_linear, linear_all_to_all
from ..measure.cases import EXCHANGES, OPERATORS, OPS, PASSES, Case, cases_of
from ..measure.models import MODELS, OPS_OF_PROJECTIONS
from ..measure.runs import Operands, Run, Session, inputs_of, overlapped, planned_like, side_by_side
from ..measure.timing import Call
from ..measure.world import World, pretends
from .async_tp import async_all_gather_matmul, async_matmul_reduce_scatter
from .turns import Contest, Runs, note

Names = Sequence[str]
# What is gathered: 64 MiB in bf16, of which each of two ranks sends half. What is exchanged has as many features for each node:
# so as many bytes of each rank cross.
ROWS, FEATURES, RATIOS = 8192, 4096, (0.5, 1.0, 2.0)  # ratios: product over network
_STEP, _PRODUCT = 256, 16384  # columns of the smallest product, and of the one that is timed


def cases(models: Names, ms: Sequence[int], world: int, ops: Names = OPS) -> list[Case]:
    """One product of each model's MLP, shape by shape, largest M first: buffers are allocated once.

    Raises:
        ValueError: a size cannot be sharded over the ranks.
    """
    found = []
    for m in sorted(ms, reverse=True):
        for op in ops:
            for name in models:
                weight = (MODELS[name].ffn_hidden_size, MODELS[name].hidden_size)
                weight = weight if OPERATORS[op].gathers else weight[::-1]
                found += cases_of(name, op, weight, m, world, name, "--rows")
    return found


def exchange_cases(models: Names, tokens: Sequence[int], world: int) -> list[Case]:
    """The projections of a Ulysses attention.

    Raises:
        ValueError: a size cannot be shared by the ranks.
    """
    return [
        case
        for name in models
        for m in tokens
        for linear, op in OPS_OF_PROJECTIONS.items()
        for case in cases_of(name, op, MODELS[name].linears[linear], m, world, name)
    ]


def hierarchical_cases(session: Session, node_ranks: int) -> list[Case]:
    """The cases of all operators, for products of several lengths against the network. CPU processes only try the code.
    Collective."""
    world, found, tiny = session.world.size, [], session.world.device.type == "cpu"
    rows, features, step = (16, 32, 32) if tiny else (ROWS, FEATURES, _STEP)
    flops = 0.0 if tiny else _flops_beside_the_network(session)
    for op in (*OPS, *EXCHANGES):
        kept = features * (world // node_ranks if OPERATORS[op].exchanges else 1)
        steps = [1, 2] if tiny else [round(ratio * flops / (2 * rows * kept * step)) for ratio in RATIOS]
        for other in (world * step * max(1, count) for count in steps):
            weight = (other, kept) if OPERATORS[op].receives else (kept, other)
            found += [Case("", op, pass_, rows, *weight) for pass_ in PASSES]
    return found


def _flops_beside_the_network(session: Session) -> float:
    """The floating-point operations of a product of one rank that takes as long as the network. Collective."""
    world = session.world
    whole = torch.randn(ROWS, FEATURES, device=world.device, dtype=session.dtype)
    right, flops = whole.new_empty(FEATURES, _PRODUCT).normal_(), 2.0 * ROWS * FEATURES * _PRODUCT
    shard = whole[: ROWS // world.size].clone()
    calls: dict[str, Call] = {"wire": lambda index: world.gather(shard, whole), "gemm": lambda index: whole @ right}
    timings = session.time(calls, flops)
    world.say(f"the network takes {timings['wire'].ms:.2f} ms for {shard.nbytes >> 20} MiB of each rank")
    return flops * timings["wire"].ms / timings["gemm"].ms


def contests(cases: Sequence[Case], session: Session) -> Iterator[Contest]:
    """Every case, one after the other; a note about one whose inputs do not fit into memory: others may. Collective."""
    world = session.world
    domain = session.domain([case.slot_bytes(world.size, session.dtype, session.fp8) for case in cases])
    nodes, between = domain.topology.nodes, dict[str, Any]()
    if not reach_of(nodes).has_rules:
        between = {"nodes": nodes, "emulated": pretends(), "network_sms": sms_of_network(domain.config, domain.device)}
    for case in cases:
        planned = case.planned(world.size, session.dtype, session.fp8)
        misfit = misfit_in_fp8(session.fp8, case.m, (planned.n, planned.k), world.size)
        if planned.fp8 and misfit is not None:
            note(f"{case.name}: fp8 with {misfit}", session, failure=False)
            continue
        inputs, problem = world.result_of(partial(inputs_of, case, session))  # memory runs out on all ranks
        if inputs is None or problem is not None:
            note(f"{case.name}: inputs: {problem}", session, failure=True)
            continue
        baselines = baselines_of(case, world, inputs.first)
        # PyTorch's async-TP stays in a node, too, knows no fp8, and we have not captured it.
        if session.fp8 != "off" or session.graphs or not reach_of(nodes).may_choose("direct"):
            baselines.pop("async_tp", None)
        head = {"op": case.op, "pass": case.pass_, "world": world.size, "m": case.m, "n": case.n, "k": case.k}
        head |= {"dtype": str(session.dtype).removeprefix("torch."), **between}
        head |= {} if session.fp8 == "off" else {"fp8": session.fp8}
        head |= {"graphs": True} if session.graphs else {}
        columns, flops = ("sequence", "async_tp", "gemm", "comm"), case.flops(world.size)
        yield Contest(case.name, head, flops, inputs, ours(case, inputs.first, domain, session), baselines, columns)
        del inputs, baselines  # before the next come


def ours(case: Case, like: Operands, domain: OverlapDomain, session: Session) -> Runs:
    """The methods that serve a case."""
    planned, found = planned_like(case, domain, like), Runs()
    for method in serving(session.methods, planned):
        if case.all_reduces:
            found[method] = all_reducing(case, domain, method, like)
            continue
        choice = choose(method, planned, domain.device, cache_of(domain, case.name).table, domain.topology.nodes)
        exchanges = case.kind.exchanges
        found[method] = exchanged(case, domain, method) if exchanges else overlapped(case, domain, choice, like)
    return found


def exchanged(case: Case, domain: OverlapDomain, method: str) -> Run:
    """A pass of Ulysses as users call it: long sequences in parts. The dgrad of one operator, without a weight gradient, runs as
    the other's forward pass does."""
    operator = linear_all_to_all if case.kind.splits_columns else all_to_all_linear
    config, name = replace(domain.config, method=method), f"{case.op}/{case.pass_}"
    return lambda o: operator(o.left, o.right.t(), group=domain.group, config=config, name=name)


def all_reducing(case: Case, domain: OverlapDomain, method: str, like: Operands) -> Run:
    """A pass that all-reduces, as autograd runs it (all_reduce.py). Collective."""
    assert isinstance(like.right, torch.Tensor), "GEMM + AR has no form in fp8"
    config = replace(domain.config, method=method)
    spec, x, w = LINEAR_ALL_REDUCE, like.left, like.right.t()
    if case.has_wgrad:
        spec, x, w = LINEAR_DGRAD_ALL_REDUCE, like.whole, like.right
    with torch.enable_grad():  # a column linear sends nothing without
        op = op_of(spec, x.detach().requires_grad_(), w, None, domain.group, config, case.name)
    return lambda o: all_reduced(op, o.left, o.right, partial(wgrad, case, o))


def wgrad(case: Case, o: Operands) -> None:
    """The weight gradient, where it is part of a pass that all-reduces. o.whole is as large as x."""
    if case.has_wgrad:
        torch.mm(o.left.t(), o.whole)


def baselines_of(case: Case, world: World, like: Operands) -> Runs:
    """The baselines of a pass, for inputs like these. Buffers that a framework would reuse are reused."""
    if case.all_reduces:
        return all_reducing_baselines(case, world, like)
    kind = case.kind
    found: Runs = {"gemm": (lambda o: product(None, o.whole if kind.receives else o.left, o.right))}
    if kind.gathers:
        buffer = torch.empty_like(like.whole)
        found["comm"] = lambda o: world.gather(o.left, buffer)
        found["sequence"] = lambda o: product(None, world.gather(o.left, buffer), o.right)
        found["async_tp"] = lambda o: async_all_gather_matmul(o.left, o.right, world.group)[1]
    elif kind.reduces:
        found["comm"] = lambda o: world.scatter(o.whole)
        found["sequence"] = lambda o: world.scatter(product(None, o.left, o.right))
        found["async_tp"] = lambda o: async_matmul_reduce_scatter(o.left, o.right, world.group)
    elif kind.sums_blocks:
        found["comm"] = lambda o: world.exchange(o.left)
        found["sequence"] = lambda o: side_by_side(world.size, world.exchange(o.left)) @ o.right
    else:
        blocks = like.left.new_zeros(len(like.whole), like.right.shape[1] // world.size)
        found["comm"] = lambda o: world.exchange(blocks)
        found["sequence"] = lambda o: world.exchange(blocks_for(world.size, o.left @ o.right))
    return found


def all_reducing_baselines(case: Case, world: World, like: Operands) -> Runs:
    zeros = torch.zeros_like(like.whole)  # their sum stays finite, in place

    def gemms(o: Operands) -> None:
        product(None, o.left, o.right)
        wgrad(case, o)

    def sequence(o: Operands) -> torch.Tensor:
        y = world.all_reduce(product(None, o.left, o.right))
        wgrad(case, o)
        return y

    return {"gemm": gemms, "comm": lambda o: world.all_reduce(zeros), "sequence": sequence}


def blocks_for(ranks: int, y: torch.Tensor) -> torch.Tensor:
    """y [M/W, F] as W blocks of rows [M, F/W], one after the other: block d has the columns for rank d."""
    return y.unflatten(1, (ranks, -1)).transpose(0, 1).contiguous().flatten(0, 1)
