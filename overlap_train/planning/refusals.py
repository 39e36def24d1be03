"""Why a plan cannot run where it was made for: the reason in words, with the way out."""

from __future__ import annotations

import torch

from ..config import flag_name
from ..select.method import Method
from .low_latency import LOW_LATENCY, refusal
from .plan import Plan


def why_not(plan: Plan, device: torch.device, interpreted: bool) -> str | None:
    """Why the plan's kernels cannot run on a device, or None. interpreted: kernels run in Triton's interpreter."""
    for engine in (plan.fprop, plan.dgrad):
        if engine.method == LOW_LATENCY:
            refused = refusal(plan.spec.name, engine.kind, plan.request.flagged_bytes)
            if refused is not None:
                return refused
        if device.type == "cuda" or not Method(engine.method).kernels:
            continue
        if not interpreted:
            return (
                f"method={engine.method!r} with CPU tensors: its kernels run there in Triton's interpreter only, which "
                "is for tests "
                f"(TRITON_INTERPRET=1 before the first import); use 'auto' or 'chunked' ({flag_name('method')})"
            )
        if Method(engine.method).multiplies and "bfloat16" in plan.request.what:
            return (
                f"method={engine.method!r} with bfloat16 CPU tensors: Triton's interpreter multiplies their bit "
                "patterns; use float32, "
                f"float16, or method 'chunked' ({flag_name('method')})"
            )
    return None


def why_not_across_nodes(plan: Plan, topology_problem: str | None) -> str | None:
    """Why the plan's engines cannot run in a group whose nodes are as they are, or None. topology_problem: of all that share
    memory."""
    sharing = [engine for engine in (plan.fprop, plan.dgrad) if engine.slots]
    for engine in sharing:
        if topology_problem is not None:
            return topology_problem
        if engine.nodes > 1 and not Method(engine.method).crosses:
            return (
                f"method={engine.method!r} in a group of {engine.nodes} nodes: its kernels send inside one node only; use "
                f"'auto', 'fused', 'chunked' or 'collective', or a group inside one node ({flag_name('method')})"
            )
    return None


def why_not_together(exchange: Plan, product: Plan, nodes: tuple[int, int]) -> str | None:
    """Why an all-to-all cannot run beside the product of another group (TP x Ulysses), or None; the same on all ranks of both.

    nodes: how many the two groups span, the worst answer of any rank (ulysses/groups.py: nodes_of_groups). The methods asked for
    decide, and no engine: those of two TP groups may differ, where one spans nodes and the other does not.
    """
    if min(nodes) == 1 or exchange.config.method in ("auto", "collective") or product.config.method == "collective":
        return None
    return (
        f"group and tp_group span {nodes[0]} and {nodes[1]} nodes: two groups of GPUs do not overlap across nodes together yet; "
        f"use 'auto' or 'collective', or a tp_group inside one node ({flag_name('method')})"
    )
