"""The recipe in pipeline stages and with micro-batches of several lengths: losses, paths, symmetric memory, resumption."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from gpt.data import batches, build_datasets
from overlap_train import OverlapConfig, shutdown
from tests.processes import run_ranks, values
from tests.recipes.recipe_runs import Ended, run_recipe

pytestmark = pytest.mark.slow
STEPS = 3
RANKS = 4  # 2 tensor-parallel ranks x 2 stages, or x 2 replicas


@dataclass(frozen=True)
class Curve:
    """What one rank saw of a short run."""

    losses: list[float]
    validation: float
    grad_norms: list[float]
    linears: dict[str, tuple[int, tuple[Any, ...]]]  # name: overlapped calls, fallback calls
    grown: bool  # symmetric memory, between the rehearsal and the end
    sample: bytes


@pytest.fixture(scope="module")
def curves() -> list[dict[str, Curve]]:
    """Each rank's curves by name."""
    return values(run_ranks(RANKS, train_all, limit_s=240))


def train_all(rank: int, world: int) -> dict[str, Curve]:
    """Called in each process: the same steps whole and in stages, with and without overlap."""
    from overlap_train.integrations.megatron import run_without_cuda

    assert run_without_cuda()
    several = {"variable_seq_length": 1}
    return {
        "whole": train({}, None),
        "stages, recomputed": train({"pp": 2, "recompute": "full"}, OverlapConfig()),
        "several, padded": train({"pp": 2, "micro_batch_size": 8}, None, padded),
        "several, whole": train(several, None),
        "several, whole, overlapped": train(several, OverlapConfig()),
        "several, stages": train({**several, "pp": 2}, None),
        "several, stages, overlapped": train({**several, "pp": 2}, OverlapConfig()),
    }


def train(
    changes: dict[str, Any], overlap: OverlapConfig | None, read: Callable[..., Iterator[Any]] = batches
) -> Curve:
    """STEPS steps of the small model in a layout of their own; with overlap where its settings are given."""
    import torch
    from megatron.core import parallel_state

    from gpt.model import build_model
    from gpt.rules import resolve
    from gpt.settings import Settings
    from gpt.training import build_trainer, data_share

    small = dict(num_layers=2, hidden_size=32, ffn_hidden_size=64, seq_length=64, lr_warmup_iters=1, sample_bytes=3)
    data = dict(train_iters=STEPS, micro_batch_size=1, global_batch_size=8, eval_iters=1, tp=2)
    settings, cpu = resolve(replace(Settings(), **{**small, **data, **changes}), RANKS), torch.device("cpu")
    parallel_state.initialize_model_parallel(settings.tp, pipeline_model_parallel_size=settings.pp)
    datasets = build_datasets(settings)
    trainer = build_trainer(settings, build_model(settings, overlap, cpu))
    curve = curve_of(trainer, read(datasets.train, 0, settings, data_share(), cpu), datasets)
    shutdown()
    parallel_state.destroy_model_parallel()
    return curve


def curve_of(trainer: Any, stream: Iterator[Any], datasets: Any) -> Curve:
    import torch

    from gpt.run import validate
    from gpt.sample import generate
    from gpt.training import per_byte

    cpu = torch.device("cpu")
    trainer.rehearse(cpu)
    before = symmetric_bytes()
    steps = [trainer.step(stream) for _ in range(STEPS)]
    return Curve(
        losses=[per_byte(total) for total, _ in steps],
        grad_norms=[norm for _, norm in steps],
        linears=paths(trainer.model.trained),
        grown=symmetric_bytes() != before,
        validation=validate(trainer, datasets, cpu),
        sample=generate(trainer.model, trainer.settings, cpu),
    )


def padded(dataset: Any, first: int, settings: Any, share: Any, device: Any) -> Iterator[Any]:
    """What a run with several lengths trains on: one micro-batch a step, filled up with bytes that do not count."""
    import torch

    several = replace(settings, variable_seq_length=1, micro_batch_size=1)
    stream = batches(dataset, first, several, share, device)
    while True:
        parts = [next(stream) for _ in range(settings.micro_batch_size)]
        yield {
            key: torch.cat([torch.nn.functional.pad(part[key], (0, 64 - part[key].shape[1])) for part in parts])
            for key in parts[0]
        }


