"""What the first call with some shapes decides: kernels, chunks, slots, and what is refused. No device is asked."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from overlap_train import OverlapConfig
from overlap_train.cache import BoundedCache
from overlap_train.group.slots import BARRIER, SLOTS, Layout
from overlap_train.ops.plan import (
    Plan,
    barrier_first,
    make_plan,
    planner_of,
    why_not,
)
from overlap_train.ops.spec import (
    ALL_GATHER_LINEAR,
    ALL_TO_ALL,
    LINEAR_REDUCE_SCATTER,
    all_gather_error,
    reduce_scatter_error,
)
from overlap_train.schedule.order import A2A_GEMM, GATHER, GEMM_A2A, SCATTER, Topology
from overlap_train.select import tiling
from overlap_train.select.choose import Choice, choose
from overlap_train.select.method import Method
from overlap_train.select.passes import SCATTER_AND_WGRAD, Pass
from overlap_train.select.system import SYSTEMS
from overlap_train.select.table import UNTUNED, Table, Winner
from overlap_train.select.tiles import chunks_of
from overlap_train.select.tiling import (
    HOPPER,
    LIBRARY,
    PORTABLE,
    TileConfig,
    chunk_count,
    direct_chunk_count,
    network_chunk_count,
    pays_in_short_chunks,
    products_that_fill,
)
from tests.linear_cases import cut_into

CPU, GPU = torch.device("cpu"), SYSTEMS["h200"]  # stands where a device stands
BF16 = torch.bfloat16


def engine_plan(
    choice: Choice, pass_: Pass, topology: Topology, device: Any, w: torch.Tensor, sms: int = 4, sums: int = 9,
    gbs: float = 0.0,
) -> Any:  # fmt: skip
    """The plan of a pass where NCCL has `sms`, the sum of a node `sums`, and the network carries `gbs` GB/s."""
    config = OverlapConfig(network_sms=sms, reduce_sms=sums)
    return planner_of(topology, config, gbs).plan(choice, pass_, device, w)


@pytest.fixture
def _hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    tiling.tma_reads.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    yield
    tiling.tma_reads.cache_clear()


def engine(
    method: str, m: int, kind: str = SCATTER, world: int = 4, n: int = 4096, k: int = 4096, w: Any = None, **how: bool
) -> Any:
    """The plan of one pass on a GPU. w: the weight, else one of [n, k]."""
    w = torch.empty(8, 8, dtype=BF16) if w is None else w
    return engine_plan(
        Choice(Method(method, **how), "asked for"),
        Pass(kind, m, n, k, BF16, world),
        Topology(1, world, 0),
        GPU,
        w,
        6,
    )


@pytest.mark.usefixtures("_hopper")
def test_whose_kernels_multiply() -> None:
    assert engine("chunked", 8192).kernels == engine("collective", 8192).kernels == LIBRARY
    assert engine("fused", 8192).kernels == engine("direct", 8192).kernels == HOPPER
    for m, kind in product((4, 8192 + 4), (GATHER, SCATTER, A2A_GEMM, GEMM_A2A)):
        assert {engine(method, m, kind).kernels for method in ("fused", "direct")} == {HOPPER}, (
            "rows may end within a tile"
        )
    assert engine("fused", 8192, n=4100).kernels == PORTABLE
    assert engine("fused", 8192, w=torch.empty(8, 9, dtype=BF16)[:, :8]).kernels == PORTABLE
    assert engine("direct", 128 * 8, world=8).kernels == HOPPER
    assert engine("direct", 128 * 9, world=9).kernels == PORTABLE, "more peers than tensor descriptors"
    assert engine("fused", 128 * 9, world=9).kernels == engine("direct", 128 * 9, GATHER, 9).kernels == HOPPER


@pytest.mark.usefixtures("_hopper")
def test_into_how_many_chunks_blocks_are_cut_and_what_pushes_wait_for() -> None:
    assert engine("chunked", 1 << 16).chunks == engine("fused", 1 << 16, whole=True).chunks == 1
    fused, direct = engine("fused", 1 << 16), engine("direct", 1 << 16)
    assert (fused.chunks, direct.chunks) == (4, 8)
    assert all(leg.after_tiles for leg in fused.legs) and not any(leg.after_tiles for leg in direct.legs)
    assert not any(leg.after_tiles for leg in engine("chunked", 8192).legs)
    assert not any(leg.after_tiles for leg in engine("fused", 8192, GATHER).legs)
    assert engine("fused", 16384, GATHER, n=512, k=4096).chunks == 4, "a gather sends rows of k"
    assert engine("fused", 16384, SCATTER, n=512, k=4096).chunks == 1, "a scatter rows of n"
    assert [engine(method, 8192).slots for method in ("collective", "chunked", "direct")] == [0, 1, 1]


def test_chunks_that_cross_the_network_are_products_that_fill_a_gpu() -> None:
    """4096 rows are 32 tiles high: of 1024 columns 128 tiles, of 4096 512, of 8192 1024. Never more than four chunks, or eight
    short ones."""

    def chunks(n: int, row_bytes: int = 8192, in_short: bool = False, at_once: int = 1) -> int:
        return network_chunk_count(4096, row_bytes, products_that_fill(4096, n, at_once, 132), in_short)

    assert [chunks(n) for n in (1024, 2048, 4096, 8192, 65536)] == [1, 1, 2, 4, 4]
    assert [chunks(n, in_short=True) for n in (1024, 2048, 4096, 8192, 65536)] == [1, 1, 2, 4, 8]
    assert [chunks(65536, *how) for how in ((2048, False), (1024, True), (2048, True))] == [1, 1, 2], (
        "a chunk is too short to be sent"
    )
    assert [chunks(1024, at_once=at_once) for at_once in (1, 2, 4, 8)] == [1, 1, 2, 4]


def test_chunks_are_short_where_the_host_is_faster_than_the_network() -> None:
    """Nodes of one GPU: of several, each chunk is also passed on. What nobody has measured may be fast."""
    found = [pays_in_short_chunks(*network) for network in ((1, 2.5), (1, 9.9), (1, 10.1), (1, 0.0), (2, 2.5))]
    assert found == [True, True, False, False, False]


def test_a_persistent_kernel_sends_chunks_of_less_than_a_gpu_of_tiles() -> None:
    """Where one launch multiplies all chunks, and nothing passes them on inside the node."""

    def chunks(method: str, kind: str, world: int) -> int:
        pass_ = Pass(kind, 8192 * world, 2048 * (world if kind == GEMM_A2A else 1), 8192, BF16, world)
        return chunks_of(Method(method), pass_, GPU, nodes=2, gbs=2.5)

    kinds = (SCATTER, GEMM_A2A)
    assert [chunks("fused", kind, 2) for kind in kinds] == [8, 8]
    assert [chunks("chunked", kind, 2) for kind in kinds] == [chunks("fused", kind, 4) for kind in kinds] == [2, 2]


def test_chunks_cost_no_tile_and_are_not_too_short() -> None:
    assert [chunk_count(rows, 8192, True) for rows in (1024, 2047, 2048, 4096, 4096 + 128)] == [1, 1, 2, 4, 1]
    # Into 4 times 16 tiles, 2 times 32, and 33 for which 2 times 17 would be needed.
    ends_within_a_tile = (8100, 8090, 4100)
    assert [chunk_count(rows, 8192, True) for rows in ends_within_a_tile] == [4, 2, 1]
    assert [direct_chunk_count(rows, True) for rows in ends_within_a_tile] == [4, 2, 1]
    longer = (1024, 2048, 4096, 8192, 8192 + 128, 16384)
    assert [direct_chunk_count(rows, True) for rows in longer] == [1, 2, 4, 8, 1, 8]
    assert [
        count(rows, *size, False) for count, size in ((chunk_count, (8,)), (direct_chunk_count, ())) for rows in (2, 3)
    ] == [2, 1] * 2
    assert TileConfig(128, 256, 64).count(129, 256) == 2 and TileConfig(128, 256, 64).count(128, 257) == 2


@pytest.mark.usefixtures("_hopper")
def test_chunks_may_cost_a_strip_but_those_of_a_gather() -> None:
    """Blocks of 4100 rows: 65 strips whole, 66 in two chunks, 68 in four. Of 2176: 34, 34 and 36."""
    counts = [
        count(4100, *size, may_cost=1) for count, size in ((chunk_count, (8192, True)), (direct_chunk_count, (True,)))
    ]
    assert counts == [2, 2]
    for method, rows in product(("fused", "direct"), (4100, 2176)):
        found = {
            kind: engine(method, 2 * rows, kind, 2, n=8192, k=8192).chunks
            for kind in (GATHER, SCATTER, A2A_GEMM, GEMM_A2A)
        }
        assert found == {GATHER: 1, SCATTER: 2, A2A_GEMM: 2, GEMM_A2A: 2}, (method, rows)


@pytest.mark.usefixtures("_hopper")
def test_chunks_cost_no_wave_that_a_split_reduction_saves() -> None:
    """Blocks of 2050 rows: 66 strips of two ranks are four waves, 68 four and a half."""
    for splits, chunks in ((True, 1), (False, 2)):
        assert engine("fused", 4100, SCATTER, world=2, split_reduction=splits).chunks == chunks
    # Of 2176 rows a split reduction saves none.
    assert engine("fused", 4352, SCATTER_AND_WGRAD, world=2, split_reduction=True).chunks == 2


@pytest.mark.usefixtures("_hopper")
def test_tests_on_gpus_cut_blocks_as_they_want(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, count in cut_into(lambda m_shard: m_shard // 64).items():
        monkeypatch.setattr(name, count)
    for method, kind in product(("fused", "direct"), (GATHER, SCATTER, A2A_GEMM, GEMM_A2A)):
        assert engine(method, 2 * 256, kind, world=2).chunks == 4, (method, kind)


def test_weights_that_tma_reads() -> None:
    whole = torch.empty(64, 64, dtype=BF16)
    assert (
        tiling.tma_reads_weight(whole) and tiling.tma_reads_weight(whole.t()) and tiling.tma_reads_weight(whole[:, 8:])
    )
    for wrong in (
        whole[:, 1:],
        whole[:, ::8],
        torch.empty(8, 9, dtype=BF16),
        torch.empty(1, 64, dtype=BF16).expand(8, 64),
    ):
        assert not tiling.tma_reads_weight(wrong)


def plan_on_cpu(spec: Any, method: str = "chunked", **settings: Any) -> Any:
    x, w = torch.empty(6, 2, 8), torch.empty(10, 8)
    return make_plan(spec, OverlapConfig(method=method, **settings), UNTUNED, Topology(1, 2, 0), x, w)


def test_rows_and_memory_of_each_operator() -> None:
    x, w = torch.empty(6, 2, 8), torch.empty(10, 8)
    assert [spec.global_rows(x, 2) for spec in (ALL_GATHER_LINEAR, LINEAR_REDUCE_SCATTER)] == [24, 12]
    assert (
        ALL_GATHER_LINEAR.slot_bytes(x, w, 2) == 24 * 8 * 4 and LINEAR_REDUCE_SCATTER.slot_bytes(x, w, 2) == 12 * 10 * 4
    )
    assert plan_on_cpu(ALL_GATHER_LINEAR).request.slot_bytes == 24 * 8 * 4
    assert plan_on_cpu(ALL_GATHER_LINEAR, "collective").request.slot_bytes == 0


def across_nodes(
    pass_: Pass, method: str = "auto", nodes: int = 2, device: torch.device = GPU, gbs: float = 0.0
) -> Any:
    topology = Topology(nodes, pass_.world // nodes, 0)
    choice = choose(method, pass_, device, UNTUNED, nodes)
    return engine_plan(choice, pass_, topology, device, torch.empty(8, 8, dtype=BF16), 6, gbs=gbs)


def test_what_crosses_nodes_of_gpus_goes_in_chunks_beside_a_product_that_spares_sms() -> None:
    """CPU processes send whole blocks, and a node alone needs none of that."""
    gather = Pass(GATHER, 8192, 14336, 4096, BF16, 2)
    plan = across_nodes(gather, "chunked")
    assert (plan.chunks, len(plan.send_recvs), plan.send_sms) == (4, 4, 6)
    assert across_nodes(gather, "chunked", gbs=2.5).chunks == 8
    again = planner_of(Topology(2, 1, 0), OverlapConfig()).sent_again(plan)
    assert (again.chunks, len(again.send_recvs), again.send_sms) == (1, 1, 6)
    assert across_nodes(Pass(GATHER, 1024, 14336, 4096, BF16, 2), "chunked").chunks == 1, "a chunk is 8 MiB at least"
    on_cpu = across_nodes(gather, device=CPU)
    assert (on_cpu.chunks, on_cpu.send_sms, on_cpu.reason) == (
        1,
        0,
        "auto: not tuned: CPU tensors on several nodes",
    )
    alone = across_nodes(gather, "chunked", nodes=1)
    assert (alone.chunks, alone.spared_sms) == (1, 0)


@pytest.mark.parametrize("kind", [GATHER, SCATTER, SCATTER_AND_WGRAD, A2A_GEMM, GEMM_A2A])
def test_products_spare_sms_for_sums_where_a_node_adds(kind: str) -> None:
    """Only a scatter does, on GPUs, of several nodes with several ranks each."""
    plan = across_nodes(Pass(kind, 8192, 14336, 4096, BF16, 4), "chunked")
    adds = kind in (SCATTER, SCATTER_AND_WGRAD)
    assert (plan.send_sms, plan.reduce_sms, plan.spared_sms) == (6, 9 * adds, 6 + 9 * adds)
    for world, nodes, device in ((2, 2, GPU), (4, 2, CPU)):
        without = across_nodes(Pass(kind, 8192, 14336, 4096, BF16, world), "chunked", nodes, device)
        assert (without.reduce_sms, without.spared_sms) == (0, without.send_sms)
    assert across_nodes(Pass(kind, 8192, 14336, 4096, BF16, 4), "collective").spared_sms == 0


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize("kind", [GATHER, SCATTER, A2A_GEMM, GEMM_A2A])
def test_a_kernel_across_nodes_leaves_an_sm_to_kernels_that_wait(kind: str) -> None:
    """It multiplies as many chunks as cross the network, in the order in which they do; nothing is added in it."""
    pass_ = Pass(kind, 65536, 14336, 4096, BF16, 4)
    plan, chunked = across_nodes(pass_, "fused"), across_nodes(pass_, "chunked")
    assert (plan.wait_sms, plan.spared_sms) == (1, chunked.spared_sms + 1)
    assert plan.chunks == chunked.chunks > 1 and plan.reduces_later
    assert tuple(crossing.sent for crossing in plan.send_recvs) == plan.legs.network.all
    assert {leg.after_tiles for leg in plan.legs.inside} == {kind in (SCATTER, GEMM_A2A)}
    inside, on_cpu = across_nodes(pass_, "fused", nodes=1), across_nodes(pass_, "fused", device=CPU)
    assert inside.spared_sms == on_cpu.spared_sms == 0
    assert not inside.reduces_later and on_cpu.reduces_later


@pytest.mark.usefixtures("_hopper")
def test_a_launch_of_a_gathers_kernel_has_a_chunk_of_all_ranks_of_a_node() -> None:
    """So the products of 4 ranks' chunks have to fill a GPU, and not that of one."""
    narrow = Pass(GATHER, 8 * 4096, 1024, 4096, BF16, 8)
    assert [across_nodes(narrow, method).chunks for method in ("fused", "chunked")] == [2, 1]
    assert across_nodes(replace(narrow, kind=SCATTER), "fused").chunks == 1


