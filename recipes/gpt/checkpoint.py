"""Checkpoints by Megatron's dist_checkpointing, each whole or not there.

A save writes `iter_0000100.tmp`, renames it to `iter_0000100` and then writes 100 into `latest_checkpointed_iteration.txt`. So a
kill at any moment leaves the checkpoint before it in place. It loads with other parallel sizes, with overlap and without.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from torch.distributed.checkpoint import CheckpointException

import overlap_train
from gpt.program import RecipeError, say
from gpt.settings import Settings
from gpt.training import Trainer
from overlap_train.flags import flag

TRACKER = "latest_checkpointed_iteration.txt"
MODEL = ("model", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "lora")


def find(settings: Settings) -> Path | None:
    """The checkpoint that --load names, None without --load; collective. Rank 0 looks: on a network file system two nodes may see
    different files. Raises RecipeError, on every rank, where there is none, or --save cannot be written or has another run's."""
    found: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            found = [_find(settings)]
        except RecipeError as error:
            found = [error]
    dist.broadcast_object_list(found)
    if isinstance(found[0], RecipeError):
        raise found[0]
    return found[0]


def _find(settings: Settings) -> Path | None:
    target, source = Path(settings.save).resolve(), Path(settings.load).resolve()
    if settings.save:
        try:
            target.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecipeError(f"--save {settings.save} cannot be written: {error.strerror}") from error
        if not (settings.load and target in (source, source.parent)) and _newest(target):
            way_out = "to continue it, or choose another folder"
            raise RecipeError(
                f"--save {settings.save} has checkpoints of an earlier run; add --load {settings.save} {way_out}"
            )
    if not settings.load:
        return None
    folder = source if source.name.startswith("iter_") else _newest(source)
    if folder is None or not folder.is_dir():
        raise RecipeError(f"--load {settings.load} has no checkpoint; give a --save folder, or an iter_ folder in it")
    return folder


def _newest(path: Path) -> Path | None:
    """The checkpoint that the tracker names, or the newest one: after a full disk the tracker may be empty."""
    try:
        return path / f"iter_{int((path / TRACKER).read_text()):07d}"
    except (OSError, ValueError):
        return max((folder for folder in path.glob("iter_*") if not folder.suffix), default=None)


def save(trainer: Trainer, iteration: int) -> None:
    """Write the state after step `iteration` below `--save`; collective. Raises RecipeError where the disk is full."""
    target = Path(trainer.settings.save)
    folder, draft = target / f"iter_{iteration:07d}", target / f"iter_{iteration:07d}.tmp"
    if dist.get_rank() == 0:
        for unfinished in target.glob("iter_*.tmp"):  # of a killed save
            shutil.rmtree(unfinished, ignore_errors=True)
        draft.mkdir()
    dist.barrier()
    run = {"iteration": iteration, "settings": asdict(trainer.settings)}
    try:
        dist_checkpointing.save(_state(trainer, is_loading=False) | run, str(draft))
    except CheckpointException as error:  # Megatron tells all ranks
        free = f"{shutil.disk_usage(draft).free / 2**30:.1f} GiB of disk free"
        raise RecipeError(f"--save {target} cannot be written, with {free}; make room and resume") from error
    overlap_train.check()  # a wait that gave up has left NaN in what was written
    dist.barrier()  # nor does rank 0 publish what another rank knows to be wrong
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
        note = target / f"{TRACKER}.tmp"
        note.write_text(str(iteration))
        os.replace(note, target / TRACKER)
    say(f"  saved checkpoint {folder}")


def load(trainer: Trainer, folder: Path) -> int:
    """Restore the state of a checkpoint and return the number of steps that it has seen; collective. Raises RecipeError, on every
    rank, where it is of another model."""
    run = dist_checkpointing.load_common_state_dict(str(folder))
    for name in MODEL:
        saved, now = run["settings"].get(name, 0), getattr(trainer.settings, name)  # without the setting: no adapters
        if saved != now:
            raise RecipeError(f"--load {folder} was saved with {flag(name)} {saved}, this run has {now}; pass {saved}")
    state = dist_checkpointing.load(_state(trainer, is_loading=True), str(folder))
    trainer.bare.load_state_dict(state["model"])
    trainer.optimizer.load_state_dict(state["optimizer"])
    # Megatron's schedule counts samples, of which this run may have another number in a step.
    samples = {"num_steps": run["iteration"] * trainer.settings.global_batch_size}
    trainer.schedule.load_state_dict(state["opt_param_scheduler"] | samples)
    say(f"  resumed from checkpoint {folder}")
    return int(run["iteration"])


def _state(trainer: Trainer, is_loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    model = trainer.bare.sharded_state_dict(metadata=metadata)
    optimizer = trainer.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer, "opt_param_scheduler": trainer.schedule.state_dict()}
