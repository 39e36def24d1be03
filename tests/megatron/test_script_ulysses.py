"""A user's script with --context-parallel-size 2 --cp-comm-type a2a under our launcher, without TransformerEngine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.megatron import test_script_run as script
from tests.script_server import ScriptServer

pytestmark = script.pytestmark

ULYSSES = ("--tensor-model-parallel-size", "1", "--context-parallel-size", "2", "--cp-comm-type", "a2a")
NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")


@pytest.fixture(scope="module")
def overlapped(script_server: ScriptServer, tmp_path_factory: pytest.TempPathFactory) -> script.Run:
    run = script.launch(
        script_server, tmp_path_factory.mktemp("ulysses"), "--overlap-train", *script.OUR_SPEC, *ULYSSES, *NO_DROPOUT
    )
    assert run.status == 0, run.output[-3000:]
    return run


def test_the_table_shows_what_is_exchanged(overlapped: script.Run):
    rows = re.findall(r"^(\S*linear_\w+) +chunked .* auto", overlapped.output, re.MULTILINE)
    attention = "decoder.layers.0-1.self_attention.linear_"
    assert sorted(rows) == [attention + "proj", attention + "qkv"]
    assert "\nproj: fprop A2A(x) + GEMM (CP 2);" in overlapped.output
    assert "\nqkv: fprop GEMM + A2A (CP 2);" in overlapped.output


def test_without_our_flag_the_losses_are_the_same_and_nothing_is_ours(
    script_server: ScriptServer, overlapped: script.Run, tmp_path: Path
):
    run = script.launch(script_server, tmp_path, *script.OUR_SPEC, *ULYSSES, *NO_DROPOUT)
    assert run.status == 0, run.output[-3000:]
    assert "GEMM + A2A" not in run.output
    assert len(overlapped.losses) == 4
    assert [float(loss) for loss in overlapped.losses] == pytest.approx([float(loss) for loss in run.losses], rel=1e-5)


def test_without_a_core_attention_for_it_the_way_out_is_named(script_server: ScriptServer, tmp_path: Path):
    failed = script.launch(script_server, tmp_path, "--overlap-train", *ULYSSES)
    assert failed.status != 0
    assert f"{' '.join(script.OUR_SPEC)} and --cp-comm-type a2a" in failed.output


def test_counters_have_the_memory_of_the_context_parallel_group(overlapped: script.Run):
    written = overlapped.written["tensorboard"]
    assert written["overlap_train/qkv/overlapped_calls 4"] == 2 * 4 * 2  # layers, iterations, microbatches
    assert written["overlap_train/symmetric_mib 4"] > 0
