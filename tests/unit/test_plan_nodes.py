"""The simulator across nodes: by hand, by the rules of the schedule's two steps, and with each rule broken."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from overlap_train.planning import cost
from overlap_train.planning.machines import SYSTEMS
from overlap_train.planning.table import UNTUNED
from overlap_train.schedule.inter_node import crossings
from overlap_train.schedule.order import A2A_GEMM, EXCHANGES, GATHER, GEMM_A2A, SCATTER, Topology, sources
from overlap_train.schedule.transfers import ARRIVED, LANDED, NETWORK, NODE_SUM, OPERAND, Leg, legs
from overlap_train.select.passes import Pass
from overlap_train.select.tiling import HOPPER, HOPPER_TILE
from overlap_train.tools.plan.estimates import work_of
from overlap_train.tools.plan.simulation import across_nodes, programs, sending
from overlap_train.tools.plan.simulation.backward import backward, wgrad_us
from overlap_train.tools.plan.simulation.persistent_tiles import gather_tiles
from overlap_train.tools.plan.simulation.programs import program
from overlap_train.tools.plan.simulation.simulate import simulate
from overlap_train.tools.plan.simulation.timeline import (
    COPIES,
    PASSED_ON,
    SENDERS,
    TO_NETWORK,
    Program,
    Send,
    Span,
    Timeline,
    Token,
    arrived,
    landed,
)
from overlap_train.tools.plan.simulation.work import Work

H200 = SYSTEMS["h200"]
KINDS = (GATHER, SCATTER, *EXCHANGES)
METHODS = ("fused", "chunked")
SIZES = [(2, 1), (2, 2), (3, 2), (2, 3), (3, 4)]
# Easy to reckon with: a shard of 1 MB takes 10 us over NVLink and 100 over the network. As long takes a sum of a node of two,
# which reads two such and writes one, on two SMs.
ROUND = replace(
    H200,
    gap_us=1.0,
    wait_us=1.0,
    push_us=2.0,
    nic_us=10.0,
    copy_gbs=100.0,
    nic_gbs=10.0,
    memory_gbs=1000.0,
    sum_sm_gbs=15.0,
)
SHARD = 1e6


def work(
    kind: str, nodes: int, local: int, rank: int = 0, chunks: int = 1, together: int = 1, method: str = "chunked"
) -> Work:
    """Blocks of 500 rows x 1000 features."""
    world = nodes * local
    n, k = {GATHER: (64, 1000), SCATTER: (1000, 64), A2A_GEMM: (64, 1000 * world), GEMM_A2A: (1000 * world, 64)}[kind]
    made = work_of(ROUND, Pass(kind, 500 * world, n, k, torch.bfloat16, world), method, UNTUNED, nodes=nodes)
    topology, tiled = Topology(nodes, local, rank), method == "fused"
    plan = replace(
        made.plan, chunks=chunks, legs=legs(kind, topology, chunks, tiled), sources=sources(topology, kind),
        crossings=crossings(kind, topology, chunks, tiled), together=together,
    )  # fmt: skip
    return replace(made, plan=plan, topology=topology)


def run(*works: Work) -> Timeline:
    return simulate([program(one) for one in works], ROUND.copy_gbs, ROUND.nic_gbs)


def everyone(kind: str, nodes: int, local: int, chunks: int = 1, method: str = "chunked") -> list[Work]:
    return [work(kind, nodes, local, rank, chunks, method=method) for rank in range(nodes * local)]


def test_a_gather_of_two_nodes_of_two_by_hand() -> None:
    made = work(GATHER, 2, 2)
    assert made.shard_bytes == SHARD and made.part_us < 8, "three products end before the last block comes"
    begun = 1 + 1  # gap, epoch
    far = begun + 10 + 100
    passed_on = far + 2 + 10
    timeline = run(made)
    assert {token: time for _, token, time in timeline.tokens if token[0] == "arrived"} == {
        arrived("call", 1, 0): pytest.approx(begun + 2 + 10),
        arrived("call", 2, 0): pytest.approx(far),
        arrived("call", 3, 0): pytest.approx(passed_on),
    }
    assert timeline.us == pytest.approx(passed_on + 1 + 1 + made.part_us)  # wait, gap, product


def test_a_scatter_of_two_nodes_of_two_by_hand() -> None:
    """Rank 0 multiplies for 3, 2, 1 and itself. Block 3 goes to rank 1, which adds it for rank 3; block 2 is added here."""
    made = work(SCATTER, 2, 2)
    assert made.shard_bytes == SHARD and made.part_us < 3
    first = 1 + 1 + 1 + made.part_us  # gap, epoch, gap, product
    assert made.plan.reduce_sms == 2
    added = first + 2 + 10 + 100  # a copy; two partials read, one sum written
    crossed = added + 10 + 100
    assert run(made).us == pytest.approx(crossed + 1 + 1 + 4)  # wait, gap; two partials, a far sum, and what is written


def test_an_all_to_all_of_two_nodes_of_two_by_hand() -> None:
    """Rank 2 sends rank 0 the block of rank 1 first, which is copied there while that of rank 0 crosses. Rank 1 does alike."""
    made = work(A2A_GEMM, 2, 2)
    assert made.shard_bytes == SHARD and made.part_us < 8
    begun = 1 + 1  # gap, epoch
    first, second = begun + 10 + 100, begun + 2 * (10 + 100)
    timeline = run(made)
    assert {token: time for _, token, time in timeline.tokens if token[0] in ("arrived", "landed")} == {
        arrived("call", 1, 0): pytest.approx(begun + 2 + 10),
        landed("call", 1, 2, 0): pytest.approx(first),
        arrived("call", 3, 0): pytest.approx(first + 2 + 10),
        arrived("call", 2, 0): pytest.approx(second),
    }
    copied = 6 * 500 * 64 / 1e6  # the sum, from fp32 to bf16
    assert timeline.us == pytest.approx(second + 1 + 1 + made.terms_us(1, 1, False) + 1 + copied)  # wait, gap; gap


def all_legs(made: Work) -> list[Leg]:
    """Also those of what lands."""
    return [*made.plan.legs, *(leg for c in made.plan.crossings for leg in c.passed_on if leg.carries == LANDED)]


def problems_of(made: Work, timeline: Timeline) -> Iterator[str]:
    """What a run did that the two steps forbid."""
    tokens = {token: time for _, token, time in timeline.tokens}
    topology, sums = made.topology, (span for span in timeline.spans if span.name == "node sum")
    for leg in all_legs(made):
        span = span_of(timeline, leg)
        if leg.carries == ARRIVED and span.start < tokens[arrived("call", leg.block, leg.chunk)]:
            yield "passed on before it had arrived"
        if leg.carries == LANDED and span.start < tokens[landed("call", leg.target, leg.block, leg.chunk)]:
            yield "passed on before it had landed"
        product = ("call", "rows", leg.block, leg.chunk)
        if made.plan.method == "fused":
            product = ("stored", "call", leg.block, leg.chunk)
        if leg.carries == OPERAND and leg.link == NETWORK and span.start < tokens.get(product, 0.0):
            yield "sent before it was multiplied"
        if leg.carries != NODE_SUM:
            continue
        ranks = topology.ranks_of(leg.target // topology.local)
        needed: list[Token] = [arrived("call", rank, leg.chunk) for rank in ranks if rank != leg.target]
        end = tokens["call", "sum", leg.block, leg.chunk]
        if span.start < end:
            yield "sent before it was added"
        begun = next(sums).start
        if any(begun < tokens[token] for token in [product, *needed]):
            yield "added before the node's partials were there"
    yield from lane_problems(made, timeline)


def lane_problems(made: Work, timeline: Timeline) -> Iterator[str]:
    for lane in SENDERS:
        spans = [span for span in timeline.spans if span.lane == lane]
        expected = [(leg.target, leg.block, leg.chunk) for leg in all_legs(made) if across_nodes.lane_of(leg) == lane]
        if lane == PASSED_ON and made.plan.kind == GATHER:  # to every rank of the node as it comes
            blocks = list(dict.fromkeys(block for _, block, _ in expected))
            expected.sort(key=lambda place: (blocks.index(place[1]), place[2]))
        if lane == COPIES and (made.plan.kind, made.plan.method) == (SCATTER, "chunked"):
            # Of far nodes a chunk for all ranks, then the next chunk.
            local, own = made.topology.local, made.topology.node
            nodes = list(dict.fromkeys(block // local for _, block, _ in expected))
            expected.sort(key=lambda place: (nodes.index(place[1] // local), place[2] * (place[1] // local != own)))
        if [span.place for span in spans] != expected:
            yield "legs went in another order than the schedule's"
        if any(second.start < first.end - 1e-9 for first, second in pairwise(spans)):
            yield "a sender did two things at a time"


def span_of(timeline: Timeline, leg: Leg) -> Span:
    place = (leg.target, leg.block, leg.chunk)
    (span,) = (one for one in timeline.spans if one.lane == across_nodes.lane_of(leg) and one.place == place)
    return span


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize(("nodes", "local"), SIZES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_the_two_steps_are_kept(method: str, kind: str, nodes: int, local: int, chunks: int) -> None:
    made = work(kind, nodes, local, chunks=chunks, method=method)
    assert not list(problems_of(made, run(made)))


def impatient(made: Work, leg: object) -> None:
    """Everything leaves with the own operand."""


def hasty_sums(made: Work) -> list[object]:
    return [replace(kernel, needs=kernel.needs[:1]) for kernel in across_nodes.node_sums(made)]


FAULTS: list[tuple[str, Callable[..., object], str, str]] = [
    ("waits_for", impatient, GATHER, "passed on before"),
    ("waits_for", impatient, SCATTER, "sent before"),
    ("waits_for", impatient, A2A_GEMM, "before it had landed"),
    ("_ready", impatient, GEMM_A2A, "before it was multiplied"),
    ("node_sums", hasty_sums, SCATTER, "added before"),
]


@pytest.mark.parametrize(
    ("name", "fault", "kind", "found"), FAULTS, ids=lambda value: getattr(value, "__name__", value)
)
@pytest.mark.parametrize("method", METHODS)
def test_a_program_that_breaks_a_step_is_found(
    method: str, name: str, fault: object, kind: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs if name == "node_sums" else sending, name, fault)
    made = work(kind, 2, 3, method=method)
    assert any(found in problem for problem in problems_of(made, run(made)))


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize(("nodes", "local"), SIZES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_one_rank_stands_for_all_of_all_nodes(method: str, kind: str, nodes: int, local: int, chunks: int) -> None:
    together = run(*everyone(kind, nodes, local, chunks, method))
    alone = run(work(kind, nodes, local, chunks=chunks, method=method))
    assert together.us == pytest.approx(alone.us)
    times = {token: time for _, token, time in alone.tokens}
    for rank, token, time in together.tokens:
        if rank == 0:
            assert times[token] == pytest.approx(time)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize(("nodes", "local"), SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_each_byte_crosses_the_network_once(kind: str, nodes: int, local: int, chunks: int) -> None:
    """A shard, or a sum, for each far node; of an all-to-all a block for each far rank."""
    works, per_node = everyone(kind, nodes, local, chunks), local if kind in EXCHANGES else 1
    timeline = run(*works)
    for made in works:
        topology = made.topology
        twins = {topology.twin(node) for node in range(nodes)} - {topology.rank}
        crossed = [s for s in timeline.spans if s.rank == topology.rank and s.lane == TO_NETWORK]
        taken = Counter(topology.receiver(span.place[0]) for span in crossed)
        assert taken == dict.fromkeys(twins, chunks * per_node)
        sent = sum(send.nbytes for send in program(made).sends if send.leg.link == NETWORK)
        assert sent == (nodes - 1) * SHARD * per_node
        got = [token for rank, token, _ in timeline.tokens if rank == topology.rank and token[0] == "arrived"]
        assert sorted(got) == sorted(made.all_arrivals())


def test_two_senders_of_one_rank_get_half_of_its_link_each() -> None:
    """3.6 MB to each of two ranks at 360 GB/s: 20 us where both share the way out, 10 where they do not."""
    sends = [
        Send("x", leg, 3.6e6, 360.0, lane=lane)
        for leg, lane in zip(legs(GATHER, Topology(1, 3, 0), 1), (COPIES, PASSED_ON), strict=True)
    ]
    idle = [Program(rank, 3, ()) for rank in (1, 2)]
    together = simulate([Program(0, 3, (), tuple(sends)), *idle], 360.0)
    assert [span.end for span in together.spans] == [pytest.approx(20.0)] * 2


def test_a_nic_is_as_fast_as_the_system_says_whoever_receives() -> None:
    timeline = simulate([program(work(GATHER, 2, 2))], ROUND.copy_gbs)  # a receiver without a limit
    (crossing,) = (span for span in timeline.spans if span.lane == TO_NETWORK)
    assert crossing.end - crossing.start == pytest.approx(10 + 100)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_faster_than_the_network(kind: str) -> None:
    assert run(work(kind, 3, 4)).us > 2 * (SHARD / 1e4 + ROUND.nic_us)


def test_what_is_passed_on_shares_nvlink_with_own_copies() -> None:
    """With a fast network both leave this rank at the same time: 9 copies of 10 us, whoever sends them."""
    fast = replace(ROUND, nic_gbs=1e6, nic_us=0.0, push_us=0.0, connections=8)
    works = [replace(one, system=fast) for one in everyone(GATHER, 3, 4)]
    timeline = simulate([program(one) for one in works], fast.copy_gbs, fast.nic_gbs)
    last = max(span.end for span in timeline.spans if span.lane == PASSED_ON)
    assert last == pytest.approx(2 + (3 + 2 * 3) * 10, abs=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_ranks_on_128_nodes(kind: str) -> None:
    world, n, k = 1024, *{A2A_GEMM: (256, 4096), GEMM_A2A: (4096, 512)}.get(kind, (256, 512))
    made = work_of(H200, Pass(kind, 128 * world, n, k, torch.bfloat16, world), "chunked", UNTUNED, nodes=128)
    timeline = simulate([program(made)], H200.copy_gbs, H200.nic_gbs)
    lanes = Counter(span.lane for span in timeline.spans)
    per_node = 8 if kind in EXCHANGES else 1
    assert lanes[TO_NETWORK] == 127 * per_node
    assert sum(lanes[lane] for lane in SENDERS) == 1023 + 127 * (per_node - 1), "what lands goes on"
    assert lanes[PASSED_ON] == (0 if kind == SCATTER else 127 * 7)


@pytest.mark.parametrize("method", ["fused", "chunked", "collective"])
@pytest.mark.parametrize("kind", [GATHER, "scatter, wgrad"])
def test_whole_backwards_across_nodes_end(kind: str, method: str) -> None:
    made = work_of(H200, Pass(kind, 8192, 4096, 1536, torch.bfloat16, 16), method, UNTUNED, nodes=2)
    timeline = simulate([backward(made)], H200.copy_gbs, H200.nic_gbs)
    assert timeline.us > 2 * made.gemm_us
    crossed = [span for span in timeline.spans if span.lane == TO_NETWORK]
    assert len(crossed) == (method != "collective") * (1 if kind == GATHER else 2)


def test_nccl_is_as_fast_as_its_slowest_link() -> None:
    nccl = replace(H200, nccl_us=20.0, nic_us=10.0, nccl_ring_gbs=200.0, nccl_pair_gbs=100.0, nic_gbs=50.0)
    nbytes = 1e6
    assert cost.collective_us(nccl, nbytes, 8) == pytest.approx(20 + 1e6 / 200e3)
    assert cost.collective_us(nccl, nbytes, 16, 2) == pytest.approx(20 + 10 + 1e6 / 200e3), (
        "8 NICs are faster than NVLink"
    )
    slow = replace(nccl, nic_gbs=20.0)
    assert cost.collective_us(slow, nbytes, 32, 4) == pytest.approx(20 + 3 * 10 + 1e6 / 160e3)
    assert cost.collective_us(nccl, nbytes, 4, 2) == pytest.approx(20 + 10 + 1e6 / 100e3), "pairs, by two NICs"
    assert cost.collective_us(nccl, nbytes, 2, 2) == pytest.approx(20 + 10 + 1e6 / 50e3), "no NVLink"
    fast = replace(nccl, nic_gbs=400.0)
    assert cost.collective_us(fast, nbytes, 2, 2) == pytest.approx(20 + 10 + 1e6 / 400e3), "nor its limit"


@pytest.mark.parametrize(("local", "most"), [(1, 14), (8, 8)])
def test_the_network_has_the_sms_that_its_nic_needs(local: int, most: int) -> None:
    """Two for each 20 GB/s, one of which sends while the other receives; never more than groups give it."""
    systems = [replace(H200, nic_gbs=gbs) for gbs in (3.0, 20.0, 25.0, 50.0, 1000.0)]
    assert [cost.communication_sms(system, local)[0] for system in systems] == [2, 2, 4, 6, most]


def test_an_all_to_all_crosses_by_every_ranks_own_nic() -> None:
    nccl = replace(H200, nccl_us=20.0, nic_us=10.0, nccl_ring_gbs=200.0, nic_gbs=50.0)
    assert cost.all_to_all_us(nccl, 15e6, 16, 2) == pytest.approx(20 + 10 + 8e6 / 50e3)
    assert cost.all_to_all_us(replace(nccl, nic_gbs=1e6), 15e6, 16, 2) == pytest.approx(20 + max(10 + 8, 7e6 / 200e3))
    assert cost.all_to_all_us(nccl, 7e6, 8) == pytest.approx(20 + 7e6 / 200e3)


@pytest.mark.parametrize("nic_gbs", [10.0, 25.0, 50.0, 100.0])
@pytest.mark.parametrize("local", [1, 2, 4, 8])
def test_sums_have_the_fewest_sms_that_keep_up_with_the_network(local: int, nic_gbs: float) -> None:
    """All partials are read, and the sum is written, while as much as one of them crosses."""
    system, crosses = replace(H200, nic_gbs=nic_gbs), SHARD / (nic_gbs * 1e3)

    def adds(sms: int) -> float:
        return cost.sum_us(system, (local + 1) * SHARD, sms)

    sms = cost.needed_sms(system, local)[1]
    assert (sms == 0) == (local == 1)
    if sms:
        assert adds(sms) <= crosses * (1 + 1e-9) and (sms == 1 or adds(sms - 1) > crosses)
        assert adds(132) == adds(0) == (local + 1) * SHARD / (H200.memory_gbs * 1e3), "never more than the memory gives"
    network, given = cost.communication_sms(system, local)
    assert given == min(sms, 15 - network), "nor more than communication may have"


def test_products_spare_the_sms_of_sums_and_of_nccl() -> None:
    made = work(SCATTER, 3, 2)
    assert (made.plan.send_sms, made.plan.reduce_sms) == (2, 2)
    kernels = {}
    for kernel in program(work(SCATTER, 3, 2, chunks=2)).kernels:
        kernels.setdefault(kernel.name, []).append(kernel.us)
    assert kernels["node sum"] == pytest.approx([50.0] * 4), "half a block each"
    products = [kernel.us for kernel in program(made).kernels if kernel.name == "library gemm"]
    assert products == pytest.approx([made.part_us] * 6)
    alone = [kernel.us for kernel in program(work(SCATTER, 3, 1)).kernels if kernel.name == "node sum"]
    assert alone == [0.0, 0.0], "a rank alone sends what it has"
    exchange = work(GEMM_A2A, 3, 2)
    assert exchange.plan.spared_sms == exchange.plan.send_sms == 2, "an all-to-all adds nothing"
    assert not [kernel for kernel in program(exchange).kernels if kernel.name == "node sum"]
    full = cost.library_gemm_us(H200, 128 * 12, 256 * 11, 4096)  # one wave of 132 tiles
    assert cost.library_gemm_us(H200, 128 * 12, 256 * 11, 4096, spared_sms=8) > 1.4 * full
    for part in ("send_sms", "reduce_sms"):
        spared = replace(made, plan=replace(made.plan, **{part: 128}))
        assert spared.part_us > 10 * made.part_us


def test_a_weight_gradient_spares_nccls_sms_while_sums_of_dx_cross() -> None:
    """A column linear's. Of a row linear all is there before it."""
    for kind, spared_sms in ((SCATTER, 130), (GEMM_A2A, 130), (GATHER, 0), (A2A_GEMM, 0)):
        made = work(kind, 2, 2)
        spared = replace(made, plan=replace(made.plan, send_sms=124, reduce_sms=6))
        (us,) = (kernel.us for kernel in backward(spared).kernels if kernel.name == "library wgrad gemm")
        assert us == wgrad_us(made, spared_sms), kind
        assert wgrad_us(made, 130) > wgrad_us(made, 124)


