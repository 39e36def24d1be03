"""The recipe's flags: defaults from one dataclass, and one clear line for each rule that is broken."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from gpt.program import RecipeError
from gpt.rules import check_device, read_flags, resolve
from gpt.settings import Settings, defaults
from overlap_train import OverlapConfig
from overlap_train.flags import Parser, add_options, flag, from_args, option_fields

OPTIONS = option_fields(Settings)
ROOT = Path(__file__).parents[2]
# torchrun ... --nproc-per-node RANKS recipes/pretrain_gpt.py FLAGS, in one node
STARTED = re.compile(r"^torchrun --standalone --nproc-per-node (\d+) recipes/pretrain_gpt\.py(.*)$", re.MULTILINE)


def commands_of_pages() -> list[tuple[int, str]]:
    """Ranks and flags of each command that starts the recipe on a page."""
    pages = "\n".join(page.read_text() for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))))
    return [(int(ranks), flags) for ranks, flags in STARTED.findall(pages.replace("\\\n", ""))]


def parser() -> Parser:
    return add_options(Parser("test"), Settings())


def parse(*arguments: str) -> Settings:
    return from_args(Settings(), parser().parse_args(list(arguments)))


def test_without_flags_every_setting_has_the_default_of_the_dataclass():
    assert parse() == Settings()


def test_every_setting_can_be_changed_by_its_flag():
    for option in OPTIONS:
        default = getattr(Settings(), option.name)
        known = option.metadata["choices"] or ("other",)
        other = known[-1] if isinstance(default, str) else type(default)(7)
        assert parse(flag(option.name), str(other)) == replace(Settings(), **{option.name: other})


def test_help_names_every_flag_and_its_default():
    text = parser().format_help()
    for option in OPTIONS:
        assert flag(option.name) in text
        assert option.metadata["help"].split()[0] in text
    assert f"(default: {Settings().train_iters})" in text


@pytest.mark.parametrize(("ranks", "flags"), commands_of_pages())
def test_commands_of_the_pages_obey_the_rules(ranks: int, flags: str):
    settings, overlap, _ = read_flags(shlex.split(flags, comments=True), None, ranks, on_gpu=True)
    assert overlap is not None and ranks % (settings.tp * settings.cp * settings.pp) == 0


def test_long_sequences_have_a_command_for_each_length():
    lengths = {length for _, flags in commands_of_pages() for length in re.findall(r"--seq-length (\d+)", flags)}
    assert {"32768", "131072"} <= lengths


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_the_defaults_for_gpus_obey_the_rules(world_size: int):
    assert resolve(defaults(on_gpu=True), world_size).tp == world_size


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_defaults_for_cpus_obey_the_rules(world_size: int):
    assert resolve(defaults(on_gpu=False), world_size).tp == world_size


def test_tp_below_the_world_size_leaves_data_parallel_replicas():
    assert resolve(replace(Settings(), tp=2), 4).tp == 2


@pytest.mark.parametrize(
    ("given", "found"), [({"pp": 2}, (2, 2)), ({"pp": 4}, (1, 4)), ({"tp": 1, "pp": 2}, (1, 2)), ({"cp": 2}, (2, 1))]
)
def test_tp_is_all_that_the_stages_leave(given: dict, found: tuple[int, int]):
    settings = resolve(replace(Settings(), **given), 4)
    assert (settings.tp, settings.pp) == found


BROKEN = [
    ({"num_layers": 0}, ["--num-layers 0", "positive"]),
    ({"lr": float("nan")}, ["--lr nan", "positive"]),
    ({"seed": -1}, ["--seed -1", "negative"]),
    ({"tp": 3}, ["--tp 3", "2 ranks"]),
    ({"pp": 3}, ["--tp 1 times --pp 3", "2 ranks", "change --tp or --pp"]),
    ({"pp": 2, "num_layers": 3}, ["--num-layers 3", "--pp 2", "stage"]),
    ({"pp": 0}, ["--pp 0", "positive"]),
    ({"cp": 3}, ["--tp 1 times --cp 3", "2 ranks", "change --tp or --cp"]),
    ({"cp": 2, "seq_length": 126}, ["--seq-length 126", "2 times --cp 2 times --tp 1"]),
    ({"cp": 2, "num_attention_heads": 1, "num_query_groups": 1}, ["--num-attention-heads 1", "--cp 2", "heads"]),
    ({"num_attention_heads": 3}, ["--hidden-size 128", "--num-attention-heads 3"]),
    ({"num_query_groups": 3}, ["--num-attention-heads 4", "--num-query-groups 3"]),
    ({"num_query_groups": 1}, ["--num-query-groups 1", "--tp 2"]),
    ({"hidden_size": 132, "num_attention_heads": 4}, ["--hidden-size 132", "odd"]),
    ({"ffn_hidden_size": 383}, ["--ffn-hidden-size 383", "--tp 2"]),
    ({"seq_length": 127}, ["--seq-length 127", "--tp 2"]),
    ({"global_batch_size": 12}, ["--global-batch-size 12", "--micro-batch-size", "8"]),
    ({"min_lr": 1.0}, ["--min-lr 1.0", "--lr"]),
    ({"save_interval": 5}, ["--save-interval 5", "--save"]),
    ({"cuda_graph": 1, "recompute": "full"}, ["--cuda-graph 1", "--recompute full", "random state"]),
    ({"cuda_graph": 1, "pp": 2}, ["--cuda-graph 1", "--pp 2", "synchronise"]),
    ({"cuda_graph": 1, "variable_seq_length": 1}, ["--cuda-graph 1", "--variable-seq-length 1", "one shape"]),
    ({"cuda_graph": 1, "experts": 8}, ["--cuda-graph 1", "--model small", "experts"]),
]


@pytest.mark.parametrize(("changes", "words"), BROKEN, ids=[next(iter(changes)) for changes, _ in BROKEN])
def test_a_broken_rule_is_refused_in_one_line_that_names_flag_and_value(changes: dict, words: list[str]):
    with pytest.raises(RecipeError) as refusal:
        resolve(replace(Settings(), **changes), 2)
    assert "\n" not in str(refusal.value)
    for word in words:
        assert word in str(refusal.value)


@pytest.mark.parametrize("arguments", [["--bogus"], ["--lr", "fast"], ["--train-iters"]])
def test_a_flag_that_cannot_be_parsed_raises_instead_of_exiting(arguments: list[str]):
    with pytest.raises(RecipeError, match=arguments[0]):
        read_flags(arguments, None, 1, False)


def test_cuda_graphs_need_gpus():
    graphed = resolve(replace(Settings(), cuda_graph=1), 2)
    check_device(graphed, None, on_gpu=True)
    check_device(Settings(), None, on_gpu=False)
    with pytest.raises(RecipeError, match="--cuda-graph 1 needs GPUs"):
        check_device(graphed, None, on_gpu=False)


def test_a_model_that_does_not_fit_a_cpu_machine_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpt.rules._free_gib", lambda: 20.0)
    large = replace(defaults(on_gpu=False, model="llama3-8b"), num_layers=8)
    with pytest.raises(RecipeError, match=r"--model llama3-8b with --num-layers 8 takes 42 GiB .* 20 GiB are free"):
        check_device(large, None, on_gpu=False)
    check_device(large, None, on_gpu=True)
    check_device(replace(large, num_layers=1, hidden_size=64, ffn_hidden_size=128), None, on_gpu=False)


@pytest.mark.parametrize(("steps", "asked", "warm_up"), [(20, 30, 5), (30, 30, 7), (31, 30, 30), (1, 1, 0), (20, 0, 0)])
def test_a_warm_up_that_does_not_fit_is_shortened_with_a_note(steps: int, asked: int, warm_up: int) -> None:
    flags = ["--train-iters", str(steps), "--lr-warmup-iters", str(asked)]
    settings, overlap, notes = read_flags(flags, None, 2, False)
    assert (settings.lr_warmup_iters, overlap) == (warm_up, None)
    expected = f"--lr-warmup-iters {asked} does not fit into --train-iters {steps}; the warm-up takes {warm_up} steps"
    assert notes == ([f"note: {expected}"] if warm_up != asked else [])


def test_a_published_model_keeps_what_has_no_flag() -> None:
    flags = ["--model", "qwen3-32b", "--num-layers", "2", "--hidden-size", "64"]
    settings, _, _ = read_flags(flags, None, 2, False)
    assert (settings.num_layers, settings.hidden_size, settings.kv_channels, settings.vocab_size) == (
        2,
        64,
        128,
        151936,
    )


def test_methods_of_kernels_are_refused_on_cpus() -> None:
    for method in ("fused", "direct", "low_latency"):
        with pytest.raises(RecipeError, match=f"--overlap-train-method {method} runs kernels on GPUs"):
            check_device(Settings(), OverlapConfig(method=method), on_gpu=False)
        check_device(Settings(), OverlapConfig(method=method), on_gpu=True)
    for method in ("auto", "chunked", "collective"):
        check_device(Settings(), OverlapConfig(method=method), on_gpu=False)
