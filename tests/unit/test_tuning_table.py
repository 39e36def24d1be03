"""The stored measurements: shapes that share one, keys that do not, whole files only, and files that cannot be used."""

from __future__ import annotations

import errno
import json
import pickle
import pwd
import shutil
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from overlap_train.schedule.kinds import Kind
from overlap_train.select.method import Method, Pass, rounded_up
from overlap_train.select.table import Key, Winner, key_of, path_of, read, save

KEY = Key("NVIDIA H200", "2.11.0", "3.6.0", "570.86.15", "0.1.0", 4)
FC1 = Pass(Kind.AG_GEMM, 8192, 7168, 4096, torch.bfloat16, 4)
FC2 = Pass(Kind.GEMM_RS, 8192, 4096, 3584, torch.bfloat16, 4)
FUSED, WHOLE, COLLECTIVE = Method("fused"), Method("fused", whole=True, barrier_first=True), Method("collective")
WON = Winner(FC1, WHOLE, {FUSED: 1.0, WHOLE: 0.9, COLLECTIVE: 2.0})


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    path = save(str(tmp_path), KEY, [WON])
    other = Winner(FC2, Method("chunked", chunks=4), {Method("chunked", chunks=4): 0.5})
    in_fp8, twice = (
        Winner(replace(FC1, fp8=True, blockwise=True, twice=twice), FUSED, {FUSED: 0.6}) for twice in (False, True)
    )
    assert save(str(tmp_path), KEY, [other, in_fp8, twice]) == path, "added to what is there"
    others = {FC2.bucket: other, in_fp8.measured.bucket: in_fp8, twice.measured.bucket: twice}
    assert read(str(tmp_path), KEY) == {FC1.bucket: WON, **others} and len(others) == 3
    again = Winner(replace(FC1, m=7000), Method("chunked"), {Method("chunked"): 0.9})
    save(str(tmp_path), KEY, [again])
    assert read(str(tmp_path), KEY) == {FC1.bucket: again, **others}, "the bucket's newest"
    assert [file.name for file in tmp_path.iterdir()] == [path.name], "no scratch file stays"
    assert path.stat().st_mode & 0o044 == 0o044, "others may read it"
    found = read(str(tmp_path), KEY)
    assert pickle.loads(pickle.dumps(found)) == found, "it is sent to the other ranks"


def test_the_folder_may_be_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    save("~/a/b", KEY, [WON])
    assert path_of("~/a/b", KEY).parent == tmp_path / "a" / "b"
    assert read("~/a/b", KEY).get(FC1.bucket) == WON


def test_without_a_home_folder_nothing_is_written_below_the_working_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", mock.Mock(side_effect=KeyError))
    monkeypatch.chdir(tmp_path)
    assert read("~/a", KEY) == {}
    with pytest.raises(OSError, match="this user has no home folder: '~/a'"):
        save("~/a", KEY, [WON])
    assert not list(tmp_path.iterdir())


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
        assert not read(str(tmp_path), theirs), "that is no mistake: nothing to warn about"
    shutil.copy(path_of(str(tmp_path), KEY), path_of(str(tmp_path), theirs))
    with pytest.warns(UserWarning, match="it was measured with"):
        assert not read(str(tmp_path), theirs)


def entry(**change: Any) -> str:
    good = {"kind": "gather", "dtype": "bfloat16", "m": 8192, "n": 7168, "k": 4096}
    good |= {"winner": {"name": "fused"}, "timed": [{"name": "fused", "ms": 1.0}]}
    key = {name: getattr(KEY, name) for name in KEY.__dataclass_fields__}
    return json.dumps({"key": key, "winners": [good | change]})


BROKEN = {
    "half": entry()[: len(entry()) // 2],
    "not utf-8": b"\xff\xfe\x00",
    "no winners": json.dumps({"key": json.loads(entry())["key"]}),
    "method of another version": entry(winner={"name": "telepathic"}),
    "kind": entry(kind="broadcast"),
    "dtype": entry(dtype="bfloat17"),
    "size": entry(m=0),
    "nested": "[" * 100_000,
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_file_that_cannot_be_used_is_one_warning_with_its_name_and_the_fix(fault: str, tmp_path: Path) -> None:
    path, content = path_of(str(tmp_path), KEY), BROKEN[fault]
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.warns(UserWarning, match="cannot be used") as caught:
        assert read(str(tmp_path), KEY) == {}
    (warning,) = caught
    text = str(warning.message)
    assert str(path) in text and "overlap-train tune" in text and "--overlap-train-tuning-dir" in text
    with pytest.warns(UserWarning, match="cannot be used"):
        save(str(tmp_path), KEY, [WON])
    assert read(str(tmp_path), KEY).get(FC1.bucket) == WON, "tuning again repairs it"


def test_the_entry_of_these_cases_is_a_good_one(tmp_path: Path) -> None:
    path_of(str(tmp_path), KEY).write_text(entry())
    assert read(str(tmp_path), KEY).get(FC1.bucket) == Winner(FC1, FUSED, {FUSED: 1.0})


def test_what_cannot_be_read_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's file, or a network file system that does not answer: what is in it would be lost."""
    save(str(tmp_path), KEY, [WON])
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", mock.Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
        with pytest.warns(UserWarning, match="cannot be used .*Stale"):
            assert read(str(tmp_path), KEY) == {}
        with pytest.raises(OSError, match="Stale"):
            save(str(tmp_path), KEY, [Winner(FC2, FUSED, {})])
    assert read(str(tmp_path), KEY).get(FC1.bucket) == WON


def test_sizes_of_a_bucket_are_within_a_factor_of_one_and_a_half(tmp_path: Path) -> None:
    edges = [(1, 1), (3, 3), (5, 6), (7, 8), (9, 12), (6144, 6144), (6145, 8192), (8192, 8192)]
    assert [rounded_up(size) for size, _ in edges] == [edge for _, edge in edges]
    for name in ("m", "n", "k"):
        table = {(at := replace(FC1, **{name: 8192})).bucket: Winner(at, FUSED, {})}
        assert table.get(replace(FC1, **{name: 6145}).bucket) is not None
        assert table.get(replace(FC1, **{name: 6144}).bucket) is table.get(replace(FC1, **{name: 8193}).bucket) is None


def test_a_reader_never_sees_a_part_of_a_file(tmp_path: Path) -> None:
    folder, stop, seen = str(tmp_path), threading.Event(), set()

    def write() -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            how = (FUSED, COLLECTIVE)[turn % 2]
            save(folder, KEY, [Winner(replace(FC1, n=64 * n), how, {how: 1.0}) for n in range(1, 40)])

    save(folder, KEY, [WON])
    writer = threading.Thread(target=write)
    writer.start()
    try:
        for turn in range(20_000):
            winners = read(folder, KEY)
            assert winners, "half a file would be a table without any"
            seen |= {winner.how.name for bucket, winner in winners.items() if bucket != FC1.bucket}
            if turn >= 300 and len(seen) == 2:
                break
    finally:
        stop.set()
        writer.join()
    assert seen == {"fused", "collective"}


def test_the_key_of_this_machine_names_what_is_installed() -> None:
    key = key_of(torch.device("cpu"), 2)
    assert (key.gpu, key.torch, key.driver, key.world) == ("cpu", torch.__version__, "none", 2)
    assert key.file_name != key_of(torch.device("cpu"), 4).file_name != key_of(torch.device("cpu"), 4, 2).file_name
