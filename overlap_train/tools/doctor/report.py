"""What the doctor says: findings, printed with those of several ranks together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

OK, WARN, FAIL = "OK", "WARN", "FAIL"


@dataclass(frozen=True)
class Finding:
    """What one check found on one rank.

    status: OK, WARN (it works, but not as it could, or could not be checked) or FAIL (training would fail or be wrong).
    measured, expected, fix: text with units; the last two may be empty. rank, host: put in by the job.
    """

    status: str
    name: str
    measured: str
    expected: str = ""
    fix: str = ""
    rank: int | None = None
    host: str = ""


def verdict(findings: Sequence[Finding]) -> str:
    """The worst status; OK where nothing was found."""
    return max((finding.status for finding in findings), key=(OK, WARN, FAIL).index, default=OK)


def lines_of(findings: Sequence[Finding], size: int) -> Iterator[str]:
    """What is printed. Ranks that say the same share a line. size: ranks of the job."""
    together: dict[tuple[str, ...], list[Finding]] = {}
    for f in findings:
        together.setdefault((f.status, f.name, f.measured, f.expected, f.fix), []).append(f)
    for (status, name, measured, expected, fix), same in together.items():
        ranks = ", ".join(f"{f.rank} on {f.host}" for f in same if f.rank is not None)
        where = "" if size == 1 or not ranks else ", all ranks" if len(same) == size else f", rank {ranks}"
        yield f"{status:<4}  {name}{where}: {measured}" + f" [{expected}]" * bool(expected)
        if fix:
            yield f"        fix: {fix}"
    counts = [f"{n} {status}" for status in (FAIL, WARN, OK) if (n := sum(key[0] == status for key in together))]
    yield f"doctor: {verdict(findings)} ({', '.join(counts)})"
