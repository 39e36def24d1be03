"""Calls that use one slot again and again, as a replayed graph does: right between barriers, and wrong without them."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest

pytest.importorskip("greenlet")

from tests.protocol.explore import Build, assert_caught, assert_passes
from tests.protocol.operator_problems import gathers, scatters, tag_of
from tests.protocol.faults import Fault
from tests.protocol.simulated_ranks import SimulatedDomain, Simulation, core
from tests.protocol.simulated_streams import StreamSimulation

PROBLEMS: dict[str, Callable[..., Build]] = {"gather": gathers, "scatter": scatters}
MACHINES: dict[str, Callable[[], Simulation]] = {
    "host": lambda: Simulation(2),
    "three ranks": lambda: Simulation(3, device_waits=True),
    "streams": lambda: StreamSimulation(2),
}


def replays(domain: SimulatedDomain) -> None:
    """A replay of a graph of one call, which uses the first slot each time."""
    core("group.registry").barrier(domain, tag_of("begin"))


def forgetful(domain: SimulatedDomain) -> None:
    """The same without a barrier."""
    domain.workspace.use.clear()


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("operator", PROBLEMS)
def test_calls_behind_barriers_may_use_one_slot_again_and_again(operator: str, machine: str) -> None:
    assert_passes(PROBLEMS[operator]("chunked", MACHINES[machine](), before=replays), range(12))


@pytest.mark.parametrize("operator", PROBLEMS)
def test_without_barriers_they_may_not(operator: str) -> None:
    assert_caught(PROBLEMS[operator]("chunked", Simulation(3, device_waits=True), before=forgetful), range(60))


PEERS_WORD = "theirs_ptr = tl.load(outgoing_at_ptr + peer).to(epoch_ptr.dtype)"
KNOCK = 'tl.atomic_xchg(theirs_ptr, word, sem="release", scope="sys")'
LISTEN = "wait_signal(signals_ptr, signal_word(source, 0), word, abort_ptr, record_ptr, limit, TIMED)"


def in_kernel(old: str, new: str, report: str = "wrong result") -> Fault:
    return Fault("kernels.signal", old, new, report)


@pytest.mark.parametrize(
    "fault",
    [
        in_kernel(f"{PEERS_WORD}\n            {KNOCK}", "pass", "deadlock"),
        in_kernel(LISTEN, "pass"),
        in_kernel("    tl.store(epoch_ptr, word)  #", "    #"),
        in_kernel(KNOCK, KNOCK.replace("release", "relaxed"), "released at system scope"),
    ],
    ids=["nobody knocks", "nobody waits", "the epoch stays", "knocks before it is done"],
)
def test_a_broken_barrier_is_caught(fault: Fault) -> None:
    with fault.planted():
        assert_caught(gathers("chunked", Simulation(3, device_waits=True), before=replays), range(60))


@pytest.mark.parametrize(
    "fault",
    [
        Fault("group.waits", "call.slot.outgoing[peer][:1].copy_(call.slot.epoch)", "pass", "deadlock"),
        Fault("group.waits", "        self.chunk_on_host(call, 0, 0, self.world_size)\n", ""),
        Fault("group.waits", "        next_epoch_on_host(call)\n", ""),
    ],
    ids=["nobody knocks", "nobody waits", "the epoch stays"],
)
def test_so_is_one_of_the_host(fault: Fault) -> None:
    with fault.planted():
        assert_caught(gathers("chunked", Simulation(3), before=replays), range(60))


def test_capturing_leaves_the_use_of_slots_as_it_was() -> None:
    """What is captured has not run, so that eager calls before the first replay must not count on its barriers."""
    free: list[tuple[str, list[int]]] = []

    def capture(domain: SimulatedDomain) -> None:
        domain.workspace.use.take()
        with (
            mock.patch.object(core("group.registry"), "made_domain", return_value=domain),
            core("group.registry").graphed(None),
        ):
            free.append(("inside", domain.workspace.use.free()))
        free.append(("behind", domain.workspace.use.free()))

    assert_passes(gathers("chunked", Simulation(2), calls=1, before=capture), range(1))
    assert sorted(free) == [("behind", [1, 2])] * 2 + [("inside", [0, 1, 2])] * 2