class OnGpu(torch.Tensor):
    """As planning sees a tensor on a GPU."""

    device = GPU


@pytest.mark.usefixtures("_hopper")
@pytest.mark.parametrize("spec", [ALL_GATHER_LINEAR, ALL_TO_ALL], ids=lambda spec: spec.name)
def test_as_many_sms_are_spared_as_the_config_gives_the_network(spec: Any) -> None:
    x, w = (torch.empty(rows, 64, dtype=BF16).as_subclass(OnGpu) for rows in (1024, 256))
    for method, sms in (("chunked", 10), ("collective", 0)):
        plan = make_plan(spec, OverlapConfig(method=method, network_sms=10), UNTUNED, Topology(2, 1, 0), x, w)
        assert {engine.send_sms for engine in (plan.fprop, plan.dgrad)} == {sms}, method


@pytest.mark.usefixtures("_hopper")
def test_as_many_sms_add_as_the_config_says() -> None:
    x, w = (torch.empty(rows, 64, dtype=BF16).as_subclass(OnGpu) for rows in (1024, 256))
    plan = make_plan(ALL_GATHER_LINEAR, OverlapConfig(method="chunked", reduce_sms=7), UNTUNED, Topology(2, 2, 0), x, w)
    assert (plan.fprop.reduce_sms, plan.dgrad.reduce_sms) == (0, 7)


