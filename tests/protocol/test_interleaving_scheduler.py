"""The scheduler itself: right orders pass, wrong ones are found, and each seed has its own schedule, again and again."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("greenlet")

from greenlet import getcurrent, greenlet

from tests.protocol.actors import Deadlock
from tests.protocol.explore import assert_caught, assert_passes, failure_of, run_seed
from tests.protocol.interleaving import Scheduler
from tests.protocol.operator_problems import gathers
from tests.protocol.simulated_ranks import Simulation


def test_equal_seeds_give_equal_schedules() -> None:
    build = gathers("fused", Simulation(2), calls=1)
    digests = [[run_seed(build, seed).digest for seed in range(9)] for _ in range(2)]
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
