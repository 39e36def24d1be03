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
    """What is printed. Ranks that say the same share an entry, and all OK ones of one check. size: ranks of the job."""
    together: dict[tuple[str, ...], list[Finding]] = {}
    for f in findings:
        differs = "" if f.status == OK else f.measured
        together.setdefault((f.status, f.name, f.expected, f.fix, differs), []).append(f)
    for (status, name, expected, fix, _), same in together.items():
        texts = list(dict.fromkeys(f.measured for f in same))
        if len(texts) > 1 and size > 1:
            texts = [f"{f.rank}: {f.measured}" for f in same]
        wanted = f" [{expected}]" if expected else ""
        yield f"{status:<4}  {name}{_where(same, size)}: " + "\n        ".join(texts) + wanted
        if fix:
            yield f"        fix: {fix}"
    counts = [f"{n} {status}" for status in (FAIL, WARN, OK) if (n := sum(key[0] == status for key in together))]
    yield f"doctor: {verdict(findings)} ({', '.join(counts)})"


def _where(same: Sequence[Finding], size: int) -> str:
    """ "", ", all ranks", ", rank 2 on node7", ", ranks 2, 3"."""
    ranks = sorted({f.rank for f in same if f.rank is not None})
    if not ranks or size == 1:
        return ""
    if len(ranks) == size:
        return ", all ranks"
    hosts = {f.host for f in same}
    on = f" on {hosts.pop()}" if len(hosts) == 1 else ""
    return f", rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}{on}"
