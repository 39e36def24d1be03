"""What one operator call does on the GPU: its kernels and copies on a time axis, from the profiler, as JSON and as a picture.

torchrun --nproc-per-node 4 -m overlap_train.bench.timeline --out benchmarks/h200x4     (records, on GPUs)
python -m overlap_train.bench.timeline --draw benchmarks/h200x4/timeline.json           (draws, anywhere)
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..config import OverlapConfig
from ..linear import all_gather_linear, linear_reduce_scatter
from ..registry import shutdown

METHODS = ("collective", "chunked", "fused", "direct")
# Llama-3-8B MLP at s = 8192: M, features in, features out of the first and the second linear
M, HIDDEN, FFN = 8192, 4096, 14336


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="record into OUT/timeline.json")
    parser.add_argument("--draw", type=Path, help="draw this recording to a .png beside it")
    arguments = parser.parse_args()
    if arguments.draw:
        draw(json.loads(arguments.draw.read_text()), arguments.draw.with_suffix(".png"))
    else:
        record(arguments.out or Path())


def record(out: Path) -> None:
    """Profile forward calls of both operators by each method; rank 0 writes its own view."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = dist.group.WORLD
    assert group is not None
    world = dist.get_world_size()
    x = torch.randn(M // world, HIDDEN, device=device, dtype=torch.bfloat16)
    h = torch.randn(M, FFN // world, device=device, dtype=torch.bfloat16)
    w1 = torch.randn(FFN // world, HIDDEN, device=device, dtype=torch.bfloat16)
    w2 = torch.randn(HIDDEN, FFN // world, device=device, dtype=torch.bfloat16)
    calls: dict[str, list[dict[str, Any]]] = {}
    for method in METHODS:
        settings = {"group": group, "config": OverlapConfig(method=method)}
        calls[f"all_gather_linear {method}"] = _profile(partial(all_gather_linear, x, w1, **settings))
        calls[f"linear_reduce_scatter {method}"] = _profile(partial(linear_reduce_scatter, h, w2, **settings))
    if dist.get_rank() == 0:
        out.mkdir(parents=True, exist_ok=True)
        shape = {"m": M, "hidden": HIDDEN, "ffn": FFN, "world": world, "dtype": "bfloat16"}
        head = {"hardware": torch.cuda.get_device_name(device), "torch": torch.__version__, "shape": shape}
        (out / "timeline.json").write_text(json.dumps({**head, "calls": calls}, indent=1))
    shutdown()
    dist.destroy_process_group()


def _profile(call: Callable[[], Any]) -> list[dict[str, Any]]:
    """Device intervals of the third of three back-to-back calls after warm-up: name, stream, start and end in microseconds."""
    marker = torch.zeros(1, device="cuda")  # its kernels separate the calls on the compute stream
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()

    def three_calls() -> None:
        for number in range(3):
            marker.fill_(number)
            call()
        marker.fill_(0)

    return device_spans(three_calls, head_start_cycles=4_000_000)


def device_spans(work: Callable[[], object], head_start_cycles: int) -> list[dict[str, Any]]:
    """Everything on the device during `work`: name, stream, start and end in microseconds, in the order of starts.

    The device starts later than the host by so many cycles (2,000,000 are about a millisecond), so that launches do not show.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        torch.cuda._sleep(head_start_cycles)
        work()
        torch.cuda.synchronize()
    events = [e for e in profiler.profiler.kineto_results.events() if e.device_type() == torch.autograd.DeviceType.CUDA]
    spans = [
        {"name": e.name(), "stream": e.device_resource_id(), "start": e.start_ns() / 1e3, "end": e.end_ns() / 1e3}
        for e in events
    ]
    return sorted(spans, key=lambda span: span["start"])


def kind_of(name: str) -> str:
    """communication, computation, marker (between two calls), or "" for bookkeeping of a few microseconds."""
    lowered = name.lower()
    if "nccl" in lowered or "memcpy" in lowered:
        return "communication"
    if any(part in lowered for part in ("gemm", "nvjet", "cutlass", "reduce_partials")):
        return "computation"
    if "fillfunctor" in lowered:
        return "marker"
    return ""


def draw(recording: dict[str, Any], path: Path) -> None:
    """One row of lanes per recorded call: computation above, communication below, exposed communication hatched."""
    from matplotlib import pyplot

    calls = recording["calls"]
    figure, axes = pyplot.subplots(len(calls), 1, figsize=(10, 1.25 * len(calls)), sharex=True)
    for axis, (title, spans) in zip(axes, calls.items(), strict=True):
        _draw_call(axis, title, last_call(spans))
    axes[-1].set_xlabel("microseconds")
    shape = recording["shape"]
    figure.suptitle(
        f"{shape['world']} x {recording['hardware']}: M={shape['m']}, hidden {shape['hidden']}, ffn {shape['ffn']}, bf16, forward"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def last_call(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The work between the last two markers, starting at 0. Markers run on the compute stream, which every call joins."""
    *_, begin, end = sorted(span["end"] for span in spans if kind_of(span["name"]) == "marker")
    work = [span for span in spans if kind_of(span["name"]) in ("communication", "computation")]
    mine = [span for span in work if begin <= span["start"] < end]
    return [{**span, "start": span["start"] - begin, "end": span["end"] - begin} for span in mine]


def exposed(spans: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Parts of communication during which no computation runs, as (start, end)."""
    busy = sorted((s["start"], s["end"]) for s in spans if kind_of(s["name"]) == "computation")
    gaps = []
    for span in spans:
        at = span["start"]
        if kind_of(span["name"]) != "communication":
            continue
        for start, end in [*busy, (span["end"], span["end"])]:
            if start > at:
                gaps.append((at, min(start, span["end"])))
            at = max(at, end)
            if at >= span["end"]:
                break
    return [(start, end) for start, end in gaps if end > start]


def _draw_call(axis: Any, title: str, spans: list[dict[str, Any]]) -> None:
    colours = {"computation": "#4c9f70", "communication": "#3b6fb6"}
    for span in spans:
        kind = kind_of(span["name"])
        axis.broken_barh(
            [(span["start"], span["end"] - span["start"])], (kind == "computation", 0.8), color=colours[kind]
        )
    for start, end in exposed(spans):
        axis.broken_barh([(start, end - start)], (0, 0.8), color="#d1495b")
    axis.set_yticks([0.4, 1.4], ["copies, NCCL", "GEMM"])
    axis.set_ylim(-0.2, 2)
    axis.set_title(
        f"{title}: {max(span['end'] for span in spans):.0f} µs, {sum(e - s for s, e in exposed(spans)):.0f} µs exposed",
        fontsize=9,
        loc="left",
    )


if __name__ == "__main__":
    main()
