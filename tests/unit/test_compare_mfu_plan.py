"""The flags of compare_mfu: what they make of each other, and one line for each that is wrong."""

from __future__ import annotations

import pytest

from gpt.program import RecipeError
from mfu.plan import Plan, baseline_of, is_graph, read_flags, settings_for


def plan(line: str = "") -> Plan:
    return read_flags(line.split())[0]


def test_the_flags_reach_the_settings() -> None:
    settings = settings_for(plan("--model llama3-8b --layers 3 --seq-length 512 --tp 2 --seed 7"), 0, 4)
    assert (settings.num_layers, settings.seq_length, settings.tp, settings.seed) == (3, 512, 2, 7)
    assert (settings.micro_batch_size, settings.global_batch_size) == (1, 2)  # two replicas


def test_graphs_are_variants_that_must_be_asked_for() -> None:
    asked = plan("--variants megatron,overlap_graph,megatron_graph")
    assert [is_graph(name) for name in asked.variants] == [False, True, True]
    assert not any(is_graph(name) for name in plan().variants)
    assert plan("--cp 2 --variants nccl,overlap_graph,nccl_graph").variants == ("nccl", "overlap_graph", "nccl_graph")


def test_context_parallelism_has_variants_and_fewer_layers_of_its_own() -> None:
    asked = plan("--cp 2")
    assert asked.variants == ("nccl", "chunked", "fused", "direct", "overlap") and asked.layers == (2,)
    settings = settings_for(asked, 0, 4)
    assert (settings.tp, settings.cp, settings.global_batch_size) == (2, 2, 1)


def test_what_others_are_compared_with() -> None:
    assert baseline_of(["nccl", "overlap", "megatron"], "overlap") == "megatron"
    assert baseline_of(["fused"], "fused") is None
    assert baseline_of(["megatron", "overlap_graph"], "overlap_graph") is None
    assert baseline_of(["nccl_graph", "megatron_graph", "megatron"], "overlap_graph") == "megatron_graph"
    assert baseline_of(["nccl", "overlap_graph", "nccl_graph"], "overlap_graph") == "nccl_graph"


WRONG = [
    ("--cp 2 --variants megatron", ["--variants megatron with --cp 2", "take nccl"]),
    ("--cp 2 --variants nccl_graph,megatron_graph", ["--variants megatron_graph with --cp 2", "take nccl_graph"]),
    ("--cp 2 --no-sequence-parallel", ["--no-sequence-parallel with --cp 2", "leave one out"]),
    ("--no-sequence-parallel --variants te_userbuffers", ["--variants te_userbuffers with --no-sequence-parallel"]),
    ("--no-sequence-parallel --variants overlap_fp8", ["--variants overlap_fp8 with --no-sequence-parallel"]),
    ("--cp 2 --lora 4", ["--lora 4, --tp 1 and --cp 2: a linear with an adapter", "take --tp 2"]),
    ("--cp 2 --variants overlap_fp8", ["--variants overlap_fp8 with --cp 2 and --tp 1", "is not in fp8"]),
    ("--overlap-train-main-grad off", ["--overlap-train-main-grad off with --weight-gradient-fusion on"]),
    ("--variants auto", ["--variants", "'auto'", "overlap"]),
    ("--model llama9", ["--model", "'llama9'", "llama3-8b"]),
    ("--variants megatron,flux", ["--variants", "'flux'", "nccl"]),
    ("--layers 1,2", ["--layers", "2 numbers for 1 models"]),
]


@pytest.mark.parametrize(("line", "words"), WRONG, ids=[line for line, _ in WRONG])
def test_a_wrong_flag_is_refused_in_one_line(line: str, words: list[str]) -> None:
    with pytest.raises(RecipeError) as refusal:
        settings_for(plan(line), 0, 2)
    assert "\n" not in str(refusal.value)
    for word in words:
        assert word in str(refusal.value)
