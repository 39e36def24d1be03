"""The planner under TP x Ulysses: the runtime's own order in a simulation, by hand, by rules, and with each rule broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_train import OverlapConfig
from overlap_train.planning import cost
from overlap_train.planning.machines import SYSTEMS
from overlap_train.tools.plan import replay
from overlap_train.tools.plan.estimates import COLLECTIVE, METHODS
from overlap_train.tools.plan.inputs import EXCHANGED, OUTPUT, PLANNED_MODELS, Strategy, linears_of
from overlap_train.tools.plan.prediction import Prediction, predict
from overlap_train.tools.plan.simulation.simulate import simulate
from overlap_train.tools.plan.simulation.timeline import COPIES, EXCHANGES, GEMM, Program, Span, Timeline
from overlap_train.tools.plan.two_groups import Projection, in_parts, projection
from overlap_train.ulysses import parts as ahead
from overlap_train.ulysses import two_groups as two_group_calls
from overlap_train.ulysses.layout import AttentionHeads

H200 = SYSTEMS["h200"]
OURS = METHODS[:-1]
# Easy to reckon with: 1 MB takes 10 us over NVLink, and 2 us where it is read and written.
ROUND = replace(H200, gap_us=1.0, wait_us=1.0, push_us=2.0, copy_gbs=100.0, memory_gbs=1000.0, torch_copy=0.5)
PASSES = ("to_heads", "heads_backward", "to_rows", "rows_backward")


@dataclass(frozen=True)
class Cut(Projection):
    """A projection in as many parts as one likes."""

    count: int = 2

    @property
    def parts(self) -> list[tuple[int, int]]:
        step = self.sizes.positions // self.count
        return [(first, first + step) for first in range(0, step * self.count, step)]


def cut(which: str, count: int = 2, tp: int = 2, cp: int = 2, heads: AttentionHeads | None = None) -> Cut:
    """Parts of 250 positions of each of tp ranks. Of QKV a part's shard is 0.5 MB, and what goes to one rank 1 MB."""
    strategy = Strategy(tp, 250 * count * tp * cp, cp=cp)
    heads = heads or AttentionHeads(3 * cp, cp, 200)
    n, k = (heads.features, 1000) if "heads" in which else (1000, heads.query * heads.dim)
    return Cut(ROUND, strategy, heads, "heads" in which, n, k, count=count)


def program(which: str, one: Projection, method: str = "chunked", rank: int = 0) -> Program:
    return in_parts(one, method, "backward" in which, rank)[0]


def run(which: str, one: Projection, method: str = "chunked") -> Timeline:
    return simulate([program(which, one, method)], ROUND.copy_gbs)


def named(timeline: Timeline, *names: str) -> list[Span]:
    return [span for span in timeline.spans if span.name in names]


def exchanges(timeline: Timeline) -> list[tuple[float, float]]:
    """(start, end) of each all-to-all, in the order in which they leave."""
    found: dict[str, tuple[float, float]] = {}
    for span in timeline.spans:
        if span.lane == EXCHANGES:
            call = span.name.partition(" to ")[0]
            found[call] = (min(span.start, found.get(call, (span.start, 0.0))[0]), span.end)
    return list(found.values())


def test_to_heads_in_two_parts_by_hand() -> None:
    one = cut("to_heads")
    half = cost.library_gemm_us(ROUND, 250, 2000, 1000, 4)
    own = 2 + 1 + half  # gap and epoch; gap, the own half
    assert own + 1 > 2 + 2 + 5, "the peer's shard of 0.5 MB has come"
    packed = own + 2 + 1 + half + 1 + 8  # gap and wait; gap, the peer's half; gap, 2 MB read and written one by one
    sent = packed + 1 + 1  # gap, epoch
    shared = sent + 2 + 1  # the second shard leaves: both have half of the wire
    second = shared + 10 + 1  # a shard; its signal
    left = 1.0 - 0.2 - 0.5  # MB, of the first all-to-all, which has had the wire for 2 us, and half of it for 10
    first_came = second - 1 + left * 10 + 1
    timeline = run("to_heads", one)
    assert exchanges(timeline)[0] == (pytest.approx(sent), pytest.approx(first_came))
    again = second + 1 + 1 + half + 1 + 8 + 1 + 1  # wait; the peer's half, packed; gap, epoch
    assert exchanges(timeline)[1] == (pytest.approx(again), pytest.approx(again + 2 + 10))
    unpacked = 4 + 500 * 4 * one.heads.dim * 8 / 1e6 / 2  # cos and sin of half of the positions are read, too
    taken = again + (1 + 2) + (1 + 1) + (1 + unpacked)  # of the first part: own block, wait, unpacked
    assert again + 12 < taken + (1 + 2) + 1, "the second has come meanwhile"
    assert timeline.us == pytest.approx(taken + (1 + 2) + (1 + 1) + (1 + unpacked))


