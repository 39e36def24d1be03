"""Exposed communication in a timeline: what no computation covers."""

from __future__ import annotations

from overlap_train.bench.timeline import exposed, kind_of, last_call


def _span(name: str, start: float, end: float) -> dict[str, object]:
    return {"name": name, "start": start, "end": end, "stream": 0}


def test_kinds() -> None:
    assert kind_of("Memcpy PtoP (Device -> Device)") == "communication"
    assert kind_of("ncclDevKernel_AllGather_RING_LL") == "communication"
    assert kind_of("nvjet_tst_128x256") == kind_of("all_gather_gemm_kernel") == "computation"
    assert kind_of("vectorized_elementwise_kernel") == ""


def test_exposed_parts_are_what_computation_does_not_cover() -> None:
    spans = [_span("memcpy", 0, 10), _span("gemm", 2, 4), _span("gemm", 6, 7), _span("nccl", 20, 25)]
    assert exposed(spans) == [(0, 2), (4, 6), (7, 10), (20, 25)]
    assert exposed([_span("memcpy", 1, 2), _span("gemm", 0, 3)]) == []


def test_last_call_starts_at_zero_behind_the_call_before() -> None:
    spans = [_span("gemm", 0, 10), _span("gemm", 10, 20), _span("memcpy", 15, 24), _span("gemm", 22, 30)]
    last = last_call(spans)
    assert [(s["start"], s["end"]) for s in last] == [(0, 4), (2, 10)]
