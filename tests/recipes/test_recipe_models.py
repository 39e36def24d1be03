"""The recipe's models with --model, cut down to CPU size: with overlap and without, with experts, and with recomputation."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from dataclasses import replace
from typing import Any

import megatron.core
import pytest
import torch

from tests.processes import run_ranks, values
from tests.recipes.recipe_runs import run_recipe

CUT = ("--num-layers", 2, "--hidden-size", 32, "--num-attention-heads", 4, "--num-query-groups", 2)


@pytest.fixture(scope="module")
def kept() -> dict[int, float]:
    """Losses of the overlapped small model that keeps all activations."""
    return run_recipe(2, "--overlap-train", *CUT)[0].losses()


def test_a_published_model_trains_with_overlap_as_without() -> None:
    flags = ("--model", "qwen3-32b", *CUT)
    overlapped, alone = (run_recipe(2, *flags, *more)[0] for more in (("--overlap-train",), ()))
    assert overlapped.exit_code == 0, overlapped.errors
    assert len(overlapped.losses()) == 6
    assert overlapped.losses() == pytest.approx(alone.losses(), rel=1e-5)


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_recomputation_changes_no_loss(kept: dict[int, float], kind: str) -> None:
    again = run_recipe(2, "--overlap-train", "--recompute", kind, *CUT)[0]
    assert again.exit_code == 0, again.errors
    assert again.losses() == kept


def test_a_deterministic_run_trains(kept: dict[int, float]) -> None:
    assert run_recipe(2, "--overlap-train", "--deterministic", 1, *CUT)[0].losses() == pytest.approx(kept, rel=1e-5)


def test_experts_are_refused_without_gpus() -> None:
    first = run_recipe(2, "--model", "mixtral-8x7b", *CUT)[0]
    assert first.exit_code == 2
    assert "--model mixtral-8x7b has experts" in first.refusals()[0]


@pytest.mark.slow
@pytest.mark.skipif(
    megatron.core.__version__.startswith("0.16"), reason="its router calls TransformerEngine unconditionally"
)
def test_experts_train_with_attention_and_output_overlapped() -> None:
    """Megatron's experts run on the CPU here behind stand-ins for CUDA that only a test can afford."""
    for alone, overlapped, calls in values(run_ranks(2, train_experts)):
        assert overlapped == pytest.approx(alone, rel=1e-5)
        assert len(overlapped) == 3 and overlapped[-1] < overlapped[0]
        assert calls == {"linear_proj": [6, 6], "linear_qkv": [6, 6], "output_layer": [6]}


def train_experts(rank: int, world: int) -> tuple[list[float], list[float], dict[str, list[int]]]:
    """Called in each process: losses of three steps without and with overlap, and how often which linear overlapped."""
    from megatron.core import parallel_state

    import gpt.model
    from gpt.data import batches, build_datasets
    from gpt.rules import resolve
    from gpt.settings import defaults
    from gpt.training import build_trainer, data_share, per_byte
    from overlap_train import OverlapConfig
    from overlap_train.integrations.megatron import report, run_without_cuda

    run_without_cuda()
    pretend_cuda()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    cut = dict(
        num_layers=2, hidden_size=64, ffn_hidden_size=64, num_attention_heads=4, num_query_groups=2, seq_length=64
    )
    settings = replace(defaults(True, "mixtral-8x7b"), **cut, train_iters=3, global_batch_size=2, lr_warmup_iters=0)
    settings = resolve(settings, world)
    bare_model = gpt.model.bare_model
    gpt.model.bare_model = lambda settings, *_: in_fp32(bare_model, settings)
    datasets, cpu = build_datasets(settings), torch.device("cpu")

    def losses(overlap: OverlapConfig | None) -> tuple[list[float], Any]:
        model = gpt.model.build_model(settings, overlap, cpu)
        trainer = build_trainer(settings, model)
        data = batches(datasets.train, 0, settings, data_share(), cpu)
        return [per_byte(trainer.step(data)[0]) for _ in range(3)], model.bare

    alone, _ = losses(None)
    overlapped, model = losses(OverlapConfig())
    calls: dict[str, list[int]] = {}
    for linear in report(model).linears:
        if linear.overlapped_calls:
            calls.setdefault(linear.name.rpartition(".")[2], []).append(linear.overlapped_calls)
    return alone, overlapped, calls


def in_fp32(bare_model: Any, settings: Any) -> Any:
    """The model of the recipe for GPUs, in the CPU's dtype."""
    import gpt.model

    config = gpt.model.transformer_config
    gpt.model.transformer_config = lambda settings, on_gpu, *rest: config(settings, False, *rest)
    try:
        return bare_model(settings, True)
    finally:
        gpt.model.transformer_config = config


class Nothing:
    """A stream or event on which everything is done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: Nothing()


def pretend_cuda() -> None:
    """For this process: Megatron's expert modules see the CPU as the current device, and streams that do nothing."""
    import megatron.core.transformer.moe as moe

    stand_in = importlib.import_module("megatron.core.tensor_parallel.random").torch
    for module in pkgutil.iter_modules(moe.__path__):
        with contextlib.suppress(ImportError):
            loaded = importlib.import_module(f"{moe.__name__}.{module.name}")
            if hasattr(loaded, "torch"):
                loaded.torch = stand_in
    torch.cuda.Stream = torch.cuda.Event = Nothing  # type: ignore[misc, assignment]
    torch.cuda.current_stream = Nothing  # type: ignore[assignment]
    torch.cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment]
    torch.cuda.set_stream = Nothing  # type: ignore[assignment]
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    torch.Tensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign, assignment]
