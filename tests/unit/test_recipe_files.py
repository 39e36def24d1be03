"""Checkpoint folders: sealed, checked, and published whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpt.files import MANIFEST, damage, listing, publish, write_atomically


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    folder, draft = tmp_path / "iter_0000001", tmp_path / "draft"
    (draft / "inner").mkdir(parents=True)
    (draft / "a").write_bytes(b"12345")
    (draft / ".hidden").write_bytes(b"678")
    (draft / "inner" / "b").write_bytes(b"9")
    publish(draft, listing(draft), folder)
    return folder


def test_a_sealed_folder_is_whole(sealed: Path):
    assert damage(sealed) == ""


def test_ranks_list_and_check_a_part_each(sealed: Path):
    parts = [listing(sealed, part, 2) for part in range(2)]
    assert [len(part) for part in parts] == [2, 1]
    assert parts[0] | parts[1] == listing(sealed)
    for name in ("a", ".hidden", "inner/b"):
        path, content = sealed / name, (sealed / name).read_bytes()
        path.write_bytes(b"x" * len(content))
        assert sum(bool(damage(sealed, part, 2)) for part in range(2)) == 1
        path.write_bytes(content)


@pytest.mark.parametrize("name", ["a", ".hidden", "inner/b"])
def test_a_truncated_file_is_named(sealed: Path, name: str):
    path = sealed / name
    path.write_bytes(path.read_bytes()[:-1])
    assert str(path) in damage(sealed)
    assert "bytes instead of" in damage(sealed)
    assert "bytes instead of" in damage(sealed, by_hash=False)


@pytest.mark.parametrize("name", ["a", ".hidden", "inner/b"])
def test_changed_bytes_are_found(sealed: Path, name: str):
    path = sealed / name
    path.write_bytes(b"x" * path.stat().st_size)
    assert str(path) in damage(sealed)
    assert damage(sealed, by_hash=False) == ""


@pytest.mark.parametrize("name", ["a", ".hidden", "inner/b", MANIFEST])
def test_a_missing_file_is_found(sealed: Path, name: str):
    (sealed / name).unlink()
    assert name in damage(sealed)


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": 3}'])
def test_a_manifest_that_cannot_be_read_is_damage(sealed: Path, content: str):
    (sealed / MANIFEST).write_text(content)
    assert damage(sealed)


def test_publishing_replaces_a_folder_of_the_same_name(sealed: Path, tmp_path: Path):
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "new").write_text("new")
    publish(draft, listing(draft), sealed)
    assert damage(sealed) == ""
    assert sorted(path.name for path in sealed.iterdir()) == [MANIFEST, "new"]
    assert [path.name for path in tmp_path.iterdir()] == [sealed.name]


def test_writing_leaves_the_new_text_and_nothing_else(tmp_path: Path):
    path = tmp_path / "tracker"
    write_atomically(path, "3")
    write_atomically(path, "6")
    assert path.read_text() == "6"
    assert list(tmp_path.iterdir()) == [path]
