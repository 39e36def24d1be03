"""What the doctor says: findings, merged over ranks, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..measure.results import write_json

OK, WARN, FAIL = "OK", "WARN", "FAIL"
_COLOURS = {OK: "green", WARN: "yellow", FAIL: "bold red"}


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    status: OK, WARN (it works, but not as it could, or could not be checked) or FAIL (training would fail or be wrong).
    measured, expected, fix: text with units; expected and fix may be empty. rank: of the job; None: of no rank in particular.
    """

    name: str
    status: str
    measured: str
    expected: str = ""
    fix: str = ""
    rank: int | None = None
    host: str = ""


def ok(name: str, measured: str, expected: str = "") -> Finding:
    """A finding of the rank that runs the check; the job adds rank and host."""
    return Finding(name, OK, measured, expected)


def warn(name: str, measured: str, expected: str, fix: str) -> Finding:
    """A finding with the status WARN, and its fix; see `ok`."""
    return Finding(name, WARN, measured, expected, fix)


def fail(name: str, measured: str, expected: str, fix: str) -> Finding:
    """A finding with the status FAIL, and its fix; see `ok`."""
    return Finding(name, FAIL, measured, expected, fix)


def verdict(findings: Sequence[Finding]) -> str:
    """The worst status; OK where nothing was found."""
    return max((finding.status for finding in findings), key=(OK, WARN, FAIL).index, default=OK)


def merged(findings: Sequence[Finding]) -> list[list[Finding]]:
    """The lines of the table, each with its findings: those that say the same on several ranks, and all OK ones of one name."""
    lines: dict[Finding, list[Finding]] = {}
    for finding in findings:
        measured = "" if finding.status == OK else finding.measured
        lines.setdefault(replace(finding, measured=measured, rank=None, host=""), []).append(finding)
    return list(lines.values())


def told(same: Sequence[Finding]) -> str:
    """The text of a line: once if all its findings agree, else rank by rank; then the fix."""
    texts = list(dict.fromkeys(finding.measured for finding in same))
    if len(texts) > 1 and len({finding.rank for finding in same}) > 1:
        texts = [f"{finding.rank}: {finding.measured}" for finding in same]
    return "\n".join(texts + ([f"fix: {same[0].fix}"] if same[0].fix else []))


def where(same: Sequence[Finding], size: int) -> str:
    """The ranks of a line: nothing for a single process, "all", "rank 2 on node7", "ranks 2, 3"."""
    ranks = sorted({finding.rank for finding in same if finding.rank is not None})
    if not ranks or size == 1:
        return ""
    if len(ranks) == size:
        return "all"
    hosts = {finding.host for finding in same}
    host = f" on {hosts.pop()}" if len(hosts) == 1 else ""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks)) + host


def render(findings: Sequence[Finding], size: int, console: Console | None = None) -> None:
    """Print the table and the verdict. Text of findings is printed as it is, not as markup."""
    console = console or Console()
    if not console.is_terminal:
        console = Console(file=console.file, width=130)  # a log file: rich would assume 80 columns
    table = Table(title="overlap-train doctor", title_justify="left", title_style="bold", box=box.SIMPLE)
    for heading in ("status", "check", "rank", "measured", "expected"):
        table.add_column(heading, no_wrap=heading == "status", overflow="fold")
    lines = merged(findings)
    for same in lines:
        first = same[0]
        status = Text(first.status, style=_COLOURS[first.status])
        table.add_row(status, first.name, where(same, size), Text(told(same)), Text(first.expected))
    console.print(table)
    counts = {status: sum(same[0].status == status for same in lines) for status in (FAIL, WARN, OK)}
    summary = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    console.print(Text(f"doctor: {verdict(findings)} ({summary})", style=_COLOURS[verdict(findings)]))


def write(path: Path, findings: Sequence[Finding], hosts: Sequence[str]) -> None:
    """Write the report as JSON: {"hardware": {verdict, hosts}, "versions", "date", "rows": one object per finding and rank}."""
    summary = {"verdict": verdict(findings), "hosts": list(hosts)}
    write_json(path, [asdict(finding) for finding in findings], summary)
