"""What the settings must obey, checked before anything is started, so that every rank refuses with the same words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gpt.architectures import ARCHITECTURES, SMALL
from gpt.errors import RecipeError
from gpt.settings import RECOMPUTE, Settings, architecture_of, flag

POSITIVE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "seq_length",
    "pp",
    "micro_batch_size",
    "global_batch_size",
    "train_iters",
    "lr",
    "log_interval",
    "eval_iters",
)
NOT_NEGATIVE = (
    "variable_seq_length",
    "tp",
    "min_lr",
    "lr_warmup_iters",
    "weight_decay",
    "clip_grad",
    "cuda_graph",
    "deterministic",
    "seed",
    "eval_interval",
    "sample_bytes",
    "temperature",
    "save_interval",
)


def resolve(settings: Settings, world_size: int) -> Settings:
    """Settings with `tp` filled in, once they obey every rule for `world_size` ranks.

    Raises:
        RecipeError: a rule is broken; the text names flag, value, rule and way out.
    """
    _check_words(settings)
    _check_ranges(settings)
    settings = replace(settings, tp=settings.tp or max(1, world_size // settings.pp))
    _check_parallel(settings, world_size)
    _check_training(settings, world_size // (settings.tp * settings.pp))
    _check_graph(settings)
    _check_checkpoint(settings)
    return settings


def _check_words(settings: Settings) -> None:
    for name, known in (("model", tuple(ARCHITECTURES)), ("recompute", RECOMPUTE)):
        if getattr(settings, name) not in known:
            raise RecipeError(f"{_shown(settings, name)} is not one of {', '.join(known)}")


def _check_ranges(settings: Settings) -> None:
    for name in POSITIVE:
        if not getattr(settings, name) > 0:
            raise RecipeError(f"{_shown(settings, name)} must be positive")
    for name in NOT_NEGATIVE:
        if not getattr(settings, name) >= 0:
            raise RecipeError(f"{_shown(settings, name)} must not be negative")


def _check_parallel(settings: Settings, world_size: int) -> None:
    model_ranks = settings.tp * settings.pp
    if world_size % model_ranks:
        stages = f" times {_shown(settings, 'pp')}" if settings.pp > 1 else ""
        raise RecipeError(
            f"{_shown(settings, 'tp')}{stages} does not divide the {world_size} ranks started; "
            f"start a multiple of {model_ranks} (torchrun --nproc-per-node) or change --tp{' or --pp' if stages else ''}"
        )
    _check_divides(settings, "pp", "num_layers", "every pipeline stage has as many layers; change one of them")
    _check_divides(settings, "num_attention_heads", "hidden_size", "each head has an equal part of the width")
    _check_divides(settings, "num_query_groups", "num_attention_heads", "query heads share key and value heads evenly")
    if settings.hidden_size // settings.num_attention_heads % 2:
        raise RecipeError(
            f"{_shown(settings, 'hidden_size')} over {_shown(settings, 'num_attention_heads')} makes heads of an odd "
            "width, and rotary embeddings turn pairs; choose an even width"
        )
    for name in ("num_query_groups", "num_attention_heads", "ffn_hidden_size", "seq_length"):
        _check_divides(settings, "tp", name, "every tensor-parallel rank has an equal part")


def _check_training(settings: Settings, dp: int) -> None:
    samples = settings.micro_batch_size * dp
    if settings.global_batch_size % samples:
        raise RecipeError(
            f"{_shown(settings, 'global_batch_size')} is not a multiple of --micro-batch-size times the {dp} "
            f"data-parallel replicas ({samples}); change one of them"
        )
    if settings.lr_warmup_iters >= settings.train_iters:
        raise RecipeError(
            f"{_shown(settings, 'lr_warmup_iters')} must be below {_shown(settings, 'train_iters')}, or the learning "
            f"rate never comes down; pass --lr-warmup-iters {settings.train_iters // 4}"
        )
    if settings.min_lr > settings.lr:
        raise RecipeError(f"{_shown(settings, 'min_lr')} must not be above {_shown(settings, 'lr')}")


def check_device(settings: Settings, on_gpu: bool) -> None:
    """Raise RecipeError for what this machine cannot do."""
    if settings.cuda_graph and not on_gpu:
        raise RecipeError(f"{_shown(settings, 'cuda_graph')} needs GPUs, and this process sees none; leave it out")
    if on_gpu:
        return
    needed, free = 16 * architecture_of(settings).parameters / 2**30, _free_gib()  # fp32: weight, gradient, two moments
    if needed > free:
        raise RecipeError(
            f"{_shown(settings, 'model')} with {_shown(settings, 'num_layers')} takes {needed:.0f} GiB to train on CPUs, and "
            f"{free:.0f} GiB are free; choose GPUs, --model {SMALL}, or fewer and narrower layers"
        )


def _free_gib() -> float:
    """Of this machine's memory."""
    with Path("/proc/meminfo").open() as file:
        return next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:")) / 2**20


def graph_problem(settings: Settings) -> str | None:
    """Why the passes of this model cannot be captured into a CUDA graph, or None."""
    cannot = "cannot be captured into a CUDA graph"
    if settings.recompute != "none":
        return f"{_shown(settings, 'recompute')} {cannot}: it reads the random state; use none"
    if ARCHITECTURES[settings.model].experts:
        reason = "the host reads how many tokens each expert gets"
        return f"{_shown(settings, 'model')} {cannot}: {reason}; choose a model without experts"
    if settings.pp > 1:
        return f"{_shown(settings, 'pp')} {cannot}: stages synchronise the host; use 1"
    if settings.variable_seq_length:
        return f"{_shown(settings, 'variable_seq_length')} {cannot}: its inputs have one shape; use 0"
    return None


def _check_graph(settings: Settings) -> None:
    problem = graph_problem(settings) if settings.cuda_graph else None
    if problem is not None:
        raise RecipeError(f"{_shown(settings, 'cuda_graph')}: {problem}")


def _check_checkpoint(settings: Settings) -> None:
    if settings.save_interval and not settings.save:
        raise RecipeError(f"{_shown(settings, 'save_interval')} without --save would save nothing; add --save DIR")
    for name in ("save", "data_dir"):
        path = Path(getattr(settings, name))
        if getattr(settings, name) and path.exists() and not path.is_dir():
            raise RecipeError(f"{_shown(settings, name)} is not a folder")


def _check_divides(settings: Settings, divisor: str, name: str, why: str) -> None:
    if getattr(settings, name) % getattr(settings, divisor):
        raise RecipeError(f"{_shown(settings, name)} must be a multiple of {_shown(settings, divisor)}: {why}")


def _shown(settings: Settings, name: str) -> str:
    return f"{flag(name)} {getattr(settings, name)}"