def test_across_nodes_no_backward_starts_with_a_barrier() -> None:
    """Which was measured inside one; across the network it takes longer."""
    backward = Pass(SCATTER_AND_WGRAD, 8192, 4096, 1536, BF16, 4)
    assert across_nodes(backward, "chunked", nodes=1).variant.barrier_first
    assert not across_nodes(backward, "chunked").variant.barrier_first


def test_how_x_comes_to_the_weight_gradient() -> None:
    plan = plan_on_cpu(ALL_GATHER_LINEAR)
    assert (plan.wgrad.method, plan.wgrad.chunks, len(list(plan.wgrad.legs))) == ("chunked", 1, 1)
    assert plan_on_cpu(ALL_GATHER_LINEAR, "collective").wgrad.method == "collective"
    assert plan_on_cpu(ALL_GATHER_LINEAR, gathered_input="keep").wgrad is None
    assert plan_on_cpu(LINEAR_REDUCE_SCATTER).wgrad is None
    fused = plan_on_cpu(ALL_GATHER_LINEAR, "fused").fprop
    again = planner_of(Topology(1, 2, 0), OverlapConfig()).sent_again(fused)
    assert (again.method, fused.chunks, len(list(fused.legs)), len(list(again.legs))) == ("chunked", 2, 2, 1)