# Of a pass: (a product, an all-to-all) of parts that are under way together, as tests/protocol/test_tp_ulysses_order.py has them.
TOGETHER = {
    "to_heads": ((1, 0), (2, 1)),
    "heads_backward": ((0, 1), (1, 2)),
    "to_rows": ((0, 1), (1, 2)),
    "rows_backward": ((0, 0), (1, 1), (2, 2)),
}
SLOW = replace(ROUND, copy_gbs=10.0)  # what goes to one rank takes 100 us: as long as a part of a backward


def products(timeline: Timeline, parts: int) -> list[tuple[float, float]]:
    """(start, end) of each part's products, from its first to its last one."""
    spans = [span for span in timeline.spans if span.kind == GEMM]
    assert len(spans) % parts == 0
    each = len(spans) // parts
    return [(spans[i].start, spans[i + each - 1].end) for i in range(0, len(spans), each)]


def problems_of(which: str, timeline: Timeline, parts: int = 3) -> Iterator[str]:
    """What a run did that the runtime's order forbids."""
    multiplied, sent = products(timeline, parts), exchanges(timeline)
    if len(sent) != parts + (which == "rows_backward"):
        yield "another number of all-to-alls"
    for product, exchange in TOGETHER[which]:
        (start, end), (leaves, comes) = multiplied[product], sent[exchange]
        if max(start, leaves) >= min(end, comes):
            yield "nothing hides an all-to-all"
    for (start, end), (leaves, comes) in zip(multiplied, sent, strict=False):
        if which == "to_heads" and leaves < end:
            yield "sent before it was multiplied"
        if which in ("to_rows", "heads_backward") and start < comes:
            yield "multiplied before it had come"
    reader = {"to_heads": "unpack kernel", "rows_backward": "library wgrad gemm"}.get(which, "")
    if any(span.start < came for span, (_, came) in zip(named(timeline, reader), sent, strict=False)):
        yield "read before it had come"
    for lane in (COPIES, EXCHANGES):
        spans = [span for span in timeline.spans if span.lane == lane]
        if any(second.start < first.end - 1e-9 for first, second in pairwise(spans)):
            yield "a sender did two things at a time"


@pytest.mark.parametrize("method", OURS)
@pytest.mark.parametrize("which", PASSES)
def test_products_and_exchanges_keep_the_order_of_the_runtime(which: str, method: str) -> None:
    assert not list(problems_of(which, slowly(which, method)))


def slowly(which: str, method: str = "chunked") -> Timeline:
    one = replace(cut(which, 3), system=SLOW)
    return simulate([program(which, one, method)], SLOW.copy_gbs)


def never_ahead(self: Any, reader: Any) -> bool:
    return False


def receives_nothing(self: Any, own: torch.Tensor) -> None:
    self._recording.add(([replay.own_block(self._work)], []))


def sends_at_once(self: Any) -> None:
    next_epoch(self)
    epoch = self._recording.kernels.pop()
    self._recording.kernels.insert(0, epoch)


next_epoch = replay.NotedCall.next_epoch
FAULTS: list[tuple[object, str, Callable[..., Any], str, str]] = [
    (ahead.Step, "may_go_before", never_ahead, "to_heads", "nothing hides"),
    (ahead.Step, "may_go_before", never_ahead, "to_rows", "nothing hides"),
    (replay.NotedCall, "receive", receives_nothing, "to_rows", "multiplied before"),
    (replay.NotedCall, "receive", receives_nothing, "to_heads", "read before"),
    (replay.NotedCall, "next_epoch", sends_at_once, "to_heads", "sent before"),
]