def test_far_blocks_are_multiplied_by_the_chunks_that_cross() -> None:
    """A gather of two nodes of two: own, own node, then chunk by chunk the twin's and what it passes on. A2A + GEMM: block by
    block, that of the twin last."""
    made = work(GATHER, 2, 2, chunks=2)
    waits = [kernel.needs for kernel in program(made).kernels if kernel.name == "wait_kernel"]
    whole = (arrived("call", 1, 0), arrived("call", 1, 1))
    assert waits == [whole, *((arrived("call", block, chunk),) for chunk in (0, 1) for block in (2, 3))]
    products = [kernel.us for kernel in program(made).kernels if kernel.name == "library gemm"]
    assert products == pytest.approx([made.part_us] * 2 + [made.chunk_us(2)] * 4)
    received = [
        kernel.needs for kernel in program(work(A2A_GEMM, 2, 2, chunks=2)).kernels if kernel.name == "wait_kernel"
    ]
    assert received == [whole, *((arrived("call", block, chunk),) for block in (3, 2) for chunk in (0, 1))]
    scatter = [
        kernel.ends for kernel in program(work(SCATTER, 2, 2, chunks=2)).kernels if kernel.name == "library gemm"
    ]
    assert scatter == [
        ("call", "rows", *piece) for piece in ((3, 0), (2, 0), (3, 1), (2, 1), (1, 0), (1, 1), (0, 0), (0, 1))
    ]
    pushes = [send.ready for send in program(work(SCATTER, 2, 2, chunks=2)).sends if send.leg.link != NETWORK]
    assert pushes == [ready for ready in scatter if ready in pushes], (
        "a push stands before one whose product comes later"
    )
    leaving = [send for send in program(work(GEMM_A2A, 2, 2, chunks=2)).sends if send.leg.link == NETWORK]
    assert [send.ready for send in leaving] == [("call", "rows", block, chunk) for block in (3, 2) for chunk in (0, 1)]


