"""What compare_mfu is told: one frozen dataclass, its flags, and the recipe settings that follow from it for each model."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from pathlib import Path

from gpt.architectures import ARCHITECTURES, SMALL
from gpt.errors import RecipeError
from gpt.rules import resolve
from gpt.settings import CACHE, Parser, Settings, defaults
from overlap_train.config import METHODS
from overlap_train.flags import add_flags

MEGATRON, OVERLAP, ASYNC_TP, USERBUFFERS = "megatron", "overlap", "async_tp", "te_userbuffers"
VARIANTS = (MEGATRON, OVERLAP, ASYNC_TP, USERBUFFERS)
OVERLAP_GRAPH, MEGATRON_GRAPH = "overlap_graph", "megatron_graph"
GRAPHS = {OVERLAP_GRAPH: OVERLAP, MEGATRON_GRAPH: MEGATRON}  # these two with their passes in a CUDA graph
AGAIN = " again"  # behind the name of a variant that is trained a second time from the same seed
WARM_UP_STEPS = 3

# As many layers as leave room for three variants with their optimizers on four GPUs of 141 GB.
FEW_LAYERS = {SMALL: 2, "llama3-8b": 4, "llama3-70b": 2, "qwen3-32b": 2, "mixtral-8x7b": 1}


@dataclass(frozen=True)
class Plan:
    """models and layers go together, one entry a model; tp 0: all ranks; global_batch_size 0: one micro-batch a replica.

    steps: timed steps of each variant, in rounds of round_steps; loss_steps: train at least so many, timed or not.
    repeat: variants that are trained a second time, to see how far two equal runs are apart. peak_tflops 0: of the device.
    """

    models: tuple[str, ...]
    layers: tuple[int, ...]
    seq_length: int
    tp: int
    micro_batch_size: int
    global_batch_size: int
    steps: int
    round_steps: int
    loss_steps: int
    variants: tuple[str, ...]
    repeat: tuple[str, ...]
    is_bitwise: bool
    exposed_rounds: int
    peak_tflops: float
    lr: float
    seed: int
    text: str
    data_dir: str
    connections: int
    out: Path

    @property
    def rounds(self) -> int:
        """Of interleaved steps. Each has one step more than it times, which brings the ranks into step with each other."""
        for_losses = math.ceil((self.loss_steps - WARM_UP_STEPS) / (self.round_steps + 1))
        return max(1, for_losses, math.ceil(self.steps / self.round_steps))

    @property
    def trained_steps(self) -> int:
        """Optimizer steps of every variant."""
        return WARM_UP_STEPS + self.rounds * (self.round_steps + 1)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all that is trained; a repetition comes last."""
        return (*self.variants, *(name + AGAIN for name in self.repeat))


def is_graph(name: str) -> bool:
    """Whether a variant, or its repetition, replays a CUDA graph."""
    return name.removesuffix(AGAIN) in GRAPHS


def parser() -> argparse.ArgumentParser:
    """The flags: the plan's own, and those of OverlapConfig for the overlapped variant."""
    top = Parser("compare_mfu", usage="torchrun --nproc-per-node RANKS recipes/compare_mfu.py [flags]")
    add = top.add_argument
    add("--model", type=_words, default=("llama3-8b",), metavar="NAME,...", help=f"of {', '.join(ARCHITECTURES)}")
    add("--layers", type=_numbers, default=(), metavar="N,...", help="one number a model; default: a few")
    add("--seq-length", type=int, default=8192, help="tokens in a sample")
    add("--tp", type=int, default=0, help="tensor-parallel ranks, with sequence parallelism; 0: all")
    add("--micro-batch-size", type=int, default=1)
    add("--global-batch-size", type=int, default=0, help="0: one micro-batch for each data-parallel replica")
    add("--steps", type=int, default=30, help="timed steps of each variant")
    add("--round-steps", type=int, default=5, help="steps of a variant before the next one has its turn")
    add("--loss-steps", type=int, default=0, help="train every variant for at least so many steps")
    add("--variants", type=_words, default=VARIANTS, metavar="NAME,...", help=_variants_help())
    add(
        "--repeat",
        type=_words,
        default=(),
        metavar="NAME,...",
        help="variants to train a second time from the same seed",
    )
    add("--bitwise", action="store_true", help="deterministic kernels; train `overlap` twice and compare to the bit")
    add("--quick", action="store_true", help="10 steps in rounds of 2, and fewer rounds for exposed communication")
    add("--peak-tflops", type=float, default=0.0, help="MFU is against this; 0: the data sheet's dense bf16 figure")
    add("--lr", type=float, default=3e-4)
    add("--seed", type=int, default=1234)
    add("--text", default="", help="file to train on; without it, the topics of Python's own help()")
    add("--data-dir", default=str(CACHE))
    add("--connections", type=int, default=1, help="CUDA_DEVICE_MAX_CONNECTIONS; Megatron-Core asks for 1")
    add("--out", type=Path, default=Path("runs/mfu"), help="folder for JSON, Markdown and pictures")
    add_flags(top)
    return top


