"""The doctor's report and command line."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from overlap_train import cli
from overlap_train.tools.doctor import report
from overlap_train.tools.doctor.environment import WITHOUT_MULTICAST
from overlap_train.tools.doctor.report import FAIL, OK, WARN, Finding

ROOT = Path(__file__).parents[2]


def lines(findings: list[Finding], size: int) -> str:
    text = io.StringIO()
    report.render(findings, size, Console(file=text))
    return text.getvalue()


def test_equal_lines_become_one_and_a_failure_shows_rank_host_and_fix() -> None:
    same = [Finding("device", OK, "GPU ranks", rank=rank, host="node0") for rank in range(4)]
    text = lines([*same, Finding("link", FAIL, "190 GB/s", "300", "replace [it]", rank=2, host="node0")], 4)
    assert text.count("device") == 1 and " all " in text
    assert "rank 2 on node0" in text and "fix: replace [it]" in text and text.endswith("doctor: FAIL (1 FAIL, 1 OK)\n")


def test_ok_lines_of_one_check_are_told_rank_by_rank() -> None:
    findings = [
        Finding("link", OK, f"38{rank} GB/s", "300", rank=rank, host="node0", figure=380.0 + rank) for rank in range(2)
    ]
    text = lines(findings, 2)
    assert text.count("link") == 1 and "0: 380 GB/s" in text and "1: 381 GB/s" in text
    assert lines([replace(finding, status=WARN) for finding in findings], 2).count("link") == 2


def test_the_verdict_is_the_worst_line() -> None:
    assert report.verdict([]) == OK
    assert report.verdict([Finding("a", WARN, ""), Finding("b", OK, "")]) == WARN
    assert report.verdict([Finding("a", WARN, ""), Finding("b", FAIL, "")]) == FAIL


@pytest.mark.parametrize("line", ["--limit 0", "--seconds soon", "--provider mpi", "--unknown"])
def test_wrong_arguments_end_with_status_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", *line.split()]) == 2
    said = capsys.readouterr().err
    assert said.startswith("overlap-train doctor: error: ") and said.count("\n") == 1


def test_a_job_without_its_store_fails_in_time_and_says_where_it_looked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {**job, **WITHOUT_MULTICAST}.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["doctor", "--limit", "1", "--json", str(tmp_path / "r.json")]) == 1
    (row,) = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert (row["name"], row["status"], row["rank"]) == ("store", FAIL, 1) and "127.0.0.1:1" in row["expected"]
    assert "store" in capsys.readouterr().out


def test_the_page_explains_every_check() -> None:
    """Every name that the sources give to a finding is a row of docs/doctor.md."""
    page = (ROOT / "docs" / "doctor.md").read_text()
    sources = "\n".join(path.read_text() for path in (ROOT / "overlap_train" / "tools" / "doctor").glob("*.py"))
    direct = re.findall(r"\b(?:ok|warn|fail|Finding|_needs_ranks|\(fail if [^)]*\))\(\s*f?\"([^\"]+)\"", sources)
    named = re.findall(r"\bname(?:, \w+)* = f?\"([^\"]+)\"", sources)
    named += re.findall(r"\"name\": \"([^\"]+)\"", sources)
    names = {re.sub(r"\{[^}]*\}", "...", name) for name in [*direct, *named]}
    assert len(names) > 20
    assert [name for name in sorted(names) if f"`{name}`" not in page] == []