@pytest.mark.usefixtures("_hopper")
def test_when_a_backward_starts_with_a_barrier_which_its_reason_then_says() -> None:
    """Llama-3 8B qkv on four GPUs, whose backward gathers and scatters for longer than it multiplies."""
    x, w = (torch.empty(rows, 4096, dtype=BF16, device="meta") for rows in (2048, 1536))

    def plan(table: Table = UNTUNED, **settings: Any) -> Plan:
        config = OverlapConfig(**{"method": "chunked"} | settings)
        return make_plan(ALL_GATHER_LINEAR, config, table, Topology(1, 4, 0), x, w, device=GPU)

    assert barrier_first(plan(), gathers=True) and plan().dgrad.reason == "asked for; barrier first"
    assert not barrier_first(plan(), gathers=False), "a frozen weight"
    fprop = Pass(GATHER, 8192, 1536, 4096, BF16, 4)
    by_nccl = {
        won.measured.bucket: won
        for won in (Winner(fprop, Method("collective"), {}), Winner(fprop.dgrad, Method("chunked"), {}))
    }
    for other in (plan(gathered_input="keep"), plan(Table(by_nccl), method="auto")):
        assert other.dgrad.method == "chunked" and not barrier_first(other, gathers=True), "only pushes collide"
        assert "barrier" not in other.dgrad.reason and "barrier" not in other.request.what


