"""The whole run in order: data, model, training with validations and checkpoints, and the comparison at the end."""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace

import megatron.core
import torch
from megatron.core import parallel_state
from megatron.core.datasets.gpt_dataset import GPTDataset

import overlap_train
from gpt import checkpoint
from gpt.bigram import Bigram
from gpt.data import Datasets, batches, build_datasets, counted
from gpt.errors import RecipeError
from gpt.graph import released, with_graph
from gpt.model import build_model
from gpt.progress import IterationLog, say
from gpt.sample import generate
from gpt.settings import Settings
from gpt.training import Trainer, build_trainer, data_share, per_byte
from gpt.world import World
from overlap_train import OverlapConfig
from overlap_train.integrations.megatron import announce_changes, run_without_cuda


def run(settings: Settings, overlap: OverlapConfig | None, world: World) -> None:
    """Train, compare with the bigram model, and show a sample; every rank of `world` calls it after `join`.

    Raises:
        RecipeError: on every rank, for what the user can put right.
        OverlapTimeoutError: a peer did not arrive in time.
    """
    started = time.perf_counter()
    run_without_cuda()
    make_deterministic(settings)
    parallel_state.initialize_model_parallel(settings.tp, pipeline_model_parallel_size=settings.pp)
    checkpoint.check_target(settings)
    datasets = build_datasets(settings)
    trainer = with_graph(build_trainer(settings, build_model(settings, overlap, world.device)))
    say(introduction(trainer, datasets, world))
    first = checkpoint.load(trainer, datasets.key) if settings.load else 0
    with released(trainer):
        train(trainer, datasets, first, world.device)
        conclude(trainer, datasets, world.device)
    say(f" {time.perf_counter() - started:.0f} s from data to sample")


def make_deterministic(settings: Settings) -> None:
    """With `--deterministic 1`: no kernel of torch or cuBLAS that adds in the order of arrival; an error where there is no other.

    Not warn_only: attention's backward then warns and adds in the order of arrival, and losses differ from the third step on.
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
        learning_rate = trainer.learning_rate()
        total, grad_norm = trainer.step(data)
        overlap_train.check()  # the norm has waited for the device: what gave up until now has left NaN behind
        if iteration == first + 1:
            announce_changes(trainer.model.bare)
        if log.is_due(iteration):
            loss = per_byte(total)
            say(log.line(iteration, learning_rate, loss, grad_norm))
            if not math.isfinite(loss):
                raise RecipeError(f"the loss is {loss} at iteration {iteration}; try a lower --lr than {settings.lr}")
        if _is_multiple(iteration, settings.eval_interval) and iteration < settings.train_iters:
            with log.paused():
                loss = validate(trainer, datasets, device)
            say(f" validation loss at iteration {iteration} | {loss:.4f} nats per byte |")
        if settings.save and (_is_multiple(iteration, settings.save_interval) or iteration == settings.train_iters):
            with log.paused():
                checkpoint.save(trainer, iteration, datasets.key)


def validate(trainer: Trainer, datasets: Datasets, device: torch.device) -> float:
    """Nats per byte of the model on the validation part, in samples of full length."""
    data = batches(datasets.valid, 0, replace(trainer.settings, variable_seq_length=0), data_share(), device)
    return trainer.evaluate(data, validation_steps(trainer.settings, datasets))


def validation_steps(settings: Settings, datasets: Datasets) -> int:
    """Global batches that cover the validation part, but no more than `eval_iters`."""
    return min(settings.eval_iters, math.ceil(len(datasets.valid) / settings.global_batch_size))


def bigram_loss(settings: Settings, datasets: Datasets) -> float:
    """Nats per byte of the byte-bigram model, fitted on the training part, on the very bytes that `validate` scores."""
    indexed = datasets.train.dataset
    bigram = Bigram(indexed[i] for i in range(len(indexed)))
    nats, count = 0.0, 0
    samples = validation_steps(settings, datasets) * settings.global_batch_size
    for number in range(min(samples, len(datasets.valid))):
        sample = datasets.valid[number]
        scored = counted(sample["loss_mask"], sample["labels"]).numpy() > 0
        nats += bigram.nats(sample["tokens"].numpy()[scored], sample["labels"].numpy()[scored])
        count += int(scored.sum())
    return nats / count


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
    return (
        f" text: {text}, {_tokens(datasets.train)} bytes to train on, {_tokens(datasets.valid)} to validate\n"
        f" ranks: {world.size} on {device}, tensor parallel {tp}, {_stages(pp)}data parallel {world.size // (tp * pp)}\n"
        f" model: {millions:.2f} M parameters {'on rank 0' if pp > 1 else 'a rank'}, {trainer.model.config.params_dtype}\n"
        f" Megatron-Core {megatron.core.__version__.partition('+')[0]}, torch {torch.__version__}"
    )


def _stages(pp: int) -> str:
    return f"pipeline parallel {pp}, " if pp > 1 else ""


def _tokens(dataset: GPTDataset) -> int:
    return int(dataset.dataset.sequence_lengths.sum())


def _is_multiple(iteration: int, interval: int) -> bool:
    return interval > 0 and iteration % interval == 0
