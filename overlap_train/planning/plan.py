"""The plan of a call: everything that the first call with some shapes decides, once, for all later ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..config import OverlapConfig
from ..select.choose import Choice, alone, choose
from ..select.method import Method
from ..select.table import Table
from .arguments import Request, shapes_of
from .engine_plan import EnginePlan, NodeNetwork, engine_plan, sent_again
from .low_latency import LOW_LATENCY, flagged_bytes
from .passes import Pass
from .schedule.kinds import INBOUND
from .schedule.topology import Topology
from .spec import OperatorSpec


@dataclass(frozen=True)
class Plan:
    """The passes of one operator.

    dgrad_alone: the input gradient where no weight gradient is wanted: nothing of it is held back. wgrad: how the weight
    gradient's operand is sent again; None where it need not be.
    """

    spec: OperatorSpec
    config: OverlapConfig
    fprop: EnginePlan
    dgrad: EnginePlan
    dgrad_alone: EnginePlan
    wgrad: EnginePlan | None
    request: Request


def make_plan(
    spec: OperatorSpec, config: OverlapConfig, table: Table, topology: Topology, x: torch.Tensor, w: torch.Tensor,
    device: torch.device | None = None, network_gbs: float = 0.0,
) -> Plan:  # fmt: skip
    """The plan of `spec` for operands like x and w, of any shape: what is wrong with them is found by `spec.error`. device: where
    it runs; None: where x is. network_gbs: what the network between the nodes carries, the same on all ranks; 0: unknown."""
    device = device or x.device
    rows, (n, k) = spec.global_rows(x, topology.world), (w.shape[:1].numel(), w.shape[-1:].numel())
    first = Pass(spec.fprop, rows, n, k, x.dtype, topology.world)
    network = network_of(config, network_gbs)
    sends_again = spec.sends_input and config.gathered_input == "regather"
    if spec.multiplies:
        second = first.dgrad
        forward, backward = (choose(config.method, p, device, table, topology.nodes) for p in (first, second))
        pushes_again = sends_again and forward.method != "collective"
        if spec.sends_input and not pushes_again:  # it would collide with nothing
            backward = backward.by(barrier_first=False)
        fprop = engine_plan(forward, first, topology, device, w, network)
        dgrad = dgrad_alone = engine_plan(backward, second, topology, device, w, network)
        if (by_itself := alone(backward, second, device)) != backward:
            dgrad_alone = engine_plan(by_itself, second, topology, device, w, network)
        dgrad = replace(dgrad, beside_wgrad=dgrad.kind not in INBOUND)
    else:
        fprop = dgrad = dgrad_alone = _exchange(first, config, topology, device, w, network)
    wgrad = sent_again(fprop, topology) if sends_again else None
    request = _request(spec, config, x, w, topology.world, (fprop, dgrad, wgrad))
    return Plan(spec, config, fprop, dgrad, dgrad_alone, wgrad, request)


def _request(
    spec: OperatorSpec, config: OverlapConfig, x: torch.Tensor, w: torch.Tensor, world: int,
    engines: tuple[EnginePlan, EnginePlan, EnginePlan | None],
) -> Request:  # fmt: skip
    """What ranks compare, and the memory that a slot needs. engines: of forward, backward, and of what is sent again."""
    fprop, dgrad, _ = engines
    how = f"method {fprop.variant} forward and {dgrad.variant} backward, gathered_input={config.gathered_input}"
    received = spec.slot_bytes(x, w, world)
    methods = {engine.method for engine in engines if engine is not None}
    return Request(
        spec.name,
        f"{shapes_of(x, w)}, {how}",
        slot_bytes=received if methods - {"collective", LOW_LATENCY} else 0,
        flagged_bytes=flagged_bytes(received, world) if LOW_LATENCY in methods else 0,
    )


def _exchange(
    pass_: Pass, config: OverlapConfig, topology: Topology, device: torch.device, w: torch.Tensor, network: NodeNetwork
) -> EnginePlan:
    """An exchange alone. Beside it runs a product of another group, whose kernel may hold its SMs to its end: waits
    need one (engine_plan.py: _wait_sms)."""
    engine = engine_plan(_without_product(config, topology), pass_, topology, device, w, network)
    return replace(engine, wait_sms=int(topology.nodes > 1 and device.type == "cuda" and engine.slots > 0))


def network_of(config: OverlapConfig, network_gbs: float) -> NodeNetwork:
    return NodeNetwork(config.network_sms, config.reduce_sms, network_gbs)


def _without_product(config: OverlapConfig, topology: Topology) -> Choice:
    """How an exchange alone runs: by the copy engine, which leaves the SMs to the product of another group beside it."""
    across = topology.nodes > 1 and config.method == "auto"
    if config.method == "collective" or across:
        unmeasured = "auto: not tuned: all-to-alls beside a product across nodes are not measured"
        return Choice(Method("collective"), unmeasured if across else "asked for")
    # Across nodes in one chunk: nothing multiplies a chunk while the next one comes.
    return Choice(Method("chunked", chunks=int(topology.nodes > 1)), "beside a product")


def barrier_first(plan: Plan, gathers: bool) -> bool:
    """Whether the backward pass starts with a barrier. gathers: x is sent again in it."""
    return plan.dgrad.variant.barrier_first and (gathers or not plan.spec.sends_input)
