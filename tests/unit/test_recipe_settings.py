"""The recipe's flags, rules, published models, and the text with its yardstick."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpt.program import RecipeError
from gpt.settings import Settings, defaults, read_flags, resolve

ROOT = Path(__file__).parents[2]
# torchrun ... --nproc-per-node RANKS recipes/pretrain_gpt.py FLAGS, in one node
STARTED = re.compile(r"^torchrun --standalone --nproc-per-node (\d+) recipes/pretrain_gpt\.py(.*)$", re.MULTILINE)


def commands_of_pages() -> list[tuple[int, str]]:
    """Ranks and flags of each command that starts the recipe on a page."""
    pages = "\n".join(page.read_text() for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))))
    return [(int(ranks), flags) for ranks, flags in STARTED.findall(pages.replace("\\\n", ""))]


@pytest.mark.parametrize(("ranks", "flags"), commands_of_pages())
def test_commands_of_the_pages_obey_the_rules(ranks: int, flags: str):
    settings, overlap = read_flags(shlex.split(flags, comments=True), None, ranks, on_gpu=True)
    assert overlap is not None and ranks % (settings.tp * settings.cp) == 0


@pytest.mark.parametrize(
    ("ranks", "on_gpu", "found"),
    [(1, False, 1), (2, False, 2), (4, False, 4), (1, True, 1), (4, True, 4), (8, True, 8)],
)
def test_the_defaults_are_tensor_parallel_over_all_ranks(ranks: int, on_gpu: bool, found: int):
    assert resolve(defaults(on_gpu), ranks).tp == found


BROKEN: list[tuple[dict[str, Any], list[str]]] = [
    ({"tp": 3}, ["--tp 3", "2 ranks"]),
    ({"cp": 2, "seq_length": 126}, ["--seq-length 126", "multiple of 4", "--cp"]),
    ({"num_query_groups": 3}, ["--num-attention-heads 8", "--num-query-groups"]),
    ({"num_query_groups": 1, "tp": 2}, ["--num-query-groups 1", "--tp"]),
    ({"ffn_hidden_size": 383}, ["--ffn-hidden-size 383", "--tp"]),
    ({"global_batch_size": 12}, ["--global-batch-size 12", "--micro-batch-size", "8"]),
]


@pytest.mark.parametrize(("changes", "words"), BROKEN, ids=[next(iter(changes)) for changes, _ in BROKEN])
def test_a_broken_rule_is_refused_in_one_line_that_names_flag_and_value(changes: dict[str, Any], words: list[str]):
    with pytest.raises(RecipeError) as refusal:
        resolve(replace(Settings(), **changes), 2)
    assert "\n" not in str(refusal.value)
    for word in words:
        assert word in str(refusal.value)


WRONG = [
    ("--bogus", "--bogus"),
    ("--lr fast", "--lr: 'fast' is not a positive number"),
    ("--model gpt5", "--model gpt5 is not one of small, llama3-8b"),
    ("--overlap-train-timeout-s 5", "--overlap-train-timeout-s given without --overlap-train"),
    ("--overlap-train --overlap-train-method fused", "--overlap-train-method fused needs GPUs"),
    ("--overlap-train --tp 1", "nothing to overlap"),
    ("--overlap-train --cp 2 --lora 4", "--overlap-train with --lora 4, --tp 1 and --cp 2: a linear with an adapter"),
    ("--save-interval 5", "--save-interval 5 without --save"),
    ("--cuda-graph 1", "--cuda-graph needs GPUs"),
    ("--cuda-graph 1 --recompute full", "--recompute full reads the random state"),
    ("--model llama3-70b", "--model llama3-70b needs GPUs"),
]


@pytest.mark.parametrize(("line", "words"), WRONG, ids=[line for line, _ in WRONG])
def test_a_wrong_flag_is_refused_in_one_line(line: str, words: str):
    with pytest.raises(RecipeError) as refusal:
        read_flags(line.split(), None, 2, on_gpu=False)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)


# What Megatron-LM's num_floating_point_operations (core 0.19.2) returned for 3 samples of 8192 tokens.
PUBLISHED = {
    "llama3-8b": 1264936588148736,
    "llama3-70b": 11040093175283712,
    "qwen3-32b": 5349482698899456,
}


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_published_model_has_its_flops_and_obeys_the_rules(model: str) -> None:
    pytest.importorskip("megatron.core")
    from mfu.results import step_flops

    settings = replace(defaults(True, model), seq_length=8192, global_batch_size=3, tp=4)
    assert step_flops(settings) == PUBLISHED[model]
    for tp in (2, 4, 8):
        assert resolve(defaults(True, model), tp) == replace(defaults(True, model), tp=tp)
