"""Which method runs, pass by pass, and that it always says why."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from overlap_train.config import METHODS
from overlap_train.planning.choice import alone, choose, untuned
from overlap_train.planning.table import UNTUNED, Table, Winner
from overlap_train.planning.untuned import FEW_ROWS, SMALL_M, SMALL_M_DIRECT
from overlap_train.planning.variants import PLAIN, VARIANTS, Variant
from overlap_train.schedule.order import GATHER, SCATTER, Strips, Topology, strip_order, units_in_run
from overlap_train.select.passes import SCATTER_AND_WGRAD, Pass
from overlap_train.select.tiling import HOPPER_TILE

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
WORLD = 4
FC1 = Pass(GATHER, 8192, 7168, 4096, torch.bfloat16, WORLD)  # Llama-3-8B
FC2 = Pass(SCATTER, 8192, 4096, 3584, torch.bfloat16, WORLD)
QKV = Pass(GATHER, 8192, 1536, 4096, torch.bfloat16, WORLD)
PROJ = Pass(SCATTER, 8192, 4096, 1024, torch.bfloat16, WORLD)


def table_of(*winners: Winner) -> Table:
    return Table({winner.measured.bucket: winner for winner in winners})


@pytest.mark.parametrize("method", [method for method in METHODS if method != "auto"])
def test_a_named_method_is_taken_whatever_the_table_says(method: str) -> None:
    table = table_of(Winner(FC1, "collective" if method == "fused" else "fused", {}))
    choice = choose(method, FC1, CPU, table)
    assert (choice.method, choice.reason) == (method, "asked for")


def test_the_dgrad_of_a_linear_runs_the_other_engine_on_the_transposed_product() -> None:
    assert FC1.dgrad == Pass(SCATTER_AND_WGRAD, 8192, 4096, 7168, torch.bfloat16, WORLD)
    assert FC1.dgrad.dgrad == FC1
    assert FC2.dgrad == Pass(GATHER, 8192, 3584, 4096, torch.bfloat16, WORLD)


def test_defaults_on_hopper(hopper_gpu: pytest.MonkeyPatch) -> None:
    for pass_ in (FC1, FC1.dgrad, FC2):
        assert untuned(pass_, GPU).method == "fused"
        assert untuned(replace(pass_, dtype=torch.float16), GPU).method == "fused"
        assert untuned(replace(pass_, dtype=torch.float32), GPU).method == "chunked"
        assert untuned(replace(pass_, m=256), GPU).method == "low_latency"
        assert untuned(replace(pass_, m=256, n=8 * pass_.n, k=8 * pass_.k), GPU).method == "collective"
        assert untuned(pass_, CPU).method == "chunked"


def test_small_m_is_left_to_nccl_where_no_tile_is_filled(hopper_gpu: pytest.MonkeyPatch) -> None:
    """Or where there are no Hopper kernels. Rows are too long for the low-latency protocol."""
    for short in (FC1, FC2, FC1.dgrad, FC2.dgrad):
        pass_ = replace(short, n=6 * short.n, k=6 * short.k)
        above = SMALL_M if pass_.kind != GATHER else SMALL_M + 1  # few rows of each rank read the weight again
        assert untuned(replace(pass_, m=above), GPU).method == "direct"
        for not_served in (
            replace(pass_, m=SMALL_M, world=8),
            replace(pass_, m=384),
            replace(pass_, m=SMALL_M, dtype=torch.float32),
            replace(pass_, m=SMALL_M_DIRECT, world=2),
        ):
            assert untuned(not_served, GPU).method == "collective"


def test_a_scatter_of_one_wave_is_sent_under_its_product(hopper_gpu: pytest.MonkeyPatch) -> None:
    """256 x 16384 are 128 tiles on 132 SMs."""
    full = Pass(SCATTER, 256, 16384, 26624, torch.bfloat16, 2)
    for pass_ in (full, replace(full, kind=SCATTER_AND_WGRAD)):
        assert untuned(pass_, GPU).method == "direct"
    emptier = (
        replace(full, n=15360),
        replace(full, m=128, n=32768),
        replace(full, world=4),
        replace(full, dtype=torch.float32),
    )
    for pass_ in (*emptier, replace(full, n=17408), replace(full, kind=GATHER)):
        assert untuned(pass_, GPU).method != "direct"


def test_defaults_where_copies_take_longer_than_the_gemm(hopper_gpu: pytest.MonkeyPatch) -> None:
    """Attention's linears: whole blocks, a reduction that is left for later, a storing kernel without copies."""
    for gather in (QKV, PROJ.dgrad):
        choice = choose("auto", gather, GPU, UNTUNED)
        assert choice.method == "fused" and choice.variant.whole
    choice = choose("auto", QKV.dgrad, GPU, UNTUNED)
    assert (choice.method, choice.variant) == ("fused", Variant(whole=True, split_reduction=True, barrier_first=True))
    assert untuned(replace(QKV.dgrad, m=6272), GPU).method == "fused"
    for shorter in (6144, 4096, 2048):
        assert untuned(replace(QKV.dgrad, m=shorter), GPU).method == "direct", "copies shorter than two launches"
    assert untuned(PROJ, GPU).method == "direct"


