"""From a command line to settings that obey every rule, before anything is started: every rank refuses with the same words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gpt.program import RecipeError, refused_by_rule
from gpt.settings import MODELS, RECOMPUTE, SMALL, Settings, defaults, named_model
from overlap_train import OverlapConfig
from overlap_train.config import flag_name
from overlap_train.flags import Parser, add_flags, add_options, config_from_args, from_args, option_fields, shown
from overlap_train.select.method import Method

USAGE = "torchrun --standalone --nproc-per-node RANKS recipes/pretrain_gpt.py [flags]"

MAY_BE_0 = (
    "variable_seq_length", "tp", "min_lr", "lr_warmup_iters", "weight_decay", "clip_grad", "cuda_graph", "deterministic", "seed",
    "eval_interval", "sample_bytes", "temperature", "save_interval", "keep_checkpoints",
)  # fmt: skip
# (divisor, what it must divide, why)
EQUAL_PARTS = (
    ("pp", "num_layers", "every pipeline stage has as many layers; change one of them"),
    ("num_attention_heads", "hidden_size", "each head has an equal part of the width"),
    ("num_query_groups", "num_attention_heads", "query heads share key and value heads evenly"),
    *(
        ("tp", name, "every tensor-parallel rank has an equal part")
        for name in ("num_query_groups", "num_attention_heads", "ffn_hidden_size", "seq_length")
    ),
)


def read_flags(
    arguments: list[str], description: str | None, world_size: int, on_gpu: bool
) -> tuple[Settings, OverlapConfig | None, list[str]]:
    """Checked settings, the overlap that was asked for (None without --overlap-train), and notes for the user.

    Raises:
        RecipeError: flags that are wrong by themselves or contradict each other.
    """
    parser = Parser("pretrain_gpt", usage=USAGE, description=description)
    initial = defaults(on_gpu, named_model(arguments))
    add_flags(add_options(parser, initial))
    with refused_by_rule():
        args = parser.parse_args(arguments)
        overlap = config_from_args(args)
    asked = from_args(initial, args)
    settings = resolve(asked, world_size)
    check_device(settings, overlap, on_gpu)
    return settings, overlap, _notes(asked, settings)


def _notes(asked: Settings, settings: Settings) -> list[str]:
    if asked.lr_warmup_iters == settings.lr_warmup_iters:
        return []
    warm_up, steps = shown(asked, "lr_warmup_iters"), shown(asked, "train_iters")
    return [f"note: {warm_up} does not fit into {steps}; the warm-up takes {settings.lr_warmup_iters} steps"]


def resolve(settings: Settings, world_size: int) -> Settings:
    """Settings with `tp` filled in and a warm-up that fits, once they obey every rule for `world_size` ranks.

    Raises:
        RecipeError: a rule is broken; the text names flag, value, rule and way out.
    """
    for name, known in (("model", tuple(MODELS)), ("recompute", RECOMPUTE)):
        if getattr(settings, name) not in known:
            raise RecipeError(f"{shown(settings, name)} is not one of {', '.join(known)}")
    _check_ranges(settings)
    settings = replace(settings, tp=settings.tp or max(1, world_size // (settings.pp * settings.cp)))
    if settings.lr_warmup_iters >= settings.train_iters:  # the learning rate would never come down
        settings = replace(settings, lr_warmup_iters=settings.train_iters // 4)
    _check_parallel(settings, world_size)
    _check_training(settings, world_size // settings.replica_ranks)
    if settings.cuda_graph and (problem := graph_problem(settings)):
        raise RecipeError(f"{shown(settings, 'cuda_graph')}: {problem}")
    if settings.save_interval and not settings.save:
        raise RecipeError(f"{shown(settings, 'save_interval')} without --save would save nothing; add --save DIR")
    return settings


def _check_ranges(settings: Settings) -> None:
    """Every number is positive, or may be 0. NaN is neither."""
    for name in (found.name for found in option_fields(settings)):
        value, may_be_0 = getattr(settings, name), name in MAY_BE_0
        if isinstance(value, str) or value > 0 or (value == 0 and may_be_0):
            continue
        if may_be_0:
            raise RecipeError(f"{shown(settings, name)} must not be negative")
        raise RecipeError(f"{shown(settings, name)} must be positive")


def _check_parallel(settings: Settings, world_size: int) -> None:
    model_ranks = settings.replica_ranks
    if world_size % model_ranks:
        others = [name for name in ("cp", "pp") if getattr(settings, name) > 1]
        factors = "".join(f" times {shown(settings, name)}" for name in others)
        raise RecipeError(
            f"{shown(settings, 'tp')}{factors} does not divide the {world_size} ranks started; start a multiple of {model_ranks} "
            f"(torchrun --nproc-per-node) or change --tp{''.join(f' or --{name}' for name in others)}"
        )
    for divisor, name, why in EQUAL_PARTS:
        if getattr(settings, name) % getattr(settings, divisor):
            raise RecipeError(f"{shown(settings, name)} must be a multiple of {shown(settings, divisor)}: {why}")
    if settings.cp > 1:
        _check_ulysses(settings)
    if settings.head_width % 2:
        raise RecipeError(
            f"{shown(settings, 'hidden_size')} over {shown(settings, 'num_attention_heads')} makes heads of an odd "
            "width, and rotary embeddings turn pairs; choose an even width"
        )


def _check_ulysses(settings: Settings) -> None:
    if settings.seq_length % settings.sequence_parts:
        raise RecipeError(
            f"{shown(settings, 'seq_length')} must be a multiple of 2 times {shown(settings, 'cp')} times "
            f"{shown(settings, 'tp')}: every rank has two of the equal parts of a sequence"
        )
    if settings.num_attention_heads % (settings.tp * settings.cp):
        raise RecipeError(
            f"{shown(settings, 'num_attention_heads')} must be a multiple of {shown(settings, 'cp')} times "
            f"{shown(settings, 'tp')}: Ulysses gives every rank whole sequences and an equal part of the heads"
        )


def _check_training(settings: Settings, replicas: int) -> None:
    samples = settings.micro_batch_size * replicas
    if settings.global_batch_size % samples:
        raise RecipeError(
            f"{shown(settings, 'global_batch_size')} is not a multiple of --micro-batch-size times the {replicas} "
            f"data-parallel replicas ({samples}); change one of them"
        )
    if settings.min_lr > settings.lr:
        raise RecipeError(f"{shown(settings, 'min_lr')} must not be above {shown(settings, 'lr')}")


def check_device(settings: Settings, overlap: OverlapConfig | None, on_gpu: bool) -> None:
    """Raise RecipeError for what this machine cannot do."""
    if on_gpu:
        return
    if overlap is not None and overlap.method != "auto" and Method(overlap.method).kernels:
        raise RecipeError(
            f"{flag_name('method')} {overlap.method} runs kernels on GPUs, and this process sees none; choose auto, chunked or "
            "collective"
        )
    if settings.cuda_graph:
        raise RecipeError(f"{shown(settings, 'cuda_graph')} needs GPUs, and this process sees none; leave it out")
    needed, free = 16 * settings.parameters / 2**30, _free_gib()  # fp32: weight, gradient, two moments
    if needed > free:
        raise RecipeError(
            f"{shown(settings, 'model')} with {shown(settings, 'num_layers')} takes {needed:.0f} GiB to train on CPUs, and "
            f"{free:.0f} GiB are free; choose GPUs, --model {SMALL}, or fewer and narrower layers"
        )


def _free_gib() -> float:
    """GiB of this machine's memory that are free."""
    with Path("/proc/meminfo").open() as file:
        return next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:")) / 2**20


def graph_problem(settings: Settings) -> str | None:
    """Why the passes of this model cannot be captured into a CUDA graph, or None."""
    cannot = "cannot be captured into a CUDA graph"
    if settings.recompute != "none":
        return f"{shown(settings, 'recompute')} {cannot}: it reads the random state; use none"
    if settings.experts:
        reason = "the host reads how many tokens each expert gets"
        return f"{shown(settings, 'model')} {cannot}: {reason}; choose a model without experts"
    if settings.pp > 1:
        return f"{shown(settings, 'pp')} {cannot}: stages synchronise the host; use 1"
    if settings.variable_seq_length:
        return f"{shown(settings, 'variable_seq_length')} {cannot}: its inputs have one shape; use 0"
    return None
