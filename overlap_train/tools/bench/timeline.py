"""What one call does on the GPU: its kernels and copies on a time axis, from the profiler, as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...config import OverlapConfig
from ...linear import all_gather_linear, linear_reduce_scatter
from ..measure.profile import Span, spans_of
from ..measure.world import START, join

METHODS = ("collective", "chunked", "fused", "direct")
M, HIDDEN, FFN = 8192, 4096, 14336  # of Llama-3 8B's MLP


@torch.no_grad()
def record(out: Path) -> None:
    """Profile forward calls of a column and a row linear by each method; rank 0 writes its own view.

    Raises:
        ValueError: there are no GPUs.
    """
    if not torch.cuda.is_available():
        raise ValueError(
            "bench timeline records GPUs, and this process sees none; to draw a recording: bench plot FOLDER"
        )
    here = join(f"{START} bench timeline")

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=here.device, dtype=torch.bfloat16)

    x, h = normal(M // here.size, HIDDEN), normal(M, FFN // here.size)
    w1, w2 = normal(FFN // here.size, HIDDEN), normal(HIDDEN, FFN // here.size)
    spans = {}
    for method in METHODS:
        settings: Any = {"group": here.group, "config": OverlapConfig(method=method)}
        spans[f"all_gather_linear {method}"] = _profile(partial(all_gather_linear, x, w1, **settings))
        spans[f"linear_reduce_scatter {method}"] = _profile(partial(linear_reduce_scatter, h, w2, **settings))
    if here.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        shape = {"world": here.size, "dtype": "bfloat16", "m": M, "hidden": HIDDEN, "ffn": FFN}
        head = {"hardware": torch.cuda.get_device_name(here.device), "torch": torch.__version__, "shape": shape}
        (out / "timeline.json").write_text(json.dumps({**head, "calls": spans}, indent=1))


def _profile(call: Callable[[], Any]) -> list[Span]:
    """Everything on the device in three back-to-back calls after warm-up, each behind a marker, in the order of starts. The
    device starts 20 ms later than the host, so that launches do not show."""
    marker = torch.zeros(1, dtype=torch.int16, device="cuda")  # its kernels separate the calls on the compute stream
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()

    def calls() -> None:
        torch.cuda._sleep(40_000_000)  # cycles
        for number in range(3):
            marker.fill_(number)
            call()
        marker.fill_(0)

    return spans_of(calls)
