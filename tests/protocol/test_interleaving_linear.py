"""The autograd functions under seeded schedules: column and row linear, both passes, two microbatches in flight.

`forward` and `backward` are called as functions: torch's autograd engine keeps state per thread, which greenlets must
not share.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("greenlet")

from overlap_train.select.method import Method
from tests.protocol.explore import Build, assert_passes
from tests.protocol.interleaving import Scheduler
from tests.protocol.operator_problems import integers
from tests.protocol.simulated_ranks import TILE, SimulatedDomain, Simulation, core

MICROBATCHES = 2


class Context(SimpleNamespace):
    """What `torch.autograd.Function` passes as ctx; `wants_dx`: whether the input needs a gradient."""

    def __init__(self, wants_dx: bool) -> None:
        super().__init__(needs_input_grad=(wants_dx, True, False, False))

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors


PLAIN = Method("fused")  # without options


def mlp(
    method: str,
    machine: Simulation,
    gathered_input: str = "regather",
    steps: int = 2,
    wants_dx: bool = True,
    variant: Method = PLAIN,
) -> Build:
    """`steps` times: forward of MICROBATCHES, then their backward in order (as a pipeline's first stage has it).

    x_shard_m [TILE, TILE] -> h [W * TILE, TILE] = x @ w1.T -> y_shard_m [TILE, TILE] = sum of h @ w2.T; gradient dy.
    x and dy lie in one buffer per microbatch, as in a training loop. wants_dx: whether x needs a gradient.
    variant: how every pass runs.
    """
    world, runs = machine.world_size, steps * MICROBATCHES
    x, dy = integers(runs, world, TILE, TILE, seed=7), integers(runs, world, TILE, TILE, seed=8)
    w1, w2 = integers(world, TILE, TILE, seed=9), integers(world, TILE, TILE, seed=10)
    w1.requires_grad_()  # gathered x is kept for trainable weights only

    def build(scheduler: Scheduler) -> Callable[[], None]:
        results: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
        buffers = torch.empty(2, MICROBATCHES, world, TILE, TILE)

        def host(domain: SimulatedDomain) -> None:
            rank = domain.rank
            plans = planned(domain, method, x[0, rank], w1[rank], w2[rank], gathered_input, variant)
            for step in range(steps):
                contexts = [(Context(wants_dx), Context(True)) for _ in range(MICROBATCHES)]
                batches = [(step * MICROBATCHES + i, buffers[:, i, rank], contexts[i]) for i in range(MICROBATCHES)]
                for run, (own_x, _), context in batches:
                    own_x.copy_(x[run, rank])
                    results[run, rank] = {"y": _forward(own_x, w1[rank], w2[rank], plans, context)}
                for run, (_, own_dy), context in batches:
                    own_dy.copy_(dy[run, rank])
                    results[run, rank] |= _backward(own_dy, context)

        machine.spawn_hosts(scheduler, host)

        def check() -> None:
            assert len(results) == runs * world
            for (run, rank), got in results.items():
                expected = _reference(x[run], dy[run], w1, w2, rank)
                wrong = [name for name, value in got.items() if not torch.equal(value, expected[name])]
                assert not wrong, f"microbatch {run}, rank {rank}: {wrong}"

        return check

    return build


def planned(
    domain: SimulatedDomain,
    method: str,
    x: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    gathered_input: str = "regather",
    variant: Method = PLAIN,
) -> tuple[Any, Any]:
    """The plans of a column linear x @ w1.T and of a row linear after it. variant: how every pass runs."""
    settings = {"gathered_input": gathered_input, "main_grad": "off", "variant": variant}
    hidden = x.new_empty(x.shape[0] * domain.world_size, w1.shape[0])
    first = domain.plan(method, x, w1, **settings)
    second = domain.plan(method, hidden, w2, "LINEAR_REDUCE_SCATTER", **settings)
    return tuple(core("ops.planned").Planned(domain, plan) for plan in (first, second))


def _forward(
    x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, plans: tuple[Any, Any], context: tuple[Context, Context]
) -> torch.Tensor:
    first, second = plans
    h = core("linear")._AllGatherLinear.forward(context[0], x, w1, None, first.linear("fc1"))
    return core("linear")._LinearReduceScatter.forward(context[1], h, w2, None, second.linear("fc2")).clone()


def _backward(dy: torch.Tensor, context: tuple[Context, Context]) -> dict[str, torch.Tensor]:
    """The gradients of x, w1 and w2, as far as they are wanted."""
    dh, dw2, *_ = core("linear")._LinearReduceScatter.backward(context[1], dy)
    dx, dw1, *_ = core("linear")._AllGatherLinear.backward(context[0], dh)
    return {"dw1": dw1, "dw2": dw2} | ({} if dx is None else {"dx": dx.clone()})


def _reference(
    x: torch.Tensor, dy: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, rank: int
) -> dict[str, torch.Tensor]:
    """The same on one device: x, dy [W, TILE, TILE] concatenated along rows, weights along their sharded dimension."""
    rows = slice(rank * TILE, (rank + 1) * TILE)
    x, dy = x.flatten(0, 1), dy.flatten(0, 1)
    h = [x @ w.t() for w in w1]
    dh = [dy @ w for w in w2]
    return {
        "y": sum(part @ w.t() for part, w in zip(h, w2, strict=True))[rows],
        "dx": sum(part @ w for part, w in zip(dh, w1, strict=True))[rows],
        "dw1": dh[rank].t() @ x,
        "dw2": dy.t() @ h[rank],
    }


@pytest.mark.parametrize("gathered_input", ["regather", "keep"])
@pytest.mark.parametrize("device_waits", [False, True])
def test_chunked_passes(gathered_input: str, device_waits: bool) -> None:
    assert_passes(mlp("chunked", Simulation(3, device_waits=device_waits), gathered_input), range(4))


@pytest.mark.parametrize("gathered_input", ["regather", "keep"])
def test_fused_passes(gathered_input: str) -> None:
    assert_passes(mlp("fused", Simulation(2), gathered_input), range(2))


def test_direct_passes() -> None:
    assert_passes(mlp("direct", Simulation(2)), range(2))


def test_a_column_whose_input_is_frozen_passes() -> None:
    assert_passes(mlp("fused", Simulation(2), wants_dx=False), range(3))


@pytest.mark.parametrize(("method", "ranks"), [("chunked", 3), ("fused", 2)])
def test_so_do_passes_that_begin_in_step(method: str, ranks: int) -> None:
    assert_passes(
        mlp(method, Simulation(ranks, device_waits=True), variant=Method(method, barrier_first=True)), range(4)
    )


def test_so_does_a_reduction_behind_the_weight_gradient() -> None:
    assert_passes(
        mlp("fused", Simulation(2, device_waits=True), variant=Method("fused", split_reduction=True)), range(4)
    )
    assert_passes(mlp("fused", Simulation(2), variant=Method("fused", whole=True, split_reduction=True)), range(4))