def test_a_backward_that_sends_nothing_again_goes_by_its_own_variant() -> None:
    plan = plan_on_cpu(LINEAR_REDUCE_SCATTER)
    assert not barrier_first(plan, gathers=False)
    assert barrier_first(
        replace(plan, dgrad=replace(plan.dgrad, variant=Method("fused", barrier_first=True))), gathers=False
    )


def test_kernels_run_on_cpus_in_the_interpreter_only() -> None:
    fused, chunked = plan_on_cpu(ALL_GATHER_LINEAR, "fused"), plan_on_cpu(ALL_GATHER_LINEAR)
    assert "Triton's interpreter only" in (why_not(fused, CPU, interpreted=False) or "")
    assert why_not(fused, CPU, interpreted=True) is why_not(fused, GPU, interpreted=False) is None
    assert why_not(chunked, CPU, interpreted=False) is None
    mixed = replace(chunked, dgrad=fused.dgrad)
    assert why_not(mixed, CPU, interpreted=False) is not None, "the backward pass counts, too"


@pytest.mark.parametrize(
    ("x", "w", "bias", "said"),
    [
        (torch.empty(4, 8), torch.empty(6, 8), torch.empty(6), None),
        (torch.empty(4, 2, 8), torch.empty(6, 8), None, None),
        (torch.empty(8), torch.empty(6, 8), None, "at least 2"),
        (torch.empty(4, 8), torch.empty(1, 6, 8), None, "exactly 2"),
        (torch.empty(4, 7), torch.empty(6, 8), None, "has 7 features"),
        (torch.empty(4, 0), torch.empty(6, 0), None, "is empty"),
        (torch.empty(4, 8), torch.empty(0, 8), None, "is empty"),
        (torch.empty(4, 8).double(), torch.empty(6, 8).double(), None, "dtype torch.float64; supported"),
        (torch.empty(4, 8), torch.empty(6, 8).half(), None, "w_shard_. has dtype torch.float16"),
        (torch.empty(4, 8), torch.empty(6, 8), torch.empty(6).half(), "bias has dtype torch.float16"),
        (torch.empty(4, 8), torch.empty(6, 8, device="meta"), None, "w_shard_. is on meta"),
        (torch.empty(4, 8), torch.empty(6, 8), torch.empty(8), r"bias has shape \(8,\); it must be \[6\]"),
    ],
)
def test_what_is_wrong_with_arguments(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, said: str | None
) -> None:
    import re

    for error in (all_gather_error(x, w, bias, 2, "fc1"), reduce_scatter_error(x, w, bias, 2, "fc1")):
        assert error is None if said is None else re.search(said, error or ""), error
    odd = torch.empty(5, 8)
    assert all_gather_error(odd, torch.empty(6, 8), None, 2, "fc1") is None
    assert "divisible by the group's 2 ranks" in (reduce_scatter_error(odd, torch.empty(6, 8), None, 2, "fc1") or "")


