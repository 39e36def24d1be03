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
from ...group.registry import shutdown
from ...linear import all_gather_linear, linear_reduce_scatter
from ..measure.models import MODELS
from ..measure.world import World
from ..pictures.timeline import Span
from .attention import Data, ours

METHODS = ("collective", "chunked", "fused", "direct")
MODEL, M, HIDDEN, FFN = "llama3-8b", 8192, 4096, 14336  # of the block M is tokens in all
# Features between the two, for each rank, where sockets carry what is sent: a GPU multiplies for 13 ms. Loopback takes 14 ms at
# 40 Gbit/s for the 32 MiB that each of two sends (bench hierarchical).
WIDE = 163840
NODES = "nodes"
WHAT = {
    "linears": "both linears of an MLP of Llama-3 8B",
    "ulysses": "a Ulysses attention block of it",
    NODES: "both linears of a wider MLP across nodes, over sockets",
}
Calls = dict[str, Callable[[], Any]]  # by "operator method"


def record(out: Path, what: str, node_ranks: int, here: World) -> None:
    """Profile forward calls of `what` by each method; rank 0 writes its own view. node_ranks: ranks of each node, of `nodes`."""
    shape: dict[str, Any] = {"world": here.size, "dtype": "bfloat16"}
    if what == "ulysses":
        calls, shape = _ulysses(here), shape | {"model": MODEL, "tokens": M}
    else:
        ffn, nodes = (WIDE * here.size, node_ranks) if what == NODES else (FFN, 0)
        calls, shape = _mlp(here, ffn, nodes), shape | {"m": M, "hidden": HIDDEN, "ffn": ffn}
        shape |= {"nodes": here.size // nodes} if nodes else {}
    with torch.no_grad():
        spans = {name: _profile(call) for name, call in calls.items()}
    if here.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        head = {"hardware": torch.cuda.get_device_name(here.device), "torch": torch.__version__}
        (out / "timeline.json").write_text(json.dumps({**head, "shape": shape, "calls": spans}, indent=1))
    shutdown()
    dist.destroy_process_group()


def _mlp(here: World, ffn: int, node_ranks: int) -> Calls:
    """Both linears by each method; across nodes of so many ranks without `direct`, which does not cross them."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=here.device, dtype=torch.bfloat16)

    x, h = normal(M // here.size, HIDDEN), normal(M, ffn // here.size)
    w1, w2 = normal(ffn // here.size, HIDDEN), normal(HIDDEN, ffn // here.size)
    calls: Calls = {}
    for method in METHODS:
        if not node_ranks or method != "direct":
            settings: Any = {"group": here.group, "config": OverlapConfig(method=method, node_ranks=node_ranks)}
            calls[f"all_gather_linear {method}"] = partial(all_gather_linear, x, w1, **settings)
            calls[f"linear_reduce_scatter {method}"] = partial(linear_reduce_scatter, h, w2, **settings)
    return calls


def _ulysses(here: World) -> Calls:
    data = Data.make(MODELS[MODEL], M, here, torch.bfloat16, seed=0)
    return {f"attention {method}": partial(ours(OverlapConfig(), method, here.group), data) for method in METHODS}


def _profile(call: Callable[[], Any]) -> list[Span]:
    """Everything on the device in three back-to-back calls after warm-up, each behind a marker, in the order of starts. The
    device starts 20 ms later than the host, so that launches do not show."""
    from torch.profiler import ProfilerActivity, profile

    marker = torch.zeros(1, dtype=torch.int16, device="cuda")  # its kernels separate the calls on the compute stream
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        torch.cuda._sleep(40_000_000)  # cycles
        for number in range(3):
            marker.fill_(number)
            call()
        marker.fill_(0)
        torch.cuda.synchronize()
    events = [e for e in profiler.profiler.kineto_results.events() if e.device_type() == torch.autograd.DeviceType.CUDA]
    spans = [
        {"name": e.name(), "stream": e.device_resource_id(), "start": e.start_ns() / 1e3, "end": e.end_ns() / 1e3}
        for e in events
    ]
    return sorted(spans, key=lambda span: span["start"])
