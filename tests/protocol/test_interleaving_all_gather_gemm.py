"""AllGather + GEMM: the real operator, kernel and pushes under seeded schedules, right and with planted faults."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("greenlet")

from tests.protocol.actors import Deadlock, StepLimit
from tests.protocol.explore import assert_caught, assert_passes
from tests.protocol.operator_problems import gathers
from tests.protocol.faults import Fault, fused_faults, host_faults, storing_faults
from tests.protocol.simulated_ranks import Simulation

OPERATOR, KERNEL, SENDER = "ops.ag_gemm", "kernels.all_gather_gemm", "kernels.p2p_store"

WAY = "        first = chunk.to"
TELL = "notify_peer(complete_ptr + signal_word(target, chunk), per_chunk, signal_ptr, word)"
TELL_FIRST = """        signal_ptr = tl.load(outgoing_at_ptr + target).to(complete_ptr.dtype) + chunk
        notify_peer(complete_ptr + signal_word(target, chunk), per_chunk, signal_ptr, word)
"""
SEND = """    if DIRECT:  # before any wait: who waits for a peer must owe nothing
"""

FUSED_FAULTS = {
    **host_faults(),
    **fused_faults(KERNEL),
    "wrong chunk order": Fault(KERNEL, "gathered_ptr + source.", "gathered_ptr + ((source + 1) % WORLD)."),
}


def in_sender(old: str, new: str, report: str = "wrong result") -> Fault:
    return Fault(SENDER, old, new, report, (KERNEL,))


DIRECT_FAULTS = {
    **storing_faults(KERNEL, SENDER),
    "wrong chunk order": FUSED_FAULTS["wrong chunk order"],
    "told before stored": in_sender(WAY, TELL_FIRST + WAY),
    "not told": in_sender(TELL, "pass", "deadlock"),
    "told for another chunk": in_sender("complete_ptr.dtype) + chunk", "complete_ptr.dtype) + 1 - chunk"),
    "told somebody else": in_sender("outgoing_at_ptr + target", "outgoing_at_ptr + rank", "deadlock"),
    "stored at somebody else": in_sender("memory_at_ptr + target", "memory_at_ptr + rank"),
    "stored in another block": in_sender("tl.cast(rank, tl.int64) * CHUNKS", "target * CHUNKS"),
    "stored in another chunk": in_sender("CHUNKS * chunk_size + first", "CHUNKS * chunk_size + chunk_size - first"),
    "told after the first piece": in_sender("chunk), per_chunk, signal", "chunk), 1, signal"),
    "told an old epoch": in_sender("signal_ptr, word)", "signal_ptr, word - (1 << 32))", "deadlock"),
    "last piece not sent": in_sender("* (WORLD - 1):", "* (WORLD - 1) - 1:", "deadlock"),
    "end of a piece not stored": in_sender("range(0, PIECE, STEP)", "range(0, PIECE - STEP, STEP)"),
    "pieces claimed as tiles": Fault(KERNEL, "rank, sent_ptr,", "rank, counter_ptr,", "wrong result|deadlock"),
    "waits before it sends": Fault(KERNEL, SEND, SEND.replace("DIRECT", "False"), "deadlock"),
}

CHUNKED_FAULTS = {
    **host_faults(),
    "no wait": Fault(OPERATOR, "self._call.wait(source)", "pass"),
}

STATIC_PIECES = (
    in_sender("    index = claim(claimed_ptr).to(tl.int32)\n    while", "    index = tl.program_id(0)\n    while"),
    in_sender("        index = claim(claimed_ptr).to(tl.int32)\n", "        index += tl.num_programs(0)\n"),
)


def test_fused_passes() -> None:
    assert_passes(gathers("fused", Simulation(2)), range(21))
    assert_passes(gathers("fused", Simulation(3)), range(9))


def test_fused_passes_with_one_resident_cta_of_three() -> None:
    assert_passes(gathers("fused", Simulation(2, ctas=3)), range(9), resident=1)


def test_direct_passes() -> None:
    assert_passes(gathers("direct", Simulation(2)), range(21))
    assert_passes(gathers("direct", Simulation(3)), range(9))
    assert_passes(gathers("direct", Simulation(2, ctas=3)), range(9), resident=1)


@pytest.mark.parametrize("method", ["chunked", "fused", "direct"])
def test_what_is_gathered_can_be_multiplied_twice(method: str) -> None:
    """The tile counter of a persistent kernel is used up after the first product."""
    assert_passes(gathers(method, Simulation(2), again=True), range(8))


@pytest.mark.parametrize("device_waits", [False, True])
def test_what_is_gathered_by_direct_without_a_product_is_sent_all_the_same(device_waits: bool) -> None:
    """A row linear whose input is frozen multiplies only for its weight gradient."""
    problem = gathers("direct", Simulation(2, device_waits=device_waits), complete=True)
    assert_passes(problem, range(9))
    with Fault(OPERATOR, "if not self._is_over:", "if False:").planted():
        assert re.search("wrong result|deadlock", str(assert_caught(problem, range(5))))


def test_pieces_that_are_not_claimed_deadlock_ranks_with_fewer_resident_ctas_than_the_grid() -> None:
    """Rule 4: those of a CTA that does not start before another ends would never be sent."""
    with STATIC_PIECES[0].planted(), STATIC_PIECES[1].planted():
        assert_passes(gathers("direct", Simulation(2, ctas=2)), range(5))
        error = assert_caught(gathers("direct", Simulation(2, ctas=2)), range(5), resident=1)
    assert isinstance(error, Deadlock)


def test_who_leaves_while_others_work_must_not_count_the_epoch() -> None:
    first = Fault("kernels.signal", "if left == tl.num_programs(0):", "if left == 1:", reload=(KERNEL,))
    with first.planted():
        assert_passes(gathers("direct", Simulation(2, ctas=1)), range(5))
        error = assert_caught(gathers("direct", Simulation(2, ctas=3)), range(30))
    assert re.search("wrong result|deadlock", str(error)), error


@pytest.mark.parametrize("device_waits", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_chunked_passes(world: int, device_waits: bool) -> None:
    assert_passes(gathers("chunked", Simulation(world, device_waits=device_waits)), range(24))


@pytest.mark.parametrize("fault", FUSED_FAULTS)
def test_fault_of_fused_is_caught(fault: str) -> None:
    with FUSED_FAULTS[fault].planted():
        error = assert_caught(gathers("fused", Simulation(3 if "somebody" in fault else 2)), range(30))
    assert re.search(FUSED_FAULTS[fault].report, str(error)), error


@pytest.mark.parametrize("fault", DIRECT_FAULTS)
def test_fault_of_direct_is_caught(fault: str) -> None:
    with DIRECT_FAULTS[fault].planted():
        error = assert_caught(gathers("direct", Simulation(3 if "somebody" in fault else 2)), range(30))
    assert re.search(DIRECT_FAULTS[fault].report, str(error)), error


@pytest.mark.parametrize("fault", CHUNKED_FAULTS)
@pytest.mark.parametrize("device_waits", [False, True])
def test_fault_of_chunked_is_caught(fault: str, device_waits: bool) -> None:
    planted = (CHUNKED_FAULTS | host_faults(device_waits))[fault]
    with planted.planted():
        error = assert_caught(gathers("chunked", Simulation(3, device_waits=device_waits)), range(100))
    assert re.search(planted.report, str(error)), error


@pytest.mark.parametrize(("method", "device_waits"), [("fused", False), ("chunked", True), ("chunked", False)])
def test_stopped_peer_is_named(method: str, device_waits: bool) -> None:
    """Rank 1 computes, but sends nothing: rank 0 reports it by name once its spin limit is reached. Of the two CTAs of a kernel,
    which wait for a chunk each, either may be the first."""
    timeout_s = 1e-7 if device_waits else 0.01  # 100 polls: that kernel takes its limit in nanoseconds
    machine = Simulation(2, timeout_s=timeout_s, device_waits=device_waits, stopped=(1,))
    error = assert_caught(gathers(method, machine, calls=1), range(1), spin=True)
    report = r"gather: rank 0 waited .* s for chunk [01] of rank 1: expected epoch 1, seen 0"
    assert re.search(report, str(error)), error


def test_unbounded_wait_is_caught() -> None:
    fault = Fault(
        "kernels.signal",
        "(has_arrived(seen, expected) == 0) & (late == 0)",
        "(has_arrived(seen, expected) == 0)",
        reload=(KERNEL,),
    )
    machine = Simulation(2, timeout_s=0.01, stopped=(1,))
    with fault.planted():
        error = assert_caught(gathers("fused", machine, calls=1), range(1), spin=True, step_limit=5000)
    assert isinstance(error, StepLimit)
