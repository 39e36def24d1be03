"""Loading Megatron's distributed optimizer where torch's AdamW is inside (no Apex, no TransformerEngine).

Apex and TransformerEngine count the steps once for each parameter group, torch's AdamW in a tensor for each parameter.
Megatron-Core 0.16 to 0.19 mistreats that tensor in three ways: it cannot describe a fresh optimizer for loading
(`assert len(steps) == 1`), it looks for the tensor among the stored ones (`KeyError: 'step'`), and it gives one tensor to all
parameters, each of which then adds to it at every step.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer


def make_describable(optimizer: MegatronOptimizer) -> None:
    """Before loading: give each parameter of a distributed optimizer that has no state one of zeros."""
    distributed = _distributed(optimizer)
    if distributed is None:
        return
    adam = distributed.optimizer
    for parameter in (parameter for group in adam.param_groups for parameter in group["params"]):
        if not adam.state[parameter]:
            moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
            adam.state[parameter] = {"step": torch.tensor(0.0), **moments}


def load_optimizer(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """Load what dist_checkpointing.load returned; takes `param_state` out of `state`."""
    distributed = _distributed(optimizer)
    if distributed is None:
        optimizer.load_state_dict(state)
        return
    moments = state.pop("param_state")
    distributed.load_state_dict(state)
    states = list(distributed.optimizer.state.values())
    steps = [entry.pop("step") for entry in states]  # Megatron looks only for what is here
    distributed.load_parameter_state_from_fully_reshardable(moments)
    for entry, step in zip(states, steps, strict=True):
        entry["step"] = step.clone()


def _distributed(optimizer: MegatronOptimizer) -> DistributedOptimizer | None:
    """The distributed optimizer of a dense model, which Megatron wraps alone in a ChainedOptimizer."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return parts[0] if len(parts) == 1 and isinstance(parts[0], DistributedOptimizer) else None
