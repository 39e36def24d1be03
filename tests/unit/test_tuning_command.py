"""The command line of `overlap-train tune`: which shapes, and arguments that do not fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from overlap_train import OverlapConfig, cli
from overlap_train.flags import option_fields
from overlap_train.planning.table import Winner
from overlap_train.planning.table_key import key_of
from overlap_train.select.passes import Pass
from overlap_train.tools.measure import methods
from overlap_train.tools.measure.models import MODELS
from overlap_train.tools.tune.cases import model_cases, one_a_bucket
from overlap_train.tools.tune.command import Tune, settings_of, where_kept
from overlap_train.tools.tune.output import columns_of, figures


@pytest.fixture(autouse=True)
def _no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def sizes(model: str, ms: list[int], ranks: int) -> list[tuple[str, int | None, int, int]]:
    passes = [case.planned(ranks, torch.bfloat16) for case in one_a_bucket(model_cases(model, ms, ranks), ranks)]
    return [(p.kind, p.m, p.n, p.k) for p in passes]


def test_the_passes_of_a_model_are_those_of_its_linears() -> None:
    """Llama-3-8B at TP 4: hidden 4096, q, k and v 6144, MLP 14336, gate and up together."""
    assert sizes("llama3-8b", [8192], 4) == [
        ("gather", 8192, 1536, 4096), ("scatter, wgrad", 8192, 4096, 1536),
        ("scatter", 8192, 4096, 1024), ("gather", 8192, 1024, 4096),
        ("gather", 8192, 7168, 4096), ("scatter, wgrad", 8192, 4096, 7168),
        ("scatter", 8192, 4096, 3584), ("gather", 8192, 3584, 4096),
    ]  # fmt: skip


def test_each_bucket_is_measured_once_and_the_largest_first() -> None:
    ms = [m for _, m, _, _ in sizes("llama3-8b", [4096, 8192, 8192, 8000], 4)]
    assert ms == [8192] * 8 + [4096] * 8


def test_winners_in_another_folder_need_a_flag_in_training() -> None:
    key = key_of(torch.device("cpu"), 2)
    usual = OverlapConfig().tuning_dir
    assert where_kept(usual, key) == f"{usual}/{key.file_name}"
    assert where_kept("/shared", key) == f"/shared/{key.file_name} (train with --overlap-train-tuning-dir /shared)"


def test_winners_across_nodes_say_how_to_train_with_them() -> None:
    folder, key = OverlapConfig().tuning_dir, replace(key_of(torch.device("cpu"), 2, 2), gpu="NVIDIA H200")
    for how, way in (
        ({}, "CUDA_DEVICE_MAX_CONNECTIONS=1"),
        ({"queues": "many"}, "CUDA_DEVICE_MAX_CONNECTIONS unset, or not 1"),
        ({"network": "nvshmem"}, "CUDA_DEVICE_MAX_CONNECTIONS=1, --overlap-train-network nvshmem"),
    ):
        told = replace(key, **how)
        assert where_kept(folder, told) == f"{folder}/{told.file_name} (train with {way})"
    assert "train with" not in where_kept(folder, replace(key, gpu="cpu"))


@pytest.mark.parametrize("model", MODELS)
def test_every_model_has_gathers_and_scatters(model: str) -> None:
    assert {kind for kind, *_ in sizes(model, [4096], 2)} == {"gather", "scatter", "scatter, wgrad"}


def test_a_dry_run_prints_the_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    line = "tune --model llama3-8b --tp 4 --seq 4096 --micro-batch 2 --dry-run"
    assert cli.main(line.split()) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9
    assert lines[5].split() == ["fc1", "fprop", "gather", "8192,", "7168,", "4096"]


def test_projections_of_ulysses_are_measured_in_the_parts_that_they_pass_in(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--model llama3-8b --ulysses --seq 8192 131072 --tp 2 --dry-run"
    assert cli.main(["tune", *line.split()]) == 0
    lines = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()[1:]}
    # of 131072 tokens the first of five parts: 3 slots of 26624 x 6144 / 2 x 2 bytes are 468 MiB; 4096 features go in three parts
    assert lines == {
        "qkv fprop gemm_a2a 26624, 6144, 4096", "qkv dgrad a2a_gemm 26624, 4096, 6144",
        "proj fprop a2a_gemm 32768, 4096, 4096", "proj dgrad gemm_a2a 32768, 4096, 4096",
        "qkv fprop gemm_a2a 8192, 6144, 4096", "qkv dgrad a2a_gemm 8192, 4096, 6144",
        "proj fprop a2a_gemm 8192, 4096, 4096", "proj dgrad gemm_a2a 8192, 4096, 4096",
    }  # fmt: skip


def test_single_weights_are_cut_as_their_linears_cut_them(capsys: pytest.CaptureFixture[str]) -> None:
    """N of one rank for a column linear, K of one rank for a row linear; sizes of one bucket once."""
    line = "--column 128256,4096 8192,512 8000,500 --row 4096,14336 --tp 4 --seq 4096 --dry-run"
    assert cli.main(["tune", *line.split()]) == 0
    assert [line.split()[:2] + line.split()[-3:] for line in capsys.readouterr().out.splitlines()[1:]] == [
        ["column", "fprop", "4096,", "32064,", "4096"], ["column", "dgrad", "4096,", "4096,", "32064"],
        ["column", "fprop", "4096,", "2048,", "512"], ["column", "dgrad", "4096,", "512,", "2048"],
        ["row", "fprop", "4096,", "4096,", "3584"], ["row", "dgrad", "4096,", "3584,", "4096"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--seq 16 --tp 2 --dry-run", "which linears? give --model (one of llama-7b, llama3-8b, "),
        ("--ulysses --column 6,8 --seq 16 --tp 2 --dry-run", "--ulysses: whose attention? give --model"),
        ("--column 6,8 --seq 16 --tp 4 --dry-run", "--column 6,8: features: 6 must be divisible by the 4 ranks"),
        ("--row 8,6 --seq 16 --tp 4 --dry-run", "--row 8,6: features: 6 must be divisible by the 4 ranks"),
        ("--model tiny --seq 16 --dry-run", "how many ranks"),
        ("--model tiny --seq 16 --tp 2", "start it under torchrun: torchrun --standalone --nproc-per-node 2"),
        ("--model tiny --seq 15 --tp 2 --dry-run", "15 must be divisible by the 2 ranks"),
        ("--model llama3-8b --seq 8190 --tp 3 --dry-run", "must be divisible by the 3 ranks"),
    ],
)
def test_arguments_that_do_not_fit(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", *line.split()]) == 2
    assert message in capsys.readouterr().err


def test_another_number_of_ranks_than_torchrun_has_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["tune", "--model", "tiny", "--seq", "16", "--tp", "4"]) == 2
    assert "torchrun has started 2 ranks; start it with --nproc-per-node 4" in capsys.readouterr().err


def test_only_a_column_is_an_output_layer() -> None:
    texts = {found.name: found.metadata["help"] for found in option_fields(Tune)}
    assert "output layer" in texts["column"] and "output layer" not in texts["row"]


@pytest.mark.parametrize(
    "line", ["--methods auto", "--methods fast", "--methods ,", "--seq 0", "--model llama9", "--row 5"]
)
def test_unknown_words_are_refused(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "--model", "tiny", "--seq", "16", *line.split()]) == 2
    said = capsys.readouterr().err
    assert line.split()[1] in said and said.count("\n") == 1


def test_kernels_are_no_candidates_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try would end in Triton's own error, behind a minute of waiting for what it should have counted."""
    monkeypatch.setattr(methods, "is_interpreted", lambda: False)  # other tests of this process may interpret kernels
    asked = Tune(model="tiny", seq=(16,), methods=("chunked", "direct"))
    with pytest.raises(ValueError, match=r"--methods: 'direct' is not one of chunked, collective, which run on CPU"):
        settings_of(asked, torch.device("cpu"))


def test_a_row_of_the_printed_table() -> None:
    winner = Winner(Pass("gather", 16, 32, 32, torch.float32, 2), "chunked", {"chunked": 1.0, "collective": 1.5})
    row = figures(winner)
    assert (row["winner"], row["gain"]) == ("chunked", "+50.0 %")
    named = {"linear": "fc1", "pass": "fprop", "kind": "gather", "sizes": "16, 32, 32"} | row
    assert [heading for heading, _ in columns_of([named])][4:] == [
        "chunked ms", "collective ms", "winner", "over collective",
    ]  # fmt: skip
    assert [value(named) for _, value in columns_of([named])][4:] == [1.0, 1.5, "chunked", "+50.0 %"]
