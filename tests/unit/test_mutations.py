"""Every entry of tests/mutations still fits the tree; `python -m tests.mutations` plants them and runs their tests."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.mutations.mutation import In, all_mutations
from tests.mutations.runner import How, run_all


def test_every_fault_can_be_planted_and_its_tests_exist() -> None:
    mutations = all_mutations()
    assert [problem for mutation in mutations if (problem := mutation.problem()) is not None] == []
    assert len({(mutation.file, mutation.old, mutation.new) for mutation in mutations}) == len(mutations)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (("one = 1", "one = 2", "test_one.py::test_one"), None),
        (("two = 1", "two = 2", "test_one.py::test_one"), "'two = 1' occurs 0 times in one.py; it must occur once"),
        (("1", "2", "test_one.py::test_one"), "'1' occurs 2 times in one.py"),
        (("one = 1", "one = (", "test_one.py::test_one"), "one.py is not Python any more"),
        (("one = 1", "one = 2", "test_one.py::test_two"), "no such test: test_one.py::test_two"),
        (("one = 1", "one = 2", "test_two.py"), "no such test: test_two.py"),
    ],
)
def test_an_entry_that_no_longer_fits_says_why(
    tmp_path: Path, change: tuple[str, str, str], problem: str | None
) -> None:
    (tmp_path / "one.py").write_text("one = 1\nother = 10\n")
    (tmp_path / "test_one.py").write_text("def test_one():\n    pass\n")
    found = In("one.py", ())("a fault", *change).problem(tmp_path)
    assert found is None if problem is None else problem in (found or "")


TESTS = """
import time
from one import one, wait
def test_one():
    assert one == 1
    while wait:
        time.sleep(1)
"""
CHANGES = {
    "caught": ("one = 1", "one = 2"),
    "survived": ("other = 3", "other = 4"),
    "broken": ("wait = False", "wait = unknown"),
    "hangs": ("wait = False", "wait = True"),
}


def test_faults_are_caught_survive_hang_or_do_not_run_and_the_tree_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.mutations.runner._SHORTEST_LIMIT_S", 5.0)
    files = {"one.py": "one = 1\nother = 3\nwait = False\n", "test_one.py": TESTS}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    plant = In("one.py", ("test_one.py",))
    failing = In("one.py", ("test_one.py::test_two",))("without a test", *CHANGES["caught"])
    mutations = [plant(name, old, new) for name, (old, new) in CHANGES.items()] + [failing]
    lines: list[str] = []
    outcomes = run_all(mutations, How(jobs=2, confirm=True), lines.append, root=tmp_path)
    assert [outcome.what for outcome in outcomes] == [*CHANGES, "not run"]
    assert [outcome.fine for outcome in outcomes] == [True, False, False, True, False]
    assert "test_one" in outcomes[0].test and "the tests fail without a fault" in outcomes[-1].test
    assert len(lines) == len(mutations) and Counter(line.split()[0] for line in lines)["caught"] == 1
    assert {path.name: path.read_text() for path in tmp_path.glob("*.py")} == files


def test_known_survivors_are_fine_and_late_ones_are_not_started(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("one = 1\n")
    late = In("one.py", ("test_one.py",))("late", "one = 1", "one = 2")
    assert [outcome.what for outcome in run_all([late], How(total_s=0.0), print, root=tmp_path)] == ["not run"]
