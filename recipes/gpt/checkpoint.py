"""Checkpoints by Megatron's dist_checkpointing: whole or not at all, checked before they are read, and the oldest deleted.

A save writes `iter_0000100.tmp`, seals it with a manifest of sizes and hashes, renames it to `iter_0000100` and then writes 100
into `latest_checkpointed_iteration.txt`. A kill at any moment therefore leaves the checkpoint before it in place. A checkpoint
has 12 bytes for each parameter (on GPUs 14): the weight and AdamW's two moments in fp32, and the bf16 weight of the model.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from torch.distributed.checkpoint import CheckpointException

import overlap_train
from gpt.adam_state import load_optimizer, make_describable
from gpt.files import damage, listing, publish, write_atomically
from gpt.program import RecipeError, say
from gpt.settings import Settings
from gpt.training import Trainer
from gpt.world import on_every_rank, on_rank_0
from overlap_train.flags import flag, option_fields

TRACKER = "latest_checkpointed_iteration.txt"
RUN = "run.json"
NAME = re.compile(r"iter_(\d{7,})")
MODEL = ("model", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups")


def save(trainer: Trainer, iteration: int, text_key: str) -> None:
    """Write the state after step `iteration` below `--save` and delete older checkpoints; collective.

    `text_key` names the text trained on. Raises RecipeError on every rank where the folder cannot be written.
    """
    target = Path(trainer.settings.save)
    folder, draft = target / f"iter_{iteration:07d}", target / f"iter_{iteration:07d}.tmp"
    flagged = f"--save {target}"
    run = json.dumps({"iteration": iteration, "text": text_key, "settings": asdict(trainer.settings)}, indent=1)
    on_rank_0(lambda: _make_anew(draft), flagged)
    _write(trainer, draft, flagged)
    overlap_train.check()  # a wait that gave up has left NaN in what was written
    dist.barrier()  # nor does rank 0 publish what another rank knows to be wrong
    on_rank_0(lambda: write_atomically(draft / RUN, run), flagged)
    parts = on_every_rank(lambda: listing(draft, dist.get_rank(), dist.get_world_size()), flagged)
    files = {name: known for part in parts for name, known in part.items()}
    on_rank_0(lambda: publish(draft, files, folder), flagged)
    on_rank_0(lambda: write_atomically(target / TRACKER, str(iteration)), flagged)
    say(f"  saved checkpoint {folder}")
    on_rank_0(lambda: _prune(folder, trainer.settings.keep_checkpoints), flagged)


def _write(trainer: Trainer, draft: Path, flagged: str) -> None:
    """Megatron's own save; collective. Where a rank cannot write, all raise RecipeError: Megatron tells them."""
    state = _state(trainer, is_loading=False)
    try:
        dist_checkpointing.save(state, str(draft))
    except CheckpointException as error:
        free = shutil.disk_usage(draft).free / 2**30
        raise RecipeError(
            f"{flagged} cannot be written: Megatron's writer failed, and {free:.1f} GiB of disk are free; make room (look at the "
            f"quota, too) and resume from the checkpoint before"
        ) from error


def _make_anew(draft: Path) -> None:
    for unfinished in draft.parent.glob("iter_*.tmp"):  # of a killed save
        shutil.rmtree(unfinished, ignore_errors=True)
    draft.mkdir(parents=True)


def _prune(newest: Path, keep: int) -> None:
    """Delete all but the `keep` newest up to `newest`, if that one is whole. Later ones are of another run and stay."""
    problem = damage(newest, by_hash=False)
    if problem:
        say(f"  WARNING: older checkpoints are kept, because the new one is damaged: {problem}")
    elif keep:
        for folder in _up_to(newest.parent, _number(newest))[keep:]:
            shutil.rmtree(folder, ignore_errors=True)


