"""The plan of a call: everything that the first call with some shapes decides, once, for all later ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from typing import Any

import torch

from ..config import OverlapConfig, flag_name
from ..group.domain import OverlapDomain
from ..group.memory import Request
from ..group.signals import Tag
from ..group.slots import Layout
from ..schedule.kinds import Kind
from ..schedule.order import Topology, Transfers, sources, transfers_of
from ..select.choose import Choice, alone, choose
from ..select.cost import all_reduce_us
from ..select.method import (
    LOW_LATENCY,
    MOST_BYTES,
    TWO_SHOTS,
    WORDS,
    Method,
    Pass,
    all_reduce_memory,
    flagged_bytes,
    refusal,
)
from ..select.system import System
from ..select.table import Table
from ..select.tiles import (
    HOPPER,
    HOPPER_TILE,
    LIBRARY,
    PORTABLE,
    TileConfig,
    chunks_of,
    on_hopper,
    portable_tile,
    tma_reads_weight,
)
from .launch import MOST_DIRECT_PEERS
from .quantize import AMAX_BYTES
from .spec import OperatorSpec, shapes_of
from .table import TABLE

SERIALISING = ("CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING")


@dataclass(frozen=True, eq=False)
class EnginePlan:
    """One pass: which engine, how it runs, and why. Compared by identity: calls look up their launches by it.

    variant: its method with options. kernels: HOPPER, PORTABLE or LIBRARY. tile: of those kernels; the library has its own.
    chunks: of each block. transfers: what this rank sends. sources: the other ranks in the order in which their blocks arrive.
    dtype: of the product.
    shares: a scatter whose sums are sent on to all ranks, chunk by chunk, as they are done.
    concurrent_sms: that what another group sends holds meanwhile. beside_wgrad: a weight gradient is multiplied while its result
    leaves.
    """

    kind: Kind
    reason: str
    variant: Method
    kernels: str
    tile: TileConfig
    chunks: int
    transfers: Transfers
    sources: tuple[int, ...]
    dtype: torch.dtype
    shares: bool = False
    concurrent_sms: int = 0
    beside_wgrad: bool = False

    reach = "node"  # of TABLE in ops/table.py: how the ranks of the group reach each other

    @cached_property
    def engine(self) -> Callable[..., Any]:
        """The class that runs the pass."""
        found: Callable[..., Any] = TABLE[self.reach][self.kind][self.method]
        return found

    def start(self, domain: OverlapDomain, tag: Tag, *operands: Any) -> Any:
        """A started engine: AllGatherGemm of x_shard_m; GemmReduceScatter of a_mk, b_kn and perhaps a bias; GemmAllToAll of
        a_shard_m, b_kn and perhaps `into`; AllToAllGemm of the blocks to send, [W, M/W, K/W], each contiguous; of experts
        those of dispatch_gemm.py and gemm_combine.py."""
        return self.engine(domain, self, tag, *operands)

    @cached_property
    def method(self) -> str:
        return self.variant.name

    @cached_property
    def slots(self) -> int:
        """How many it takes of the workspace."""
        return 0 if self.method == "collective" else 1

    @cached_property
    def sm_margin(self) -> int:
        """SMs that products leave alone, so that nothing starves another."""
        return self.concurrent_sms

    @cached_property
    def reduces_later(self) -> bool:  # by a kernel of its own
        return self.variant.split_reduction

    @cached_property
    def hides_copies(self) -> bool:
        """Whether a copy within the GPU, enqueued behind what the plan pushes, is hidden by the plan's kernel. That outlasts its
        pushes, since it waits for the peers', and its last wave of tiles leaves SMs to the copy unless it is full."""
        outlasts = self.kind.gathers or (self.kind.reduces and not self.reduces_later)
        return outlasts and self.method == "fused" and self.reach == "node"

    @property
    def sends_ahead(self) -> bool:
        """Whether copies send an operand, which may leave before the product of the part before it."""
        return self.kind.sums_blocks and self.variant.pushes

    @property
    def may_pull(self) -> bool:
        """Whether ranks may pull what a product leaves for them, beside the product of the part after it."""
        return self.kind.splits_columns and self.variant.pushes and self.reach == "node"

    @property
    def error(self) -> str | None:
        """Why the engine cannot run between the ranks of the group, or None."""
        return None


