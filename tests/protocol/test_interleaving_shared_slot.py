"""Different uses of one slot in a row: methods that count in different words, barriers without a call between, time-outs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch

pytest.importorskip("greenlet")

from overlap_train import OverlapTimeoutError
from overlap_train.kernels.signal_words import LATE_ELAPSED
from tests.protocol.explore import Build, assert_passes
from tests.protocol.interleaving import Scheduler
from tests.protocol.operator_problems import Before, gathers, integers, scatters, tag_of
from tests.protocol.simulated_ranks import TILE, SimulatedDomain, Simulation, core


def gather_and_barrier(method: str) -> Before:
    """A call of another method; the barrier after it frees its slot for the next call."""

    def before(domain: SimulatedDomain) -> None:
        own = torch.ones(TILE, TILE)
        with domain.operator(tag_of("other"), slots=1):
            plan = domain.plan(method, own, own).fprop
            plan.start(domain, tag_of("other"), own).matmul(own)
        domain.workspace.barrier(tag_of("between"))

    return before


@pytest.mark.parametrize("operator", [gathers, scatters])
@pytest.mark.parametrize(("first", "second"), [("fused", "direct"), ("direct", "fused")])
def test_methods_take_turns_on_one_slot(operator: Callable[..., Build], first: str, second: str) -> None:
    """`auto` mixes them: neither may find the other's counters used up."""
    assert_passes(operator(second, Simulation(2), calls=2, before=gather_and_barrier(first)), range(3))


def two_barriers(domain: SimulatedDomain) -> None:
    for name in ("end", "begin"):
        core("group.domain").barrier(domain, tag_of(name))
    assert not domain.fault.words[LATE_ELAPSED], "nobody has used a tenth of 60 s"


@pytest.mark.parametrize("device_waits", [False, True])
def test_barriers_in_a_row(device_waits: bool) -> None:
    """As at the end of one replay and the beginning of the next: a peer may be one barrier ahead."""
    machine = Simulation(3, device_waits=device_waits)
    assert_passes(gathers("chunked", machine, calls=2, before=two_barriers), range(8))


def without_a_peer(method: str, operator: str) -> Build:
    """One call of rank 0, whose peer does not come. Slots hold zeros: what is not poisoned looks like a result."""
    x, b = integers(2 * TILE, TILE, seed=1), integers(TILE, TILE, seed=2)
    machine = Simulation(2, timeout_s=0.01, device_waits=operator == "gathered rows")

    def build(scheduler: Scheduler) -> Callable[[], None]:
        results: list[torch.Tensor] = []

        def host(domain: SimulatedDomain) -> None:
            if domain.rank == 1:
                return
            domain.heap.view(0)[domain.heap.words :].zero_()
            with pytest.raises(OverlapTimeoutError, match="of rank 1"), domain.operator(tag_of("call"), 1):
                results.append(run(domain))

        def run(domain: SimulatedDomain) -> torch.Tensor:
            if operator == "all-reduce":
                return core("ops.low_latency").all_reduce(domain, tag_of("call"), x, method, 0)
            if operator != "scatter":
                plan = domain.plan(method, x[:TILE], b.t()).fprop
                gather = plan.start(domain, tag_of("call"), x[:TILE])
                y = gather.matmul(b)
                if operator == "gather":
                    return y[TILE:]
                gather.keep_own(plan)
                return gather.gathered_view()[TILE : TILE + 1]  # a weight gradient reads it: one row shows there
            plan = domain.plan(method, x, b.t(), "LINEAR_REDUCE_SCATTER").fprop
            return plan.start(domain, tag_of("call"), x, b).finish()

        machine.spawn_hosts(scheduler, host)

        def check() -> None:
            assert results[0].isnan().all(), "what has not come is not poisoned"

        return check

    return build


@pytest.mark.parametrize(
    ("method", "operator"),
    [
        *product(("fused", "direct", "low_latency"), ("gather", "scatter")),
        *product(("words", "one shot", "two shots"), ("all-reduce",)),
    ],
)
def test_what_has_not_come_is_nan_in_the_result(operator: str, method: str) -> None:
    """The loss shows it even where nobody calls an operator or `check` any more."""
    assert_passes(without_a_peer(method, operator), range(1), spin=True)


def test_what_has_not_come_is_nan_in_gathered_rows_whose_own_were_kept_beside_a_product() -> None:
    """All that orders their data is the kernel's own wait; the wait behind it shows in the weight gradient that one failed."""
    assert_passes(without_a_peer("fused", "gathered rows"), range(1), spin=True)
