"""The scheduler and `mutant` themselves: right toy protocols pass, planted faults are found, and replay by seed."""

from __future__ import annotations

import gc
import re
from types import ModuleType

import pytest
import torch

pytest.importorskip("greenlet")

from greenlet import getcurrent, greenlet

from tests.protocol import toy_kernels
from tests.protocol.actors import Deadlock, StepLimit
from tests.protocol.explore import Build, assert_caught, assert_passes, failure_of, run_seed
from tests.protocol.interleaving import Scheduler

CALLS, SIZE, TILES = 4, 8, 2
NO_SPIN_LIMIT = 1 << 30


def gather(kernels: ModuleType = toy_kernels, world: int = 2, slots: int = 2, spin_limit: int = NO_SPIN_LIMIT) -> Build:
    """`CALLS` gathers on `world` ranks; the k-th call of rank r sends 100 k + 10 r + (0..SIZE-1)."""

    def build(scheduler: Scheduler):
        x = torch.arange(SIZE) + 10.0 * torch.arange(world)[:, None] + 100.0 * torch.arange(CALLS)[:, None, None]
        workspace = torch.full((world, slots, world, SIZE), torch.nan)
        flags, claims, faults = (torch.zeros(shape, dtype=torch.int32) for shape in ((world, world), world, world))
        y = torch.full((world, CALLS, world, SIZE), torch.nan)
        scheduler.watch(slots=workspace, flags=flags, claims=claims, faults=faults)
        sizes = {"SLOTS": slots, "WORLD": world, "SIZE": SIZE}

        def host(r: int) -> None:
            for call in range(CALLS):
                kernels.push[(world,)](x[call, r], workspace, flags, r, call + 1, **sizes)
                kernels.collect[(2,)](
                    y[r, call], workspace, flags, claims[r:], faults[r:], r, call + 1, spin_limit, **sizes
                )

        def check() -> None:
            assert not faults.any(), f"fault words {faults.tolist()}"
            wrong = [
                (r, call) for r in range(world) for call in range(CALLS) if not torch.equal(y[r, call], 2 * x[call])
            ]
            assert not wrong, f"(rank, call) {wrong}"

        for r in range(world):
            scheduler.spawn(f"host{r}", lambda r=r: host(r), rank=r)
        return check

    return build


def exchange(kernels: ModuleType = toy_kernels) -> Build:
    """`CALLS` exchanges of two ranks with as many CTAs as own tiles."""

    def build(scheduler: Scheduler):
        workspace, y = torch.full((2, 2, TILES, SIZE), torch.nan), torch.full((2, CALLS, TILES, SIZE), torch.nan)
        flags, claims, faults = (torch.zeros(2, dtype=torch.int32) for _ in range(3))
        scheduler.watch(slots=workspace, flags=flags, claims=claims, faults=faults)

        def host(r: int) -> None:
            for call in range(CALLS):
                pointers = y[r, call], workspace, flags, claims[r:], faults[r:]
                kernels.exchange[(TILES,)](*pointers, r, call + 1, NO_SPIN_LIMIT, TILES=TILES, SIZE=SIZE)

        def check() -> None:
            expected = (10.0 * torch.arange(TILES) + 1)[:, None].expand_as(y)
            assert torch.equal(y, expected), "y"

        for r in range(2):
            scheduler.spawn(f"host{r}", lambda r=r: host(r), rank=r)
        return check

    return build


@pytest.mark.parametrize("world", [2, 3])
def test_right_gather_passes(world: int) -> None:
    assert_passes(gather(world=world), range(12))


@pytest.mark.parametrize("resident", [1, None])
def test_right_exchange_passes(resident: int | None) -> None:
    assert_passes(exchange(), range(15), resident=resident)


def test_slot_reused_one_epoch_early_is_found() -> None:
    assert "wrong result" in str(assert_caught(gather(slots=1), range(60)))


def test_equal_seeds_give_equal_schedules() -> None:
    digests = [[run_seed(gather(), seed).digest for seed in range(9)] for _ in range(2)]
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == 9, "different seeds gave the same schedule"


def test_python_actors_copy_signal_and_poll() -> None:
    """The shape of a copy engine: copy and signal against a poll loop; right order passes, wrong order is found."""

    def build_in_order(order: str):
        def build(scheduler: Scheduler):
            memory, seen = torch.zeros(2, dtype=torch.int32), []
            scheduler.watch(memory=memory)

            def writer() -> None:
                for word in order:
                    scheduler.step()
                    memory[int(word)] = 7

            def reader() -> None:
                while memory[1] == 0:
                    scheduler.pause()
                seen.append(int(memory[0]))

            scheduler.spawn("writer", writer)
            scheduler.spawn("reader", reader, rank=1)

            def check() -> None:
                assert seen == [7]

            return check

        return build

    assert_passes(build_in_order("01"), range(30))
    assert "wrong result" in str(assert_caught(build_in_order("10"), range(30)))
    assert "reader waits for" in str(assert_caught(build_in_order("0"), range(1)))


def test_an_exception_names_seed_and_actor() -> None:
    def build(scheduler: Scheduler):
        scheduler.spawn("copier", lambda: 1 // 0)
        return lambda: None

    assert re.match(r"seed 3 .*copier raised ZeroDivisionError", str(failure_of(build, 3)))


def test_no_actor_outlives_its_schedule() -> None:
    """One that waits for something while it is ended, as an operator does for its pushes: else Python would end it whenever it
    finds it as garbage, in the middle of another schedule."""
    started: list[greenlet] = []

    def build(scheduler: Scheduler):
        def host() -> None:
            started.append(getcurrent())
            try:
                scheduler.wait_until(lambda: False, "nothing")
            finally:
                scheduler.wait_until(lambda: False, "its pushes")

        scheduler.spawn("host", host)
        return lambda: None

    assert isinstance(failure_of(build, 0), Deadlock)
    assert [one.dead for one in started] == [True]


def test_no_garbage_is_looked_for_within_a_schedule() -> None:
    """Finalizers would run in the middle of a step, wherever the process has made enough objects."""
    within: list[bool] = []

    def build(scheduler: Scheduler):
        scheduler.spawn("host", lambda: within.append(gc.isenabled()))
        return lambda: None

    run_seed(build, 0)
    assert within == [False] and gc.isenabled()


def test_step_limit_ends_a_schedule_that_never_ends() -> None:
    def build(scheduler: Scheduler):
        def busy() -> None:
            while True:
                scheduler.pause()

        scheduler.spawn("busy", busy)
        return lambda: None

    assert isinstance(failure_of(build, 0, step_limit=100), StepLimit)