def test_shallow_blocks_are_multiplied_side_by_side() -> None:
    """Two blocks of a node at once: their chunks as those of the last one come, and a copy before each product."""
    made = work(A2A_GEMM, 2, 2, chunks=2, together=2)
    kernels = [kernel for kernel in program(made).kernels if kernel.name in ("wait_kernel", "library gemm")]
    whole = (arrived("call", 1, 0), arrived("call", 1, 1))
    far = [((arrived("call", 3, chunk),), (arrived("call", 2, chunk),), ()) for chunk in (0, 1)]
    assert [kernel.needs for kernel in kernels] == [whole, (), *far[0], *far[1]]
    assert kernels[1].us == pytest.approx(made.terms_us(2, 1, True))
    assert kernels[-1].us == pytest.approx(made.terms_us(2, 2, False))
    assert sum(kernel.name == "copy of the blocks" for kernel in program(made).kernels) == 2
    wide = replace(made, pass_=replace(made.pass_, n=64_000))
    (copy, _) = (kernel.us for kernel in program(wide).kernels if kernel.name == "copy of the blocks")
    assert copy == pytest.approx(2 * (2 * SHARD + 2 * 2 * 1000 * 64_000) / 1e6), "and so are both operands"


def test_two_ranks_multiply_many_chunks_by_rows() -> None:
    """The own terms of the first chunk and of the last two; then, as they come, the peer's terms of these, added in fp32, and
    the blocks of what is between, side by side."""
    made = work(A2A_GEMM, 2, 1, rank=1, chunks=4)
    made = replace(made, plan=replace(made.plan, by_rows=True))
    kernels = [kernel for kernel in program(made).kernels if kernel.name != "next_epoch_kernel"]
    waits, products = (
        [kernel for kernel in kernels if kernel.name == name] for name in ("wait_kernel", "library gemm")
    )
    assert [kernel.needs for kernel in waits] == [(arrived("call", 0, chunk),) for chunk in range(4)]
    own, peers = ([made.terms_us(1, parts, is_first) for parts in (4, 2)] for is_first in (True, False))
    assert [kernel.us for kernel in products] == pytest.approx([*own, peers[0], made.rows_us(4), peers[1]])
    assert [kernel.name for kernel in kernels[:2]] == ["library gemm"] * 2, "they wait for nothing"
    copies = [(kernel.name, kernel.us) for kernel in kernels if kernel.name.startswith("copy")]
    rows = 500 / 4
    both = ("copy of the blocks", pytest.approx(2 * rows * 2000 * 2 / 1e6))
    first, last = (("copy of the sum", pytest.approx(6 * count * rows * 64 / 1e6)) for count in (1, 2))
    assert copies == [first, both, last]


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_sum_in_fp32_is_written_read_and_copied(nodes: int) -> None:
    """Beside what a product in bf16 writes. Inside a node block by block, too."""
    made = work(A2A_GEMM, nodes, 4 // nodes)
    first, *others, copy = (kernel for kernel in program(made).kernels if kernel.name.endswith(("gemm", "of the sum")))
    elements, product = 500 * 64 / 1e6, made.part_us
    assert first.us == pytest.approx(product + 2 * elements), "4 bytes instead of 2"
    assert [kernel.us for kernel in others] == pytest.approx([product + 6 * elements] * 3), "4 read, 4 written"
    assert copy.name == "copy of the sum" and copy.us == pytest.approx(6 * elements)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_runs_on_the_sms_that_it_does_not_leave(kind: str) -> None:
    """Those of NCCL, of sums, and one for kernels that wait."""
    made = work(kind, 2, 2, method="fused")
    kernel, *again = (kernel for kernel in program(made).kernels if kernel.tiles)
    assert not again or [one.leaves for one in (kernel, *again)] == [True] * len(again) + [False]
    assert kernel.sms == H200.sms - made.plan.spared_sms == H200.sms - made.plan.send_sms - made.plan.reduce_sms - 1
    ran_on = {span.lane for span in run(made).tiles}
    at_once = [tile for tile in kernel.tiles if not tile.far] or kernel.tiles  # a gather's own node, before the rest
    assert len(ran_on) == min(kernel.sms, len(at_once))
    assert any(tile.adds for tile in kernel.tiles) == (kind == A2A_GEMM), (
        "what nodes have is summed after a scatter's kernel"
    )


def test_tiles_that_no_launch_takes_are_an_error() -> None:
    whole = program(work(GATHER, 2, 1, method="fused"))
    with pytest.raises(ValueError, match="rank 0 has 8 tiles that no launch has taken; the program is wrong"):
        simulate([replace(whole, kernels=whole.kernels[:-1])], H200.copy_gbs, H200.nic_gbs)


def test_the_last_wave_of_a_kernel_is_that_of_its_own_sms() -> None:
    """120 tiles are a wave of 132 SMs, and of 119 a wave and half of one, as only one tile is left."""
    wide = replace(work(GATHER, 2, 1, method="fused"), pass_=Pass(GATHER, 2 * 1920, 1024, 1000, torch.bfloat16, 2))
    spared = replace(wide.plan, send_sms=12, wait_sms=1, kernels=HOPPER, tile=HOPPER_TILE)
    assert len(gather_tiles(replace(wide, plan=replace(spared, send_sms=11)))) == 120
    assert len(gather_tiles(replace(wide, plan=spared))) == 121, "the last one is cut into halves"
