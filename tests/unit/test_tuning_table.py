"""The stored measurements: shapes that share one, keys that do not, whole files only, and files that cannot be used."""

from __future__ import annotations

import errno
import json
import os
import pickle
import pwd
import shutil
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from overlap_train import OverlapConfig
from overlap_train.planning import table as table_module
from overlap_train.planning import table_key
from overlap_train.planning.table import Table, Winner, path_of, read, save
from overlap_train.planning.table_key import Key, key_of
from overlap_train.planning.variants import PLAIN, VARIANTS, Variant, method_of
from overlap_train.schedule.order import GATHER, SCATTER
from overlap_train.select.passes import Pass, rounded_up
from overlap_train.tools.measure.timing import Timing
from overlap_train.tools.tune.candidates import NOISE, WORTH_LAUNCHES, candidates, decide, variants_to_run

KEY = Key("NVIDIA H200", "2.11.0", "3.6.0", "570.86.15", "0.1.0", 4)
FC1 = Pass(GATHER, 8192, 7168, 4096, torch.bfloat16, 4)
FC2 = Pass(SCATTER, 8192, 4096, 3584, torch.bfloat16, 4)
WON = Winner(FC1, "fused", {"fused": 1.0, "collective": 2.0})


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    path = save(str(tmp_path), KEY, [WON])
    other = Winner(FC2, "direct", {"direct": 0.5})
    assert save(str(tmp_path), KEY, [other]) == path, "added to what is there"
    assert read(str(tmp_path), KEY) == Table({FC1.bucket: WON, FC2.bucket: other})
    again = Winner(replace(FC1, m=7000), "chunked", {"chunked": 0.9})
    save(str(tmp_path), KEY, [again])
    assert read(str(tmp_path), KEY).winners == {FC1.bucket: again, FC2.bucket: other}, "the bucket's newest"
    assert [file.name for file in tmp_path.iterdir()] == [path.name], "no scratch file stays"
    found = read(str(tmp_path), KEY)
    assert pickle.loads(pickle.dumps(found)) == found, "it is sent to the other ranks"


def test_the_folder_may_be_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save("~/a/b", KEY, [WON])
    assert path_of("~/a/b", KEY).parent == tmp_path / "a" / "b"
    assert read("~/a/b", KEY).find(FC1) == WON


def test_no_folder_is_an_error_that_names_the_flag() -> None:
    with pytest.raises(ValueError, match=r"tuning_dir=''.*--overlap-train-tuning-dir"):
        OverlapConfig(tuning_dir="")


def test_others_may_read_what_one_user_has_measured(tmp_path: Path) -> None:
    previous = os.umask(0o022)
    try:
        assert save(str(tmp_path), KEY, [WON]).stat().st_mode & 0o044 == 0o044
    finally:
        os.umask(previous)


