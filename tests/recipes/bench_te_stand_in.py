"""A stand-in for TransformerEngine, which is not installed where the tests run: what the benchmark calls of it, over gloo.

`install(folder)` makes it importable for programs that start in a folder. It refuses what the real one refuses: userbuffers that
exist already, linears whose communicator has another shape, and userbuffers that would use multicast.
"""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.nn import functional as differentiable

UserBufferQuantizationMode = Enum("UserBufferQuantizationMode", ["NONE"])
_buffers: list[int] | None = None  # shape


def install(folder: Path) -> None:
    """Make `import transformer_engine` find this file."""
    package = folder / "transformer_engine" / "pytorch"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(Path(__file__).read_text())


def initialize_ub(
    shape: list[int],
    tp_size: int,
    *,
    quantization_modes: list[Any],
    dtype: torch.dtype,
    ub_cfgs: dict[str, Any],
    bootstrap_backend: str,
) -> None:
    global _buffers
    assert _buffers is None, "UB communicators are already initialized."
    assert os.environ["UB_SKIPMC"] == "1" and tp_size == dist.get_world_size() and bootstrap_backend == "gloo"
    assert set(ub_cfgs) == {"qkv_dgrad", "proj_fprop"}
    _buffers = shape
    print(f"userbuffers {shape}")


def destroy_ub() -> None:
    global _buffers
    _buffers = None


def _gather(x: torch.Tensor, group: Any) -> torch.Tensor:
    """x [M/W, K] -> [M, K]; its backward scatters the sum."""
    return torch.cat(differentiable.all_gather(x, group=group))


def _scatter(x: torch.Tensor, group: Any) -> torch.Tensor:
    """The other way round."""
    return differentiable.all_reduce(x, group=group).chunk(dist.get_world_size(group))[dist.get_rank(group)]


class Linear(torch.nn.Module):
    """te.pytorch.Linear, column or row parallel."""

    def __init__(
        self, in_features: int, out_features: int, *, parallel_mode: str, bias: bool, sequence_parallel: bool, tp_group: Any,
        tp_size: int, params_dtype: torch.dtype, device: torch.device, ub_name: str = "", **overlapped: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        assert sequence_parallel and not bias
        assert bool(ub_name) == bool(overlapped)
        shape = (
            (out_features // tp_size, in_features)
            if parallel_mode == "column"
            else (out_features, in_features // tp_size)
        )
        self.parallel_mode, self.group, self.ub_name = parallel_mode, tp_group, ub_name
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=params_dtype, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_column = self.parallel_mode == "column"
        whole = _gather(x, self.group) if is_column else F.linear(x, self.weight)
        assert not self.ub_name or list(whole.shape) == _buffers, f"{self.ub_name}: buffers of {_buffers}"
        return F.linear(whole, self.weight) if is_column else _scatter(whole, self.group)
