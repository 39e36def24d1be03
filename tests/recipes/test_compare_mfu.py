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

TINY = "--seq-length 32 --steps 2 --round-steps 2 --bitwise --peak-tflops 0.1"
LINES = {
    "tp": f"--model small,small --layers 1,2 {TINY} --variants megatron,nccl,overlap,async_tp",
    "both": f"--model small --layers 1 {TINY} --variants megatron,overlap --weight-gradient-fusion both",
    "cp": f"--model small --layers 1 {TINY} --cp 2 --variants nccl,chunked,overlap --repeat overlap",
    "lora": f"--model small --layers 1 {TINY} --lora 4",
    "fused": f"--model small --layers 1 {TINY} --variants megatron,fused --repeat megatron",
}
needs_matplotlib = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")


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

    from gpt.program import RecipeError
    from mfu.run import build_variant

    os.environ["WORLD_SIZE"] = str(world)

    def built(name: str, *rest: Any) -> Any:
        if name == "fused":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        return build_variant(name, *rest)

    ended = {}
    for key, line in LINES.items():
        said, refusal = io.StringIO(), ""
        fails = patch("mfu.run.build_variant", built) if key == "fused" else contextlib.nullcontext()
        with contextlib.redirect_stdout(said), fails, joined():
            try:
                compare([*line.split(), "--out", str(folder / key)])
            except RecipeError as error:
                refusal = str(error)
        parallel_state.destroy_model_parallel()
        torch.distributed.barrier()
        written = json.loads((folder / key / "mfu.json").read_text())
        table = (folder / key / "mfu.md").read_text()
        ended[key] = Ended(said.getvalue(), refusal, written["rows"], table)
    return ended


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mfu")


@pytest.fixture(scope="module")
def ended(folder: Path) -> dict[str, Ended]:
    return values(run_ranks(2, compare_all, folder, limit_s=280))[0]


def test_every_variant_of_every_model_has_a_row(ended: dict[str, Ended]) -> None:
    found = [(row["layers"], row["variant"]) for row in ended["tp"].rows]
    assert found == [(n, name) for n in (1, 2) for name in ("megatron", "nccl", "overlap", "async_tp", "overlap again")]
    assert ended["tp"].row("async_tp")["status"] == "async_tp needs CUDA devices"
    assert ended["tp"].row("async_tp")["step_ms"] is None
    assert ended["tp"].refusal == "", "async-TP may be absent"
    assert "async-TP did not run: async_tp needs CUDA devices" in ended["tp"].table


def test_lora_starts_from_the_frozen_model_and_trains_adapters(ended: dict[str, Ended]) -> None:
    megatron, overlap, again = ended["lora"].rows
    assert (megatron["variant"], overlap["variant"], again["same_bits"]) == ("megatron", "overlap", True)
    assert overlap["losses"] == pytest.approx(megatron["losses"], rel=1e-5)
    trained = ended["tp"].row("megatron")["losses"]
    assert overlap["losses"][0] == pytest.approx(trained[0]) and overlap["losses"][5] > trained[5]
    assert "LoRA of 4 features" in ended["lora"].table


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


@pytest.mark.parametrize(("key", "layers"), [("tp", 1), ("tp", 2), ("both", 1), ("cp", 1)])
def test_all_variants_train_the_same_model_on_the_same_data(ended: dict[str, Ended], key: str, layers: int) -> None:
    losses = {row["variant"]: row["losses"] for row in ended[key].rows if row["layers"] == layers and row["losses"]}
    first = next(iter(losses))
    for variant, found in losses.items():
        assert len(found) == 6 == len(set(found)), "of other weights or other data at every step"
        assert found == pytest.approx(losses[first], rel=1e-5), variant
        assert losses[first] == pytest.approx(ended["tp"].row("megatron", layers)["losses"], rel=1e-5)
    assert ended[key].row("overlap again", layers)["same_bits"] is True
    assert ended[key].row("overlap", layers)["same_bits"] is None


def test_a_variant_that_fails_has_a_row_with_the_reason_and_the_others_go_on(ended: dict[str, Ended]) -> None:
    row = ended["fused"].row("fused")
    assert "CUDA out of memory" in row["status"] and "name fewer (--variants)" in row["status"]
    assert ended["fused"].row("megatron again")["same_bits"] is True
    assert "not all of them ran" in ended["fused"].refusal