def load(trainer: Trainer, text_key: str) -> int:
    """Restore the state from `--load` and return the number of steps that it has seen; collective.

    A damaged checkpoint is skipped, and the newest good one before it is loaded.

    Raises:
        RecipeError: on every rank, where there is no good checkpoint, or it is of another model.
    """
    path = Path(trainer.settings.load)
    folder = _first_good(path, on_rank_0(lambda: _candidates(path)))
    run = on_rank_0(lambda: json.loads((folder / RUN).read_text()))
    _compare(run, trainer.settings, text_key)
    make_describable(trainer.optimizer)
    state = dist_checkpointing.load(_state(trainer, is_loading=True), str(folder))
    trainer.model.bare.load_state_dict(state["model"])
    load_optimizer(trainer.optimizer, state["optimizer"])
    iteration = int(run["iteration"])
    # Megatron's schedule counts samples, of which this run may have another number in a step.
    samples = {"num_steps": iteration * trainer.settings.global_batch_size}
    trainer.schedule.load_state_dict(state["opt_param_scheduler"] | samples)
    say(f"  resumed from checkpoint {folder}")
    return iteration


def check_target(settings: Settings) -> None:
    """Refuse to write into a folder with checkpoints of another run; collective.

    Raises:
        RecipeError: on every rank, where `--save` has checkpoints and `--load` does not continue them.
    """
    target, source = Path(settings.save).resolve(), Path(settings.load).resolve()
    continues = settings.load and target in (source, source.parent)
    if settings.save and not continues and on_rank_0((target / TRACKER).exists):
        raise RecipeError(
            f"--save {settings.save} has checkpoints of an earlier run; add --load {settings.save} to continue it, or "
            "choose another folder"
        )


def _state(trainer: Trainer, is_loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    model = trainer.model.bare.sharded_state_dict(metadata=metadata)
    optimizer = trainer.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer, "opt_param_scheduler": trainer.schedule.state_dict()}


def _candidates(path: Path) -> list[Path]:
    """What `--load` names, the newest first: the folder itself, or the checkpoint that the tracker names and those before it."""
    if NAME.fullmatch(path.name):
        return [path]
    try:
        newest = path / f"iter_{int((path / TRACKER).read_text()):07d}"
    except (OSError, ValueError) as error:
        found = _up_to(path)
        if not found:
            raise RecipeError(f"--load {path} has no checkpoint: {TRACKER} cannot be read ({error})") from error
        say(f"  WARNING: {path / TRACKER} cannot be read ({error}): looking for the newest good checkpoint")
        return found
    return list(dict.fromkeys([newest, *_up_to(path, _number(newest))]))


def _first_good(path: Path, folders: list[Path]) -> Path:
    """Each rank checks a part of the files."""
    for folder in folders:
        problems = on_every_rank(lambda folder=folder: damage(folder, dist.get_rank(), dist.get_world_size()))  # type: ignore[misc]
        problem = next(filter(None, problems), "")
        if not problem:
            return folder
        say(f"  WARNING: checkpoint {folder} is damaged and is skipped: {problem}")
    names = ", ".join(folder.name for folder in folders)
    raise RecipeError(f"--load {path} has no good checkpoint ({names}); the lines above say what is damaged")


def _up_to(path: Path, last: float = float("inf")) -> list[Path]:
    """The checkpoints in a folder up to step `last`, the newest first."""
    found = [folder for folder in path.glob("iter_*") if NAME.fullmatch(folder.name) and _number(folder) <= last]
    return sorted(found, key=_number, reverse=True)


def _number(folder: Path) -> int:
    return int(folder.name.removeprefix("iter_"))


def _compare(run: dict[str, Any], settings: Settings, text_key: str) -> None:
    saved, now = run["settings"], asdict(settings)
    for name in MODEL:
        if saved[name] != now[name]:
            raise RecipeError(
                f"--load {settings.load}: the checkpoint was saved with {flag(name)} {saved[name]}, this run has "
                f"{now[name]}; pass {flag(name)} {saved[name]}"
            )
    of_training = [
        found.name for found in option_fields(settings) if found.metadata["group"] in ("parallel", "training")
    ]
    names = ("seq_length", "variable_seq_length", *of_training)
    changed = [flag(name) for name in names if saved.get(name) != now[name]] + ["the text"] * (run["text"] != text_key)
    if changed:
        say(f"  note: {', '.join(changed)} changed since the checkpoint; data order and learning rate follow this run")
