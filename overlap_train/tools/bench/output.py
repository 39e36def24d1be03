"""The columns of the benchmarks' tables, and the summary below them."""

from __future__ import annotations

import statistics

from ..measure.results import Columns, Row, plain


def speed_up(row: Row) -> float:
    """The speed-up of a row over NCCL + cuBLAS."""
    return row["sequence_ms"] / row["ms"]


def is_as_found(row: Row) -> bool:
    """Whether the network had the SMs that the probe found, or that the config names; so it is where nothing crosses nodes."""
    return row.get("network_sms") == row.get("probe_sms")


def label_of(row: Row) -> str:
    """The method of a row, and how many SMs the network had where the bench has given it others."""
    return row["method"] if is_as_found(row) else f"{row['method']}, {row['network_sms']} SMs"


def _over(row: Row, baseline: str) -> float | None:
    return None if row[baseline] is None else row[baseline] / row["ms"]


_TIMES: Columns = (
    *plain({"method": "method", "ms": "ms"}),
    ("host µs", lambda row: round(row["host_us"])),
)
_PASS: Columns = (
    *plain({"op": "op", "pass": "pass"}),
    ("M, N, K", lambda row: f"{row['m']}, {row['n']}, {row['k']}"),
    *_TIMES,
    *plain({"GEMM": "gemm_ms", "comm": "comm_ms", "sequence": "sequence_ms"}),
)
_BOUND: Columns = (
    ("speed-up", speed_up),
    ("bound", lambda row: row["bound"]),
    ("speed-up/bound", lambda row: speed_up(row) / row["bound"]),
)
OPERATOR_COLUMNS: Columns = (
    *_PASS,
    *plain({"async-TP": "async_tp_ms"}),
    *_BOUND,
    ("vs async-TP", lambda row: _over(row, "async_tp_ms")),
)
EXCHANGE_COLUMNS: Columns = (*_PASS, *_BOUND, *plain({"three GEMMs": "three_gemms_ms"}))
HIERARCHICAL_COLUMNS: Columns = (
    *_PASS,
    *_BOUND,
    *plain({"SMs": "network_sms", "by the probe": "probe_sms"}),
    *plain({"NCCL by nodes": "by_nodes_ms", "three GEMMs": "three_gemms_ms"}),
    ("GEMM/comm", lambda row: row["gemm_ms"] / row["comm_ms"]),
)
BLOCK_COLUMNS: Columns = (
    *plain({"block": "layer", "tokens": "seq"}),
    *_TIMES,
    *plain({"NCCL": "sequence_ms", "no exchange": "alone_ms", "TE": "te_ms", "TE, no exchange": "te_alone_ms"}),
    ("vs NCCL", speed_up),
    ("vs TE", lambda row: _over(row, "te_ms")),
    ("ms/no exchange", lambda row: row["ms"] / row["alone_ms"]),
)
LAYER_COLUMNS: Columns = (
    *plain({"layer": "layer", "s": "seq"}),
    *_TIMES,
    *plain({"tuned": "tuned_ms", "GEMMs": "gemms_ms", "Megatron-Core": "megatron_ms"}),
    *plain({"async-TP": "async_tp_ms", "TE": "te_ms", "TE userbuffers": "te_userbuffers_ms"}),
    ("ms/tuned", lambda row: None if row["tuned_ms"] is None else row["ms"] / row["tuned_ms"]),
    ("ms/GEMMs", lambda row: row["ms"] / row["gemms_ms"]),
    ("Megatron-Core/GEMMs", lambda row: None if row["megatron_ms"] is None else row["megatron_ms"] / row["gemms_ms"]),
    ("vs Megatron-Core", lambda row: _over(row, "megatron_ms")),
    ("vs TE userbuffers", lambda row: _over(row, "te_userbuffers_ms")),
)


def summary(rows: list[Row]) -> list[str]:
    """A line for each method and pass, of operator rows only: the lowest figure and the geometric mean of the ratio to the
    bound."""
    groups: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        if "bound" in row:
            groups.setdefault((label_of(row), row["pass"]), []).append(speed_up(row) / row["bound"])
    return [
        f"{method} {pass_}: speed-up/bound lowest {min(ratios):.3f}, "
        f"geometric mean {statistics.geometric_mean(ratios):.3f} over {len(ratios)} shapes"
        for (method, pass_), ratios in groups.items()
    ]