class Planner:
    """Plans passes of a group inside one node; `planner_of` finds that of any group."""

    def __init__(self, topology: Topology, config: OverlapConfig) -> None:
        self.topology, self.config = topology, config

    def chunks(self, how: Method, pass_: Pass, device: torch.device) -> int:
        """Into how many chunks each block is cut."""
        return chunks_of(how, pass_, device)

    def plan(self, choice: Choice, pass_: Pass, device: torch.device, w: torch.Tensor) -> EnginePlan:
        """How a pass runs by a choice. w: the weight shard, of which its layout counts."""
        kind = pass_.kind.engine
        chunks = self.chunks(choice.how, pass_, device)
        if choice.how.chunks:  # these rows may not divide into as many as were measured
            choice = choice.by(chunks=chunks)
        kernels = _kernels(kind, choice, pass_, device, w)
        tile = portable_tile(pass_.dtype, device) if kernels == PORTABLE else HOPPER_TILE
        how, order = choice.how, sources(self.topology, kind)
        transfers = transfers_of(kind, self.topology, chunks, tiled=how.name == "fused")
        return EnginePlan(kind, choice.reason, how, kernels, tile, chunks, transfers, order, pass_.dtype)

    def sent_again(self, fprop: EnginePlan) -> EnginePlan:
        """How x is sent again for its weight gradient: by the copy engine, which leaves the SMs to the dgrad beside it; chunks
        would be pushes for nothing. As in the forward pass where that sends by NCCL, or few rows."""
        method = fprop.method if fprop.method in ("collective", LOW_LATENCY) else "chunked"
        return self._in_whole_blocks(fprop.kind, "for wgrad", method, fprop.dtype)

    def amax_gather(self, by_nccl: bool, device: torch.device) -> EnginePlan:
        """How each rank sends the largest elements of its shard, or other few numbers, to all others. by_nccl: as what comes
        after them."""
        method = "collective" if by_nccl else LOW_LATENCY if device.type == "cuda" else "chunked"
        return self._in_whole_blocks(Kind.AG_GEMM, "for amax", method, torch.float32)

    def _in_whole_blocks(self, kind: Kind, reason: str, method: str, dtype: torch.dtype) -> EnginePlan:
        transfers, order = transfers_of(kind, self.topology, chunks=1), sources(self.topology, kind)
        return EnginePlan(kind, reason, Method(method), LIBRARY, HOPPER_TILE, 1, transfers, order, dtype)

    def exchange(self, pass_: Pass, device: torch.device, w: torch.Tensor) -> EnginePlan:
        """An exchange alone, beside a product of another group."""
        return self.plan(self.without_product(), pass_, device, w)

    def without_product(self) -> Choice:
        """How an exchange alone runs: by the copy engine, which leaves the SMs to the product of another group beside it."""
        if self.config.method == "collective":
            return Choice(Method("collective"), "asked for")
        return Choice(Method("chunked"), "beside a product")


def planner_of(topology: Topology, config: OverlapConfig) -> Planner:
    """The Planner of a group. See there."""
    make = Planner if topology.nodes == 1 else import_module("...nodes.plan", __name__).InterNodePlanner
    planner: Planner = make(topology, config)
    return planner


def _kernels(kind: Kind, choice: Choice, pass_: Pass, device: torch.device, w: torch.Tensor) -> str:
    if not choice.how.multiplies:
        return LIBRARY
    # what is made in fp8 lies as it must
    if w.dim() != 2 or not on_hopper(pass_, device) or not (pass_.fp8 or tma_reads_weight(w)):
        return PORTABLE
    too_many = not kind.receives and choice.method == "direct" and pass_.world - 1 > MOST_DIRECT_PEERS
    return PORTABLE if too_many else HOPPER


@dataclass(frozen=True)
class Plan:
    """The passes of one operator.

    dgrad_alone: the input gradient where no weight gradient is wanted: nothing of it is held back. wgrad: how the weight
    gradient's operand is sent again; None where it need not be.

    amax: in fp8 with one scale that is found in each call, how ranks tell each other the largest elements of what is gathered;
    None: also where scales are given (takes_scales).

    rows: of all ranks, M; of experts 0, since each call has as many as it has.

    Of an operator that all-reduces all of these are the pass that does. gather: how the sums are gathered again. shots: how
    low_latency does both in one kernel (select/method.py).
    """

    spec: OperatorSpec
    config: OverlapConfig
    fprop: EnginePlan
    dgrad: EnginePlan
    dgrad_alone: EnginePlan
    wgrad: EnginePlan | None
    request: Request
    dtype: torch.dtype
    rows: int
    gather: EnginePlan | None = None
    shots: str = ""
    amax: EnginePlan | None = None

    @property
    def slots_of_amax(self) -> int:
        return 0 if self.amax is None else self.amax.slots


