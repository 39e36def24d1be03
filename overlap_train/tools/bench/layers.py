"""The layer benchmark: forward and backward of one column and one row linear with sequence parallelism.

    y = column(x)  x [s/W, K1], w1 [N1/W, K1] -> [s, N1/W]        z = row(h)  h [s, K2/W], w2 [N2, K2/W] -> [s/W, N2]

h and both output gradients are given: what a model computes between the two linears is not part of the figure.
Gradients of x, w1, h and w2 are taken by autograd, the row linear's first, and returned in the dtype of the weights.
Beside ours are Megatron-Core's linears, PyTorch's async-TP and TransformerEngine's linears.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from ...config import OverlapConfig
from ...linear import all_gather_linear, linear_reduce_scatter
from ..measure.cases import LAYERS, check_divisible
from ..measure.check import check
from ..measure.runs import Inputs, Run, Session, normal
from ..measure.world import World
from . import transformer_engine
from .async_tp import AsyncColumn, AsyncRow
from .transformer_engine import Linear, Maker
from .turns import Contest

Tensors = Sequence[torch.Tensor]
Outcome = tuple[torch.Tensor, ...]  # y, z, dx, dw1, dh, dw2
NAMES = ("y", "z", "dx", "dw1", "dh", "dw2")
COLUMNS = ("megatron", "async_tp", "te", "gemms", "te_userbuffers")
MEGATRON_LINEARS = "overlap_train.integrations.megatron.bench_baseline"


@dataclass(frozen=True, eq=False)
class Data:
    """Inputs, weights and output gradients of one layer on this rank; inputs and weights are leaves of autograd."""

    x: torch.Tensor
    w1: torch.nn.Parameter
    dy: torch.Tensor
    h: torch.Tensor
    w2: torch.nn.Parameter
    dz: torch.Tensor

    @classmethod
    def make(cls, layer: str, sequence: int, world: World, dtype: torch.dtype, seed: int) -> Data:
        (n1, k1), (n2, k2), s, w = *LAYERS[layer], sequence, world.size
        shapes = ((s // w, k1), (n1 // w, k1), (s, n1 // w), (s, k2 // w), (n2, k2 // w), (s // w, n2))
        x, w1, dy, h, w2, dz = map(normal(world, dtype, seed), shapes)
        return cls(x.requires_grad_(), torch.nn.Parameter(w1), dy, h.requires_grad_(), torch.nn.Parameter(w2), dz)


def gradients(outputs: Tensors, leaves: Tensors, given: Tensors) -> Outcome:
    """The outputs and the gradients of the leaves, from those of the outputs. In this thread: training wakes autograd's own
    thread, which takes 0.3 ms, once a step and not once a layer."""
    with torch.autograd.set_multithreading_enabled(False):
        return (*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, given))


def check_parts(expected: Tensors, name: str, found: Tensors) -> None:
    """Check outputs and gradients one after the other."""
    for part, ours, theirs in zip(NAMES, found, expected, strict=True):
        check(f"{name}: {part}", ours, theirs)


def forward_backward(make: Maker) -> Run:
    """What is timed. make: linears are made once for each set of weights."""
    made = cache(make)

    def run(data: Data) -> Outcome:
        column, row = made(data)
        return gradients([column(data.x), row(data.h)], [data.x, data.w1, data.h, data.w2], [data.dy, data.dz])

    return run


@torch.no_grad()
def products(data: Data, whole_x: Any, whole_dz: Any, mm: Callable[..., Any], summed: Callable[..., Any]) -> list[Any]:
    """The six products of a layer in the order of NAMES. summed: of those that are partial sums."""
    return [
        mm(whole_x, data.w1.t()),
        summed(data.h, data.w2.t()),
        summed(data.dy, data.w1),
        mm(data.dy.t(), whole_x),
        mm(whole_dz, data.w2),
        mm(whole_dz.t(), data.h),
    ]


def contests(layers: Sequence[str], sequences: Sequence[int], session: Session) -> Iterator[Contest]:
    """Every layer with every length, one after the other. Collective.

    Raises:
        ValueError: a size cannot be sharded over the ranks.
    """
    for layer in layers:
        (n1, _), (_, k2) = LAYERS[layer]
        for what, size in (*(("--seq", sequence) for sequence in sequences), (layer, n1), (layer, k2)):
            check_divisible(what, size, session.world.size)
    features = {layer: (LAYERS[layer][0][1], LAYERS[layer][1][0]) for layer in layers}  # of x, of z
    session.domain([max(sequences) * max(map(max, features.values())) * session.dtype.itemsize])
    for layer, sequence in product(layers, sequences):
        title = f"{layer} s={sequence}"
        with transformer_engine.linears(title, sequence, features[layer], session) as makers:
            yield contest_of(title, layer, sequence, makers, session)


@torch.no_grad()
def contest_of(title: str, layer: str, sequence: int, makers: dict[str, Maker], session: Session) -> Contest:
    """All methods and baselines of one layer. makers: TransformerEngine's. Collective."""
    world = session.world
    data, decoy = (Data.make(layer, sequence, world, session.dtype, seed) for seed in (0, 99))
    wholes = cache(lambda data: (world.gather(data.x.detach()), world.gather(data.dz)))
    expected = products(data, *wholes(data), torch.mm, lambda a, b: world.scatter(torch.mm(a, b).float()))
    inputs = Inputs([data], decoy, partial(check_parts, expected))
    configs = {method: replace(session.config, method=method) for method in session.methods}
    ours = {method: forward_backward(partial(overlapped, config, world.group)) for method, config in configs.items()}
    makers = {"megatron": partial(megatron, world), "async_tp": partial(async_tp, world), **makers}
    baselines = {name: forward_backward(make) for name, make in makers.items()}
    baselines["gemms"] = lambda data: products(data, *wholes(data), torch.mm, torch.mm)  # without communication
    head = {"layer": layer, "world": world.size, "seq": sequence}
    flops = 6 * sequence * sum(n * k for n, k in LAYERS[layer]) / world.size  # of six GEMMs
    return Contest(title, head, flops, inputs, ours, baselines, COLUMNS)


def overlapped(config: OverlapConfig, group: dist.ProcessGroup, data: Data) -> tuple[Linear, Linear]:
    told: Any = {"group": group, "config": config}
    return lambda x: all_gather_linear(x, data.w1, **told), lambda h: linear_reduce_scatter(h, data.w2, **told)


def async_tp(world: World, data: Data) -> tuple[Linear, Linear]:
    return lambda x: AsyncColumn.apply(x, data.w1, world.group), lambda h: AsyncRow.apply(h, data.w2, world.group)


def megatron(world: World, data: Data) -> tuple[Linear, Linear]:
    """Megatron-Core's own linears on the same weights. Loaded by name: this package does not depend on Megatron."""
    if importlib.util.find_spec("megatron") is None:
        raise RuntimeError("megatron-core is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a page about what is not installed
        return importlib.import_module(MEGATRON_LINEARS).linears(data.w1, data.w2, world.group)
