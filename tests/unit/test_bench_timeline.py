"""Exposed communication in a timeline: what no computation covers."""

from __future__ import annotations

from overlap_train.bench.timeline import exposed, kind_of, last_call


def _span(name: str, start: float, end: float) -> dict[str, object]:
    return {"name": name, "start": start, "end": end, "stream": 0}


def test_kinds() -> None:
    assert kind_of("Memcpy PtoP (Device -> Device)") == "communication"
    assert kind_of("ncclDevKernel_AllGather_RING_LL") == "communication"
    assert kind_of("nvjet_tst_128x256") == kind_of("all_gather_gemm_kernel") == "computation"
    assert kind_of("vectorized_elementwise_kernel<4, FillFunctor<float>>") == "marker"
    assert kind_of("vectorized_elementwise_kernel") == ""


def test_exposed_parts_are_what_computation_does_not_cover() -> None:
    spans = [_span("memcpy", 0, 10), _span("gemm", 2, 4), _span("gemm", 6, 7), _span("nccl", 20, 25)]
    assert exposed(spans) == [(0, 2), (4, 6), (7, 10), (20, 25)]
    assert exposed([_span("memcpy", 1, 2), _span("gemm", 0, 3)]) == []


def test_last_call_is_what_lies_between_the_last_two_markers() -> None:
    marks = [_span("FillFunctor", t, t + 1) for t in (0, 10, 30)]
    spans = [*marks, _span("gemm", 2, 9), _span("memcpy", 12, 16), _span("gemm", 15, 29), _span("gemm", 33, 34)]
    last = last_call(spans)
    assert [(s["start"], s["end"]) for s in last] == [(1, 5), (4, 18)]
