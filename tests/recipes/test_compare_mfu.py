"""recipes/compare_mfu.py on two CPU processes: what it writes, and that all variants train the same model on the same data."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.megatron.workers import Workers
from tests.processes import run_ranks, values
from tests.recipes.recipe_runs import joined

TINY = "--seq-length 32 --steps 2 --round-steps 2 --peak-tflops 0.1"
LINES = {
    "tp": f"--model small,small --layers 1,2 {TINY} --variants megatron,nccl,overlap",
    "off": f"--model small --layers 1 {TINY} --variants megatron,overlap,overlap_fp8 --weight-gradient-fusion off",
    "cp": f"--model small --layers 1 {TINY} --cp 2 --variants nccl,chunked,overlap",
    "all_reduce": f"--model small --layers 1 {TINY} --no-sequence-parallel",
    "lora": f"--model small --layers 1 {TINY} --lora 4 --deterministic",
    "alone": f"--model small --layers 1 {TINY} --variants overlap",
    "fused": f"--model small,small --layers 1,2 {TINY} --variants megatron,overlap",
    "refused": f"--model small --layers 1 {TINY} --variants overlap --overlap-train-provider torch",
}


@dataclass(frozen=True)
class Ended:
    """How one command ended on rank 0."""

    output: str
    refusal: str
    rows: list[dict[str, Any]]
    table: str

    def row(self, variant: str, layers: int = 1) -> dict[str, Any]:
        (row,) = [row for row in self.rows if (row["layers"], row["variant"]) == (layers, variant)]
        return row


def compare_all(rank: int, world: int, folder: Path) -> dict[str, Ended]:
    """Called in each process: every command of LINES, one after the other."""
    import os

    from compare_mfu import compare
    from megatron.core import parallel_state

    from gpt.model import build_model
    from gpt.program import RecipeError

    os.environ["WORLD_SIZE"] = str(world)

    def built(settings: Any, *rest: Any) -> Any:
        if settings.num_layers == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return build_model(settings, *rest)

    ended = {}
    for key, line in LINES.items():
        said, refusal = io.StringIO(), ""
        fails = patch("mfu.run.build_model", built) if key == "fused" else contextlib.nullcontext()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), fails, joined():
            try:
                compare([*line.split(), "--out", str(folder / key)])
            except (torch.OutOfMemoryError, RecipeError) as error:
                refusal = str(error)
        torch.use_deterministic_algorithms(False)
        parallel_state.destroy_model_parallel()
        torch.distributed.barrier()
        json_file, md_file = folder / key / "mfu.json", folder / key / "mfu.md"
        rows = json.loads(json_file.read_text())["rows"] if json_file.exists() else []
        ended[key] = Ended(said.getvalue(), refusal, rows, md_file.read_text() if rows else "")
    return ended


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mfu")


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, Ended]:
    return values(run_ranks(2, compare_all, folder, limit_s=280))[0]


def test_every_variant_of_every_model_has_a_row(ended: dict[str, Ended], folder: Path) -> None:
    found = [(row["layers"], row["variant"]) for row in ended["tp"].rows]
    assert found == [(n, name) for n in (1, 2) for name in ("megatron", "nccl", "overlap")]
    assert ended["tp"].refusal == ""
    assert (folder / "tp" / "mfu.png").exists() == (importlib.util.find_spec("matplotlib") is not None)


def test_a_comparison_without_its_baseline_is_written_and_drawn(ended: dict[str, Ended], folder: Path) -> None:
    (row,) = ended["alone"].rows
    assert row["speed_up"] is None and row["busy_ms"] is None, "a speed-up over nothing, or a GPU"
    assert (folder / "alone" / "mfu.png").exists() == (importlib.util.find_spec("matplotlib") is not None)


def test_lora_starts_from_the_frozen_model_and_trains_adapters(ended: dict[str, Ended]) -> None:
    megatron, overlap = ended["lora"].rows
    assert overlap["losses"] == pytest.approx(megatron["losses"], rel=1e-5)
    trained = ended["tp"].row("megatron")["losses"]
    assert overlap["losses"][0] == pytest.approx(trained[0]) and overlap["losses"][5] > trained[5]
    assert "LoRA of 4 features" in ended["lora"].table and "deterministic kernels" in ended["lora"].table


def test_figures_follow_from_times_and_sizes(ended: dict[str, Ended]) -> None:
    row = ended["tp"].row("overlap")
    seconds = 1e-3 * row["step_ms"]
    assert row["tokens_per_s_per_gpu"] == pytest.approx(32 / seconds / 2)
    # one layer of hidden 128: qkv 256, attention over 32 keys, proj, three matrices of 384, and 256 logits
    flops = 6 * 32 * (128 * 256 + 32 * 128 + 128 * 128 + 3 * 128 * 384 + 128 * 256)
    assert row["tflops_per_gpu"] == pytest.approx(flops / seconds / 2 / 1e12)
    assert row["mfu"] == pytest.approx(row["tflops_per_gpu"] / 0.1)
    assert row["speed_up"] == pytest.approx(ended["tp"].row("megatron")["step_ms"] / row["step_ms"])
    assert row["exposed_ms"] < row["forward_backward_ms"]


@pytest.mark.parametrize(("key", "layers"), [("tp", 1), ("tp", 2), ("off", 1), ("cp", 1), ("all_reduce", 1)])
def test_all_variants_train_the_same_model_on_the_same_data(ended: dict[str, Ended], key: str, layers: int) -> None:
    losses = {row["variant"]: row["losses"] for row in ended[key].rows if row["layers"] == layers}
    first = next(iter(losses))
    for variant, found in losses.items():
        assert len(found) == 6 == len(set(found)), "of other weights or other data at every step"
        assert found == pytest.approx(losses[first], rel=0.02 if variant == "overlap_fp8" else 1e-5), variant
        assert losses[first] == pytest.approx(ended["tp"].row("megatron", layers)["losses"], rel=1e-5)


def test_without_sequence_parallelism_linears_all_reduce(ended: dict[str, Ended]) -> None:
    assert "fprop GEMM + AR" in ended["all_reduce"].output and "GEMM + AR" not in ended["tp"].output
    assert [ended[key].row("overlap")["sequence_parallel"] for key in ("tp", "all_reduce")] == [True, False]
    assert "without sequence parallelism" in ended["all_reduce"].table


def test_a_variant_in_fp8_rounds_to_fp8(ended: dict[str, Ended]) -> None:
    losses = [ended["off"].row(variant)["losses"] for variant in ("overlap", "overlap_fp8")]
    assert losses[1] != pytest.approx(losses[0], rel=1e-5)


def test_a_model_that_does_not_fit_ends_the_program_and_leaves_the_rows_before_it(ended: dict[str, Ended]) -> None:
    assert "CUDA out of memory" in ended["fused"].refusal and "name fewer (--variants)" in ended["fused"].output
    assert [row["layers"] for row in ended["fused"].rows] == [1, 1]


def test_what_an_operator_refuses_is_one_line(ended: dict[str, Ended]) -> None:
    assert ended["refused"].refusal.startswith("provider='torch' with tensors on cpu") and not ended["refused"].rows


def test_the_table_is_narrow_and_says_what_its_figures_mean(ended: dict[str, Ended]) -> None:
    heading, _, *lines = ended["tp"].table.partition("\n\n")[0].splitlines()
    assert heading.split(" | ")[1:6] == ["Step ms", "GPU busy ms", "Speed-up", "MFU %", "Tokens/s/GPU"]
    assert lines[0].startswith("| small GPT, 1 layers: Megatron-Core | ") and max(map(len, lines)) <= 120
    tables = (ended[key].table for key in ("tp", "off"))
    assert all(f"weight-gradient fusion: {how}" in table for how, table in zip(("on", "off"), tables, strict=True))
    assert " - | " in next(line for line in ended["cp"].table.splitlines() if ": overlap_train |" in line), "no exposed"


def test_linears_without_communication_multiply_the_same_sizes(workers: Workers) -> None:
    assert workers.call(compute_alone) == [True, True]
    assert workers.call(all_reduce_alone) == [True, True]


def compute_alone() -> bool:
    """Called on two ranks. What was gathered before stands for what is not gathered, so results are those of before."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    from mfu.run import without_communication
    from tests.megatron.models import LLAMA, Recipe, gpt

    model = gpt(Recipe(LLAMA))
    column = next(module for module in model.modules() if isinstance(module, ColumnParallelLinear))
    x = torch.randn(4, 2, column.input_size, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def results(scale: int = 1) -> list[torch.Tensor]:
        column.weight.grad = None
        y = column(scale * x)[0]
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
        return [y.detach(), column.weight.grad]

    expected = results()
    with without_communication():
        found = results(2)
    return all(map(torch.allclose, expected, found))


def all_reduce_alone() -> bool:
    """Without sequence parallelism: this rank's part of dx and of y, while the rest of training adds up."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from mfu.run import without_communication
    from tests.megatron.models import LLAMA, Recipe, gpt

    model = gpt(Recipe({**LLAMA, "sequence_parallel": False}))
    column, row = (
        next(module for module in model.modules() if isinstance(module, kind))
        for kind in (ColumnParallelLinear, RowParallelLinear)
    )
    x, h = torch.randn(4, 2, column.input_size, requires_grad=True), torch.randn(4, 2, row.weight.shape[1])
    total = torch.ones(2)
    with without_communication():
        y = column(x)[0]
        y.sum().backward()
        z = row(h)[0]
        torch.distributed.all_reduce(total)
    assert total.tolist() == [2.0, 2.0]
    return torch.allclose(x.grad, torch.ones_like(y) @ column.weight) and torch.allclose(z, h @ row.weight.t())
