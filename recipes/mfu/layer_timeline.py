"""One transformer layer of a training step on a time axis: what the GPU does in its forward and in its backward pass.

Recorded by torch's profiler between marker kernels that hooks launch on the compute stream, on rank 0's GPU. The device starts a
little later than the host, so that launches do not show: the picture is about the device. What a fused kernel waits inside itself
does not show either; the step's figures have it (mfu/alone.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from overlap_train.tools.bench.timeline import device_spans
from overlap_train.tools.pictures.lanes import Span, between

if TYPE_CHECKING:
    from mfu.trained import Trained

MARKER = "nextafter"  # a kernel that nobody else launches; PyTorch's async-TP has spin kernels (torch.cuda._sleep) of its own
HEAD_START_CYCLES = 20_000_000  # about 10 ms
PASSES = ("forward", "backward")


def record(trained: Trained) -> list[Span]:
    """Spans of the model's middle layer in forward and backward of its first micro-batch; collective, on GPUs."""
    layers = trained.trainer.model.bare.decoder.layers
    handles = _mark(layers[len(layers) // 2])
    try:
        trained.forward_backward()
        torch.cuda.synchronize()
        dist.barrier()
        return cut(device_spans(trained.forward_backward, HEAD_START_CYCLES))
    finally:
        for handle in handles:
            handle.remove()


def _mark(layer: torch.nn.Module) -> list[Any]:
    """Launch a marker where the layer's forward begins and ends, and where its backward begins and ends."""

    def before(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        hidden = kwargs.get("hidden_states", args[0] if args else None)
        if hidden.requires_grad:
            hidden.register_hook(launch_marker)
        launch_marker(hidden)

    def after(module: torch.nn.Module, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        launch_marker(hidden)
        hidden.register_hook(launch_marker)

    return [layer.register_forward_pre_hook(before, with_kwargs=True), layer.register_forward_hook(after)]


def launch_marker(like: torch.Tensor) -> None:
    """One small kernel on the device of `like`, in its current stream."""
    one = torch.empty(1, device=like.device)
    torch.nextafter(one, one)


def cut(spans: Sequence[Span]) -> list[Span]:
    """The spans between the first two markers (forward) and between the next two (backward), each with its pass and kind.

    Their start and end are in microseconds from where the pass begins.

    Raises:
        ValueError: there are fewer markers.
    """
    markers = [span for span in spans if MARKER in span["name"]]
    if len(markers) < 4:
        raise ValueError(f"the profiler saw {len(markers)} markers of a layer instead of 4")
    stream, found = markers[0]["stream"], []
    for name, first, last in zip(PASSES, markers[::2], markers[1::2], strict=False):
        found += [{"pass": name, **span} for span in between(spans, first["end"], last["start"], stream, MARKER)]
    return found
