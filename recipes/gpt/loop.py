"""The whole run in order: text, ranks, model, steps with checkpoints between them, and what came out."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

import overlap_train
from gpt import checkpoint
from gpt.data import BYTES, batches, bigram_loss, part_of_rank, read_samples
from gpt.model import build_model
from gpt.program import RecipeError, join_ranks, refused_by_rule, say
from gpt.settings import Settings
from gpt.training import Trainer, per_byte
from overlap_train import OverlapConfig

PROMPT, TEMPERATURE = "The ", 0.7


def run(settings: Settings, overlap: OverlapConfig | None) -> None:
    """Train, compare with the bigram model, and show a sample; every rank calls it. Raises RecipeError, on every rank, for what
    the user can put right, and OverlapTimeoutError where a peer did not arrive in time."""
    train_on, validate_on = read_samples(settings, is_held_out=False), read_samples(settings, is_held_out=True)
    device = join_ranks(settings).device
    folder = checkpoint.find(settings)
    trainer = Trainer(settings, build_model(settings, overlap, device))
    sizes = f"tensor parallel {settings.tp}, " + f"context parallel {settings.cp} (Ulysses), " * (settings.cp > 1)
    ranks, length = dist.get_world_size(), settings.seq_length
    say(f" text: {settings.text or 'the topics of help()'}, {len(train_on) * length} bytes to train on")
    say(f" ranks: {ranks} on {device.type.upper()}, {sizes}data parallel {ranks // (settings.tp * settings.cp)}")
    say(f" model: {settings.title}, {settings.num_layers} layers of {settings.hidden_size}")
    first = checkpoint.load(trainer, folder) if folder else 0
    try:
        train(trainer, train_on, first, device)
        conclude(trainer, train_on, validate_on, device)
    # Not after an OverlapTimeoutError: without the peer, waiting for the device could last for ever.
    except RecipeError:
        trainer.release()
        raise
    trainer.release()


def train(trainer: Trainer, train_on: np.ndarray, first: int, device: torch.device) -> None:
    """Steps `first` + 1 to `train_iters`, with iteration lines and checkpoints between them."""
    settings, last, begun = trainer.settings, first, time.perf_counter()
    data = batches(train_on, first * settings.global_batch_size, settings, device, is_trained=True)
    for iteration in range(first + 1, settings.train_iters + 1):
        is_end, rate = iteration == settings.train_iters, trainer.optimizer.param_groups[0]["lr"]
        # Operators refuse settings in the first step; a later ValueError is a bug.
        with refused_by_rule() if iteration == first + 1 else nullcontext():
            total, grad_norm = trainer.step(data)
        overlap_train.check()  # reading the norm has waited for the device; a wait that gave up before has left NaN
        is_saved = bool(settings.save) and (is_end or iteration % (settings.save_interval or math.inf) == 0)
        if not (is_end or is_saved or iteration % settings.log_interval == 0):
            continue
        loss, ms = per_byte(total), 1e3 * (time.perf_counter() - begun) / (iteration - last)
        say(  # in the form of Megatron's own training log
            f" iteration {iteration:8d}/{settings.train_iters:8d} | consumed samples:"
            f" {iteration * settings.global_batch_size:12d} | elapsed time per iteration (ms): {ms:.1f} | learning rate:"
            f" {rate:.6E} | global batch size: {settings.global_batch_size:5d} | lm loss: {loss:.6E} |"
            f" grad norm: {grad_norm:.3f} |"
        )
        if not math.isfinite(loss + grad_norm):  # before it is saved
            found = f"the loss is {loss} and the gradient norm {grad_norm} at iteration {iteration}"
            raise RecipeError(f"{found}; try a lower --lr than {settings.lr}")
        if is_saved:
            checkpoint.save(trainer, iteration)
        last, begun = iteration, time.perf_counter()


def conclude(trainer: Trainer, train_on: np.ndarray, validate_on: np.ndarray, device: torch.device) -> None:
    """Print the model's loss beside the bigram's, on the very same bytes of at most `eval_iters` global batches, and a sample."""
    settings = trainer.settings
    steps = min(settings.eval_iters, math.ceil(len(validate_on) / settings.global_batch_size))
    model = trainer.evaluate(batches(validate_on, 0, settings, device, is_trained=False), steps)
    bigram = bigram_loss(train_on, validate_on[: steps * settings.global_batch_size])
    say(f" validation loss | model {model:.4f} | byte bigram {bigram:.4f} | nats per byte, on the same bytes |")
    if settings.sample_bytes:
        text = generate(trainer, device)
        say(f" sample, {settings.sample_bytes} bytes at temperature {TEMPERATURE}:\n{text}")


@torch.no_grad()
def generate(trainer: Trainer, device: torch.device) -> str:
    """PROMPT and `sample_bytes` more bytes; every rank gets the same text.

    The window is computed anew for each byte. It is always filled up to seq_length, so that sequence parallelism can divide it.
    Attention is causal, so the filling after the last byte changes nothing.
    """
    settings, tokens = trainer.settings, [*PROMPT.encode()]
    trainer.trained.eval()
    generator = torch.Generator().manual_seed(settings.seed)
    positions = torch.arange(settings.seq_length, device=device).unsqueeze(0)
    for _ in range(settings.sample_bytes):
        known = torch.tensor(tokens[-settings.seq_length :], device=device)
        window = torch.nn.functional.pad(known, (0, settings.seq_length - len(known))).unsqueeze(0)
        is_last = (positions == len(known) - 1).float()
        batch = part_of_rank({"tokens": window, "position_ids": positions, "is_last": is_last})
        logits = trainer.trained(batch["tokens"], batch["position_ids"], None)  # [1, s/cp, V/W]
        row = (logits[0].float() * batch["is_last"][0].unsqueeze(1)).sum(0)
        dist.all_reduce(row, group=parallel_state.get_context_parallel_group())
        row = gather_from_tensor_model_parallel_region(row, group=parallel_state.get_tensor_model_parallel_group())
        shares = torch.softmax(row[:BYTES].cpu() / TEMPERATURE, dim=-1)
        tokens.append(int(torch.multinomial(shares, 1, generator=generator)))
    return bytes(tokens).decode("utf-8", errors="replace")
