"""The autograd functions under seeded schedules: column and row linear, both passes, two microbatches in flight.

`forward` and `backward` are called as functions: torch's autograd engine keeps state per thread, which greenlets must
not share.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("greenlet")

from tests.protocol.explore import Build, assert_caught, assert_passes
from tests.protocol.faults import Fault
from tests.protocol.interleaving import Scheduler
from tests.protocol.operator_problems import integers
from tests.protocol.simulated_ranks import TILE, SimulatedDomain, Simulation, core

MICROBATCHES = 2
STEPS = 2


class Context(SimpleNamespace):
    """What `torch.autograd.Function` passes as ctx."""

    needs_input_grad = (True, True, False)

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors


def mlp(method: str, machine: Simulation, gathered_input: str = "regather") -> Build:
    """STEPS times: forward of MICROBATCHES, then their backward in order (as a pipeline's first stage has it).

    x_shard_m [TILE, TILE] -> h [W * TILE, TILE] = x @ w1.T -> y_shard_m [TILE, TILE] = sum of h @ w2.T; gradient dy.
    """
    world, runs = machine.world_size, STEPS * MICROBATCHES
    x, dy = integers(runs, world, TILE, TILE, seed=7), integers(runs, world, TILE, TILE, seed=8)
    w1, w2 = integers(world, TILE, TILE, seed=9), integers(world, TILE, TILE, seed=10)
    w1.requires_grad_()  # gathered x is kept for trainable weights only

    def build(scheduler: Scheduler) -> Callable[[], None]:
        results: dict[tuple[int, int], dict[str, torch.Tensor]] = {}

        def host(domain: SimulatedDomain) -> None:
            linear, rank = core("linear"), domain.rank
            plan = SimpleNamespace(
                domain=domain,
                method=method,
                name="mlp",
                config=SimpleNamespace(gathered_input=gathered_input, main_grad="off"),
            )
            for step in range(STEPS):
                batches = range(step * MICROBATCHES, (step + 1) * MICROBATCHES)
                contexts = {run: (Context(), Context()) for run in batches}
                for run in batches:
                    column, row = contexts[run]
                    h = linear._AllGatherLinear.forward(column, x[run, rank], w1[rank], plan)
                    y = linear._LinearReduceScatter.forward(row, h, w2[rank], plan)
                    results[run, rank] = {"y": y.clone()}
                for run in batches:
                    column, row = contexts[run]
                    dh, dw2, _ = linear._LinearReduceScatter.backward(row, dy[run, rank])
                    dx, dw1, _ = linear._AllGatherLinear.backward(column, dh)
                    results[run, rank] |= {"dx": dx.clone(), "dw1": dw1, "dw2": dw2}

        machine.spawn_hosts(scheduler, host)

        def check() -> None:
            assert len(results) == runs * world
            for (run, rank), got in results.items():
                expected = _reference(x[run], dy[run], w1, w2, rank)
                wrong = [name for name, value in got.items() if not torch.equal(value, expected[name])]
                assert not wrong, f"microbatch {run}, rank {rank}: {wrong}"

        return check

    return build


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
    assert_passes(mlp("chunked", Simulation(3, device_waits=device_waits), gathered_input), range(25))


@pytest.mark.parametrize("gathered_input", ["regather", "keep"])
def test_fused_passes(gathered_input: str) -> None:
    assert_passes(mlp("fused", Simulation(2), gathered_input), range(8))


GATHER = "operators.all_gather_gemm"
OWN = "self._call.blocks[self._domain.rank].copy_(self._own)"
FAULTS = {
    "gathered x not waited for": Fault(GATHER, "self._call.wait_for_all()", "pass", reload=("linear",)),
    "own block not copied": Fault(GATHER, OWN, "pass", reload=("linear",)),
    "kept x not copied out of its slot": Fault("linear", "gather.full().clone() if keep", "gather.full() if keep"),
    "one slot": Fault("workspace", "SLOTS = 2\n", "SLOTS = 1\n"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_caught(fault: str) -> None:
    gathered_input = "keep" if "kept" in fault else "regather"
    with FAULTS[fault].planted():
        assert "wrong result" in str(assert_caught(mlp("chunked", Simulation(2), gathered_input), range(40)))
