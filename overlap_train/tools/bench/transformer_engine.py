"""TransformerEngine's linears as a baseline of layers, where it is importable. What goes wrong in it is a note, and it has a time
limit.

    te          NCCL, nothing overlapped
    te_default  userbuffers as they come: gathers by ring exchange, the forward scatter in a pipeline, the backward's in bulk
    te_ring     userbuffers with every scatter by ring exchange, too

A process has one set of userbuffers, of one shape [s, hidden], with a communicator for each product of a transformer. So one set
has both configurations: linears called fc1 and fc2 run by default, qkv and proj by ring exchange.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..measure.runs import Session
from ..measure.world import World

# Of a layer, with all others that are timed: it compiles its own code at its first call, in up to a minute.
LIMIT_S = 300.0
Flags = dict[str, Any]
Linear = Callable[[torch.Tensor], torch.Tensor]
Maker = Callable[[Any], tuple[Linear, Linear]]  # of a column and a row linear, with the weights of a layer's data
USERBUFFERS = ("te_default", "te_ring")
_ROW: Flags = {"ub_overlap_ag": True, "ub_overlap_rs": True}
# What the column and the row linear are told
_FLAGS: dict[str, tuple[Flags, Flags]] = {
    "te": ({}, {}),
    "te_default": (
        {"ub_overlap_ag": True, "ub_bulk_dgrad": True, "ub_bulk_wgrad": True, "ub_name": "fc1"},
        {**_ROW, "ub_name": "fc2"},
    ),
    "te_ring": (
        {"ub_overlap_ag": True, "ub_overlap_rs_dgrad": True, "ub_name": "qkv"},
        {**_ROW, "ub_name": "proj"},
    ),
}


@contextmanager
def linears(title: str, sequence: int, features: tuple[int, int], session: Session) -> Iterator[dict[str, Maker]]:
    """Makers of linears for one layer, by name. A note says why there are none, or none with userbuffers.

    Userbuffers go at the end, while GPUs are idle, as peers map them. What takes too long ends this process, as userbuffers
    wait in C++; torchrun then ends the others. Collective.
    """
    world = session.world
    if problem := world.attempt(_module):
        session.results.note(f"te: {problem}", failure=False)  # the same words for each layer: notes are printed once
        yield {}
        return
    te = _module()
    faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=2)
    problem = world.attempt(partial(_initialise, te, sequence, features, world.size, session.dtype))
    if problem:
        session.results.note(f"{title}: te_userbuffers: {problem}", failure=False)
    yield {name: partial(_linears, te, world, name) for name in ("te", *(() if problem else USERBUFFERS))}
    gc.collect()  # whoever outlives the others would close the communicator of the next layer
    _idle(world)
    te.destroy_ub()
    _idle(world)
    faulthandler.cancel_dump_traceback_later()


def _module() -> Any:
    if importlib.util.find_spec("transformer_engine") is None:
        raise RuntimeError("transformer_engine is not installed")
    os.environ["UB_SKIPMC"] = "1"  # userbuffers over CUDA IPC and never NVLink multicast, which machines may forbid
    os.environ.setdefault("UB_TIMEOUT", "20")  # seconds that one of its kernels waits for a peer; 110 by itself
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("transformer_engine.pytorch")


def _initialise(te: Any, sequence: int, features: tuple[int, int], ranks: int, dtype: torch.dtype) -> None:
    hidden, other = features
    if hidden != other:
        raise RuntimeError(f"userbuffers have one shape, and this layer has {hidden} and {other} features")
    ring = {"method": "ring_exchange", "num_sm": 1, "cga_size": 1, "set_sm_margin": False, "num_splits": ranks}
    te.initialize_ub(
        [sequence, hidden], ranks, quantization_modes=[te.UserBufferQuantizationMode.NONE], dtype=dtype,
        ub_cfgs={"qkv_dgrad": dict(ring), "proj_fprop": dict(ring)}, bootstrap_backend=dist.get_backend(),
    )  # fmt: skip


def _idle(world: World) -> None:
    world.synchronize()
    dist.barrier(world.group)
    world.synchronize()


def _linears(te: Any, world: World, name: str, data: Any) -> tuple[Linear, Linear]:
    """A column linear on data.w1 [N1/W, K1] and a row linear on data.w2 [N2, K2/W], with sequence parallelism and no bias."""
    (n1, k1), (n2, k2), of_column, of_row = data.w1.shape, data.w2.shape, *_FLAGS[name]
    common: Flags = dict(
        bias=False, sequence_parallel=True, tp_group=world.group, tp_size=world.size, params_dtype=data.w1.dtype,
        device=world.device,
    )  # fmt: skip
    column = te.Linear(k1, n1 * world.size, parallel_mode="column", **common, **of_column)
    row = te.Linear(k2 * world.size, n2, parallel_mode="row", **common, **of_row)
    column.weight, row.weight = data.w1, data.w2
    return column, row