@pytest.mark.parametrize(("owner", "name", "fault", "which", "found"), FAULTS)
def test_another_order_is_found(
    owner: object, name: str, fault: object, which: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one of the runtime: the plan follows it."""
    monkeypatch.setattr(owner, name, fault)
    assert any(found in problem for problem in problems_of(which, slowly(which)))


@pytest.mark.parametrize("method", OURS)
@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize(("tp", "cp"), [(4, 2), (2, 3)])
def test_one_rank_stands_for_all_of_both_groups(which: str, method: str, tp: int, cp: int) -> None:
    one = cut(which, tp=tp, cp=cp)
    alone = run(which, one, method)
    everyone = simulate([program(which, one, method, rank) for rank in range(tp * cp)], ROUND.copy_gbs)
    assert everyone.us == pytest.approx(alone.us)
    for rank in range(tp * cp):
        sent = [span for span in everyone.spans if span.rank == rank and span.lane == EXCHANGES]
        assert len(sent) == (cp - 1) * len(exchanges(alone))


@pytest.mark.parametrize("which", PASSES)
def test_a_group_has_slots_of_its_own(which: str) -> None:
    """Only a column linear's backward needs a barrier: two calls in each part. A fourth all-to-all waits until the third has
    begun to come, which is read later."""
    for count in (2, 4):
        spans = run(which, cut(which, count)).spans
        barriers = [span for span in spans if span.name == "barrier_kernel"]
        assert len(barriers) == (count - 1 if which == "heads_backward" else 0)
        waits = sum(span.name == "wait_kernel" for span in spans)
        own = sum(span.name == "copy of the own block" for span in spans)
        of_product = {"to_heads": 1, "heads_backward": 2, "to_rows": 1, "rows_backward": 2}[which]
        own_blocks = {"to_heads": 0, "heads_backward": 1, "to_rows": 0, "rows_backward": 1}[which]
        received = count + (which == "rows_backward")
        assert own == received + own_blocks * count
        assert waits == received + of_product * count + (count - 3 if count > 3 and which != "rows_backward" else 0)


def test_a_column_backward_that_begins_with_a_barrier_has_one_of_them() -> None:
    """Of four TP ranks, whose copies outweigh the product. The second part's slots are in use, too."""
    strategy = Strategy(4, 1024 * 2 * 4 * 2, cp=2)
    one = replace(cut("heads_backward", tp=4), strategy=strategy, n=16, k=8192, heads=AttentionHeads(6, 1, 2))
    assert in_parts(one, "chunked", True)[1] == "chunked barrier first"
    assert kernels_of("heads_backward", one).count("barrier_kernel") == 2


def kernels_of(which: str, one: Projection, method: str = "chunked") -> list[str]:
    return [kernel.name for kernel in program(which, one, method).kernels]


def test_every_copy_of_the_runtime_is_a_kernel() -> None:
    """Of a part: packing and unpacking, sides put together, rows ordered; at the end the parts put together."""
    assert [kernels_of("to_heads", cut("to_heads")).count(f"{name} kernel") for name in ("clone", "unpack", "cat")] == [
        2,
        2,
        0,
    ]
    backward = kernels_of("heads_backward", cut("heads_backward"))
    assert [backward.count(f"{name} kernel") for name in ("pack", "cat")] == [2, 2 + 1]
    forward = kernels_of("to_rows", cut("to_rows"))
    assert [forward.count(f"{name} kernel") for name in ("index_select", "cat")] == [2, 2 + 1]
    backward = kernels_of("rows_backward", cut("rows_backward"))
    names = ("index_select", "cat", "index_put_")
    assert [backward.count(f"{name} kernel") for name in names] == [2, 1, 2], "x and dx of two parts together"


def test_kv_heads_that_go_to_several_ranks_are_sent_to_each() -> None:
    """Two KV heads, four ranks: k and v of each go to two. Their gradients are added in fp32."""
    shared = cut("to_heads", cp=4, heads=AttentionHeads(12, 2, 200))
    assert (shared.n, shared.sizes.sent) == (16 * 200, (12 + 2 * 4) * 200)
    (send, *_) = (send for send in program("to_heads", shared).sends if send.lane == EXCHANGES)
    assert send.nbytes == 500 * 5 * 200 * 2
    assert "index_select kernel" in kernels_of("to_heads", shared)
    assert kernels_of("heads_backward", shared).count("index_put_ kernel") == 2 * 4
    assert (
        run("heads_backward", shared).us
        > run("heads_backward", cut("heads_backward", cp=4, heads=AttentionHeads(8, 4, 200))).us
    )


def test_a_torch_operation_moves_what_it_writes() -> None:
    seen: dict[str, int] = {}

    class Watched(replay.Recording):
        def copy(self, name: str, nbytes: float) -> None:
            seen[name] = int(nbytes)

    x = torch.empty(8, 6, dtype=torch.bfloat16, device="meta")
    into, rows = (
        torch.empty(100, 6, dtype=torch.bfloat16, device="meta"),
        torch.empty(8, dtype=torch.int64, device="meta"),
    )
    with Watched(ROUND, SimpleNamespace()):  # type: ignore[arg-type]
        x.unflatten(0, (2, -1)).transpose(0, 1)[1:].unbind()
        x.new_empty(1000)
        assert not seen, "views, and memory alone"
        torch.cat((x, x), dim=1)
        into[rows] = x
        x.add_(1)
        x.float()
    assert seen == {"cat": 192, "index_put_": 96, "add_": 96, "_to_copy": 192}


def test_parts_of_a_product_share_what_power_allows() -> None:
    """Four products that follow each other are as slow as one of all their rows, and not as fast as each after a pause."""
    four = replace(cut("to_heads", 4), n=2048, k=8192, system=H200, strategy=Strategy(2, 16384 * 2, cp=2))
    alone = replace(four, count=1, strategy=Strategy(2, 4096 * 2, cp=2))
    flops = 2.0 * 16384 * 2048 * 8192
    slower = cost.power_us(H200, flops) / 4 / cost.power_us(H200, flops / 4)
    assert slower > 1.04

    def first(one: Projection, method: str) -> float:
        product = next(kernel for kernel in program("to_heads", one, method).kernels if kernel.kind == GEMM)
        return product.tiles[0].us if product.tiles else product.us

    for method in ("chunked", "fused"):
        assert first(four, method) == pytest.approx(slower * first(alone, method), rel=1e-3)
    wgrads = [kernel.us for kernel in program("heads_backward", four).kernels if kernel.name == "library wgrad gemm"]
    assert sum(wgrads) == pytest.approx(cost.library_gemm_us(H200, 8192, 2048, 16384))


def test_the_weight_gradient_of_blocks_is_a_product_for_each() -> None:
    one = cut("rows_backward")
    (us, _) = (kernel.us for kernel in program("rows_backward", one).kernels if kernel.name == "library wgrad gemm")
    assert us == pytest.approx(2 * cost.library_gemm_us(ROUND, 1000, 600, 500, 4))


@pytest.mark.parametrize("name", EXCHANGED)
@pytest.mark.parametrize(
    ("tp", "cp", "seq", "batch"), [(2, 4, 32768, 1), (4, 2, 131072, 1), (2, 2, 8192, 4), (2, 2, 4096, 1)]
)
def test_sizes_and_parts_are_those_of_the_runtime(name: str, tp: int, cp: int, seq: int, batch: int) -> None:
    model, strategy = PLANNED_MODELS["llama3-70b"], Strategy(tp, seq, batch, cp=cp)
    linear = next(linear for linear in linears_of(model, tp) if linear.name == name)
    one, config = projection(H200, strategy, model, linear), OverlapConfig()
    groups: Any = SimpleNamespace(shards=tp, ranks=cp)
    weight = torch.empty(one.n, one.k, dtype=torch.bfloat16, device="meta")
    if name == "qkv":
        x = torch.empty(seq // (tp * cp), batch, 8192, dtype=torch.bfloat16, device="meta")
        expected = two_group_calls.sizes_of_heads(x, weight, AttentionHeads(64 // tp, 8 // tp, 128), groups)
    else:
        x = torch.empty(seq, batch, 8192 // (tp * cp), dtype=torch.bfloat16, device="meta")
        expected = two_group_calls.sizes_of_rows(x, weight, groups, config)
    assert one.sizes == expected
    assert one.parts == expected.parts(config)


LLAMA = replace(PLANNED_MODELS["llama3-8b"], ffn_hidden_size=2048, vocab_size=0)  # less to simulate
LONG = Strategy(2, 65536, cp=2)


@cache
def predicted(strategy: Strategy) -> list[Prediction]:
    return predict(H200, strategy, LLAMA)


def test_all_other_linears_are_those_of_tensor_parallelism_over_a_part_of_the_tokens() -> None:
    both, alone = predicted(LONG), predicted(Strategy(2, 32768))
    for one, other in zip(both, alone, strict=True):
        assert (one.m, one.n, one.k) == (other.m, other.n, other.k)
        assert one.gemm_us == pytest.approx(other.gemm_us)
        if one.linear in EXCHANGED:
            assert one.parts > 1 and one.nccl_us > other.nccl_us
            assert one.by_method[COLLECTIVE].us > other.by_method[COLLECTIVE].us
        else:
            assert one.parts == 1 and one.nccl_us == other.nccl_us
            assert {name: one.by_method[name].us for name in METHODS} == {
                name: e.us for name, e in other.by_method.items()
            }


def test_the_exchange_is_an_all_to_all_of_what_one_rank_has() -> None:
    both, alone = predicted(LONG), predicted(Strategy(2, 32768))
    for one, other, features in zip(both[:4], alone[:4], (3072, 3072, 2048, 2048), strict=True):
        nbytes = 32768 * features * 2 / 2  # one of two blocks leaves
        assert one.nccl_us - other.nccl_us == pytest.approx(H200.nccl_us + nbytes / (H200.nccl_ring_gbs * 1e3))


def test_the_product_of_a_part_hides_an_exchange_by_every_method_of_ours() -> None:
    for one in predicted(LONG)[:4]:
        names = [span.name for span in one.by_method[COLLECTIVE].timeline.spans]
        assert names.count("nccl all-to-all") == 1 and "exchange apart" in one.by_method[COLLECTIVE].variant
        for method in OURS:
            hidden = one.by_method[method]
            assert hidden.variant.endswith(f"{one.parts} parts") and hidden.us < one.by_method[COLLECTIVE].us
            assert not any("nccl" in span.name for span in hidden.timeline.spans)


def test_what_is_too_short_for_parts_overlaps_over_tp_alone() -> None:
    short = predicted(Strategy(2, 8192, cp=2))
    assert all(p.parts == 1 and tuple(p.by_method) == METHODS for p in short)
    for p in short[:4]:
        assert all("exchange apart" in e.variant for e in p.by_method.values())
    forward, backward = short[0].by_method["fused"].timeline, short[1].by_method["fused"].timeline
    order = [
        [span.name for span in line.spans if span.kind == GEMM or "nccl" in span.name] for line in (forward, backward)
    ]
    assert order[0] == ["all_gather_gemm_kernel", "nccl all-to-all"], "then the exchange"
    assert order[1][0] == "nccl all-to-all" and order[1][-1] == "library wgrad gemm", "which comes first in backward"
    rows = [p.by_method["fused"].timeline.spans for p in short[2:4]]
    order = [[span.name for span in spans if span.kind == GEMM or "nccl" in span.name] for spans in rows]
    assert order[0][0] == "nccl all-to-all" and order[1][-1] == "nccl all-to-all"
    copies = [sum(s.name == "copy of the blocks" for s in p.by_method[COLLECTIVE].timeline.spans) for p in short[:4]]
    assert copies == [4, 4, 2, 3]


def test_exchanges_across_nodes_are_nccls() -> None:
    """As many tensor-parallel ranks in each node: their linears overlap by all methods."""
    inside, across = (predict(H200, Strategy(4, 65536, nodes=nodes, cp=2), LLAMA) for nodes in (1, 2))
    for one, other in zip(inside, across, strict=True):
        assert set(METHODS) <= set(other.by_method)
        if one.linear in EXCHANGED:
            assert one.parts > 1 == other.parts
            assert "exchange apart" in other.by_method["fused"].variant and other.nccl_us > one.nccl_us
        else:
            assert one.by_method["fused"].us == other.by_method["fused"].us


def test_a_tensor_parallel_group_may_fill_nodes() -> None:
    model = PLANNED_MODELS["llama-7b"]
    found = predict(H200, Strategy(16, 32768, nodes=4, cp=2), model)
    assert all(tuple(p.by_method) == ("fused", "chunked", COLLECTIVE) for p in found)
    alone = predict(H200, Strategy(16, 16384, nodes=2), model)
    assert found[4].by_method["chunked"].us == alone[4].by_method["chunked"].us, "fc1"
    nbytes = 16384 * 768 * 2 / 2
    assert found[0].nccl_us - alone[0].nccl_us == pytest.approx(
        H200.nccl_us + H200.nic_us + nbytes / (H200.nic_gbs * 1e3)
    )


@pytest.mark.parametrize(
    ("strategy", "nodes"),
    [
        (Strategy(4), (1, 1, 1)), (Strategy(16, nodes=2), (2, 1, 2)), (Strategy(1, nodes=2, cp=16), (1, 2, 2)),
        (Strategy(4, nodes=2, cp=4), (1, 2, 1)), (Strategy(16, nodes=4, cp=2), (2, 2, 2)), (Strategy(2, cp=4), (1, 1, 1)),
    ],
)  # fmt: skip
def test_which_group_spans_how_many_nodes(strategy: Strategy, nodes: tuple[int, int, int]) -> None:
    assert (strategy.tp_nodes, strategy.cp_nodes, strategy.overlap_nodes) == nodes


def test_the_output_layer_has_no_exchange() -> None:
    (output, _) = (p for p in predict(H200, LONG, replace(LLAMA, vocab_size=1024)) if p.linear == OUTPUT)
    assert output.parts == 1 and not any("exchange" in span.name for span in output.by_method["fused"].timeline.spans)
