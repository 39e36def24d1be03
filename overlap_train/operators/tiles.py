"""Tile sizes and launch arguments of the persistent kernels."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..domain import OverlapDomain
from ..workspace import Call

# A poll in Triton's interpreter takes about 0.1 ms, and the interpreter has no clock: its time-out is a number of polls.
_INTERPRETER_POLLS_PER_SECOND = 10_000


@dataclass(frozen=True)
class TileConfig:
    """How a kernel is cut: output tile, depth of a step, rows of tiles that share columns in L2, warps, pipeline stages."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int = 8
    num_warps: int = 8
    num_stages: int = 3


# 128 x 256 x 64 with 3 stages and 8 warps won nearly every shape on H200 (docs/design.md); fp32 has no tensor-core path.
_HALF = TileConfig(128, 256, 64)
_FULL = TileConfig(64, 64, 32, num_warps=4)
_INTERPRETED = TileConfig(32, 32, 32, num_warps=4)


def tile_config(dtype: torch.dtype, device: torch.device) -> TileConfig:
    """The tile for a dtype. The interpreter pays per operation, not per element, but small problems should have several tiles."""
    if device.type != "cuda":
        return _INTERPRETED
    return _FULL if dtype == torch.float32 else _HALF


def launch_arguments(domain: OverlapDomain, call: Call, dtype: torch.dtype) -> dict[str, Any]:
    """What both kernels take by the same name: the protocol's words and the tile."""
    on_gpu = domain.device.type == "cuda"
    tile = {key.upper() if key.startswith(("block", "group")) else key: value
            for key, value in asdict(tile_config(dtype, domain.device)).items()}  # fmt: skip
    timeout_s = domain.config.timeout_s
    return dict(
        rank=domain.rank, counter_ptr=call.slot.counters, signals_ptr=call.slot.signals, epoch_ptr=call.slot.epoch,
        abort_ptr=domain.fault.abort, record_ptr=domain.fault.record, tag=domain.fault.tag(call.waiting(domain.rank)),
        limit=int(timeout_s * (1e9 if on_gpu else _INTERPRETER_POLLS_PER_SECOND)),
        WORLD=domain.world_size, PRECISION="ieee", TIMED=on_gpu, **tile,
    )  # fmt: skip


def grid_size(m_shard: int, n: int, world_size: int, tile: TileConfig, device: torch.device) -> tuple[int]:
    """One CTA per SM, or per tile if there are fewer; one in the interpreter, which runs CTAs one after the other."""
    if device.type != "cuda":
        return (1,)
    tiles = -(-m_shard // tile.block_m) * -(-n // tile.block_n) * world_size
    return (min(tiles, torch.cuda.get_device_properties(device).multi_processor_count),)