def takes_scales(config: OverlapConfig | None, w: torch.Tensor) -> bool:
    """Whether a call in fp8 with one scale a tensor takes those that the owner of its weight gives (GivenScales)."""
    fp8 = getattr(config, "fp8", "off")  # what is no config is refused later
    return fp8 not in ("off", "blockwise") and hasattr(w, "fp8_scales")


def fprop_of(spec: OperatorSpec, config: OverlapConfig, world: int, x: torch.Tensor, w: torch.Tensor) -> Pass:
    """The forward pass of `spec`, were its rows sharded, with operands like x and w."""
    n, k, blockwise = w.shape[:1].numel(), w.shape[-1:].numel(), config.fp8 == "blockwise"
    twice = blockwise and spec.sends_input and config.gathered_input == "keep"
    return Pass(spec.fprop, spec.global_rows(x, world), n, k, x.dtype, world, config.fp8 != "off", blockwise, twice)


def make_plan(
    spec: OperatorSpec, config: OverlapConfig, table: Table, topology: Topology, x: torch.Tensor, w: torch.Tensor,
    holds: Callable[[Request], bool] | None = None,
) -> Plan:  # fmt: skip
    """The plan of `spec` for operands like x and w, of any shape: what is wrong with them is found by `spec.error`.

    holds: whether the group may have so much memory beside what it has, the same on all ranks; None: as in an empty heap."""
    device, world = x.device, topology.world
    first = fprop_of(spec, config, world, x, w)
    planner = planner_of(topology, config)
    if spec.replicated:
        return _all_reducing(spec, planner, first, x, w, holds)
    sends_again = spec.sends_input and config.gathered_input == "regather"
    if spec.multiplies:
        second = first.dgrad
        forward, backward = [choose(config.method, p, device, table, topology.nodes) for p in (first, second)]
        pushes_again = sends_again and forward.method != "collective"
        if spec.sends_input and not pushes_again:  # it would collide with nothing
            backward = backward.by(barrier_first=False)
        fprop = planner.plan(forward, first, device, w)
        dgrad = dgrad_alone = planner.plan(backward, second, device, w)
        if (by_itself := alone(backward, second, device)) != backward:
            dgrad_alone = planner.plan(by_itself, second, device, w)
        dgrad = replace(dgrad, beside_wgrad=not dgrad.kind.receives)
    else:
        fprop = dgrad = dgrad_alone = planner.exchange(first, device, w)
    wgrad = planner.sent_again(fprop) if sends_again else None
    given = takes_scales(config, w)
    finds_scales = first.fp8 and not first.blockwise and not given
    amax = planner.amax_gather(fprop.method == "collective", device) if finds_scales else None
    how = f"method {fprop.variant} forward and {dgrad.variant} backward, gathered_input={config.gathered_input}"
    how += f", fp8={config.fp8}{', scales given' * given}" * first.fp8
    methods = {one.method for one in (fprop, dgrad, wgrad, amax) if one is not None}
    passes = (first, first.dgrad) if spec.multiplies else ()
    received = max((one.received_bytes for one in passes), default=spec.slot_bytes(x, w, world))
    words = received if LOW_LATENCY in methods else 0
    if amax is not None and amax.method == LOW_LATENCY:
        words = max(words, AMAX_BYTES * world)
    request = Request(
        spec.name, shapes_of(x, w), how=how,
        slot_bytes=received if methods - {"collective", LOW_LATENCY} else 0,
        flagged_bytes=flagged_bytes(words, world),
    )  # fmt: skip
    return Plan(spec, config, fprop, dgrad, dgrad_alone, wgrad, request, x.dtype, first.m, amax=amax)


