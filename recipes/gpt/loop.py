"""The whole run in order: text, ranks, model, steps with validations and checkpoints between them, and what came out."""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist

import overlap_train
from gpt import checkpoint
from gpt.data import Samples, batches, bigram_loss, read_samples
from gpt.model import build_model
from gpt.program import RecipeError, join_ranks, say
from gpt.sample import TEMPERATURE, generate
from gpt.settings import Settings
from gpt.training import Trainer, build_trainer, per_byte
from overlap_train import OverlapConfig


def run(settings: Settings, overlap: OverlapConfig | None) -> None:
    """Train, compare with the bigram model, and show a sample; every rank calls it.

    Raises:
        RecipeError: on every rank, for what the user can put right.
        OverlapTimeoutError: a peer did not arrive in time.
    """
    train_on, validate_on = read_samples(settings)
    device = join_ranks(settings).device
    folder = checkpoint.find(settings)
    trainer = build_trainer(settings, build_model(settings, overlap, device))
    introduce(settings, train_on, validate_on, device)
    first = checkpoint.load(trainer, folder) if folder else 0
    try:
        train(trainer, train_on, validate_on, first, device)
        conclude(trainer, train_on, validate_on, device)
    except (
        RecipeError
    ):  # not after an OverlapTimeoutError: without the peer, waiting for the device could last for ever
        trainer.release()
        raise
    trainer.release()


def introduce(settings: Settings, train_on: Samples, validate_on: Samples, device: torch.device) -> None:
    """Say what is about to be trained, on what, and where."""
    text, ranks = settings.text or "the topics of help()", dist.get_world_size()
    others = f"context parallel {settings.cp} (Ulysses), " if settings.cp > 1 else ""
    say(f" text: {text}, {len(train_on.text)} bytes to train on, {len(validate_on.text)} to validate")
    replicas = ranks // settings.replica_ranks
    say(f" ranks: {ranks} on {device.type.upper()}, tensor parallel {settings.tp}, {others}data parallel {replicas}")
    say(f" model: {settings.title}, {settings.num_layers} layers, {settings.parameters / 1e6:.2f} M parameters")


def train(trainer: Trainer, train_on: Samples, validate_on: Samples, first: int, device: torch.device) -> None:
    """Steps `first` + 1 to `train_iters`, with iteration lines, validations and checkpoints between them."""
    settings, last, begun = trainer.settings, first, time.perf_counter()
    data = batches(train_on, first * settings.global_batch_size, settings, device)
    for iteration in range(first + 1, settings.train_iters + 1):
        is_end, rate = iteration == settings.train_iters, trainer.optimizer.param_groups[0]["lr"]
        total, grad_norm = trainer.step(data)
        overlap_train.check()  # reading the norm has waited for the device; a wait that gave up before has left NaN
        is_saved = bool(settings.save) and (is_end or is_due(iteration, settings.save_interval))
        is_validated = is_due(iteration, settings.eval_interval) and not is_end
        if not (is_end or is_saved or is_validated or is_due(iteration, settings.log_interval)):
            continue
        loss, ms = per_byte(total), 1e3 * (time.perf_counter() - begun) / (iteration - last)
        say(iteration_line(settings, iteration, ms, rate, loss, grad_norm))
        if not math.isfinite(loss + grad_norm):  # before it is saved
            raise RecipeError(
                f"the loss is {loss} and the gradient norm {grad_norm} at iteration {iteration}; try a lower --lr than "
                f"{settings.lr}"
            )
        if is_validated:
            say(
                f" validation loss at iteration {iteration} | {validate(trainer, validate_on, device):.4f} nats per byte |"
            )
        if is_saved:
            checkpoint.save(trainer, iteration)
        last, begun = iteration, time.perf_counter()


def is_due(iteration: int, interval: int) -> bool:
    """Whether it is time for what happens every `interval` steps; 0: never."""
    return interval > 0 and iteration % interval == 0


def iteration_line(settings: Settings, iteration: int, ms: float, rate: float, loss: float, grad_norm: float) -> str:
    """A line in the form of Megatron's own training log."""
    return (
        f" iteration {iteration:8d}/{settings.train_iters:8d} | consumed samples: {iteration * settings.global_batch_size:12d} |"
        f" elapsed time per iteration (ms): {ms:.1f} | learning rate: {rate:.6E} | global batch size:"
        f" {settings.global_batch_size:5d} | lm loss: {loss:.6E} | grad norm: {grad_norm:.3f} |"
    )


def validate(trainer: Trainer, samples: Samples, device: torch.device) -> float:
    """Nats per byte of the model on the validation part, of at most `eval_iters` global batches."""
    settings = trainer.settings
    steps = min(settings.eval_iters, math.ceil(len(samples) / settings.global_batch_size))
    return trainer.evaluate(batches(samples, 0, settings, device), steps)


def conclude(trainer: Trainer, train_on: Samples, validate_on: Samples, device: torch.device) -> None:
    """Print the model's loss beside the bigram's, on the very same bytes, and a sample."""
    settings = trainer.settings
    scored = min(len(validate_on), settings.eval_iters * settings.global_batch_size) * settings.seq_length
    model, bigram = validate(trainer, validate_on, device), bigram_loss(train_on.text, validate_on.text[: scored + 1])
    say(f" validation loss | model {model:.4f} | byte bigram {bigram:.4f} | nats per byte, on the same bytes |")
    if settings.sample_bytes:
        text = generate(trainer, device)
        say(f" sample, {settings.sample_bytes} bytes at temperature {TEMPERATURE}:\n{text}")
