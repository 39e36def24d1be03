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
ULYSSES = shlex.split("""
    --tensor-model-parallel-size 1 --context-parallel-size 2 --cp-comm-type a2a --hidden-dropout 0 --attention-dropout 0
""")
LAYOUTS = {"tensor parallelism": ("--deterministic-mode",), "Ulysses": ULYSSES}
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


def launch(server: ScriptServer, folder: Path, *flags: str) -> Run:
    """Train the small model under our launcher."""
    # There Megatron refuses the fusion that it turns on by default, for want of Apex.
    if "--overlap-train" not in flags:
        flags = (*flags, "--no-gradient-accumulation-fusion")
    program = ("-m", "overlap_train.integrations.megatron", str(SCRIPT))
    written = folder / "written.json"
    status, output = server.run(*program, *SMALL, *flags, folder=folder, WRITTEN=str(written), **MEGATRON_VARIABLES)
    values = json.loads(written.read_text()) if written.exists() else {}
    return Run(status, output, values)


@pytest.fixture(scope="module")
def overlapped(script_server: ScriptServer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """A run of each layout."""
    runs = {}
    for name, flags in LAYOUTS.items():
        folder = tmp_path_factory.mktemp("overlapped")
        runs[name] = launch(script_server, folder, "--overlap-train", *OUR_SPEC, *flags)
        assert runs[name].status == 0, runs[name].output[-3000:]
    return runs


def test_every_linear_is_overlapped_and_the_table_is_printed_once(overlapped: dict[str, Run]):
    names = [f"decoder.layers.0-1.{name}" for name in ("self_attention.linear_proj", "self_attention.linear_qkv")]
    mlp = ["decoder.layers.0-1.mlp.linear_fc1", "decoder.layers.0-1.mlp.linear_fc2", "output_layer"]
    for layout, expected in (("tensor parallelism", [*names, *mlp]), ("Ulysses", names)):
        output = overlapped[layout].output
        rows = re.findall(r"^(\S*(?:linear_\w+|output_layer)) +chunked .* auto", output, re.MULTILINE)
        assert sorted(rows) == sorted(expected)
    assert "\nproj: fprop A2A(x) + GEMM (CP 2);" in output and "\nqkv: fprop GEMM + A2A (CP 2);" in output


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_our_flag_the_losses_are_the_same_and_nothing_is_ours(
    script_server: ScriptServer, overlapped: dict[str, Run], tmp_path: Path, layout: str
):
    run = launch(script_server, tmp_path, *OUR_SPEC, *LAYOUTS[layout])
    assert run.status == 0, run.output[-3000:]
    assert "GEMM + " not in run.output
    assert not any(name.startswith("overlap_train/") for name in run.written["tensorboard"])
    losses, own = ([float(loss) for loss in one.losses] for one in (overlapped[layout], run))
    assert len(own) == 4 and losses == pytest.approx(own, rel=1e-5)


def test_flags_are_in_the_parser_and_counters_are_written_where_and_when_megatron_writes(overlapped: dict[str, Run]):
    run = overlapped["tensor parallelism"]
    assert "dataset helpers: compiled ones of the megatron-core wheel" in run.output
    assert re.search(r"^ *overlap_train \.+ True$", run.output, re.MULTILINE)
    for writer in ("tensorboard", "wandb"):
        ours = {name: value for name, value in run.written[writer].items() if name.startswith("overlap_train/")}
        assert {name.split()[1] for name in ours} == {"2", "4"}
        assert ours["overlap_train/fc1/overlapped_calls 2"] == 8  # layers, microbatches, iterations
        assert ours["overlap_train/output/overlapped_calls 4"] == 8
        assert ours["overlap_train/qkv/fallback_calls 4"] == 0
        assert ours["overlap_train/symmetric_mib 4"] > 0
    assert "learning-rate 2" in run.written["tensorboard"]
    of_ulysses = overlapped["Ulysses"].written["tensorboard"]
    assert of_ulysses["overlap_train/qkv/overlapped_calls 4"] == 16 and of_ulysses["overlap_train/symmetric_mib 4"] > 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((*OUR_SPEC, "--tensor-model-parallel-size", "1"), "tensor_model_parallel_size=1 in the model's config"),
        ((), " ".join(OUR_SPEC)),  # no norm for sequence parallelism
        (ULYSSES, f"{' '.join(OUR_SPEC)} and --cp-comm-type a2a"),  # no core attention
    ],
    ids=["cannot act", "no norm", "no core attention"],
)
def test_what_cannot_work_is_an_error_that_names_the_way_out(
    script_server: ScriptServer, tmp_path: Path, flags: tuple[str, ...], said: str
):
    refused = launch(script_server, tmp_path, "--overlap-train", *flags)
    assert refused.status != 0 and said in refused.output and not refused.losses