def test_default_of_long_products(hopper_gpu: pytest.MonkeyPatch) -> None:
    """Of an output layer cuBLAS is faster in training; of the longest layers our kernels are."""
    for pass_ in (FC1, FC1.dgrad, FC2, FC2.dgrad):
        for times in (2, 4):  # Llama-3 70B, 405B
            assert untuned(replace(pass_, n=times * pass_.n, k=times * pass_.k), GPU).method == "fused"
    output = replace(FC1, n=128256 // 2)
    assert [untuned(pass_, GPU).method for pass_ in (output, output.dgrad)] == ["chunked"] * 2
    four = replace(FC1, n=128256 // 4)
    assert [untuned(pass_, GPU).method for pass_ in (four, four.dgrad)] == ["chunked"] * 2
    elsewhere = {
        "half as long": replace(four, m=4096),
        "of eight ranks it is shorter, and not as narrow": replace(four, n=128256 // 8),
        "as long, and less narrow": replace(four, n=25600, k=5120),  # Qwen3 32B
    }
    assert {why: untuned(pass_, GPU).method for why, pass_ in elsewhere.items()} == dict.fromkeys(elsewhere, "fused")
    assert untuned(replace(four, n=25600, k=5120, m=16384), GPU).method == "chunked", "twice as long"


def test_defaults_of_short_products(hopper_gpu: pytest.MonkeyPatch) -> None:
    """Host time decides: chunked takes 110 microseconds of it, direct 22."""
    for pass_ in (FC1, FC2, QKV):
        assert untuned(replace(pass_, m=1536), GPU).method == "direct"
    for pass_ in (FC1, FC2):
        assert untuned(replace(pass_, m=1536, n=6 * pass_.n), GPU).method == "fused"


def test_a_short_gather_is_stored_by_its_product_where_its_shard_is_short(hopper_gpu: pytest.MonkeyPatch) -> None:
    """Whatever direct stores it takes from the product, and fused does not."""
    short = Pass(GATHER, 2048, 5120, 8192, torch.bfloat16, 2)
    assert untuned(short, GPU).method == "direct"
    assert untuned(replace(short, n=7168), GPU).method == "fused", "a longer product"
    assert untuned(replace(short, m=8192, n=2048, k=4096), GPU).method == "fused", "a shard twice as long"


def test_own_tiles_do_not_wait_beside_those_of_peers(hopper_gpu: pytest.MonkeyPatch) -> None:
    """The peers' 160 tiles end in the second wave of 132. The other 104 of it are own ones, which wait for a copy of 10 MiB."""
    waits = Pass(SCATTER, 2048, 5120, 4096, torch.bfloat16, 2)
    for pass_ in (waits, replace(waits, kind=SCATTER_AND_WGRAD, k=5120), replace(waits, m=4096, k=1920, world=4)):
        assert untuned(pass_, GPU).method == "direct"
        assert choose("auto", pass_, GPU, UNTUNED).reason.endswith("own tiles would wait for the peers' sums")
    elsewhere = {
        "for a small part of the product": replace(waits, k=12800),
        "in chunks, the first of which has come": replace(waits, m=4096),
        "the peers' tiles fill a wave": replace(waits, m=2816, n=3072),
        "few own tiles beside them": replace(waits, n=8192, k=2560),
        "the copies of two blocks were earlier": replace(waits, m=4096, k=3840, world=4),
        "nobody waits for a reduction that is split": replace(waits, m=4100, n=4096, k=7168),
        "a gather": replace(waits, kind=GATHER, k=14336),
    }
    assert {why: untuned(pass_, GPU).method for why, pass_ in elsewhere.items()} == dict.fromkeys(elsewhere, "fused")


def test_defaults_of_few_rows(hopper_gpu: pytest.MonkeyPatch) -> None:
    """However long the product is."""
    for pass_ in (FC1, FC1.dgrad, FC2, FC2.dgrad):
        long = replace(pass_, m=FEW_ROWS, n=8 * pass_.n, k=4 * pass_.k)
        assert untuned(long, GPU).method == "direct"
        twice = replace(long, m=2 * FEW_ROWS)
        assert untuned(twice, GPU).method == "fused"


def test_a_weight_is_not_read_again_for_each_ranks_few_rows(hopper_gpu: pytest.MonkeyPatch) -> None:
    few = Pass(GATHER, 512, 7168, 8192, torch.bfloat16, 4)
    assert untuned(few, GPU).method == "collective"
    elsewhere = {
        "rows that take as long to multiply": replace(few, m=1024),
        "all of them are multiplied side by side": replace(few, kind=SCATTER),
        "fewer ranks have more rows each": replace(few, world=2),
        "a weight that L2 holds": replace(few, n=3072),
    }
    assert {why: untuned(pass_, GPU).method for why, pass_ in elsewhere.items()} == dict.fromkeys(elsewhere, "direct")
    assert untuned(replace(few, m=1024, world=8), GPU).method == "collective"


def test_features_that_the_hopper_kernels_do_not_serve(hopper_gpu: pytest.MonkeyPatch) -> None:
    odd_rows = 8192 + WORLD  # divisible by the ranks, not into whole tiles
    for pass_ in (FC1, FC1.dgrad):
        assert untuned(replace(pass_, m=odd_rows), GPU).method == "fused", "rows may end within a tile"
    for name in ("n", "k"):
        assert untuned(replace(FC1, **{name: 4100}), GPU).method == "chunked", "rows do not start on 16 bytes"


def test_default_on_an_older_gpu(hopper_gpu: pytest.MonkeyPatch) -> None:
    hopper_gpu.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert untuned(FC1, GPU).method == "chunked"


def test_a_measurement_decides_its_own_pass_only() -> None:
    table = table_of(Winner(FC1, "collective", {}))
    choice = choose("auto", FC1, CPU, table)
    assert choice.method == "collective"
    assert choice.reason == "auto: tuned for M=8192 N=7168 K=4096"
    others = [FC1.dgrad, replace(FC1, kind=SCATTER), replace(FC1, dtype=torch.float32), replace(FC1, world=2)]
    for other in [*others, replace(FC1, m=4096), replace(FC1, n=4096), replace(FC1, k=2048)]:
        assert "not tuned" in choose("auto", other, CPU, table).reason


def test_a_measurement_with_the_hopper_kernels_is_not_used_where_they_do_not_serve(
    hopper_gpu: pytest.MonkeyPatch,
) -> None:
    measured = FC1.dgrad
    table, beside = table_of(Winner(measured, "direct", {})), replace(measured, n=measured.n - 2)
    assert beside.bucket == measured.bucket
    assert choose("auto", measured, GPU, table).method == "direct"
    assert choose("auto", beside, GPU, table).method == "chunked"
    for m in (7680, 8000):  # of whole tiles or not
        assert choose("auto", replace(measured, m=m), GPU, table).method == "direct"


def test_a_measured_reduction_is_split_or_not_whatever_the_model_says(hopper_gpu: pytest.MonkeyPatch) -> None:
    late = table_of(Winner(FC1.dgrad, "fused", {"fused": 1.0, "fused split": 0.9}))
    assert choose("auto", FC1.dgrad, GPU, late).variant == Variant(split_reduction=True)
    soon = table_of(Winner(QKV.dgrad, "fused", {"fused": 0.9, "fused split": 1.0}))
    assert choose("auto", QKV.dgrad, GPU, soon).variant == Variant(barrier_first=True)


@pytest.mark.parametrize("m", [1, 1024, 1025, 1 << 20])
@pytest.mark.parametrize("device", [CPU, GPU])
def test_every_choice_has_a_reason(m: int, device: torch.device, hopper_gpu: pytest.MonkeyPatch) -> None:
    for pass_ in (replace(FC1, m=m), replace(FC1, m=m).dgrad):
        for method in METHODS:
            choice = choose(method, pass_, device, UNTUNED)
            assert choice.method in METHODS and choice.method != "auto"
            assert choice.reason.startswith("auto: not tuned: " if method == "auto" else "asked for")


def test_a_backward_starts_with_a_barrier_where_two_rounds_of_long_copies_would_collide(
    hopper_gpu: pytest.MonkeyPatch,
) -> None:
    choice = choose("chunked", QKV.dgrad, GPU, UNTUNED)
    assert (choice.variant, choice.reason) == (Variant(barrier_first=True), "asked for; barrier first")
    assert choose("fused", QKV.dgrad, GPU, UNTUNED).variant.barrier_first
    assert choose("auto", QKV.dgrad, GPU, UNTUNED).variant.barrier_first
    elsewhere = {
        "stores that take turns": choose("direct", QKV.dgrad, GPU, UNTUNED),
        "NCCL": choose("collective", QKV.dgrad, GPU, UNTUNED),
        "one round": choose("chunked", QKV, GPU, UNTUNED),
        "short copies": choose("chunked", replace(QKV.dgrad, m=4096), GPU, UNTUNED),
        "products are longer": choose("chunked", FC1.dgrad, GPU, UNTUNED),
        "one peer only": choose("chunked", replace(QKV.dgrad, world=2, m=16384, k=512), GPU, UNTUNED),
        "no links": choose("chunked", QKV.dgrad, CPU, UNTUNED),
    }
    assert not [why for why, choice in elsewhere.items() if choice.variant.barrier_first]


def test_blocks_are_gathered_whole_where_copies_outweigh_the_product(hopper_gpu: pytest.MonkeyPatch) -> None:
    choice = choose("fused", QKV, GPU, UNTUNED)
    assert (choice.variant, choice.reason) == (
        Variant(whole=True, barrier_first=True),
        "asked for; whole blocks; barrier first",
    )
    assert choose("fused", replace(QKV, world=2, n=768), GPU, UNTUNED).variant == Variant(whole=True), "one peer only"
    elsewhere = [("fused", FC1), ("chunked", QKV), ("fused", PROJ)]
    assert not [case for case in elsewhere if choose(*case, GPU, UNTUNED).variant.whole]
    assert not choose("fused", QKV, CPU, UNTUNED).variant.whole
    assert choose("fused", QKV.dgrad, GPU, UNTUNED).variant.whole
    for pass_ in (QKV, QKV.dgrad):
        assert not choose("direct", pass_, GPU, UNTUNED).variant.whole, "it pushes nothing"


def test_a_reduction_is_split_where_partials_come_after_long_copies(hopper_gpu: pytest.MonkeyPatch) -> None:
    choice = choose("fused", replace(FC1.dgrad, k=2752), GPU, UNTUNED)
    assert choice.variant == Variant(split_reduction=True)
    assert choice.reason == "asked for; split reduction"
    elsewhere = [("fused", FC1.dgrad), ("fused", PROJ), ("fused", QKV), ("chunked", QKV.dgrad), ("direct", QKV.dgrad)]
    assert not [case for case in elsewhere if choose(*case, GPU, UNTUNED).variant.split_reduction]


RAGGED = Pass(SCATTER, 4100, 4096, 7168, torch.bfloat16, 2)  # 4.5 waves of tiles, or four


@pytest.mark.parametrize(
    ("pass_", "splits"),
    [
        (RAGGED, True),
        (replace(RAGGED, kind=SCATTER_AND_WGRAD), True),
        (replace(RAGGED, m=4096), False),  # four waves either way
        (replace(RAGGED, m=8200), False),  # eight
        (replace(RAGGED, m=1994), False),
        (replace(RAGGED, k=256), False),  # half a wave takes less time than the second kernel
        (replace(RAGGED, world=4, m=8200), True),  # 2050 rows a rank: 1088 tiles, 8.5 waves, or 1040, eight
        (replace(RAGGED, m=4616), True),  # 608 tiles, five waves, or 592, four and one of halves
        (replace(RAGGED, m=384, n=5120, k=4096), False),  # 80 tiles or 60, a wave: of neither are enough own ones
        (replace(RAGGED, world=4, m=4352, n=3840), False),  # 525 tiles or 510, four waves; no block shared tiles, 540
        (replace(RAGGED, dtype=torch.float32), False),  # by the plain kernels, whose tiles never cross
        (replace(RAGGED, kind=GATHER), False),
    ],
    ids=str,
)
def test_a_reduction_is_split_where_that_saves_a_wave_of_tiles(
    pass_: Pass, splits: bool, hopper_gpu: pytest.MonkeyPatch
) -> None:
    """Where the rows tell, whatever was measured for a pass of about as many."""
    measured = table_of(Winner(replace(pass_, m=pass_.m + pass_.world), "fused", {"fused": 1.0, "fused split": 1.1}))
    for table in (UNTUNED, measured):
        choice = choose("fused", pass_, GPU, table)
        assert choice.variant.split_reduction == splits
        assert alone(choice, pass_, GPU).variant == choice.variant
    assert not choose("direct", pass_, GPU, UNTUNED).variant.split_reduction
    assert not choose("fused", pass_, CPU, UNTUNED).variant.split_reduction


@pytest.mark.parametrize("split_ms", [0.9, 1.1])
def test_where_these_rows_were_measured_the_faster_runs(split_ms: float, hopper_gpu: pytest.MonkeyPatch) -> None:
    table = table_of(Winner(RAGGED, "fused", {"fused": 1.0, "fused split": split_ms}))
    assert choose("auto", RAGGED, GPU, table).variant.split_reduction == (split_ms < 1)


def test_own_tiles_do_not_wait_where_a_split_reduction_saves_a_wave(hopper_gpu: pytest.MonkeyPatch) -> None:
    """1156 rows a rank of 5120 columns, in blocks too short to be cut: with 1024 rows nothing is split, and own tiles wait."""
    pass_ = replace(RAGGED, m=2312, n=5120, k=3072)
    choice = choose("auto", pass_, GPU, UNTUNED)
    assert choice.method == "fused" and choice.variant.split_reduction
    assert choose("auto", replace(pass_, m=2048), GPU, UNTUNED).method == "direct"


@pytest.mark.parametrize("pass_", [RAGGED, replace(RAGGED, kind=GATHER, n=7168, k=4096).dgrad], ids=lambda p: p.kind)
@pytest.mark.parametrize("method", ["auto", "fused"])
def test_what_a_trial_has_timed_runs_as_it_was_timed(pass_: Pass, method: str, hopper_gpu: pytest.MonkeyPatch) -> None:
    """A trial runs each method in the model's variant, and keeps one time of each."""
    timed = choose("fused", pass_, GPU, UNTUNED).variant
    assert timed.split_reduction
    found = table_of(Winner(pass_, "fused", {"fused": 0.332, "direct": 0.418, "chunked": 0.4}))
    assert choose(method, pass_, GPU, found).variant == timed


def test_the_tiles_that_are_saved_are_those_of_the_schedule(hopper_gpu: pytest.MonkeyPatch) -> None:
    topology, block = Topology(1, 2, 0), HOPPER_TILE.strips(2050)
    counts = []
    for adds in (True, False):
        strips = Strips(block, HOPPER_TILE.columns(4096), 2, units_in_run(SCATTER, 2, 1, interleaved=False, adds=adds))
        counts.append(len(list(strip_order(SCATTER, topology, 1, strips))))
    assert counts == [544, 528]


def test_alone_nothing_runs_before_a_reduction_that_was_split_for_it(hopper_gpu: pytest.MonkeyPatch) -> None:
    late = replace(FC1.dgrad, k=2752)
    choice = choose("fused", late, GPU, UNTUNED)
    assert choice.variant == Variant(split_reduction=True) and alone(choice, late, GPU).variant == PLAIN


@pytest.mark.parametrize("faster", ["fused", "fused whole", "fused barrier first", "fused whole barrier first"])
def test_of_several_variants_the_fastest_runs(faster: str, hopper_gpu: pytest.MonkeyPatch) -> None:
    ms = {variant.named("fused"): 1.0 for variant in VARIANTS} | {"chunked": 1.2, faster: 0.9}
    table = table_of(Winner(FC1, "fused", ms), Winner(QKV.dgrad, "fused", ms))
    for asked in ("auto", "fused"):
        assert choose(asked, FC1, GPU, table).variant.named("fused") == faster
    assert choose("chunked", FC1, GPU, table).variant == PLAIN, "measured in one variant: the model decides"
    assert choose("fused", FC1, CPU, table).variant == PLAIN


def test_the_model_decides_on_the_barrier_of_a_columns_backward_since_the_tuner_has_one_anyway(
    hopper_gpu: pytest.MonkeyPatch,
) -> None:
    for pass_, barrier_first in ((QKV.dgrad, True), (FC1.dgrad, False)):
        table = table_of(Winner(pass_, "fused", {"fused": 1.0, "fused whole": 0.9}))
        assert choose("auto", pass_, GPU, table).variant == Variant(whole=True, barrier_first=barrier_first)
