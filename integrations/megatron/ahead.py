"""What the linears of a model launch is compiled from the first call of one of them on, for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from overlap_train.integrations.megatron.conditions import attribute, our_fp8, standing_reason
from overlap_train.integrations.megatron.linears import OPERATORS, biases
from overlap_train.ops.plan import Plan
from overlap_train.ops.plan_cache import Foreseen, foresee


class CompileAhead:
    """Starts to compile, in the first call of a linear of a model, what all linears of its group launch. Linears call it with
    their plans. Llama-3 8B's first step took 22 s when each linear began with its own kernels, 4 s with all of them in Triton's
    cache (four ranks, 16 cores)."""

    def __init__(self, group: dist.ProcessGroup, linears: Sequence[Any]) -> None:
        self._group, self._linears = group, [linear for linear in linears if linear.tp_group is group]
        for linear in self._linears:
            linear.overlap.on_first_plan = self

    def __call__(self, name: str, plan: Plan) -> None:
        """In the first call, which has this plan. name: of its linear."""
        linears, self._linears = self._linears, []
        for linear in linears:
            linear.overlap.on_first_plan = None
        foresee(self._group, plan.rows, filter(None, map(_foreseen, linears)), name)


def _foreseen(linear: Any) -> Foreseen | None:
    """What calls of an overlapped linear will be like. None: nothing is sent for it, or its weight comes with the call."""
    weight, overlap = linear.weight, linear.overlap
    if weight is None or standing_reason(linear, weight) is not None:
        return None
    spec = OPERATORS[attribute(linear, "input_is_parallel", False), linear.sequence_parallel][0]
    # By TransformerEngine's context most layers are in fp8, whatever the one that is called first is.
    fp8 = our_fp8(linear.config) if overlap.slot != "output" else None
    return Foreseen(spec, weight, biases(linear)[0], replace(overlap.config, fp8=fp8 or overlap.fp8_of(linear)))
