"""What is global in a process and belongs to one variant: the division of the ranks, and TransformerEngine's userbuffers.

A variant makes its own current before it is built and before each of its steps, so that several take turns in one process.
"""

from __future__ import annotations

import importlib
import re
from typing import Any, Protocol

from megatron.core import parallel_state

from gpt.settings import Settings


class Current(Protocol):
    """Collective to make; `use` and `release` are not."""

    def use(self) -> None:
        """Make it the one that Megatron-Core or TransformerEngine sees."""

    def release(self) -> None:
        """Free what must not outlive the process groups."""


class Layout:
    """Tensor-, context- and data-parallel groups. Megatron-Core keeps one set of them, in globals of parallel_state."""

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
        vars(parallel_state).update(self._globals)

    def release(self) -> None:
        """Nothing: groups end with torch.distributed."""


class Layouts:
    """Those of a process, each made once."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], Layout] = {}

    def use(self, settings: Settings) -> Layout:
        """Make that of these settings current; collective the first time."""
        key = settings.tp, settings.cp
        if key not in self._made:
            self._made[key] = Layout(settings)
        self._made[key].use()
        return self._made[key]


def _globals() -> dict[str, Any]:
    return {name: value for name, value in vars(parallel_state).items() if re.fullmatch(r"_[A-Z][A-Z_]*", name)}


class Userbuffers:
    """TransformerEngine's communication buffers for the linears of a model, as Megatron-LM makes them (--tp-comm-overlap).

    Needs TransformerEngine 2.7 or newer. `ring`: column linears' input gradients and row linears by ring exchange, too.
    """

    def __init__(self, settings: Settings, ring: bool) -> None:
        self._base = importlib.import_module("transformer_engine.pytorch.module.base")
        self._base._ub_communicators = None  # it refuses to make buffers where it has some
        self._base.initialize_ub(
            shape=[settings.seq_length * settings.micro_batch_size, settings.hidden_size],
            tp_size=settings.tp,
            quantization_modes=[self._base.UserBufferQuantizationMode.NONE],
            ub_cfgs=ring_exchange(settings.tp) if ring else {},
            bootstrap_backend="nccl",
        )
        self._communicators = self._base._ub_communicators

    def use(self) -> None:
        self._base._ub_communicators = self._communicators

    def release(self) -> None:
        self._communicators = None
        self._base.destroy_ub()


def ring_exchange(tp: int) -> dict[str, dict[str, Any]]:
    """A --tp-comm-overlap-cfg: what its defaults do in bulk or in a pipeline, by ring exchange."""
    ring = dict(method="ring_exchange", num_sm=1, cga_size=1, set_sm_margin=False, num_splits=tp)
    return {name: dict(ring) for name in ("qkv_dgrad", "proj_fprop", "fc1_dgrad", "fc2_fprop")}
