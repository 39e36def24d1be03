"""The plan of an operator of experts: by which method one call runs, the same on all ranks, which all know the matrix of counts.

Plans hold for every number of rows. What a call needs of a slot decides: there is room, the heap grows until there is (up to
`experts_room` times what even routing needs, and as memory allows), or the call is a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

import torch

from ..config import OverlapConfig, check_type
from ..group.domain import OverlapDomain
from ..group.memory import Request, may_hold, prepare
from ..schedule.kinds import Kind
from ..schedule.order import Topology, Transfers, sources
from ..select.method import LOW_LATENCY, Method, dtype_name, flagged_bytes
from ..select.tiles import HOPPER, HOPPER_TILE, LIBRARY, tma_reads
from .blocks import BLOCK
from .expert_tables import expert_chunks
from .launch_experts import MOST_RANKS
from .messages import slot_bytes
from .plan import EnginePlan, Plan, Planner
from .plan_cache import OnPlan, cache_of, compiling_ahead, in_words
from .planned import Planned, PlannedOp
from .routing import Routing
from .spec import DTYPES, EXPERT_ROUTING, OperatorSpec, autocast_error, no_fp8_on, refuse_non_tensors, tensor_error

OVERFLOW = "more rows for one rank than slots hold (experts_room)"
NO_MEMORY = "more rows for one rank than slots hold (symmetric_mib, or a CUDA graph holds their addresses)"
OVERFLOWS = (OVERFLOW, NO_MEMORY)


def routing_op(chosen: torch.Tensor, domain: OverlapDomain, config: OverlapConfig | None, name: str) -> PlannedOp:
    """The planned gather of how many rows each rank has for each expert, int32 [1, E] of each. Raises as ExpertCall."""
    cache, world, experts = cache_of(domain, name), domain.world_size, chosen.shape[-1:].numel()
    config, problem = config or cache.defaults, None
    if chosen.dim() != 2 or chosen.dtype != torch.bool or not experts or experts % world:
        problem = (
            f"{name}: experts is {chosen.dtype} {tuple(chosen.shape)}; it must be bool [T, E], with E, how many experts there "
            f"are, divisible by the group's {world} ranks"
        )
        if not chosen.is_floating_point() and chosen.dtype != torch.bool:
            problem += "; of indices [T, k] make it by torch.zeros(T, E, dtype=torch.bool).scatter_(1, indices, True)"
    key = (EXPERT_ROUTING.name, experts, config)
    known = cache.plans.get(key)
    if known is None and problem is None and chosen.is_cuda:
        with compiling_ahead(name):
            from .rehearsal import compile_routing_ahead

            compile_routing_ahead(domain, *chosen.shape)
    if known is None or problem is not None:
        nbytes = 4 * experts * world
        what = Request(EXPERT_ROUTING.name, f"rows of {experts} experts", how=f"method {config.method}")
        gather = Planner(domain.topology, config).amax_gather(_by_nccl(domain, config), domain.device)
        words = flagged_bytes(nbytes, world) * (gather.method == LOW_LATENCY)
        request = replace(what, slot_bytes=nbytes * (gather.method == "chunked"), flagged_bytes=words)
        _agree(domain, request, problem, name, known is not None)
        plan = Plan(EXPERT_ROUTING, config, gather, gather, gather, None, request, torch.int32, rows=0)
        known = cache.plans.put(key, {None: Planned(domain, plan)})
    return known[None].linear(name)


class ExpertCall:
    """A call of the operator of experts `name`, made before the host knows how many rows there are: `op` waits for that.

    Raises:
        ValueError, RuntimeError: config is no OverlapConfig; routing is none, or was made before shutdown().
    """

    def __init__(
        self, spec: OperatorSpec, x: torch.Tensor, weights: Sequence[torch.Tensor], probs: torch.Tensor | None, routing: Routing,
        config: OverlapConfig | None, name: str, on_plan: OnPlan | None,
    ) -> None:  # fmt: skip
        check_type(config)
        operands = {spec.x_name: x} | ({} if probs is None else {"probs": probs})
        refuse_non_tensors(name, operands)
        if not isinstance(routing, Routing):
            raise ValueError(
                f"{name}: routing is a {type(routing).__name__}; it must be what expert_routing returned in this forward pass"
            )
        if routing.domain.closed:
            raise RuntimeError(f"{name}: its routing was made before shutdown(); make another one")
        self._spec, self._x, self._weights, self._probs, self._routing = spec, x, weights, probs, routing
        self._name, self._on_plan, self._cache = name, on_plan, cache_of(routing.domain, name)
        self._config = config = config or self._cache.defaults
        self._trains_w = torch.is_grad_enabled() and any(map(attrgetter("requires_grad"), weights))
        self._trains = in_words(dict(x=x.requires_grad, w=self._trains_w))
        probs_train = probs is not None and torch.is_grad_enabled() and probs.requires_grad
        self._with_probs = "" if probs is None else ", probs that require grad" if probs_train else ", probs"
        # All that is checked once: of known calls only the number of rows may be wrong. The first part ranks have in common.
        shapes = frozenset(map(attrgetter("shape", "dtype"), weights))
        self._common = (
            spec.name, routing.experts, shapes, x.shape[1:], x.dtype, self._with_probs, self._trains, config.agreed
        )  # fmt: skip
        kinds = frozenset(map(type, weights)), frozenset(map(attrgetter("device"), weights))
        of_probs = None if probs is None else (probs.shape[1:], probs.dtype, probs.device)
        self._key = (*self._common, len(weights), kinds, x.device, of_probs, config)
        self._problem = tensor_error(name, operands) or autocast_error(name, x)

    def op(self) -> PlannedOp:
        """The planned call, once the rows are counted. Communicates at its first call, and where the heap has to grow.

        Raises:
            ValueError: something is wrong with the arguments, or the ranks differ; on all ranks at a first call.
            OverlapTimeoutError, OverlapMismatchError, RuntimeError: see ops/plan_cache.py: plan_of; or the counts did not come.
        """
        spec, x, weights, probs, routing = self._spec, self._x, self._weights, self._probs, self._routing
        domain, name, known = routing.domain, self._name, self._cache.plans.get(self._key)
        rows = routing.tokens_here if spec.sends_input else routing.rows_received
        fits = known is not None and len(x) == rows and x.device == routing.device
        fits = fits and (probs is None or len(probs) == routing.tokens_here)
        problem = self._problem or (
            None if fits else _error(spec, x, weights, probs, routing, self._config, rows, name)
        )
        asked, overflow = (0, None) if problem is not None else _memory(spec, weights[0], routing, self._config)
        if known is None or problem is not None or asked:
            known = self._agreed(problem, asked, known is not None)
            if known[None].plan.fprop.method == "fused" and overflow is None:
                with compiling_ahead(name):
                    from .rehearsal import compile_experts_ahead

                    compile_experts_ahead(domain, known[None].plan, weights, probs is not None)
        op = known[overflow].linear(name)
        if op.plan.fprop.method != "fused":
            routing.prepare()
        if self._on_plan is not None:
            self._on_plan(op.plan, None)
        return op

    def _agreed(self, problem: str | None, asked: int, is_known: bool) -> dict[object, Planned]:
        """The plans of such calls, by what does not fit, once ranks agree on one; else it raises."""
        spec, weights, routing, config, dtype = self._spec, self._weights, self._routing, self._config, self._x.dtype
        domain = routing.domain
        of_x = f" of {self._x.shape[1]} features" if self._x.dim() == 2 else ""
        what = f"{routing.experts} experts {[*weights[0].shape] if weights else []}, rows{of_x}, {dtype_name(dtype)}"
        what += self._with_probs + ("" if config.fp8 == "off" else f", fp8 {config.fp8}")
        request = Request(spec.name, what, asked, how=f"method {config.method}, experts_room={config.experts_room:g}")
        is_known = is_known or bool(self._cache.agreed.get(self._common))
        if problem is not None or asked or not is_known:
            _agree(domain, request, problem, self._name, is_known, self._trains)
        self._cache.agreed.put(self._common, True)
        served = len(weights) if _kernels_serve(weights[0], routing.world_size) else None
        plans: dict[object, Planned] = {
            why: Planned(
                domain, make_expert_plan(spec, config, domain.topology, dtype, request, why, served), self._trains_w
            )
            for why in (None, *OVERFLOWS)
        }
        return self._cache.plans.put(self._key, plans)


def _agree(
    domain: OverlapDomain, request: Request, problem: str | None, name: str, is_known: bool, trains: str = ""
) -> None:
    """Agree on a call, or raise ValueError(problem): on all ranks, unless it is known, and peers do not ask. They hear of it."""
    with domain.exclusively(name):
        if problem is not None and is_known:
            raise ValueError(problem)
        prepare(domain, request, problem, name, trains)


def _by_nccl(domain: OverlapDomain, config: OverlapConfig) -> bool:
    """Whether calls of experts are collectives, whatever their rows: of NCCL, or of gloo."""
    return domain.topology.nodes > 1 or config.method == "collective"


def _memory(spec: OperatorSpec, w: torch.Tensor, routing: Routing, config: OverlapConfig) -> tuple[int, str | None]:
    """(how large slots have to grow, or 0; why the call is a collective, or None), the same on all ranks. What holds no even
    share is asked for, too: ranks refuse it together."""
    domain, world = routing.domain, routing.world_size
    if _by_nccl(domain, config):
        return 0, None
    even = -(-routing.total // world**2)
    needed, share, room = (
        slot_bytes(rows, world, w.shape[1 if spec.sends_input else 0], w.dtype)
        for rows in (routing.largest, even, int(config.experts_room * even))
    )
    if domain.heap is not None and needed <= domain.layout.slot_bytes:
        return 0, None
    if needed > room:
        return 0, OVERFLOW
    for size in (room, needed, share):
        if may_hold(domain, Request(spec.name, "", size)):
            return (0, NO_MEMORY) if size < needed else (size, None)
    return share, None


def make_expert_plan(
    spec: OperatorSpec, config: OverlapConfig, topology: Topology, dtype: torch.dtype, request: Request,
    overflow: str | None = None, served: int | None = None,
) -> Plan:  # fmt: skip
    """The plan of `spec` for rows of a dtype. overflow: why slots are too small for a call, or None. served: experts of a rank
    whose weights the kernels for Hopper serve; None: they do not."""
    method, reason = _choice(config, topology.nodes, served)
    if overflow is not None and method != "collective":
        method, reason = "collective", overflow
    elif config.tune_steps:
        reason += "; tune_steps measures no experts"

    def engine(kind: Kind) -> EnginePlan:
        order, kernels = sources(topology), HOPPER if method == "fused" else LIBRARY
        cut = expert_chunks(served) if method == "fused" and served and kind.receives else 1
        return EnginePlan(kind, reason, Method(method), kernels, HOPPER_TILE, cut, Transfers(()), order, dtype)

    fprop, dgrad = engine(spec.fprop), engine(spec.fprop.dgrad)
    return Plan(spec, config, fprop, dgrad, dgrad, None, request, dtype, rows=0)


def _choice(config: OverlapConfig, nodes: int, served: int | None) -> tuple[str, str]:
    """(method, why), where slots have room."""
    asked = config.method
    if nodes > 1:
        return "collective", f"the group spans {nodes} nodes"
    if asked in ("collective", "chunked") or (served and asked == "fused"):
        return asked, "asked for"
    if asked not in ("auto", "fused"):
        return "chunked", f"{asked}: experts run chunked"
    if not served:
        return "chunked", f"{asked}: no Hopper kernel for this GPU, dtype or shape"
    return "fused", "auto: experts on Hopper"


def _kernels_serve(w: torch.Tensor, world: int) -> bool:
    """Whether the kernels for Hopper serve weights [N, K] like w."""
    n, k = w.shape
    return tma_reads(w.device, w.dtype, k, n) and world <= MOST_RANKS


def _error(
    spec: OperatorSpec, x: torch.Tensor, weights: Sequence[torch.Tensor], probs: torch.Tensor | None, routing: Routing,
    config: OverlapConfig, rows: int, name: str,
) -> str | None:  # fmt: skip
    """What is wrong with the arguments of a call, or None. rows: that x must have."""
    here, of_x = routing.experts // routing.world_size, spec.x_name
    strange = tensor_error(name, {f"w[{number}]": weight for number, weight in enumerate(weights)})
    if strange is not None:
        return strange
    if len(weights) != here or any(weight.shape != weights[0].shape or weight.dim() != 2 for weight in weights):
        shapes = ", ".join(map(str, dict.fromkeys(tuple(weight.shape) for weight in weights)))
        return (
            f"{name}: w has {len(weights)} weights of shape {shapes}; it must be [E/W, N, K], or a list of one [N, K] for each "
            f"of this rank's {here} experts"
        )
    whose = "tokens" if spec.sends_input else "received rows"
    if x.dim() != 2 or x.shape[0] != rows or x.shape[1] != weights[0].shape[1]:
        return (
            f"{name}: {of_x} has shape {tuple(x.shape)}; with this routing and weights {tuple(weights[0].shape)} it must be "
            f"[{rows}, {weights[0].shape[1]}], a row for each of the {whose}"
        )
    if 0 in weights[0].shape:
        return f"{name}: w has weights {tuple(weights[0].shape)}; dimensions must be at least 1"
    if x.device != routing.device:
        return f"{name}: {of_x} is on {x.device}, its routing on {routing.device}; make the routing of experts on {x.device}"
    if x.dtype not in DTYPES:
        return f"{name}: {of_x} has dtype {x.dtype}; supported are {', '.join(map(str, DTYPES))}"
    for number, weight in enumerate(weights):
        if weight.dtype != x.dtype or weight.device != x.device:
            its, theirs = (f"{tensor.dtype} on {tensor.device}" for tensor in (weight, x))
            return f"{name}: w[{number}] is {its}, {of_x} {theirs}; they must be the same"
    if probs is not None and probs.device != x.device:
        return f"{name}: probs is on {probs.device}, {of_x} on {x.device}; they must be on one device"
    if probs is not None and (probs.shape != (routing.tokens_here, routing.experts) or not probs.is_floating_point()):
        return (
            f"{name}: probs is {probs.dtype} {tuple(probs.shape)}; it must be floating-point "
            f"[{routing.tokens_here}, {routing.experts}], one for each token and expert"
        )
    if config.fp8 not in ("off", "blockwise"):
        return f"{name}: fp8={config.fp8!r} of experts: their scales are of blocks; use fp8='blockwise' or 'off'"
    if config.fp8 != "off" and x.is_cuda and (where := no_fp8_on(x.device, config.fp8)) is not None:
        return f"{name}: fp8={config.fp8!r} on {torch.cuda.get_device_name(x.device)}: {where}; use fp8='off'"
    if config.fp8 != "off" and x.dtype == torch.float16:
        held = "which does not hold what such numbers stand for"
        return f"{name}: fp8={config.fp8!r} with {of_x} in float16, {held}; cast it to bfloat16, or use fp8='off'"
    if config.fp8 == "blockwise" and any(size % BLOCK for size in weights[0].shape):
        return f"{name}: w has weights {tuple(weights[0].shape)}; with fp8='blockwise' features must be multiples of {BLOCK}"
    return None
