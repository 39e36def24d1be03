"""What ranks of tests import, once in the process that they are forked from: torch takes 2 s, its compiler and what else Megatron
imports of it 0.7 s, Triton and our modules 0.2 s. Megatron itself must come after the stand-in for TransformerEngine.

Triton reads from the environment whether kernels are interpreted, when it is imported and when a kernel is made. So a rank whose
environment says something else than that process's forgets them, and imports them again.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys

_MODULES = (
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.fx.experimental.symbolic_shapes",
    "torch._dynamo",  # use_deterministic_algorithms imports it, too
    "pytest",
    "triton",
    "triton.experimental.gluon",
    "tests.linear_cases",
    "overlap_train.linear",
    "overlap_train.ulysses.linears",
    "overlap_train.ulysses.two_groups",
    "overlap_train.symmetric.host",
    "overlap_train.kernels.all_gather_gemm",
    "overlap_train.kernels.all_to_all_gemm",
    "overlap_train.kernels.gemm_reduce_scatter",
    "overlap_train.kernels.low_latency",
)
_READ_IT = ("triton", "overlap_train", "tests")


def _is_interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _load() -> None:
    for module in _MODULES:
        with contextlib.suppress(ImportError):  # Triton may be missing; then a rank that needs it says so
            importlib.import_module(module)
    if _is_interpreted():
        from tests import faster_interpreter

        faster_interpreter.install()


def load_for_this_environment() -> None:
    """In a rank that has its environment: import everything again if it was imported for another one."""
    if _is_interpreted() == _WAS_INTERPRETED:
        return
    for name in list(sys.modules):
        if name.partition(".")[0] in _READ_IT and not name.startswith("triton._C"):
            del sys.modules[name]
    _load()


_load()
_WAS_INTERPRETED = _is_interpreted()
gc.collect()
gc.freeze()  # ranks would look at all of it for garbage, and so copy every page of it