def test_the_least_recently_used_is_forgotten() -> None:
    cache: BoundedCache[str, int] = BoundedCache(1)
    made: list[str] = []
    for key in ("a", "b", "a", "c", "a", "b"):
        if cache.get(key) is None:
            made.append(key)
            assert cache.put(key, len(made)) == len(made)
    assert made == ["a", "b", "c", "b"] and len(cache) == 2
    assert sorted(cache) == ["a", "b"]
    cache.clear()
    assert cache.get("a") is None


def test_what_was_used_last_is_remembered() -> None:
    cache, pick, used = BoundedCache[int, int](4), random.Random(0), []
    for _ in range(2000):
        key = min(int(pick.expovariate(0.2)), 20)
        found = cache.get(key)
        assert found == key or key not in list(dict.fromkeys(reversed(used)))[:4], "one of the last four that were used"
        if found is None or pick.random() < 0.1:
            cache.put(key, key)
        used.append(key)
        assert len(cache) == len(set(cache)) <= 8


def test_slots_signals_and_the_barrier_do_not_overlap() -> None:
    layout = Layout(3, 5000)
    places = [(layout.signals_offset(slot), layout.signals_bytes) for slot in range(SLOTS + 1)]
    places += [(layout.offset(slot), layout.size(slot)) for slot in range(SLOTS)]
    ends = [start + size for start, size in places]
    assert all(end <= start for end, (start, _) in zip(ends, places[1:], strict=False)) and ends[-1] <= layout.nbytes
    assert layout.signals_bytes == 3 * 8 * 8 and layout.size(BARRIER) == 0
    assert all(layout.offset(slot) % 4096 == 0 for slot in range(SLOTS))
    assert layout.covering(100) == layout and layout.covering(6000) == Layout(3, 6000)
