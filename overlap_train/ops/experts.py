"""The plan of an operator of experts: by which method one call runs, the same on all ranks, which all know the matrix of counts.

Plans hold for every number of rows. What a call needs of a slot decides: there is room, the heap grows until there is (up to
`experts_room` times what even routing needs), or the call is a collective.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..config import OverlapConfig, check_type
from ..group.memory import Request, prepare
from ..group.slots import SLOTS
from ..schedule.kinds import Kind
from ..schedule.order import Topology, Transfers, sources
from ..select.method import Method, dtype_name
from ..select.tiles import HOPPER_TILE, LIBRARY
from .messages import slot_bytes
from .plan import EnginePlan, Plan
from .plan_cache import OnPlan, cache_of
from .planned import Planned, PlannedOp
from .routing import Routing
from .spec import DTYPES, OperatorSpec, autocast_error, tensor_error

OVERFLOW = "more rows for one rank than slots hold (experts_room)"


def expert_op(
    spec: OperatorSpec, x: torch.Tensor, weights: Sequence[torch.Tensor], probs: torch.Tensor | None, routing: Routing,
    config: OverlapConfig | None, name: str, on_plan: OnPlan | None,
) -> PlannedOp:  # fmt: skip
    """The planned call of the operator of experts `name`. Communicates at its first call, and where the heap has to grow.

    Raises:
        ValueError: something is wrong with the arguments, or the ranks differ; on all ranks at a first call.
        OverlapTimeoutError, RuntimeError: see ops/plan_cache.py: plan_of; or the routing was made before shutdown().
    """
    check_type(config)
    domain = routing.domain
    if domain.closed:
        raise RuntimeError(f"{name}: its routing was made before shutdown(); make another one")
    cache = cache_of(domain, name)
    config = config or cache.defaults
    problem = _error(spec, x, weights, probs, routing, name)
    trains = _trained(x, weights, probs)
    shapes = tuple(weights[0].shape) if weights else ()
    key = (spec.name, routing.experts, shapes, x.dtype, x.device, trains, config)
    methods = cache.plans.get(key)
    if methods is not None and problem is not None:
        raise ValueError(problem)  # of a call that peers know, in which nobody asks
    features = shapes[-1 if spec.sends_input else 0] if problem is None else 1
    needed = slot_bytes(routing.largest, domain.world_size, features, x.dtype)
    holds = domain.heap is not None and needed <= domain.layout.slot_bytes
    even = -(-routing.total // domain.world_size**2)
    room = slot_bytes(int(config.experts_room * even), domain.world_size, features, x.dtype)
    most = ((config.symmetric_mib - 1) << 20) // SLOTS
    shares_memory = domain.topology.nodes == 1 and config.method != "collective"
    grows = not holds and needed <= room and shares_memory
    if methods is None or grows:
        what = f"{routing.experts} experts {[*shapes]}, {dtype_name(x.dtype)}"
        how = f"method {config.method}, experts_room={config.experts_room:g}"
        # What does not fit at all is refused there.
        request = Request(spec.name, what, min(room, max(most, needed)) * grows, how=how)
        with domain.exclusively(name):
            prepare(domain, request, problem, name, trains)
        plans = [
            make_expert_plan(spec, config, domain.topology, x.dtype, request, overflows) for overflows in (False, True)
        ]
        methods = cache.plans.put(key, {overflows: Planned(domain, plan) for overflows, plan in enumerate(plans)})
    op = methods[not holds and not grows].linear(name)
    if on_plan is not None:
        on_plan(op.plan, None)
    return op


def make_expert_plan(
    spec: OperatorSpec, config: OverlapConfig, topology: Topology, dtype: torch.dtype, request: Request, overflows: bool = False,
) -> Plan:  # fmt: skip
    """The plan of `spec` for rows of a dtype. overflows: slots are too small for a call."""
    method, reason = "chunked", "experts run by no kernel of ours yet"
    if topology.nodes > 1:
        method, reason = "collective", f"the group spans {topology.nodes} nodes"
    elif config.method == "collective":
        method, reason = "collective", "asked for"
    elif overflows:
        method, reason = "collective", OVERFLOW
    elif config.method == "chunked":
        reason = "asked for"

    def engine(kind: Kind) -> EnginePlan:
        order = sources(topology)
        return EnginePlan(kind, reason, Method(method), LIBRARY, HOPPER_TILE, 1, Transfers(()), order, dtype)

    fprop, dgrad = engine(spec.fprop), engine(spec.fprop.dgrad)
    return Plan(spec, config, fprop, dgrad, dgrad, None, request, dtype, rows=0)


def _trained(x: torch.Tensor, weights: Sequence[torch.Tensor], probs: torch.Tensor | None) -> str:
    """Which operands get gradients, in words."""
    if not torch.is_grad_enabled():
        return "no gradients"
    trained = {"x": x.requires_grad, "w": any(weight.requires_grad for weight in weights)}
    if probs is not None:
        trained["probs"] = probs.requires_grad
    return ", ".join(f"{what} {'trained' if is_so else 'frozen'}" for what, is_so in trained.items())


def _error(
    spec: OperatorSpec, x: torch.Tensor, weights: Sequence[torch.Tensor], probs: torch.Tensor | None, routing: Routing, name: str,
) -> str | None:  # fmt: skip
    """What is wrong with the arguments of a call, or None."""
    here, of_x = routing.experts // routing.world_size, spec.x_name
    tensors = {of_x: x, "probs": probs, **{f"w[{number}]": weight for number, weight in enumerate(weights)}}
    strange = tensor_error(name, tensors) or autocast_error(name, x)
    if strange is not None:
        return strange
    if len(weights) != here or any(weight.shape != weights[0].shape or weight.dim() != 2 for weight in weights):
        shapes = ", ".join(str(tuple(weight.shape)) for weight in weights)
        return f"{name}: w has {len(weights)} weights ({shapes}); it needs one [N, K] for each of this rank's {here} experts"
    rows, whose = (routing.tokens_here, "tokens") if spec.sends_input else (routing.rows_received, "received rows")
    if x.dim() != 2 or x.shape[0] != rows or x.shape[1] != weights[0].shape[1]:
        return (
            f"{name}: {of_x} has shape {tuple(x.shape)}; with this routing and weights {tuple(weights[0].shape)} it must be "
            f"[{rows}, {weights[0].shape[1]}], a row for each of the {whose}"
        )
    if 0 in weights[0].shape:
        return f"{name}: w has weights {tuple(weights[0].shape)}; dimensions must be at least 1"
    if x.dtype not in DTYPES:
        return f"{name}: {of_x} has dtype {x.dtype}; supported are {', '.join(map(str, DTYPES))}"
    for number, weight in enumerate(weights):
        if weight.dtype != x.dtype or weight.device != x.device:
            its, theirs = (f"{tensor.dtype} on {tensor.device}" for tensor in (weight, x))
            return f"{name}: w[{number}] is {its}, {of_x} {theirs}; they must be the same"
    if probs is not None and (probs.shape != (routing.tokens_here, routing.experts) or not probs.is_floating_point()):
        return (
            f"{name}: probs is {probs.dtype} {tuple(probs.shape)}; it must be floating-point "
            f"[{routing.tokens_here}, {routing.experts}], one for each token and expert"
        )
    return None
