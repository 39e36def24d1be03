"""Settings of the recipe: one frozen dataclass, from which the flags, their help and their defaults are made."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn

from gpt.architectures import ARCHITECTURES, SHAPE, SMALL, Architecture, shape_of
from gpt.errors import RecipeError

CACHE = Path.home() / ".cache" / "overlap_train" / "pretrain_gpt"

_DEFAULT = ARCHITECTURES[SMALL]
RECOMPUTE = ("none", "selective", "full")  # nothing, the core attention, whole layers
METAVARS = {int: "N", float: "X", str: "TEXT"}


def _option(group: str, default: Any, help: str) -> Any:
    return field(default=default, metadata={"group": group, "help": help})


@dataclass(frozen=True)
class Settings:
    """Every field is a flag: `num_layers` is `--num-layers`. These defaults train on two CPU cores in some minutes."""

    text: str = _option("data", "", "file to train on; without it, the topics of Python's own help()")
    data_dir: str = _option("data", str(CACHE), "where index files are kept; shared by all nodes")
    model: str = _option("model", SMALL, f"{', '.join(ARCHITECTURES)}; sets the defaults of the flags below")
    num_layers: int = _option("model", _DEFAULT.num_layers, "transformer layers")
    hidden_size: int = _option("model", _DEFAULT.hidden_size, "width of the residual stream")
    ffn_hidden_size: int = _option("model", _DEFAULT.ffn_hidden_size, "width inside the SwiGLU MLP")
    num_attention_heads: int = _option("model", _DEFAULT.num_attention_heads, "query heads")
    num_query_groups: int = _option("model", _DEFAULT.num_query_groups, "key and value heads (GQA)")
    seq_length: int = _option("model", 128, "bytes in a sample")
    variable_seq_length: int = _option("model", 0, "1: micro-batches of half of --seq-length up to all of it")
    tp: int = _option("parallel", 0, "tensor-parallel ranks, with sequence parallelism; 0: all that --pp leaves")
    pp: int = _option("parallel", 1, "pipeline stages, each with an equal share of the layers")
    micro_batch_size: int = _option("training", 8, "samples of one forward and backward pass on one rank")
    global_batch_size: int = _option("training", 16, "samples of one optimizer step, over all ranks")
    train_iters: int = _option("training", 400, "optimizer steps in all, those before --load included")
    lr: float = _option("training", 3e-3, "highest learning rate")
    min_lr: float = _option("training", 3e-4, "learning rate at the end of the cosine")
    lr_warmup_iters: int = _option("training", 30, "steps of linear warm-up")
    weight_decay: float = _option("training", 0.1, "AdamW weight decay")
    clip_grad: float = _option("training", 1.0, "largest gradient norm; 0: no clipping")
    recompute: str = _option(
        "training", "none", f"{', '.join(RECOMPUTE)}: what backward computes again instead of keeping it from forward"
    )
    cuda_graph: int = _option(
        "training", 0, "1: forward and backward as one CUDA graph (GPUs), where the host is the limit"
    )
    deterministic: int = _option("training", 0, "1: the same bits on every run, at some cost in speed")
    seed: int = _option("training", 1234, "seed of weights, data order and sample")
    log_interval: int = _option("report", 10, "steps between iteration lines")
    eval_interval: int = _option("report", 200, "steps between validations; 0: only at the end")
    eval_iters: int = _option("report", 100, "most global batches in a validation")
    prompt: str = _option("report", "The ", "text that the sample continues")
    sample_bytes: int = _option("report", 240, "bytes of generated text at the end; 0: none")
    temperature: float = _option("report", 0.7, "of the sample; 0: always the likeliest byte")
    save: str = _option("checkpoint", "", "folder to write checkpoints to")
    save_interval: int = _option("checkpoint", 0, "steps between checkpoints; 0: only at the end")
    load: str = _option("checkpoint", "", "where to resume: a --save folder (its newest checkpoint) or an iter_ folder")


def architecture_of(settings: Settings) -> Architecture:
    """The architecture that `settings.model` names, with the shape that the flags ask for."""
    return replace(ARCHITECTURES[settings.model], **{name: getattr(settings, name) for name in SHAPE})


def defaults(on_gpu: bool, model: str = SMALL) -> Settings:
    """The defaults of this machine: `Settings()` on CPUs, a model that gives a GPU something to do on GPUs.

    A published `model` brings its shape, and a batch and learning rate that suit it, to either machine.

    Raises:
        RecipeError: there is no such model.
    """
    if model not in ARCHITECTURES:
        raise RecipeError(f"--model {model} is not one of {', '.join(ARCHITECTURES)}")
    if model != SMALL:
        return replace(
            Settings(),
            model=model,
            **shape_of(model),
            seq_length=4096,
            micro_batch_size=1,
            global_batch_size=8,
            train_iters=200,
            lr=3e-4,
            min_lr=3e-5,
            lr_warmup_iters=20,
            eval_interval=0,
            eval_iters=4,
            sample_bytes=64,
        )
    if not on_gpu:
        return Settings()
    return replace(
        Settings(),
        num_layers=8,
        hidden_size=1024,
        ffn_hidden_size=2816,
        num_attention_heads=16,
        num_query_groups=8,
        seq_length=1024,
        micro_batch_size=4,
        global_batch_size=16,
        train_iters=150,
        lr=6e-4,
        min_lr=6e-5,
        lr_warmup_iters=20,
        eval_interval=50,
    )


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises RecipeError, so that a wrong flag is one line from rank 0."""

    def error(self, message: str) -> NoReturn:
        raise RecipeError(f"{message} (--help lists the flags)")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wide enough for a flag and its meaning in one line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=120)


def add_settings(parser: argparse.ArgumentParser, initial: Settings) -> argparse.ArgumentParser:
    """Add a flag for each field of Settings, in groups, with the defaults of `initial`; returns the parser."""
    groups: dict[str, Any] = {}
    for option in fields(Settings):
        title, help = option.metadata["group"], option.metadata["help"]
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        value = getattr(initial, option.name)
        shown = f" (default: {value})" if value != "" else ""
        groups[title].add_argument(
            flag(option.name), type=type(value), default=value, metavar=METAVARS[type(value)], help=help + shown
        )
    return parser


def named_model(arguments: list[str]) -> str:
    """What follows `--model` among the words of a command line; it decides the defaults of other flags."""
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", default=SMALL)
    return str(parser.parse_known_args(arguments)[0].model)


def settings_from_args(args: argparse.Namespace) -> Settings:
    """The Settings that parsed flags ask for, unchecked."""
    return Settings(**{option.name: getattr(args, option.name) for option in fields(Settings)})


def flag(name: str) -> str:
    """`num_layers` -> `--num-layers`."""
    return "--" + name.replace("_", "-")
