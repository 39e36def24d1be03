"""GEMM + A2A and A2A + GEMM: the real operators, kernels and pushes under seeded schedules, right and with planted faults."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

pytest.importorskip("greenlet")

from tests.protocol.actors import Deadlock
from tests.protocol.explore import Build, assert_caught, assert_passes
from tests.protocol.operator_problems import to_heads, to_rows
from tests.protocol.faults import Fault, fused_faults, host_faults, storing_faults
from tests.protocol.simulated_ranks import TILE, Simulation
from tests.protocol.test_interleaving_all_gather_gemm import SEND, TELL, TELL_FIRST, WAY
from tests.protocol.test_interleaving_gemm_reduce_scatter import (
    CHUNKED_ON_DEVICE_FAULTS,
    CHUNKED_ON_HOST_FAULTS,
    size_for,
)
from tests.protocol.test_interleaving_gemm_reduce_scatter import DIRECT_FAULTS as SCATTERING_DIRECT
from tests.protocol.test_interleaving_gemm_reduce_scatter import FUSED_FAULTS as SCATTERING_FUSED

OUT, OUT_KERNEL = "ops.gemm_a2a", "kernels.gemm_reduce_scatter"
IN, IN_KERNEL, SENDER = "ops.a2a_gemm", "kernels.all_to_all_gemm", "kernels.p2p_store"
OWN_TILE = "            tl.store(y_ptr + offsets, acc.to(y_ptr.dtype.element_ty), mask=mask)\n"
OWN_PRODUCT = "torch.mm(self._a, columns[domain.rank], out=self._own_place())"
WAIT_OUT, WAIT_IN = "        self._call.wait_for_all()\n", "            self._call.receive(own)\n"
WORD = "word = signal_word(source, chunk)"
ARRIVAL = "source = received_block(step, rank, WORLD, LOCAL)"

# ---- GEMM + AllToAll: the kernel of GEMM + RS, in which nobody waits: who takes the blocks does ---------------------

_WAITS = ("no wait", "wait for", "wait does", "stale", "first poll", "next poll", "wrong chunk", "own rows first")
_OF_BLOCKS = {
    "no wait": Fault(OUT, WAIT_OUT, ""),
    "own block not stored": Fault(OUT_KERNEL, OWN_TILE, "            pass\n"),
    "own block stored as another": Fault(OUT, "self._into)[self._domain.rank]", "self._into)[self._domain.rank - 1]"),
    "columns of another rank": Fault(OUT_KERNEL, "target.to(tl.int64) * n if EXCHANGE", "rank * n if EXCHANGE"),
}
_OF_THE_HOST = tuple(host_faults())  # planted in chunked, for which they cost less
OUT_FUSED = {
    **{name: fault for name, fault in SCATTERING_FUSED.items() if not name.startswith((*_WAITS, *_OF_THE_HOST))},
    **_OF_BLOCKS,
    **CHUNKED_ON_HOST_FAULTS,
}
_SHOWS_NOTHING = "told for another chunk"  # all chunks are waited for at once
OUT_DIRECT = {  # with waits by kernels: memory orders are those of words that kernels wait for
    **{name: fault for name, fault in SCATTERING_DIRECT.items() if not name.startswith((*_WAITS, _SHOWS_NOTHING))},
    **_OF_BLOCKS,
    **CHUNKED_ON_DEVICE_FAULTS,
}
OUT_CHUNKED = {"no wait": _OF_BLOCKS["no wait"], "own block not stored": Fault(OUT, OWN_PRODUCT, "pass")}

# ---- AllToAll + GEMM: every tile waits at each block's edge -----------------------------------------------------------


def in_sender(old: str, new: str, report: str = "wrong result") -> Fault:
    return Fault(SENDER, old, new, report, (IN_KERNEL,))


def in_pieces(old: str, new: str) -> Fault:
    return Fault("kernels.order", old, new, "wrong result|deadlock", (SENDER, IN_KERNEL))


_OF_TILES = {
    "wait for the first block only": Fault(IN_KERNEL, WORD, "word = signal_word((rank + WORLD - 1) % WORLD, chunk)"),
    "wait for the last block only": Fault(IN_KERNEL, WORD, "word = signal_word((rank + 1) % WORLD, chunk)"),
    "peers' blocks read from the own": Fault(IN_KERNEL, "block_ptr = received_ptr", "block_ptr = own_ptr"),
    "another block": Fault(IN_KERNEL, "(source.to(tl.int64) * m_shard", "((source + 1) % WORLD * m_shard"),
    "another block's rows of b": Fault(IN_KERNEL, "b_ptr + source.to(tl.int64)", "b_ptr + rank"),
    "each block's sum replaces the last": Fault(IN_KERNEL, "tile_product(acc, rows", "tile_product(0 * acc, rows"),
    "blocks in another order": Fault(IN_KERNEL, ARRIVAL, "source = (rank + step) % WORLD"),
}
IN_FUSED = fused_faults(IN_KERNEL) | _OF_TILES
IN_DIRECT = {
    **storing_faults(IN_KERNEL, SENDER),
    **_OF_TILES,
    "told before stored": in_sender(WAY, TELL_FIRST + WAY),
    "not told": in_sender(TELL, "pass", "deadlock"),
    "told for another chunk": in_sender("complete_ptr.dtype) + chunk", "complete_ptr.dtype) + 1 - chunk"),
    "told somebody else": in_sender("outgoing_at_ptr + target", "outgoing_at_ptr + rank", "deadlock"),
    "stored at somebody else": in_sender("memory_at_ptr + target", "memory_at_ptr + rank"),
    "stored in another block": in_sender("tl.cast(rank, tl.int64) * CHUNKS", "target * CHUNKS"),
    "the own block sent to everybody": in_sender(
        "first += tl.cast(target, tl.int64)", "first += tl.cast(rank, tl.int64)"
    ),
    "told after the first piece": in_sender("chunk), per_chunk, signal", "chunk), 1, signal"),
    "told an old epoch": in_sender("signal_ptr, word)", "signal_ptr, word - (1 << 32))", "deadlock"),
    "last piece not sent": in_sender("* (WORLD - 1):", "* (WORLD - 1) - 1:", "deadlock"),
    "pieces claimed as tiles": Fault(IN_KERNEL, "rank, sent_ptr,", "rank, counter_ptr,", "wrong result|deadlock"),
    "pieces of the first chunk only": in_pieces("unit // PEERS, index", "0 * unit, index"),
    "pieces for somebody else": in_pieces("1 + unit % PEERS", "2 + unit % PEERS"),
    "waits before it sends": Fault(IN_KERNEL, SEND, SEND.replace("DIRECT", "False"), "deadlock"),
}
IN_CHUNKED = {
    "no wait": Fault(IN, "self._call.wait(source)", "pass"),
    "wait for the first block only": Fault(IN, "self._call.wait(source)", "self._call.wait(self._plan.sources[0])"),
    "another block": Fault(IN, "self._call.blocks[source], b", "self._call.blocks[source - 1], b"),
    "own block left out": Fault(IN, "product_in_fp32(self._sent[rank]", "product_in_fp32(0 * self._sent[rank]"),
    "own block not stored": Fault(IN, "self._call.keep(own)", "pass"),
}
IN_WITHOUT_PRODUCT = {
    "no wait": Fault(IN, WAIT_IN, "            self._call.keep(own)\n"),
    "own block not stored": Fault(IN, WAIT_IN, "            self._call.wait_for_all()\n"),
}
STATIC_PIECES = (
    in_sender("    index = claim(claimed_ptr).to(tl.int32)\n    while", "    index = tl.program_id(0)\n    while"),
    in_sender("        index = claim(claimed_ptr).to(tl.int32)\n", "        index += tl.num_programs(0)\n"),
)
EXCHANGES = [to_heads, to_rows]
MORE_THAN_TWO = ("somebody", "block", "one peer", "another order")  # ranks that a fault needs to show

Problem = Callable[..., Build]


@pytest.mark.parametrize("method", ["fused", "direct"])
@pytest.mark.parametrize("problem", EXCHANGES)
def test_kernels_pass(problem: Problem, method: str) -> None:
    assert_passes(problem(method, Simulation(2)), range(6))
    assert_passes(problem(method, Simulation(3)), range(3))
    assert_passes(problem(method, Simulation(2, ctas=3), columns=2 * TILE), range(3), resident=1)


@pytest.mark.parametrize("device_waits", [False, True])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("problem", EXCHANGES)
def test_chunked_passes(problem: Problem, world: int, device_waits: bool) -> None:
    assert_passes(problem("chunked", Simulation(world, device_waits=device_waits)), range(12))


IN_PLACE = {
    "no wait": _OF_BLOCKS["no wait"],
    "own block left in the slot": Fault(OUT, "blocks if self._into is None else self._into)", "blocks)"),
    "peers' blocks left in the slot": Fault(
        OUT, "            self._into[source].copy_(self._call.blocks[source])\n", "            pass\n"
    ),
    "another peer's block": Fault(OUT, "self._call.blocks[source])", "self._call.blocks[source - 1])"),
}


@pytest.mark.parametrize("device_waits", [False, True])
@pytest.mark.parametrize("method", ["fused", "chunked"])
def test_blocks_go_where_the_caller_wants_them(method: str, device_waits: bool) -> None:
    problem = to_heads(method, Simulation(3, device_waits=device_waits), in_place=True)
    assert_passes(problem, range(3))
    for name, fault in IN_PLACE.items():
        with fault.planted():
            assert "wrong result" in str(assert_caught(problem, range(60))), name


@pytest.mark.parametrize("method", ["chunked", "fused", "direct"])
def test_blocks_are_added_in_the_order_of_the_schedule(method: str) -> None:
    assert_passes(to_rows(method, Simulation(3), ordered=True), range(2))


@pytest.mark.parametrize("device_waits", [False, True])
def test_what_is_received_without_a_product_is_complete(device_waits: bool) -> None:
    """Beside a frozen input, only the weight gradient reads it; `direct` must send it all the same."""
    for method in ("chunked", "direct"):
        problem = to_rows(method, Simulation(2, device_waits=device_waits), complete=True)
        assert_passes(problem, range(10))
        for fault in IN_WITHOUT_PRODUCT.values():
            with fault.planted():
                assert "wrong result" in str(assert_caught(problem, range(60)))
    with Fault(IN, "if not self._is_over:", "if False:").planted():
        assert re.search("wrong result|deadlock", str(assert_caught(problem, range(5))))


@pytest.mark.parametrize("fault", OUT_FUSED)
def test_fault_of_a_fused_gemm_all_to_all_is_caught(fault: str) -> None:
    _is_caught(to_heads, "fused", fault, OUT_FUSED[fault])


@pytest.mark.parametrize("fault", OUT_DIRECT)
def test_fault_of_a_direct_gemm_all_to_all_is_caught(fault: str) -> None:
    _is_caught(to_heads, "direct", fault, OUT_DIRECT[fault], device_waits=True)


@pytest.mark.parametrize("fault", IN_FUSED)
def test_fault_of_a_fused_all_to_all_gemm_is_caught(fault: str) -> None:
    _is_caught(to_rows, "fused", fault, IN_FUSED[fault])


@pytest.mark.parametrize("fault", IN_DIRECT)
def test_fault_of_a_direct_all_to_all_gemm_is_caught(fault: str) -> None:
    _is_caught(to_rows, "direct", fault, IN_DIRECT[fault])


def _is_caught(problem: Problem, method: str, name: str, fault: Fault, device_waits: bool = False) -> None:
    world = 3 if any(text in name for text in MORE_THAN_TWO) else 2
    options = {"ordered": True} if "another order" in name else {}
    with fault.planted():
        error = assert_caught(
            problem(method, Simulation(world, device_waits=device_waits), **size_for(name), **options), range(30)
        )
    assert re.search(fault.report, str(error)), error


@pytest.mark.parametrize("device_waits", [False, True])
@pytest.mark.parametrize(("problem", "own"), [(to_heads, OUT_CHUNKED), (to_rows, IN_CHUNKED)])
def test_faults_of_chunked_are_caught(problem: Problem, own: dict[str, Fault], device_waits: bool) -> None:
    waits = CHUNKED_ON_DEVICE_FAULTS if device_waits else CHUNKED_ON_HOST_FAULTS
    if problem is to_rows:  # which waits for one block at a time
        waits = {"stale epoch": waits["stale epoch"]}
    for fault in (host_faults(device_waits) | waits | own).values():
        with fault.planted():
            error = assert_caught(problem("chunked", Simulation(3, device_waits=device_waits)), range(100))
        assert re.search(fault.report, str(error)), error


def test_pieces_that_are_not_claimed_deadlock_ranks_with_fewer_resident_ctas_than_the_grid() -> None:
    """Rule 4, as for AG + GEMM."""
    with STATIC_PIECES[0].planted(), STATIC_PIECES[1].planted():
        assert_passes(to_rows("direct", Simulation(2, ctas=2)), range(3))
        error = assert_caught(to_rows("direct", Simulation(2, ctas=2)), range(5), resident=1)
    assert isinstance(error, Deadlock)


@pytest.mark.parametrize("method", ["fused", "chunked"])
@pytest.mark.parametrize("problem", EXCHANGES)
def test_stopped_peer_is_named(problem: Problem, method: str) -> None:
    """Rank 1 computes, but sends nothing: rank 0 reports it by name, from inside the kernel or after it."""
    machine = Simulation(2, timeout_s=0.01, stopped=(1,))
    error = assert_caught(problem(method, machine, calls=1), range(1), spin=True)
    report = rf"{problem.__name__}: rank 0 waited .* s for chunk 0 of rank 1: expected epoch 1, seen 0"
    assert re.search(report, str(error)), error
