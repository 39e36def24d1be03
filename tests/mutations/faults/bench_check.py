"""Faults of the check before timing: what it lets pass, and what it says."""

from __future__ import annotations

from tests.mutations.mutation import In

CHECK = In("overlap_train/tools/measure/check.py", ("tests/unit/test_bench_check.py",))

FAULTS = [
    CHECK("a product may differ by ten roundings", "+ unit * exact[rows].abs())", "+ 10 * unit * exact[rows].abs())"),
    CHECK("a product may differ by the roundings of other rows", "in_rows[rows], in_columns",
          "in_rows[: len(exact[rows])], in_columns"),
    CHECK("a sum may differ by many roundings", "+ world * unit * spread", "+ 50 * unit * spread"),
    CHECK("sums count the products of one rank", "2 * (world * a.shape[1] + world)", "2 * (a.shape[1] + world)"),
    CHECK("the last bad block is the worst", "worst = max(worst, float((error", "worst = (float((error"),
    CHECK("nothing is compared but the last block", "            count += wrong\n", "            count = wrong\n"),
    CHECK("NaN is right", "~(error <= bound)", "error > bound"),
    CHECK("rows beyond the last block are left out", "range(0, rows, most)", "range(0, rows - most, most)"),
]  # fmt: skip
