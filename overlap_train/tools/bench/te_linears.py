"""TransformerEngine's column and row linear with sequence parallelism, as baselines of the layer benchmark:

    te          NCCL, nothing overlapped
    te_default  userbuffers as they come: gathers by ring exchange, the forward scatter in a pipeline, the backward's in bulk
    te_ring     userbuffers with every scatter by ring exchange, too

A process has one set of userbuffers, of one shape [s, hidden]. The set has a communicator for each product of a transformer, by
name, and each can be told how to work. So one set has both configurations: linears called fc1 and fc2 run by default, qkv and
proj by ring exchange.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..measure.shapes import Layer
from ..measure.world import World
from .layer_data import Data, Linear, Maker

Flags = dict[str, Any]
USERBUFFERS = ("te_default", "te_ring")
_ROW: Flags = {"ub_overlap_ag": True, "ub_overlap_rs": True}
# What the column and the row linear are told; the order of USERBUFFERS
_FLAGS: dict[str, tuple[Flags, Flags]] = {
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
def userbuffers(te: Any, layer: Layer, sequence: int, world: World, dtype: torch.dtype) -> Iterator[str | None]:
    """Buffers for one layer, given back at the end; yields what went wrong, or None. Collective.

    All GPUs must be idle before buffers go, and all ranks must have let go before others are made: peers map them.
    """
    problem = world.attempt(partial(_initialise, te, layer, sequence, world.size, dtype))
    yield problem
    gc.collect()  # whoever outlives the others would close the communicator of the next layer
    _idle(world)
    te.destroy_ub()
    _idle(world)


def _initialise(te: Any, layer: Layer, sequence: int, ranks: int, dtype: torch.dtype) -> None:
    if layer.column_k != layer.row_n:
        raise RuntimeError(
            f"userbuffers have one shape, and this layer has {layer.column_k} and {layer.row_n} features"
        )
    ring = {"method": "ring_exchange", "num_sm": 1, "cga_size": 1, "set_sm_margin": False, "num_splits": ranks}
    te.initialize_ub(
        [sequence, layer.column_k], ranks, quantization_modes=[te.UserBufferQuantizationMode.NONE], dtype=dtype,
        ub_cfgs={"qkv_dgrad": dict(ring), "proj_fprop": dict(ring)}, bootstrap_backend=dist.get_backend(),
    )  # fmt: skip


def _idle(world: World) -> None:
    world.synchronize()
    dist.barrier(world.group)
    world.synchronize()


def makers(te: Any, world: World, with_userbuffers: bool) -> dict[str, Maker]:
    """What makes TransformerEngine's linears, by the names above."""
    found: dict[str, Maker] = {"te": partial(_linears, te, world, ({}, {}))}
    if with_userbuffers:
        found |= {name: partial(_linears, te, world, _FLAGS[name]) for name in USERBUFFERS}
    return found


def _linears(te: Any, world: World, flags: tuple[Flags, Flags], data: Data) -> tuple[Linear, Linear]:
    common: Flags = dict(
        bias=False, sequence_parallel=True, tp_group=world.group, tp_size=world.size, params_dtype=data.w1.dtype,
        device=world.device,
    )  # fmt: skip
    (n1, k1), (n2, k2) = data.w1.shape, data.w2.shape
    column = te.Linear(k1, n1 * world.size, parallel_mode="column", **common, **flags[0])
    row = te.Linear(k2 * world.size, n2, parallel_mode="row", **common, **flags[1])
    column.weight, row.weight = data.w1, data.w2
    return column, row
