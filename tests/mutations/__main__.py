"""Plants single-line faults, one at a time, and tells which of them the tests notice.

python -m tests.mutations [--only TEXT ...] [--gpu] [--jobs N] [--confirm] [--list]

The working tree is never touched: faults are planted in copies of it. Status 0: all were caught.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from .mutation import Mutation, all_mutations
from .runner import CAUGHT, How, Outcome, run_all


def main() -> int:
    arguments = _parser().parse_args()
    chosen = [mutation for mutation in all_mutations() if _is_wanted(mutation, arguments)]
    problems = [problem for mutation in chosen if (problem := mutation.problem()) is not None]
    if problems or not chosen:
        print("\n".join(problems) or "no mutation has such a name or file", file=sys.stderr)
        return 2
    if arguments.list:
        print("\n".join(f"{mutation.file}: {mutation.name}" for mutation in chosen))
        return 0
    how = How(arguments.jobs, arguments.confirm, arguments.ranks, arguments.provider, arguments.total_s)
    outcomes = run_all(chosen, how, lambda line: print(line, flush=True))
    print(_summary(outcomes))
    return 0 if all(outcome.fine for outcome in outcomes) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.mutations", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="TEXT", help="those whose name or file contains a text"
    )
    parser.add_argument(
        "--gpu", action="store_true", help="those that need GPUs, under torchrun, instead of the others"
    )
    parser.add_argument("--jobs", type=int, default=1, help="how many at once; with --gpu they take turns on the GPUs")
    parser.add_argument("--confirm", action="store_true", help="run a test that fails again without the fault")
    parser.add_argument("--ranks", type=int, default=2, help="with --gpu: ranks")
    parser.add_argument("--provider", default="torch", help="with --gpu: provider of symmetric memory")
    parser.add_argument("--total-s", type=float, default=float("inf"), help="start none after so many seconds")
    parser.add_argument("--list", action="store_true", help="only print the names")
    return parser


def _is_wanted(mutation: Mutation, arguments: argparse.Namespace) -> bool:
    named = not arguments.only or any(text in mutation.name or text in mutation.file for text in arguments.only)
    return named and mutation.gpu == arguments.gpu


def _summary(outcomes: list[Outcome]) -> str:
    """A line a file, then what was not caught."""
    lines = ["", f"{'file':48} {'faults':>6} {'caught':>6} {'of them hang':>12} {'survived':>8} {'other':>5}"]
    groups = dict.fromkeys(outcome.mutation.file for outcome in outcomes)
    for file in [*groups, "all"]:
        counts = Counter(outcome.what for outcome in outcomes if file in ("all", outcome.mutation.file))
        other = counts["broken"] + counts["doubtful"] + counts["not run"]
        caught, hung, survived = counts["caught"] + counts["hangs"], counts["hangs"], counts["survived"]
        lines.append(f"{file:48} {counts.total():6} {caught:6} {hung:12} {survived:8} {other:5}")
    for outcome in outcomes:
        if outcome.what not in CAUGHT:
            lines.append(f"{outcome.what}: {outcome.mutation.file}: {outcome.mutation.name}  {outcome.test}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