def plan_from_args(args: argparse.Namespace) -> Plan:
    """The checked plan.

    Raises:
        RecipeError: a model or variant is unknown, or numbers that do not go together.
    """
    layers = args.layers or tuple(FEW_LAYERS.get(model, 1) for model in args.model)
    variants = tuple(dict.fromkeys(args.variants))
    repeat = tuple(dict.fromkeys((*args.repeat, *((OVERLAP,) if args.bitwise else ()))))
    _check_words("--model", args.model, tuple(ARCHITECTURES))
    _check_words("--variants", variants, (*VARIANTS, *GRAPHS, *METHODS))
    _check_words("--repeat", repeat, variants)
    if len(layers) != len(args.model):
        raise RecipeError(f"--layers has {len(layers)} numbers for {len(args.model)} models; give one for each")
    steps, round_steps = (10, 2) if args.quick else (args.steps, args.round_steps)
    for flag, value in (("--steps", steps), ("--round-steps", round_steps), ("--connections", args.connections)):
        if value < 1:
            raise RecipeError(f"{flag} {value} must be positive")
    return Plan(
        models=args.model,
        layers=layers,
        seq_length=args.seq_length,
        tp=args.tp,
        micro_batch_size=args.micro_batch_size,
        global_batch_size=args.global_batch_size,
        steps=steps,
        round_steps=round_steps,
        loss_steps=args.loss_steps,
        variants=variants,
        repeat=repeat,
        is_bitwise=args.bitwise,
        exposed_rounds=3 if args.quick else 5,
        peak_tflops=args.peak_tflops,
        lr=args.lr,
        seed=args.seed,
        text=args.text,
        data_dir=args.data_dir,
        connections=args.connections,
        out=args.out,
    )


def settings_for(plan: Plan, number: int, world_size: int) -> Settings:
    """The recipe settings of the plan's model of this number, checked.

    Raises:
        RecipeError: they break a rule of the recipe.
    """
    tp = plan.tp or world_size
    steps = plan.trained_steps
    settings = replace(
        defaults(True, plan.models[number]) if plan.models[number] != SMALL else Settings(),
        num_layers=plan.layers[number],
        seq_length=plan.seq_length,
        tp=tp,
        micro_batch_size=plan.micro_batch_size,
        global_batch_size=plan.global_batch_size or plan.micro_batch_size * max(1, world_size // tp),
        train_iters=steps,
        lr=plan.lr,
        min_lr=plan.lr / 10,
        lr_warmup_iters=min(20, steps // 4),
        deterministic=int(plan.is_bitwise),
        seed=plan.seed,
        text=plan.text,
        data_dir=plan.data_dir,
    )
    return resolve(settings, world_size)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in _words(text))


def _variants_help() -> str:
    return f"of {', '.join((*VARIANTS, *GRAPHS))}, or a method of the overlap ({', '.join(METHODS)}) as a variant of its own"


def _check_words(flag: str, words: tuple[str, ...], known: tuple[str, ...]) -> None:
    wrong = [word for word in words if word not in known]
    if wrong:
        raise RecipeError(f"{flag} {','.join(words)}: {wrong[0]!r} is not one of {', '.join(known)}")
    if flag != "--repeat" and not words:
        raise RecipeError(f"{flag} names nothing; choose from {', '.join(known)}")
