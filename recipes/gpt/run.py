"""The whole run in order: data, model, training with validations and checkpoints, and the comparison at the end."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import megatron.core
import torch
from megatron.core import parallel_state

import overlap_train
from gpt import checkpoint
from gpt.corpus import Bigram
from gpt.data import Batch, Datasets, batches, build_datasets
from gpt.graph import released, with_graph
from gpt.model import build_model
from gpt.program import RecipeError, say
from gpt.progress import IterationLog
from gpt.sample import generate
from gpt.settings import Settings
from gpt.training import Trainer, build_trainer, data_share, per_byte
from gpt.world import on_rank_0
from overlap_train import OverlapConfig
from overlap_train.flags import flag
from overlap_train.integrations.megatron import run_without_cuda
from overlap_train.tools.measure.world import World


def run(settings: Settings, overlap: OverlapConfig | None, world: World) -> None:
    """Train, compare with the bigram model, and show a sample; every rank of `world` calls it.

    Raises:
        RecipeError: on every rank, for what the user can put right.
        OverlapTimeoutError: a peer did not arrive in time.
    """
    started = time.perf_counter()
    run_without_cuda()
    make_deterministic(settings)
    parallel_state.initialize_model_parallel(
        settings.tp,
        pipeline_model_parallel_size=settings.pp,
        context_parallel_size=settings.cp,
        distributed_timeout_minutes=settings.distributed_timeout_minutes,
    )
    make_folders(settings)
    checkpoint.check_target(settings)
    datasets = build_datasets(settings)
    trainer = with_graph(build_trainer(settings, build_model(settings, overlap, world.device)))
    say(introduction(trainer, datasets, world))
    first = checkpoint.load(trainer, datasets.key) if settings.load else 0
    with released(trainer):
        train(trainer, datasets, first, world.device)
        conclude(trainer, datasets, world.device)
    say(f" {time.perf_counter() - started:.0f} s from data to sample")


def make_folders(settings: Settings) -> None:
    """Make what the run will write to; collective. Raises RecipeError on every rank where that fails."""
    for name in ("save", "tensorboard_dir"):
        if folder := getattr(settings, name):
            make = partial(Path(folder).mkdir, parents=True, exist_ok=True)
            on_rank_0(make, f"{flag(name)} {folder}")


def make_deterministic(settings: Settings) -> None:
    """With `--deterministic 1`, let torch and cuBLAS refuse kernels that add in the order of arrival.

    With warn_only attention's backward would only warn, and losses would differ from the third step on.
    """
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts; torch insists on it
        torch.use_deterministic_algorithms(True)


def train(trainer: Trainer, datasets: Datasets, first: int, device: torch.device) -> None:
    """Steps `first` + 1 to `train_iters`, with iteration lines, validations and checkpoints between them."""
    settings = trainer.settings
    data = batches(datasets.train, first * settings.global_batch_size, settings, data_share(), device)
    trainer.rehearse(device)
    log = IterationLog(settings, first)
    for iteration in range(first + 1, settings.train_iters + 1):
        _train_step(trainer, data, iteration, log)
        with log.paused():
            if _is_multiple(iteration, settings.eval_interval) and iteration < settings.train_iters:
                loss = validate(trainer, datasets, device)
                say(f" validation loss at iteration {iteration} | {loss:.4f} nats per byte |")
            if _is_saved(settings, iteration):
                checkpoint.save(trainer, iteration, datasets.key)


def _train_step(trainer: Trainer, data: Iterator[Batch], iteration: int, log: IterationLog) -> None:
    """One step and its line. A loss that is not finite ends the run before it is saved."""
    settings, learning_rate = trainer.settings, trainer.learning_rate()
    total, grad_norm = trainer.step(data)
    overlap_train.check()  # reading the norm has waited for the device; a wait that gave up before has left NaN
    if log.is_due(iteration) or _is_saved(settings, iteration):
        loss = per_byte(total)
        if log.is_due(iteration):
            say(log.report(iteration, learning_rate, loss, grad_norm))
        if not math.isfinite(loss + grad_norm):
            raise RecipeError(
                f"the loss is {loss} and the gradient norm {grad_norm} at iteration {iteration}; try a lower --lr than "
                f"{settings.lr}"
            )


def _is_saved(settings: Settings, iteration: int) -> bool:
    is_last = iteration == settings.train_iters
    return bool(settings.save) and (is_last or _is_multiple(iteration, settings.save_interval))


def _is_multiple(iteration: int, interval: int) -> bool:
    return interval > 0 and iteration % interval == 0


def validate(trainer: Trainer, datasets: Datasets, device: torch.device) -> float:
    """Nats per byte of the model on the validation part, in samples of full length."""
    data = batches(datasets.valid, 0, replace(trainer.settings, variable_seq_length=0), data_share(), device)
    return trainer.evaluate(data, validation_steps(trainer.settings, datasets))


def validation_steps(settings: Settings, datasets: Datasets) -> int:
    """Global batches that cover the validation part, but no more than `eval_iters`."""
    return min(settings.eval_iters, math.ceil(len(datasets.valid) / settings.global_batch_size))


def bigram_loss(settings: Settings, datasets: Datasets) -> float:
    """Nats per byte of the byte-bigram model, fitted on the training part, on the very bytes that `validate` scores."""
    samples = min(len(datasets.valid), validation_steps(settings, datasets) * settings.global_batch_size)
    scored = samples * settings.seq_length
    return Bigram(datasets.train.text).nats(datasets.valid.text[: scored + 1]) / scored


def conclude(trainer: Trainer, datasets: Datasets, device: torch.device) -> None:
    """Print the model's loss beside the bigram's, and a sample."""
    model, bigram = validate(trainer, datasets, device), bigram_loss(trainer.settings, datasets)
    say(f" validation loss | model {model:.4f} | byte bigram {bigram:.4f} | nats per byte, on the same bytes |")
    if trainer.settings.sample_bytes:
        text = generate(trainer.model, trainer.settings, device).decode("utf-8", errors="replace")
        say(f" sample, {trainer.settings.sample_bytes} bytes at temperature {trainer.settings.temperature}:\n{text}")


def introduction(trainer: Trainer, datasets: Datasets, world: World) -> str:
    """What is about to be trained, on what, and where."""
    settings, tp, pp = trainer.settings, trainer.settings.tp, trainer.settings.pp
    millions = sum(parameter.numel() for parameter in trainer.model.bare.parameters()) / 1e6
    text = settings.text or "the topics of Python's help()"
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "CPU"
    stages = f"context parallel {settings.cp} (Ulysses), " if settings.cp > 1 else ""
    stages += f"pipeline parallel {pp}, " if pp > 1 else ""
    return (
        f" text: {text}, {len(datasets.train.text)} bytes to train on, {len(datasets.valid.text)} to validate\n"
        f" ranks: {world.size} on {device}, tensor parallel {tp}, {stages}data parallel {world.size // settings.replica_ranks}\n"
        f" model: {millions:.2f} M parameters {'on rank 0' if pp > 1 else 'a rank'}, {trainer.model.config.params_dtype}\n"
        f" Megatron-Core {megatron.core.__version__.partition('+')[0]}, torch {torch.__version__}"
    )
