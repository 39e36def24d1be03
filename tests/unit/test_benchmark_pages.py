"""The figures in the first tables of the pages are those of the JSON records under benchmarks/, and its columns are explained."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README, INDEX, BENCHMARKS = (ROOT / page for page in ("README.md", "docs/index.md", "benchmarks/README.md"))
MACHINES = ("h100x4", "h200x4", "h200x2", "h100x2")  # in the order of the columns of benchmarks/README.md
NAMES = {
    "llama3-8b-mlp": "Llama-3 8B MLP",
    "llama3-70b-mlp": "Llama-3 70B MLP",
    "llama3-8b-attn": "Llama-3 8B attention (qkv, proj)",
    "llama3-70b-attn": "Llama-3 70B attention (qkv, proj)",
}
Row = dict[str, Any]


@cache
def rows(file: str) -> list[Row]:
    return json.loads((ROOT / "benchmarks" / file).read_text())["rows"]


def row_of(file: str, **keys: Any) -> Row:
    (found,) = (row for row in rows(file) if all(row[key] == value for key, value in keys.items()))
    return found


def step(folder: str, over: tuple[str, ...] = ("megatron",), ours: str = "overlap", model: str = "llama3-8b") -> str:
    """How many times as fast as the fastest of some variants a step of ours is."""
    steps = {row["variant"]: row["step_ms"] for row in rows(f"{folder}/mfu.json") if row["model"] == model}
    return f"{min(steps[name] for name in over) / steps[ours]:.2f}"


def operators(file: str, method: str = "auto", **keys: Any) -> list[Row]:
    keys["method"] = method
    return [row for row in rows(f"{file}/operators.json") if all(row[key] == value for key, value in keys.items())]


def speed_ups(file: str, baseline: str = "sequence_ms", method: str = "auto") -> list[float]:
    return [row[baseline] / row["ms"] for row in operators(file, method)]


def of_the_bound(found: list[Row]) -> list[float]:
    return [row["sequence_ms"] / row["ms"] / row["bound"] for row in found]


def span(numbers: list[float]) -> str:
    return f"{min(numbers):.2f} to {max(numbers):.2f}"


def line(*cells: str) -> str:
    return " ".join(["|", *(f"{cell} |" if cell else "|" for cell in cells)])


def over_userbuffers(file: str) -> str:
    found = [row for row in rows(f"{file}/layers.json") if row["method"] == "auto"]
    assert len(found) == 6
    return span([row["te_userbuffers_ms"] / row["ms"] for row in found])


def means(*files: str, **keys: Any) -> list[str]:
    return [f"{geometric_mean(of_the_bound(operators(file, **keys))):.3f}" for file in files]


def mean_speed_ups() -> list[str]:
    found = [
        speed_ups(folder) for folder in ("h100x4/small_m", "h200x4/untuned/small_m", "h200x2/small_m", "h100x2/small_m")
    ]
    assert {len(some) for some in found} == {80}
    return [f"{geometric_mean(some):.2f}" for some in found]


GRAPHS: dict[str, Any] = {"over": ("megatron_graph",), "ours": "overlap_graph"}
UB = ("te_userbuffers", "te_userbuffers_ring")


def te(folder: str) -> str:
    return "; ".join(step(folder, over, "te_overlap") for over in (("te",), UB))


def block(*files: str) -> str:
    """A Ulysses attention block of 8B, 32768 tokens, by `fused`, or `auto` where that was recorded."""
    found = [row_of(f"{file}/layers.json", layer="llama3-8b-ulysses", seq=32768, method=method) for file, method in
             ((file, "auto" if file.startswith("h200x2") else "fused") for file in files)]  # fmt: skip
    return "; ".join(f"{ratio:.2f}" for ratio in sorted(row["sequence_ms"] / row["ms"] for row in found))


def between_nodes(machine: str) -> list[float]:
    return speed_ups(f"{machine}/hierarchical")


SUMMARY = {
    "a training step of Llama-3 8B, s = 8192, over Megatron-Core": [step(f"{machine}/mfu") for machine in MACHINES],
    "of Llama-3 70B, s = 8192": [
        "", step("h200x4/mfu", model="llama3-70b"), step("h200x2/mfu_70b", model="llama3-70b"), "",
    ],
    "of Llama-3 8B, s = 2048, both sides as CUDA graphs": [step(f"{m}/mfu_s2048", **GRAPHS) for m in MACHINES],
    "of Llama-3 8B, s = 8192, on TransformerEngine's modules, over TransformerEngine; over its userbuffers": [
        te("h100x4/mfu_te"), "", te("h200x2/mfu_te"), "",
    ],
    "a training step of 8B with 2 layers, 32768 tokens, TP 2 and Ulysses 2, over our modules with NCCL + cuBLAS (`collective`)": [
        step("h100x4/mfu_tp_ulysses", ("nccl",)), "", "", "",
    ],
    "six layers, forward and backward, over TransformerEngine's userbuffers": [
        over_userbuffers("h100x4/te"), over_userbuffers("h200x4/te"), over_userbuffers("h200x2/te"), over_userbuffers("h100x2"),
    ],
    "an operator, M = 8192, forward: part of perfect overlap that is reached, mean of ten shapes": means(
        *MACHINES, **{"pass": "fprop"}
    ),
    "an operator, M = 128 to 1024, over NCCL + cuBLAS, mean of 80 passes": mean_speed_ups(),
    "a Ulysses attention block of 8B, 32768 tokens, over NCCL + cuBLAS, by run": [
        block("h100x4/ulysses", "h100x4/ulysses_te"), block("h200x4/ulysses"), block("h200x2/ulysses"), "",
    ],
    "an operator between two emulated nodes, over NCCL + cuBLAS; over NCCL in two steps + cuBLAS": [
        f"{span(between_nodes('h100x4'))}; {span(speed_ups('h100x4/hierarchical', 'by_nodes_ms'))}", "",
        span(between_nodes("h200x2")), "",
    ],
}  # fmt: skip


@pytest.mark.parametrize("what", SUMMARY)
def test_the_summary_of_the_benchmarks(what: str) -> None:
    assert line(what, *SUMMARY[what]) in BENCHMARKS.read_text().splitlines()


def test_the_summary_fits_a_glance() -> None:
    """Who wants more reads on; rows of one kind of work belong to its own part of the page."""
    _, _, first = BENCHMARKS.read_text().partition("| --- |")
    assert first.partition("\n\n")[0].count("\n") <= 8


@pytest.mark.parametrize("page", [README, INDEX], ids=["README", "index"])
def test_training_steps(page: Path) -> None:
    eight = "Llama-3 8B, 4 layers"
    lines = [
        line(eight, "4 x H100", "8192", step("h100x4/mfu")),
        line(eight, "4 x H200", "8192", step("h200x4/mfu")),
        line("Llama-3 70B, 2 layers", "4 x H200", "8192", step("h200x4/mfu", model="llama3-70b")),
        line(f"{eight}, both sides as CUDA graphs", "4 x H200", "2048", step("h200x4/mfu_s2048", **GRAPHS)),
        line(eight, "2 x H200; 2 x H100", "8192", f"{step('h200x2/mfu')}; {step('h100x2/mfu')}"),
    ]
    assert [wanted for wanted in lines if wanted not in page.read_text().splitlines()] == []


def over_gemms(file: str, layer: str, sequence: int, *keys: str) -> list[str]:
    row = row_of(f"{file}/layers.json", layer=layer, seq=sequence, method="auto")
    return [f"{row[key] / row['gemms_ms']:.2f}" for key in keys]


def test_layers_of_the_readme() -> None:
    shown = [("llama3-8b-mlp", 8192), ("llama3-8b-mlp", 4096), *((layer, 8192) for layer in (*NAMES,)[1:])]
    for layer, sequence in shown:
        figures = over_gemms("h200x4", layer, sequence, "ms", "megatron_ms", "async_tp_ms")
        assert line(NAMES[layer], str(sequence), *figures) in README.read_text().splitlines()


def test_layers_of_the_benchmarks() -> None:
    again = over_gemms("h100x2/rounds25", "llama3-70b-mlp", 8192, "ms", "megatron_ms")
    for layer, name in NAMES.items():
        figures = [
            over_gemms(file, layer, 8192, "ms", "megatron_ms") for file in ("h100x4", "h200x4", "h200x2/te", "h100x2")
        ]
        if layer == "llama3-70b-mlp":
            figures[-1] = [f"{figures[-1][0]}; {again[0]} in 25 rounds", f"{figures[-1][1]}; {again[1]}"]
        assert line(name, *(figure for pair in figures for figure in pair)) in BENCHMARKS.read_text().splitlines()


def test_the_least_operators() -> None:
    least = [f"{min(of_the_bound(operators(machine, **{'pass': 'fprop'}))):.3f}" for machine in MACHINES]
    assert line("mean", *means(*MACHINES, **{"pass": "fprop"})) in BENCHMARKS.read_text().splitlines()
    assert line("least", *least) in BENCHMARKS.read_text().splitlines()


@pytest.mark.parametrize(
    ("title", "folder", "model"),
    [
        ("8B, 4 x H200", "h200x4/mfu", "llama3-8b"),
        ("70B, 4 x H200", "h200x4/mfu", "llama3-70b"),
        ("8B, 2 x H200", "h200x2/mfu", "llama3-8b"),
        ("70B, 2 x H200", "h200x2/mfu_70b", "llama3-70b"),
    ],
)
def test_steps_without_exposed_communication(title: str, folder: str, model: str) -> None:
    theirs, ours = (row_of(f"{folder}/mfu.json", model=model, variant=name) for name in ("megatron", "overlap"))
    whole = theirs["step_ms"]
    figures = (
        whole / ours["step_ms"],
        whole / (whole - theirs["exposed_ms"]),
        whole / (ours["step_ms"] - ours["exposed_ms"]),
    )
    assert (
        line(f"{title} (`{folder}/`)", *(f"{figure:.2f}" for figure in figures)) in BENCHMARKS.read_text().splitlines()
    )


def test_ranges_in_the_text_below_the_tables() -> None:
    text = " ".join(BENCHMARKS.read_text().split())
    h100, h200 = ((f"{machine}/ulysses", f"{machine}/ulysses/full") for machine in ("h100x4", "h200x2"))
    quick = of_the_bound(operators(h100[0], "fused"))
    assert f"are {span(speed_ups(h200[1], method='fused'))} times as fast as NCCL + cuBLAS on 2 x H200" in text
    four = of_the_bound(operators("h200x4/ulysses", "fused"))
    wanted = (
        f"On 4 x H200 it was {span(speed_ups('h200x4/ulysses', method='fused'))} times, {geometric_mean(four):.3f} and "
        f"{min(four):.3f}, on 4 x H100 (`--quick`) {span(speed_ups(h100[0], method='fused'))} times, "
        f"{geometric_mean(quick):.3f} and {min(quick):.3f}"
    )
    assert wanted in text
    for machine in ("h100x2", "h100x4", "h200x4", "h200x4/untuned"):
        assert span(speed_ups(f"{machine}/small_m")) in text
    for machine in ("h200x2", "h100x2", "h200x4/untuned"):
        found = operators(f"{machine}/small_m", m=512)
        assert span([row["sequence_ms"] / row["ms"] for row in found]) in text


def test_every_column_is_explained() -> None:
    plain = {"op", "pass", "world", "m", "n", "k", "dtype", "method", "layer", "seq"}
    explained = set(re.findall(r"`([a-z_]+)`", BENCHMARKS.read_text().partition("| column |")[2].partition("\n\n")[0]))
    files = [str(file.relative_to(ROOT / "benchmarks")) for kind in ("operators", "layers") for file in
             (ROOT / "benchmarks").rglob(f"{kind}.json")]  # fmt: skip
    assert {key for file in files for row in rows(file) for key in row} - plain - explained == set()