@pytest.mark.parametrize(
    "other",
    [
        {"gpu": "NVIDIA H100 80GB HBM3"}, {"torch": "2.13.0"}, {"triton": "3.9.0"}, {"driver": "580.65.06"},
        {"overlap_train": "0.2.0"}, {"world": 2}, {"nodes": 2}, {"network": "nvshmem"}, {"queues": "many"},
    ],
    ids=lambda other: next(iter(other)),
)  # fmt: skip
def test_another_key_is_never_used(other: dict[str, Any], tmp_path: Path) -> None:
    save(str(tmp_path), KEY, [WON])
    theirs = replace(KEY, **other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not read(str(tmp_path), theirs).winners, "that is no mistake: nothing to warn about"
    shutil.copy(path_of(str(tmp_path), KEY), path_of(str(tmp_path), theirs))
    with pytest.warns(UserWarning, match="it was measured with"):
        assert not read(str(tmp_path), theirs).winners


def test_a_missing_folder_is_an_empty_table(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(str(tmp_path / "nowhere"), KEY) == Table({})


def entry(**change: Any) -> str:
    good = {"kind": "gather", "dtype": "bfloat16", "m": 8192, "n": 7168, "k": 4096, "method": "fused", "ms": {}}
    key = {name: getattr(KEY, name) for name in KEY.__dataclass_fields__}
    return json.dumps({"key": key, "winners": [good | change]})


BROKEN = {
    "empty": "",
    "half": entry()[: len(entry()) // 2],
    "not utf-8": b"\xff\xfe\x00",
    "a list": "[]",
    "null": "null",
    "no winners": json.dumps({"key": json.loads(entry())["key"]}),
    "method of another version": entry(method="telepathic"),
    "auto": entry(method="auto"),
    "kind": entry(kind="broadcast"),
    "dtype": entry(dtype="bfloat17"),
    "no dtype": entry(dtype="nn"),
    "size": entry(m=0),
    "times": entry(ms=[1.0]),
    "no number": entry(m=float("inf")),
    "nested": "[" * 100_000,
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_file_that_cannot_be_used_is_one_warning_with_its_name_and_the_fix(fault: str, tmp_path: Path) -> None:
    path, content = path_of(str(tmp_path), KEY), BROKEN[fault]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.warns(UserWarning, match="cannot be used") as caught:
        assert read(str(tmp_path), KEY) == Table({})
    (warning,) = caught
    text = str(warning.message)
    assert str(path) in text and "overlap-train tune" in text and "--overlap-train-tuning-dir" in text
    assert "\n" not in text
    with pytest.warns(UserWarning, match="cannot be used"):
        save(str(tmp_path), KEY, [WON])
    assert read(str(tmp_path), KEY).find(FC1) == WON, "tuning again repairs it"


def test_what_cannot_be_read_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's file, or a network file system that does not answer: what is in it would be lost."""
    save(str(tmp_path), KEY, [WON])
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", mock.Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
        with pytest.warns(UserWarning, match="cannot be used .*Stale"):
            assert read(str(tmp_path), KEY) == Table({})
        with pytest.raises(OSError, match="Stale"):
            save(str(tmp_path), KEY, [Winner(FC2, "direct", {"direct": 0.5})])
    assert read(str(tmp_path), KEY).find(FC1) == WON


def test_without_a_home_folder_nothing_is_written_below_the_working_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder called ~ would be left there. The user is one that the container does not know."""
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", mock.Mock(side_effect=KeyError))
    monkeypatch.chdir(tmp_path)
    assert read("~/a", KEY) == Table({})
    with pytest.raises(OSError, match="this user has no home folder: '~/a'"):
        save("~/a", KEY, [WON])
    assert not list(tmp_path.iterdir())


def test_the_entry_of_these_cases_is_a_good_one(tmp_path: Path) -> None:
    path_of(str(tmp_path), KEY).write_text(entry())
    assert read(str(tmp_path), KEY).find(FC1) == Winner(FC1, "fused", {})


def test_a_folder_in_place_of_the_file(tmp_path: Path) -> None:
    path_of(str(tmp_path), KEY).mkdir()
    with pytest.warns(UserWarning, match="cannot be used"):
        read(str(tmp_path), KEY)


@pytest.mark.parametrize(
    ("size", "edge"),
    [(1, 1), (2, 2), (3, 3), (4, 4), (5, 6), (6, 6), (7, 8), (8, 8), (9, 12), (6144, 6144), (6145, 8192), (8192, 8192)],
)
def test_bucket_edges(size: int, edge: int) -> None:
    assert rounded_up(size) == edge


def test_sizes_of_a_bucket_are_within_a_factor_of_one_and_a_half() -> None:
    buckets: dict[int, list[int]] = {}
    for size in range(1, 5000):
        assert size <= rounded_up(size)
        buckets.setdefault(rounded_up(size), []).append(size)
    assert all(max(sizes) == edge and max(sizes) <= 1.5 * min(sizes) for edge, sizes in buckets.items() if edge < 4096)


@pytest.mark.parametrize("name", ["m", "n", "k"])
def test_neighbouring_buckets_do_not_share(name: str, tmp_path: Path) -> None:
    save(str(tmp_path), KEY, [Winner(replace(FC1, **{name: 8192}), "fused", {})])
    table = read(str(tmp_path), KEY)
    assert table.find(replace(FC1, **{name: 6145})) is not None
    assert table.find(replace(FC1, **{name: 6144})) is None
    assert table.find(replace(FC1, **{name: 8193})) is None


def torn_replace(scratch: str | Path, path: str | Path) -> None:
    """The planted fault: written where readers look, in two halves."""
    text = Path(scratch).read_text()
    with open(path, "w") as file:
        for half in (text[: len(text) // 2], text[len(text) // 2 :]):
            file.write(half)
            file.flush()
            os.sched_yield()


def broken_reads(folder: str, enough: Callable[[set[str], int], bool]) -> tuple[set[str], int]:
    """What a reader sees while another thread writes: methods, and how many reads found no whole file."""
    stop, seen, broken = threading.Event(), set(), 0

    def write() -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            method = ("fused", "direct")[turn % 2]
            save(folder, KEY, [Winner(replace(FC1, n=64 * n), method, {"fused": 1.0}) for n in range(1, 40)])

    save(folder, KEY, [WON])
    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(20_000):
            winners = read(folder, KEY).winners
            broken += not winners
            seen |= {winner.method for bucket, winner in winners.items() if bucket != FC1.bucket}
            if enough(seen, broken):
                break
    finally:
        stop.set()
        writer.join()
    return seen, broken


@pytest.mark.filterwarnings("ignore:.*cannot be used:UserWarning")
def test_a_reader_never_sees_a_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = iter(range(20_000))
    seen, broken = broken_reads(str(tmp_path), lambda seen, broken: next(reads) >= 300 and len(seen) == 2)
    assert seen == {"fused", "direct"}, "the reader saw the writer at work"
    assert broken == 0
    monkeypatch.setattr(table_module.os, "replace", torn_replace)
    _, broken = broken_reads(str(tmp_path), lambda seen, broken: broken > 0)
    assert broken > 0, "the test would see a file that is written in place"


def test_the_key_of_this_machine_names_what_is_installed() -> None:
    key = key_of(torch.device("cpu"), 2)
    assert (key.gpu, key.torch, key.driver, key.world) == ("cpu", torch.__version__, "none", 2)
    assert key.file_name != key_of(torch.device("cpu"), 4).file_name


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.133.20  Sun Mar 30 2025", "570.133.20"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", "580.65.06"),
        ("", "unknown"),
    ],
)
def test_the_driver_version(line: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "version"
    file.write_text(line + "\nGCC version:  gcc 12.3.0\n" if line else "")
    monkeypatch.setattr(table_key, "_DRIVER", file)
    assert table_key._driver_version() == version


def test_a_winner_beats_the_default_by_more_than_noise() -> None:
    just, well = 1 - NOISE / 2, 1 - 2 * NOISE
    assert winner("fused", fused=1.0, collective=just) == "fused"
    assert winner("fused", fused=1.0, collective=well) == "collective"
    assert winner("fused", fused=1.0, chunked=well, collective=0.5) == "collective"
    assert winner("fused", chunked=3.0, collective=2.0) == "collective", "the default did not work"
    assert winner("collective", fused=just, collective=1.0) == "collective"
    assert winner("collective", fused=well, collective=1.0) == "fused"


def test_of_equal_methods_the_one_with_the_least_launches_where_they_show() -> None:
    """Training may be bound by its launches where a burst of one operator is not, so more is equal then."""
    just, well = 1 - WORTH_LAUNCHES / 2, 1 - 2 * WORTH_LAUNCHES
    host = {"chunked": 600.0, "fused": 200.0, "direct": 60.0, "collective": 20.0}
    assert winner("chunked", host, chunked=just, fused=1.0) == "fused"
    assert winner("chunked", host, chunked=well, fused=1.0) == "chunked"
    assert winner("chunked", host, chunked=1.0, fused=1.0, direct=1.0, collective=1.0) == "direct"
    assert winner("collective", host, chunked=1.0, direct=1.0, collective=1.0) == "collective"
    assert winner("fused", host, chunked=just, fused=1.0) == "fused"
    assert winner("fused", host, chunked=well, direct=just * well, fused=2.0) == "direct"


def test_launches_are_no_reason_to_be_slower_than_collective() -> None:
    """At small M those of every method show."""
    host = {"fused": 700.0, "direct": 600.0, "collective": 650.0}
    clear, same = 1 - 1.5 * NOISE, 1 - NOISE / 2
    assert winner("fused", host, fused=1.0, direct=1.0, collective=clear) == "collective"
    assert winner("fused", host, fused=clear, direct=1.0, collective=clear) == "fused", (
        "direct is slower than collective"
    )
    assert winner("fused", host, fused=clear, direct=1.0, collective=same) == "direct"


def test_long_products_keep_their_default() -> None:
    just, well = 1 - NOISE / 2, 1 - 2 * NOISE
    host = {"chunked": 400.0, "fused": 200.0}
    assert winner("chunked", host, chunked=1.0, fused=just) == "chunked"
    assert winner("direct", host, direct=1.0, chunked=well, fused=just * well) == "fused", "neither: the fastest"


def winner(default: str, host_us: dict[str, float] | None = None, **ms: float) -> str:
    """What `decide` says; names of ways with "_" for spaces."""
    return decide(
        {name.replace("_", " "): Timing(time, (host_us or {}).get(name, 1.0)) for name, time in ms.items()}, default
    )


def test_a_method_is_as_good_as_its_best_variant() -> None:
    assert winner("collective", fused=1.0, fused_barrier_first=0.8, collective=0.85) == "fused"
    assert winner("fused", fused=1.0, collective=1.0, collective_in_step=0.8) == "collective"
    assert winner("chunked", fused=1.0, fused_whole_in_step=0.9, chunked=0.8) == "chunked"
    assert winner("fused", fused_whole=1.0, collective=2.0) == "collective", "plain fused did not work"


@pytest.mark.parametrize(
    ("other", "variant"),
    [
        ({}, None),
        ({"fused barrier first": 0.99}, PLAIN),
        ({"fused barrier first": 0.97}, Variant(barrier_first=True)),
        ({"fused barrier first": 0.97, "fused whole": 0.96, "fused whole barrier first": 0.98}, Variant(whole=True)),
    ],
)
def test_another_variant_has_to_gain_more_than_noise(other: dict[str, float], variant: Variant | None) -> None:
    winner = Winner(FC1, "fused", {"fused": 1.0, "chunked": 0.5} | other)
    assert winner.variant_of("fused") == variant
    assert winner.variant_of("chunked") is winner.variant_of("direct") is None


def test_every_variant_has_a_name_of_its_own_that_says_the_method() -> None:
    names = {variant.named(method) for variant in VARIANTS for method in ("fused", "chunked")}
    assert len(names) == 24 and {method_of(name) for name in names} == {"fused", "chunked"}


GPU = torch.device("cuda", 0)
BARRIER_FIRST, WHOLE, SPLIT = Variant(barrier_first=True), Variant(whole=True), Variant(split_reduction=True)


WHOLE_AND_SPLIT = Variant(whole=True, split_reduction=True)


@pytest.mark.parametrize(
    ("pass_", "method", "variants"),
    [
        (FC1, "fused", [PLAIN, BARRIER_FIRST, WHOLE, Variant(whole=True, barrier_first=True)]),
        (FC1, "chunked", [PLAIN, BARRIER_FIRST]),
        (FC1, "collective", [PLAIN]),
        (FC2, "direct", [PLAIN]),
        (FC1.dgrad, "fused", [PLAIN, SPLIT, WHOLE, WHOLE_AND_SPLIT]),
        (replace(FC1.dgrad, m=512), "fused", [PLAIN, SPLIT]),
        (FC1.dgrad, "chunked", [PLAIN]),
        (replace(FC1, world=2), "fused", [PLAIN, WHOLE]),
        (replace(FC1, m=4096), "fused", [PLAIN, BARRIER_FIRST]),
        (replace(FC1, m=512), "fused", [PLAIN]),
        (Pass(SCATTER, 4100, 4096, 7168, torch.bfloat16, 2), "fused", [PLAIN, SPLIT, WHOLE, WHOLE_AND_SPLIT]),
    ],
)
def test_the_variants_that_are_tried(
    pass_: Pass, method: str, variants: list[Variant], hopper_gpu: pytest.MonkeyPatch
) -> None:
    assert variants_to_run(pass_, method, GPU) == variants


def test_collective_and_the_default_are_always_candidates() -> None:
    assert set(candidates(["chunked"], "fused", FC1)) == {"chunked", "fused", "collective"}
    assert candidates(["direct", "collective"], "fused", FC1) == ["direct", "collective", "fused"]


def test_the_low_latency_protocol_is_a_candidate_for_few_rows() -> None:
    assert candidates(["low_latency"], "fused", FC1) == ["fused", "collective"]
    assert candidates(["low_latency"], "direct", replace(FC1, m=1024)) == ["low_latency", "direct", "collective"]
    assert "low_latency" not in candidates(["low_latency"], "direct", replace(FC1, m=1024, kind="a2a_gemm"))
