"""Checkpoints with Megatron's dist_checkpointing: whole or not at all, checked before they are read.

A save writes `iter_0000100.tmp`, seals it with a manifest of sizes and hashes, renames it to `iter_0000100` and only
then points `latest_checkpointed_iteration.txt` at it, so a kill at any moment leaves the checkpoint before it in place.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state

import overlap_train
from gpt.adam_state import load_optimizer, make_describable
from gpt.architectures import SHAPE, SMALL
from gpt.errors import RecipeError
from gpt.files import Listing, damage, listing, publish, seal, write_atomically
from gpt.progress import say
from gpt.settings import Settings, flag
from gpt.training import Trainer
from gpt.world import on_every_rank, on_rank_0

TRACKER = "latest_checkpointed_iteration.txt"
RUN = "run.json"
ORDER = (
    "seq_length",
    "variable_seq_length",
    "global_batch_size",
    "train_iters",
    "seed",
    "lr",
    "min_lr",
    "lr_warmup_iters",
)
FIRST = {"model": SMALL, "variable_seq_length": 0}  # what checkpoints have that were saved before there was a choice


def save(trainer: Trainer, iteration: int, text_key: str) -> None:
    """Write the state after step `iteration` below `--save`; collective. `text_key` names the text trained on.

    Raises:
        RecipeError: on every rank, where the folder cannot be written.
    """
    folder = _folder(Path(trainer.settings.save), iteration)
    draft = folder.with_name(folder.name + ".tmp")
    on_rank_0(lambda: _start(draft))
    dist_checkpointing.save(_state(trainer, is_loading=False), str(draft))
    overlap_train.check()  # a wait that gave up has left NaN in what was written
    dist.barrier()  # nor does rank 0 publish what another rank knows to be wrong
    run = {"iteration": iteration, "text": text_key, "settings": asdict(trainer.settings)}
    on_rank_0(lambda: _describe(draft, run))
    parts = on_every_rank(lambda: _list_part(draft))
    on_rank_0(
        lambda: _finish(draft, folder, iteration, {name: known for part in parts for name, known in part.items()})
    )
    say(f"  saved checkpoint {folder}")


def load(trainer: Trainer, text_key: str) -> int:
    """Restore the state from `--load` and return the number of steps it has behind it; collective.

    Raises:
        RecipeError: on every rank, where there is no checkpoint, it is damaged, or it is of another model.
    """
    path = Path(trainer.settings.load)
    folder = on_rank_0(lambda: path if path.name.startswith("iter_") else _newest(path))
    damaged = next(filter(None, on_every_rank(lambda: _damaged_part(folder))), None)
    run = on_rank_0(lambda: _run_of(folder, path, damaged))
    _compare(run, trainer.settings, text_key)
    make_describable(trainer.optimizer)
    state = dist_checkpointing.load(_state(trainer, is_loading=True), str(folder))
    trainer.model.bare.load_state_dict(state["model"])
    load_optimizer(trainer.optimizer, state["optimizer"])
    trainer.schedule.load_state_dict(state["opt_param_scheduler"])
    say(f"  resumed from checkpoint {folder}")
    return int(run["iteration"])


def check_target(settings: Settings) -> None:
    """Refuse to write into a folder with checkpoints of another run; collective.

    Raises:
        RecipeError: on every rank, where `--save` has checkpoints and `--load` does not continue them.
    """
    on_rank_0(lambda: _check_target(settings))


def _check_target(settings: Settings) -> None:
    if not settings.save or not (Path(settings.save) / TRACKER).exists():
        return
    target, source = Path(settings.save).resolve(), Path(settings.load).resolve()
    if not settings.load or target not in (source, source.parent):
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


def _start(draft: Path) -> None:
    with _writing(draft.parent):
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)


def _describe(draft: Path, run: dict[str, Any]) -> None:
    with _writing(draft.parent):
        write_atomically(draft / RUN, json.dumps(run, indent=1))


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RecipeError(f"--save {folder} cannot be written: {error.strerror or error}") from error


def _list_part(draft: Path) -> Listing:
    with _writing(draft.parent):
        return listing(draft, dist.get_rank(), dist.get_world_size())


def _finish(draft: Path, folder: Path, iteration: int, files: Listing) -> None:
    with _writing(folder.parent):
        seal(draft, files)
        publish(draft, folder)
        write_atomically(folder.parent / TRACKER, str(iteration))


def _damaged_part(folder: Path) -> str | None:
    """What is wrong with this rank's part of the files."""
    if not folder.is_dir():
        return f"{folder} is missing"
    return damage(folder, dist.get_rank(), dist.get_world_size()) or None


def _run_of(folder: Path, path: Path, damaged: str | None) -> dict[str, Any]:
    """run.json of a folder of which nothing is damaged; on rank 0."""
    if damaged:
        raise RecipeError(f"--load {path}: the checkpoint is damaged: {damaged}; {_last_good(folder)}")
    found: dict[str, Any] = json.loads((folder / RUN).read_text())
    return found


def _newest(path: Path) -> Path:
    try:
        return _folder(path, int((path / TRACKER).read_text()))
    except OSError as error:
        raise RecipeError(f"--load {path} has no checkpoint: {TRACKER} cannot be read ({error.strerror})") from error
    except ValueError as error:
        problem = f"{TRACKER} does not hold a step number"
        raise RecipeError(f"--load {path}: {problem}; {_last_good(path / 'iter_')}") from error


def _last_good(bad: Path) -> str:
    others = sorted(bad.parent.glob("iter_*[0-9]"), reverse=True)
    good = next((str(folder) for folder in others if folder != bad and not damage(folder)), None)
    return f"the last good one is --load {good}" if good else "there is no other good one beside it"


def _compare(run: dict[str, Any], settings: Settings, text_key: str) -> None:
    saved, now = {**FIRST, **run["settings"]}, asdict(settings)
    for name in ("model", *SHAPE):
        if saved[name] != now[name]:
            raise RecipeError(
                f"--load {settings.load}: the checkpoint was saved with {flag(name)} {saved[name]}, this run has "
                f"{now[name]}; pass {flag(name)} {saved[name]}"
            )
    order = (*ORDER, *(("micro_batch_size", "tp") if now["variable_seq_length"] else ()))
    changed = [flag(name) for name in order if saved[name] != now[name]]
    if run["text"] != text_key:
        changed.append("the text")
    if changed:
        say(f"  note: {', '.join(changed)} changed since the checkpoint; data order and learning rate follow this run")


def _folder(path: Path, iteration: int) -> Path:
    return path / f"iter_{iteration:07d}"