def symmetric_bytes() -> int:
    from megatron.core import parallel_state

    from overlap_train.group.registry import made_domain

    domain = made_domain(parallel_state.get_tensor_model_parallel_group())
    return 0 if domain is None else domain.layout.nbytes


def paths(model: Any) -> dict[str, tuple[int, tuple[Any, ...]]]:
    from overlap_train.integrations.megatron import report

    return {linear.name: (linear.overlapped_calls, linear.fallback_calls) for linear in report(model).linears}


def assert_same_curve(found: Curve, expected: Curve) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=2e-6)
    assert found.grad_norms == pytest.approx(expected.grad_norms, rel=1e-4)
    assert found.validation == pytest.approx(expected.validation, rel=2e-6)
    assert found.sample == expected.sample


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("stages, recomputed", "whole"),
        ("several, whole, overlapped", "several, whole"),
        ("several, stages", "several, whole"),
        ("several, whole", "several, padded"),
        ("several, stages, overlapped", "several, whole"),
    ],
)
def test_neither_stages_nor_overlap_change_a_curve(curves: list[dict[str, Curve]], name: str, reference: str) -> None:
    for rank in curves:
        assert_same_curve(rank[name], curves[0][reference])
    assert curves[0][name].losses[-1] < curves[0][name].losses[0]


def test_lengths_differ_from_full_ones(curves: list[dict[str, Curve]]) -> None:
    assert curves[0]["several, whole"].losses != pytest.approx(curves[0]["whole"].losses, rel=1e-4)


def test_every_linear_of_every_stage_overlaps(curves: list[dict[str, Curve]]) -> None:
    layer = ("self_attention.linear_proj", "self_attention.linear_qkv", "mlp.linear_fc1", "mlp.linear_fc2")
    names = {f"decoder.layers.0.{name}" for name in layer}
    rehearsed, steps = 9, STEPS * 8
    for rank, found in enumerate(curves):
        calls = found["several, stages, overlapped"].linears
        assert calls.keys() == (names if rank < 2 else names | {"output_layer"})
        assert set(calls.values()) == {(rehearsed + steps, ())}


def test_symmetric_memory_does_not_grow_after_the_rehearsal(curves: list[dict[str, Curve]]) -> None:
    assert not any(curve.grown for rank in curves for name, curve in rank.items() if name.startswith("several"))


STAGES = ("--tp", 2, "--pp", 2, "--num-layers", 2, "--variable-seq-length", 1)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Ended]]:
    """Six overlapped steps in two stages, with checkpoints after three and six."""
    folder = tmp_path_factory.mktemp("checkpoints")
    ranks = run_recipe(RANKS, *STAGES, "--overlap-train", "--save", folder, "--save-interval", 3)
    assert [rank.exit_code for rank in ranks] == [0] * RANKS, ranks[0].errors
    return folder, ranks


def test_each_stage_shows_its_linears_and_rank_0_all_else(saved: tuple[Path, list[Ended]]) -> None:
    first, second, third, fourth = saved[1]
    assert "pipeline stage 0 of 2" in first.output and "output_layer" not in first.output
    assert "pipeline stage 1 of 2" in third.output and "output_layer" in third.output
    assert "iteration" not in third.output
    assert second.output == fourth.output == ""
    assert list(first.losses()) == [1, 2, 3, 4, 5, 6]
    assert "| byte bigram " in first.output


def test_a_checkpoint_of_two_stages_loads_into_one_without_overlap_and_back(
    saved: tuple[Path, list[Ended]], tmp_path: Path
) -> None:
    folder, ranks = saved
    expected = ranks[0].losses()
    save = ("--save", tmp_path, "--save-interval", 5)
    whole = run_recipe(2, *STAGES, "--pp", 1, "--load", folder / "iter_0000003", *save)[0]
    assert whole.losses() == pytest.approx({i: expected[i] for i in (4, 5, 6)}, rel=1e-5), whole.errors
    back = run_recipe(RANKS, *STAGES, "--overlap-train", "--load", tmp_path / "iter_0000005")[0]
    assert back.losses() == pytest.approx({6: expected[6]}, rel=1e-5), back.errors