def _all_reducing(
    spec: OperatorSpec, planner: Planner, first: Pass, x: torch.Tensor, w: torch.Tensor,
    holds: Callable[[Request], bool] | None,
) -> Plan:  # fmt: skip
    """The plan of an operator that all-reduces. first: its forward pass, were its rows sharded. Nobody measures all-reduces, and
    measurements of scatters say half."""
    topology, config, pass_ = planner.topology, planner.config, first if first.kind.reduces else first.dgrad
    pass_ = replace(pass_, kind=pass_.kind.engine)  # the weight gradient comes after its sums
    in_forward, world, received = not spec.sends_input, topology.world, spec.slot_bytes(x, w, topology.world)
    most = config.symmetric_mib << 20
    holds = holds or (lambda request: Layout(world, request.slot_bytes, request.flagged_bytes).nbytes <= most)
    fits = _shots_that_fit(received, world, holds, System.of(x.device))
    without = () if fits else (LOW_LATENCY,)
    choice = choose(config.method, pass_, x.device, {}, topology.nodes, True, in_forward, without)
    if config.tune_steps:
        choice = replace(choice, why=f"{choice.why}; tune_steps measures no all-reduce")
    shares = in_forward and choice.method == "fused" and topology.nodes == 1
    if shares:
        choice = choice.by(split_reduction=False)
    plan = replace(planner.plan(choice, pass_, x.device, w), shares=shares)
    gather = planner.sent_again(replace(plan, kind=plan.kind.dgrad))
    memory, shots = (received * (plan.method != "collective"), 0), ""
    if plan.method == LOW_LATENCY:
        shots = fits[0] if fits else TWO_SHOTS
        memory = all_reduce_memory(received, world)[shots]
    trains_x = x.requires_grad and torch.is_grad_enabled()
    if not (trains_x or in_forward):  # a column linear sends in its backward only
        memory = (0, 0)
    how = f"method {plan.variant}{', ' * bool(shots)}{shots}"
    request = Request(spec.name, shapes_of(x, w), *memory, how=how)
    return Plan(spec, config, plan, plan, plan, None, request, x.dtype, first.m, gather, shots)


def _shots_that_fit(received: int, world: int, holds: Callable[[Request], bool], system: System) -> list[str]:
    """How low_latency may all-reduce in the memory that there is, the fastest way first."""
    memory, us = all_reduce_memory(received, world), all_reduce_us(received, world, system)
    ways = [how for how in us if how != WORDS or memory[how][1] <= flagged_bytes(MOST_BYTES, 1)]
    return sorted([how for how in ways if holds(Request("", "", *memory[how]))], key=us.__getitem__)


def error_on_device(plan: Plan, device: torch.device, interpreted: Callable[[], bool]) -> str | None:
    """Why the plan's kernels cannot run on a device, or None. interpreted: kernels run in Triton's interpreter."""
    for engine in (plan.fprop, plan.dgrad):
        if engine.method == LOW_LATENCY:
            refused = refusal(plan.spec.name, engine.kind, plan.request.flagged_bytes)
            if refused is not None:
                return refused
        if not engine.variant.kernels:
            continue
        if plan.config.fp8 != "off" and engine.variant.multiplies and engine.kernels != HOPPER:
            return (
                f"method={engine.method!r} with fp8={plan.config.fp8!r}: its kernels multiply fp8 on Hopper GPUs, to results in "
                f"bf16 or fp16; use 'auto' or 'chunked' ({flag_name('method')})"
            )
        variable = serialising() if device.type == "cuda" else None
        if variable is not None:
            taken = "" if plan.config.method == engine.method else f", which takes {engine.method!r} here,"
            return (
                f"method={plan.config.method!r}{taken} with {variable} set: the host would wait for each kernel, and ours wait "
                f"for what hosts of peers enqueue later; unset it, or use 'chunked' or 'collective' ({flag_name('method')})"
            )
        if device.type == "cpu" and not interpreted():
            return (
                f"method={engine.method!r} with CPU tensors: its kernels run there in Triton's interpreter only, which is for "
                f"tests (TRITON_INTERPRET=1 before the first import); use 'auto' or 'chunked' ({flag_name('method')})"
            )
        if device.type == "cpu" and engine.variant.multiplies and plan.dtype == torch.bfloat16:
            return (
                f"method={engine.method!r} with bfloat16 CPU tensors: Triton's interpreter multiplies their bit patterns; "
                f"use float32, float16, or method 'chunked' ({flag_name('method')})"
            )
    return None


def serialising() -> str | None:
    """The variable of the environment under which the host waits for its GPU at each launch, or each allocation; None: none is
    set."""
    return next((name for name in SERIALISING if os.environ.get(name, "0") not in ("", "0")), None)


def error_together(exchange: Plan, product: Plan, nodes: tuple[int, int]) -> str | None:
    """Why an all-to-all cannot run beside the product of another group (TP x Ulysses), or None; the same on all ranks of both.

    nodes: how many the two groups span, the worst answer of any rank (ulysses/two_groups.py: nodes_of_groups). The methods asked
    for decide, and no engine: those of two TP groups may differ, where one spans nodes and the other does not.
    """
    if min(nodes) == 1 or exchange.config.method in ("auto", "collective") or product.config.method == "collective":
        return None
    return (
        f"group and tp_group span {nodes[0]} and {nodes[1]} nodes: two groups of GPUs do not overlap across nodes together yet; "
        f"use 'auto' or 'collective', or a tp_group inside one node ({flag_name('method')})"
    )