def test_the_table_is_narrow_and_says_what_its_figures_mean(ended: dict[str, Ended]) -> None:
    heading, _, *lines = ended["tp"].table.partition("\n\n")[0].splitlines()
    assert heading.split(" | ")[1:6] == ["Step ms", "Speed-up", "MFU %", "Tokens/s/GPU", "Exposed %"]
    assert lines[0].startswith("| small GPT, 1 layers: Megatron-Core | ") and max(map(len, lines)) <= 120
    assert "weight-gradient fusion: both" in ended["both"].table
    assert " - | " in next(line for line in ended["cp"].table.splitlines() if ": overlap_train |" in line), "no exposed"


@needs_matplotlib
def test_the_picture_is_drawn_anew_from_json_alone(ended: dict[str, Ended], folder: Path) -> None:
    from mfu.results import draw

    picture = folder / "tp" / "mfu.png"
    before = picture.read_bytes()
    picture.unlink()
    assert draw(folder / "tp") == picture and picture.read_bytes() == before


def test_linears_without_communication_and_of_async_tp_compute_what_megatrons_do(workers: Workers) -> None:
    assert workers.call(compute_alone) == [[], []]
    assert workers.call(compare_async_tp) == [[], []]


def compute_alone() -> list[str]:
    """Called on two ranks: what is wrong. All ranks hold equal shards, so repeating one is the same as gathering all."""
    from mfu.linears import Column, Row, Wholes, parallel_linears, without_communication
    from tests.megatron.models import LLAMA, Recipe, gpt

    model = gpt(Recipe(LLAMA))
    linears = parallel_linears(model)
    column = next(linear for linear in linears if linear.weight.shape[0] != linear.output_size)
    x = torch.randn(4, 2, column.input_size, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def results() -> list[torch.Tensor]:
        column.weight.grad = None
        y = column(x)[0]
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
        return [y.detach(), column.weight.grad]

    expected = results()
    column.weight.main_grad = torch.ones_like(column.weight)
    with without_communication(model, Wholes(2, adds_in_place=False)):
        is_exchanged = all(isinstance(linear, Column | Row) for linear in linears)
        found = results()
    with without_communication(model, Wholes(2, adds_in_place=True)):
        results()
    facts = {
        "results are equal": all(map(torch.allclose, expected, found)),
        "the weight gradient is added": torch.allclose(column.weight.main_grad, 1 + expected[1], atol=1e-6),
        "all linears have another class inside": len(linears) >= 5 and is_exchanged,
        "and their own class again": not any(isinstance(linear, Column | Row) for linear in linears),
    }
    return [fact for fact, is_so in facts.items() if not is_so]


def compare_async_tp() -> list[str]:
    """Called on two ranks: parameters whose gradient differs, with plain collectives in place of the CUDA operators."""
    from mfu.linears import Column, Row, use_async_tp
    from tests.megatron.models import LLAMA, SEQUENCE, Recipe, batches, gpt

    def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
        tokens = next(batches())
        positions = torch.arange(SEQUENCE).expand(len(tokens), -1)
        model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    def all_gather_matmul(shard: torch.Tensor, b: torch.Tensor, group: Any) -> tuple[torch.Tensor, torch.Tensor]:
        whole = shard.new_empty(2 * len(shard), *shard.shape[1:])
        torch.distributed.all_gather_into_tensor(whole, shard, group=group)
        return whole, whole @ b

    def matmul_reduce_scatter(a: torch.Tensor, b: torch.Tensor, group: Any) -> torch.Tensor:
        partial = a @ b
        torch.distributed.all_reduce(partial, group=group)
        return partial.chunk(2)[torch.distributed.get_rank(group)].contiguous()

    expected = gradients(gpt(Recipe(LLAMA)))
    model = use_async_tp(gpt(Recipe(LLAMA)))
    assert sum(isinstance(module, Column | Row) for module in model.modules()) == 9
    here = "overlap_train.tools.bench.async_tp"
    mm = torch.mm  # the CPU's has no out_dtype
    with (
        patch(f"{here}.async_all_gather_matmul", all_gather_matmul),
        patch(f"{here}.async_matmul_reduce_scatter", matmul_reduce_scatter),
        patch("torch.mm", lambda a, b, out_dtype=None: mm(a, b)),
    ):
        found = gradients(model)
    is_close = {name: torch.allclose(expected[name], found[name], rtol=1e-4, atol=1e-6) for name in expected}
    return [name for name, close in is_close.items() if not close]
