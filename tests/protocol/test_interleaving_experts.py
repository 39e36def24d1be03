"""The autograd functions of experts under seeded schedules: both linears, both passes, two micro-batches in flight."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("greenlet")

from tests.protocol.explore import Build, assert_passes
from tests.protocol.interleaving import Scheduler
from tests.protocol.operator_problems import integers, planned_experts, routings
from tests.protocol.simulated_ranks import TILE, SimulatedDomain, Simulation, core
from tests.protocol.simulated_streams import StreamSimulation


class Context(SimpleNamespace):
    """What autograd passes as ctx: everything is wanted."""

    needs_input_grad, next_functions = (True,) * 6, ((None, 0),) * 6

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors


def layer(machine: Simulation, batches: int = 4) -> Build:
    """z = combine((dispatch(x) * p) ...) of two experts a rank, forward of two micro-batches, then their backward in order."""
    world, of_batches = machine.world_size, routings(machine.world_size, batches)
    x, dz = integers(batches, world, TILE, TILE, seed=21), integers(batches, world, TILE, TILE, seed=22)
    w1, w2 = integers(2 * world, TILE, TILE, seed=23), integers(2 * world, TILE, TILE, seed=24)
    probs = integers(batches, world, TILE, 2 * world, seed=25)

    def reference(batch: int) -> dict[str, torch.Tensor]:
        leaves = [leaf.clone().requires_grad_() for leaf in (x[batch], probs[batch], w1, w2)]
        chosen = torch.zeros(world, TILE, 2 * world)
        for rank, routing in enumerate(of_batches[batch]):
            chosen[rank].view(-1)[routing.places_of_tokens] = 1
        hidden = torch.einsum("rtk,enk->rten", leaves[0], leaves[2]) * (leaves[1] * chosen)[..., None]
        z = torch.einsum("rten,ekn->rtk", hidden, leaves[3])
        z.backward(dz[batch])
        return dict(zip(("z", "dx", "dprobs", "dw1", "dw2"), (z, *(leaf.grad for leaf in leaves)), strict=True))

    def build(scheduler: Scheduler) -> Callable[[], None]:
        found: dict[tuple[int, int], dict[str, Any]] = {}

        def host(domain: SimulatedDomain) -> None:
            rank, functions = domain.rank, core("experts")
            mine = slice(2 * rank, 2 * rank + 2)
            ops = [planned_experts(domain, spec) for spec in ("DISPATCH_LINEAR", "LINEAR_COMBINE")]
            first, second = (SimpleNamespace(op=lambda op=op: op) for op in ops)
            for start in range(0, batches, 2):
                waiting = []
                for batch in (start, start + 1):
                    routing, contexts = of_batches[batch][rank], (Context(), Context())
                    arguments = (*w1[mine], probs[batch, rank], first, routing)
                    y, p = functions._DispatchLinear.forward(contexts[0], x[batch, rank], *arguments)
                    z = functions._LinearCombine.forward(contexts[1], y * p[:, None], *w2[mine], second, routing)
                    found[batch, rank] = {"z": z.clone()}
                    waiting.append((batch, y, p, contexts))
                for batch, y, p, contexts in waiting:
                    da, *dw2 = functions._LinearCombine.backward(contexts[1], dz[batch, rank])[:3]
                    gradients = functions._DispatchLinear.backward(contexts[0], da * p[:, None], (da * y).sum(1))
                    dx, *dw1, dprobs = gradients[:4]
                    found[batch, rank] |= dict(dx=dx, dprobs=dprobs, dw1=torch.stack(dw1), dw2=torch.stack(dw2))

        machine.spawn_hosts(scheduler, host)

        def check() -> None:
            for batch in range(batches):
                right = reference(batch)
                for rank in range(world):
                    of_rank = {
                        n: t[2 * rank : 2 * rank + 2] if n.startswith("dw") else t[rank] for n, t in right.items()
                    }
                    wrong = [name for name in of_rank if not torch.equal(found[batch, rank][name], of_rank[name])]
                    assert not wrong, f"micro-batch {batch}, rank {rank}: {wrong}"

        return check

    return build


@pytest.mark.parametrize(
    "machine",
    [Simulation(2), Simulation(3, device_waits=True), StreamSimulation(2), StreamSimulation(3, one_queue=True)],
)
def test_two_micro_batches_pass(machine: Simulation) -> None:
    assert_passes(layer(machine), range(6))
