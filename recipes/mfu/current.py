"""What is global in a process and belongs to one variant: the division of the ranks, and TransformerEngine's userbuffers.

A variant uses its own division before it is built and before each of its steps, so that several take turns in one process.
Linears without userbuffers do not look at them.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

from megatron.core import parallel_state

from gpt.settings import Settings


class Layout:
    """Tensor-, context- and data-parallel groups. Megatron-Core keeps one set of them, in globals of parallel_state. Making one
    is collective."""

    def __init__(self, settings: Settings) -> None:
        blank = {name: {} if isinstance(value, dict) else None for name, value in _globals().items()}
        vars(parallel_state).update(blank)  # it refuses to make groups where it has some
        parallel_state.initialize_model_parallel(
            settings.tp,
            context_parallel_size=settings.cp,
            distributed_timeout_minutes=settings.distributed_timeout_minutes,
        )
        self._globals = _globals()

    def use(self) -> None:
        """Let Megatron-Core see this one."""
        vars(parallel_state).update(self._globals)


class Layouts:
    """The layouts of a process, and its userbuffers. Each is made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], Layout] = {}
        self._userbuffers: Userbuffers | None = None

    def use(self, settings: Settings) -> Layout:
        """Use the layout of these settings, which is returned. The first time it is made; collective then."""
        key = settings.tp, settings.cp
        if key not in self._made:
            self._made[key] = Layout(settings)
        self._made[key].use()
        return self._made[key]

    def userbuffers(self, settings: Settings) -> Userbuffers:
        """The userbuffers of this process, made for the first model that asks; collective the first time."""
        self._userbuffers = self._userbuffers or Userbuffers(settings)
        return self._userbuffers


def _globals() -> dict[str, Any]:
    return {name: value for name, value in vars(parallel_state).items() if re.fullmatch(r"_[A-Z][A-Z_]*", name)}


class Userbuffers:
    """TransformerEngine's communication buffers for the linears of a model, as Megatron-LM makes them (--tp-comm-overlap).

    Needs TransformerEngine 2.7 or newer. A process can have one set: a second one would ask the helper of the first, which is
    gone. The set has a communicator for each product of a transformer, by name, and each can be told how to work. So one set
    has both configurations: linears named fc1 and fc2 run by the defaults, qkv and proj by ring exchange for every scatter.
    """

    DEFAULT, RING = ("fc1", "fc2"), ("qkv", "proj")  # what column and row linears are named

    def __init__(self, settings: Settings) -> None:
        self._base = importlib.import_module("transformer_engine.pytorch.module.base")
        ring = dict(method="ring_exchange", num_sm=1, cga_size=1, set_sm_margin=False, num_splits=settings.tp)
        self._base.initialize_ub(
            shape=[settings.seq_length * settings.micro_batch_size, settings.hidden_size],
            tp_size=settings.tp,
            quantization_modes=[self._base.UserBufferQuantizationMode.NONE],
            ub_cfgs={"qkv_dgrad": dict(ring), "proj_fprop": dict(ring)},
            bootstrap_backend="nccl",
        )

    def name(self, model: Any, names: tuple[str, str]) -> None:
        """Let the model's column and row linears take the communicators of these two names."""
        for module in model.modules():
            if getattr(module, "ub_name", None) is not None:
                module.ub_name = names[module.parallel_mode == "row"]

    def release(self) -> None:
        """Free them: they must not outlive the process groups."""
        self._base.destroy_ub()
