"""The simulator keeps the schedule: no SM twice, no tile before its chunk, legs in order. A simulator that does not is found."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from unittest.mock import Mock

import pytest
import torch

from overlap_train.planning.machines import SYSTEMS
from overlap_train.planning.table import UNTUNED
from overlap_train.schedule.order import (
    A2A_GEMM,
    EXCHANGES,
    GATHER,
    GEMM_A2A,
    INBOUND,
    SCATTER,
    Strips,
    Topology,
    strip_order,
    tile_order,
    units_in_run,
)
from overlap_train.schedule.transfers import legs
from overlap_train.select.passes import Pass
from overlap_train.tools.plan.estimates import METHODS, work_of
from overlap_train.tools.plan.simulation import simulated_rank as simulator
from overlap_train.tools.plan.simulation.backward import backward
from overlap_train.tools.plan.simulation.clock import Clock
from overlap_train.tools.plan.simulation.programs import program
from overlap_train.tools.plan.simulation.simulate import simulate
from overlap_train.tools.plan.simulation.timeline import COPIES, Program, Send, Span, Timeline, Token, arrived
from overlap_train.tools.plan.simulation.work import Work

H200 = SYSTEMS["h200"]
KINDS = (GATHER, SCATTER, A2A_GEMM, GEMM_A2A)
OURS = [(kind, method) for kind in KINDS for method in METHODS if method != "collective"]


def work(kind: str, method: str, world: int = 4, rank: int = 0, k: int = 4096, rows: int = 2048) -> Work:
    """2048 rows a rank, small enough for a fast test, with several chunks by direct and fused."""
    pass_ = Pass(kind, rows * world, 2048, k, torch.bfloat16, world)
    made = work_of(H200, pass_, method, UNTUNED, is_alone=True)
    return replace(made, topology=Topology(1, world, rank), plan=_plan_of(made, Topology(1, world, rank)))


def _plan_of(made: Work, topology: Topology):
    plan = made.plan
    after = plan.kind not in INBOUND and plan.method == "fused"
    sources = tuple((topology.rank - step) % topology.world for step in range(1, topology.world))
    return replace(plan, legs=legs(plan.kind, topology, plan.chunks, after), sources=sources)


def run(made: Work) -> Timeline:
    return simulate([program(made)], H200.copy_gbs)


def times_of(timeline: Timeline) -> dict[Token, float]:
    return {token: time for _, token, time in timeline.tokens}


def problems_of(made: Work, timeline: Timeline) -> Iterator[str]:
    """What a run did that the schedule forbids."""
    tokens, what = times_of(timeline), program(made)
    tiles = [tile for kernel in what.kernels for tile in kernel.tiles]
    begun = sorted(timeline.tiles, key=lambda span: span.start)
    if sorted(span.place for span in begun) != sorted(tile.place for tile in tiles):
        yield "a tile ran twice or never"
    for first, second in _neighbours(timeline.tiles):
        if second.start < first.end - 1e-9:
            yield f"{first.lane} is used twice"
    by_place = {tile.place: tile for tile in tiles}
    for span in timeline.tiles:
        tile = by_place[span.place]
        if any(span.start < tokens[token] for token in tile.needs):
            yield "a tile began before its chunk had arrived"
        if any(span.end < tokens[token] + tile.adds_us for token in tile.adds):
            yield "a tile was done before it had added what arrived"
    yield from _copy_problems(made, timeline, tokens)


def _copy_problems(made: Work, timeline: Timeline, tokens: dict[Token, float]) -> Iterator[str]:
    copies = [span for span in timeline.spans if span.lane == COPIES]
    sends = program(made).sends
    if [span.place for span in copies] != [(s.leg.target, s.leg.block, s.leg.chunk) for s in sends]:
        yield "legs went in another order than the schedule's"
    for first, second in pairwise(copies):
        if second.start < first.end - 1e-9:
            yield "the copy engine did two things at a time"
    ready = {(s.leg.target, s.leg.chunk): s.ready for s in sends}
    for span in copies:
        token = ready[span.place[0], span.place[2]]
        if token is not None and span.start < tokens[token]:
            yield "a chunk left before its tiles were stored"


def _neighbours(spans: tuple[Span, ...]) -> Iterator[tuple[Span, Span]]:
    """Those that follow each other on one SM."""
    lanes = defaultdict(list)
    for span in spans:
        lanes[span.lane].append(span)
    for lane in lanes.values():
        lane.sort(key=lambda span: span.start)
        yield from pairwise(lane)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("kind", "method"), OURS)
def test_the_schedule_is_kept(kind: str, method: str, world: int) -> None:
    made = work(kind, method, world)
    assert not list(problems_of(made, run(made)))


@pytest.mark.parametrize("rows", [2048, 2050])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["fused", "direct"])
def test_tiles_begin_in_the_order_of_the_schedule(kind: str, method: str, rows: int) -> None:
    """Of rows that fill tiles it is that of tiles of each chunk alone."""
    made, direct = work(kind, method, rows=rows), method == "direct"
    plan = made.plan
    strips, columns = -(-made.m_shard // plan.chunks // 64), -(-made.block_columns // 256)
    units = units_in_run(kind, 4, plan.chunks, direct, kind == SCATTER and not plan.variant.split_reduction)
    order = strip_order(kind, made.topology, plan.chunks, Strips(strips, columns, 2, units), direct)
    expected = [place for place, _ in order]
    if rows == 2048:
        assert expected == list(tile_order(kind, made.topology, plan.chunks, strips // 2 * columns, direct))
    (kernel,) = (kernel for kernel in program(made).kernels if kernel.tiles)
    assert list(dict.fromkeys(tile.place for tile in kernel.tiles)) == expected
    begun = [span.place for span in sorted(run(made).tiles, key=lambda span: span.start)]
    last = {place: number for number, place in enumerate(begun)}
    sms = H200.sms  # that many may begin at one time, in any order
    assert all(abs(last[place] - number) <= 2 * sms for number, place in enumerate(expected))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("kind", "method"), [(kind, method) for kind in KINDS for method in ("fused", "direct")])
def test_the_schedule_is_kept_where_tiles_cross_between_chunks(kind: str, method: str, world: int) -> None:
    made = work(kind, method, world, rows=2050)
    assert not list(problems_of(made, run(made)))


def test_tiles_that_cross_save_a_wave() -> None:
    """Two shards of 2050 rows and 4096 columns are four waves of 132 tiles, and no longer five."""
    made = work_of(H200, Pass(GATHER, 4100, 4096, 4096, torch.bfloat16, 2), "fused", UNTUNED, is_alone=True)
    (kernel,) = (kernel for kernel in program(made).kernels if kernel.tiles)
    assert len(kernel.tiles) == 4 * H200.sms


@pytest.mark.parametrize(("kind", "world", "k"), [(SCATTER, 2, 7168), (SCATTER, 4, 3584), (A2A_GEMM, 2, 4096)])
def test_rows_that_end_within_a_tile_are_sent_in_chunks_too(kind: str, world: int, k: int) -> None:
    """Sent whole they took 1.024, 1.16 and 1.12 times as long as 8192 rows in chunks do."""

    def us(m: int) -> float:
        return run(work_of(H200, Pass(kind, m, 4096, k, torch.bfloat16, world), "fused", UNTUNED, is_alone=True)).us

    assert us(8200) < 1.02 * us(8192)


@pytest.mark.parametrize("method", ["fused", "direct"])
@pytest.mark.parametrize(
    ("m", "n", "world", "dtype", "cut"),
    [
        (2048, 5120, 2, torch.bfloat16, 56),  # of 320
        (2048, 5120, 2, torch.float32, 0),  # of 2560 of the plain kernels, which cut none; the last 52 were few enough
        (768, 7168, 4, torch.bfloat16, 0),  # of 196: of the last 64 only 28 have two own strips
    ],
)
def test_the_last_wave_is_cut_where_it_has_enough_own_tiles(
    m: int, n: int, world: int, dtype: torch.dtype, cut: int, method: str
) -> None:
    made = work_of(H200, Pass(SCATTER, m, n, 4096, dtype, world), method, UNTUNED, is_alone=True)
    (kernel,) = (kernel for kernel in program(made).kernels if kernel.tiles)
    pieces = Counter(tile.place for tile in kernel.tiles)
    assert sum(number == 2 for number in pieces.values()) == cut
    assert sum(pieces.values()) == len(pieces) + cut


@pytest.mark.parametrize(("kind", "method"), OURS)
def test_one_rank_stands_for_all(kind: str, method: str) -> None:
    everyone = simulate([program(work(kind, method, rank=rank)) for rank in range(4)], H200.copy_gbs)
    assert everyone.us == pytest.approx(run(work(kind, method)).us)


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_gets_every_chunk_once(kind: str) -> None:
    made = [work(kind, "fused", rank=rank) for rank in range(4)]
    timeline = simulate([program(one) for one in made], H200.copy_gbs)
    for rank, one in enumerate(made):
        got = [token for where, token, _ in timeline.tokens if where == rank and token[0] == "arrived"]
        assert sorted(got) == sorted(one.all_arrivals())


def test_nothing_is_faster_than_its_resources() -> None:
    for kind, method in OURS:
        made = work(kind, method)
        sent = 3 * made.shard_bytes
        fastest = H200.copy_gbs if method != "direct" else H200.tile_store_gbs
        assert run(made).us > sent / (fastest * 1e3)
        if method != "chunked":
            flops = 2.0 * made.pass_.rows * made.pass_.n * made.pass_.k
            assert run(made).us > flops / (H200.tile_tflops * 1e6)


# Planted faults: each breaks one rule of the simulator, and the rules above notice.


def reversed_legs(self: simulator.SimulatedRank, lane: list[Send], index: int) -> None:
    backwards = lane[::-1] if index == 0 else lane
    if index < len(lane):
        ready = backwards[index].ready
        self._when(() if ready is None else (ready,), partial(self._begin, backwards, index))


def impatient_send(self: simulator.SimulatedRank, lane: list[Send], index: int) -> None:
    if index < len(lane):
        self._begin(lane, index)


def impatient_tile(self: simulator.SimulatedRank, grid: simulator.Grid, sm: int) -> None:
    if grid.tiles:
        self._multiply(grid, sm, grid.tiles.popleft())
    else:
        self._leave(grid)


def unreduced_tile(self: simulator.SimulatedRank, grid: simulator.Grid, sm: int, tile: object, start: float) -> None:
    self._finish_tile(grid, sm, tile, start)  # type: ignore[arg-type]


def greedy_claim(self: simulator.SimulatedRank, grid: simulator.Grid, sm: int) -> None:
    if not grid.tiles:
        self._leave(grid)
    for tile in [grid.tiles.popleft() for _ in range(min(2, len(grid.tiles)))]:
        self._when(tile.needs, partial(self._multiply, grid, sm, tile))


FAULTS = [
    ("_next_send", reversed_legs, GATHER, "another order"),
    ("_next_send", impatient_send, SCATTER, "left before its tiles"),
    ("_claim", impatient_tile, GATHER, "before its chunk"),
    ("_add", unreduced_tile, SCATTER, "before it had added"),
    ("_claim", greedy_claim, SCATTER, "used twice"),
]


@pytest.mark.parametrize(("name", "fault", "kind", "found"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_simulator_that_breaks_a_rule_is_found(
    name: str, fault: object, kind: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulator.SimulatedRank, name, fault)
    made = work(kind, "fused", k=1024)  # copies outlast the product, so that tiles really wait
    assert any(found in problem for problem in problems_of(made, run(made)))


def test_what_has_happened_is_not_looked_at_again() -> None:
    """With 8,192 ranks a kernel waits for as many blocks."""

    class Counted(set):  # type: ignore[type-arg]
        looks = 0

        def __contains__(self, token: object) -> bool:
            self.looks += 1
            return super().__contains__(token)

    blocks = tuple(("arrived", "x", block, 0) for block in range(100))
    rank, done = simulator.SimulatedRank(Clock(), Program(0, 1, ()), carry=Mock(), deliver=Mock()), []
    rank._reached = seen = Counted()
    rank._when(blocks, lambda: done.append(True))
    for block in blocks:
        assert not done
        rank.reach(block)
    assert done == [True] and seen.looks == 100


def test_a_schedule_that_cannot_end_is_refused() -> None:
    made = work(GATHER, "fused")
    silent = replace(program(made), sends=())
    with pytest.raises(
        ValueError, match=r"rank 0 waits for what never comes: arrived call 3 0, .*; the schedule is wrong"
    ):
        simulate([silent], H200.copy_gbs)


def pushes(rank: int, rounds: int, start_us: float) -> Program:
    """Pushes of 16 MiB to each peer, one round after the other."""
    sends = [
        Send(str(number), leg, 16 << 20, H200.copy_gbs, H200.push_us)
        for number in range(rounds)
        for leg in legs(GATHER, Topology(1, 4, rank), 1)
    ]
    return Program(rank, 4, (), tuple(sends), start_us=start_us)


def longest_us(starts: tuple[float, ...], rounds: int) -> float:
    timeline = simulate([pushes(rank, rounds, start) for rank, start in enumerate(starts)], H200.copy_gbs)
    ends = [max(span.end for span in timeline.spans if span.rank == rank) - starts[rank] for rank in range(4)]
    return max(ends)


@pytest.mark.parametrize(("rounds", "measured_us"), [(1, 169), (2, 320)])
def test_pushes_in_step_take_what_was_measured(rounds: int, measured_us: float) -> None:
    assert longest_us((0, 0, 0, 0), rounds) == pytest.approx(measured_us, rel=0.1)


def test_pushes_of_skewed_ranks_collide_as_was_measured() -> None:
    in_step = longest_us((0, 0, 0, 0), 2)
    skewed = [longest_us(starts, 2) for starts in ((0, 80, 0, 80), (0, 80, 60, 20), (0, 20, 40, 80))]
    assert all(one > 1.1 * in_step for one in skewed)
    assert min(skewed) < 431 < max(skewed)  # what was measured where ranks start within 80 us of each other


def test_two_that_send_to_one_get_half_each() -> None:
    def to_rank_0(rank: int) -> Program:
        (leg,) = (leg for leg in legs(GATHER, Topology(1, 3, rank), 1) if leg.target == 0)
        return Program(rank, 3, (), (Send("x", leg, 3.6e6, 360.0),))

    idle = Program(0, 3, ())
    together = simulate([idle, to_rank_0(1), to_rank_0(2)], 360.0)
    assert [span.end for span in together.spans] == [pytest.approx(20.0)] * 2
    assert times_of(together)[arrived("x", 1, 0)] == pytest.approx(20.0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_ranks(kind: str) -> None:
    wide = 8 if kind in EXCHANGES else 1  # features of each rank
    pass_ = Pass(kind, 128 * 1024, 256 * wide, 512 * wide, torch.bfloat16, 1024)
    made = work_of(H200, pass_, "fused", UNTUNED, is_alone=True)
    timeline = run(made)
    assert len([span for span in timeline.spans if span.lane == COPIES]) == 1023 * made.plan.chunks


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["gather", "scatter, wgrad", A2A_GEMM, GEMM_A2A])
def test_whole_backwards_end_and_take_both_products(kind: str, method: str) -> None:
    made = work_of(H200, Pass(kind, 8192, 4096, 1536, torch.bfloat16, 4), method, UNTUNED)
    timeline = simulate([backward(made)], H200.copy_gbs)
    assert timeline.us > 2 * made.gemm_us


@pytest.mark.parametrize(("tokens", "measured_us"), [(8192, 110.0), (32768, 369.0), (131072, 1313.0)])
def test_all_to_alls_of_nccl_take_what_was_measured(tokens: int, measured_us: float) -> None:
    """Llama-3 8B's QKV features between two H200s."""
    made = work_of(H200, Pass(GEMM_A2A, tokens, 6144, 4096, torch.bfloat16, 2), "collective", UNTUNED)
    assert made.collective_us == pytest.approx(measured_us, rel=0.1)


def test_a_receiving_tile_multiplies_its_own_block_while_the_others_are_on_their_way() -> None:
    """An own part of W, then a wait, then the rest: with a slow wire every tile ends that much after the last arrival."""
    made = work(A2A_GEMM, "fused", world=2)
    slow = replace(made, system=replace(H200, copy_gbs=1.0))
    timeline = simulate([program(slow)], 1.0)
    (last,) = {
        token: time for _, token, time in timeline.tokens if token == arrived("call", 1, slow.plan.chunks - 1)
    }.values()
    (tile,) = {tile.adds_us for kernel in program(slow).kernels for tile in kernel.tiles}
    first_wave = min(span.end for span in timeline.tiles if span.place[1] == slow.plan.chunks - 1)
    assert first_wave == pytest.approx(last + tile, rel=1e-3)
