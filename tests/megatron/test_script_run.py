"""A user's script on two CPU ranks under our launcher, with the megatron.training of the megatron-core 0.19 wheel."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.script_server import ScriptServer

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("megatron.training") is None,
        reason="this megatron-core wheel has no megatron.training",
    ),
    pytest.mark.slow,
]

SCRIPT = Path(__file__).parent / "user_scripts" / "train_small.py"
OUR_SPEC = ("--spec", "overlap_train.integrations.megatron.spec", "gpt_block_spec")
SMALL = shlex.split("""
    --mock-data --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr 1e-3 --log-interval 1
    --eval-iters 1 --eval-interval 99 --tensor-model-parallel-size 2 --sequence-parallel --distributed-backend gloo
    --transformer-impl local --vocab-size 127 --normalization RMSNorm --swiglu --disable-bias-linear
    --no-masked-softmax-fusion --no-persist-layer-norm --position-embedding-type rope
    --no-rope-fusion --num-workers 0 --use-cpu-initialization --tensorboard-log-interval 2
""")
MEGATRON_VARIABLES = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


@dataclass(frozen=True)
class Run:
    """How a run ended: exit status, what all ranks printed, and what Megatron's writers got on the last rank."""

    status: int
    output: str
    written: dict[str, dict[str, float]]

    @property
    def losses(self) -> list[str]:
        return re.findall(r"iteration +\d+/.* lm loss: (\S+)", self.output)


def launch(server: ScriptServer, folder: Path, *flags: str, launcher: bool = True) -> Run:
    """Train the small model; `launcher` False: without ours."""
    if (
        "--overlap-train" not in flags
    ):  # there Megatron refuses the fusion that it turns on by default, for want of Apex
        flags = (*flags, "--no-gradient-accumulation-fusion")
    program = ["-m", "overlap_train.integrations.megatron", str(SCRIPT)] if launcher else [str(SCRIPT)]
    written = folder / "written.json"
    status, output = server.run(*program, *SMALL, *flags, folder=folder, WRITTEN=str(written), **MEGATRON_VARIABLES)
    values = json.loads(written.read_text()) if written.exists() else {}
    return Run(status, output, values)


@pytest.fixture(scope="module")
def overlapped(script_server: ScriptServer, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = launch(script_server, tmp_path_factory.mktemp("overlapped"), "--overlap-train", *OUR_SPEC)
    assert run.status == 0, run.output[-3000:]
    return run


def test_every_linear_is_overlapped_and_the_table_is_printed_once(overlapped: Run):
    rows = re.findall(r"^(\S*(?:linear_\w+|output_layer)) +chunked .* auto", overlapped.output, re.MULTILINE)
    layer = "decoder.layers.0-1."
    attention, mlp = layer + "self_attention.linear_", layer + "mlp.linear_"
    assert sorted(rows) == sorted([attention + "proj", attention + "qkv", mlp + "fc1", mlp + "fc2", "output_layer"])


def test_without_our_flag_the_losses_are_the_same_and_nothing_is_ours(
    script_server: ScriptServer, overlapped: Run, tmp_path: Path
):
    run = launch(script_server, tmp_path, *OUR_SPEC)
    assert run.status == 0, run.output[-3000:]
    assert "GEMM + RS" not in run.output
    assert not any(name.startswith("overlap_train/") for name in run.written["tensorboard"])
    assert len(overlapped.losses) == 4
    assert [float(loss) for loss in overlapped.losses] == pytest.approx([float(loss) for loss in run.losses], rel=1e-5)


def test_the_compile_step_that_the_wheel_cannot_do_is_skipped(
    script_server: ScriptServer, overlapped: Run, tmp_path: Path
):
    assert "dataset helpers: compiled ones of the megatron-core wheel" in overlapped.output
    alone = launch(script_server, tmp_path, *OUR_SPEC, launcher=False)
    assert alone.status != 0
    assert "Failed to compile the C++ dataset helper functions" in alone.output


def test_our_flags_are_in_the_parser_of_the_script(overlapped: Run):
    assert re.search(r"^ *overlap_train \.+ True$", overlapped.output, re.MULTILINE)


def test_counters_are_written_where_and_when_megatron_writes(overlapped: Run):
    for writer in ("tensorboard", "wandb"):
        ours = {name: value for name, value in overlapped.written[writer].items() if name.startswith("overlap_train/")}
        assert {name.split()[1] for name in ours} == {"2", "4"}
        assert ours["overlap_train/fc1/overlapped_calls 2"] == 8  # layers, microbatches, iterations
        assert ours["overlap_train/output/overlapped_calls 4"] == 8
        assert ours["overlap_train/qkv/fallback_calls 4"] == 0
        assert ours["overlap_train/symmetric_mib 4"] > 0
    assert "learning-rate 2" in overlapped.written["tensorboard"]


def test_a_flag_that_cannot_act_is_an_error(script_server: ScriptServer, tmp_path: Path):
    refused = launch(script_server, tmp_path, "--overlap-train", *OUR_SPEC, "--tensor-model-parallel-size", "1")
    assert refused.status != 0
    assert "tensor_model_parallel_size=1 in the model's config" in refused.output
    assert not refused.losses


def test_without_a_norm_for_sequence_parallelism_the_way_out_is_named(script_server: ScriptServer, tmp_path: Path):
    failed = launch(script_server, tmp_path, "--overlap-train")
    assert failed.status != 0
    assert "--spec overlap_train.integrations.megatron.spec gpt_block_spec" in failed.output
