"""Settings of the recipe: one frozen dataclass, its flags, the published models, and the rules that settings obey.

The text is always bytes. A published vocabulary counts by its size only: the embedding and the output layer have as many rows
as in the real model and cost as much.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gpt.program import RecipeError, refused_by_rule
from overlap_train import OverlapConfig, flags
from overlap_train.flags import option, shown
from overlap_train.tools.measure import models

USAGE = "torchrun --standalone --nproc-per-node RANKS recipes/pretrain_gpt.py [flags]"
SMALL = "small"
RECOMPUTE = ("none", "selective", "full")
ON_CPUS = ("auto", "chunked", "collective")  # methods that need no kernels
_positive, _count = partial(option, parse=flags.positive_int), partial(option, parse=flags.positive_int_or_0)


@dataclass(frozen=True)
class Settings:
    """A GPT with RMSNorm, rotary positions, grouped queries and a gated MLP, and how to train it.

    These defaults train on two CPU cores in some minutes.
    """

    text: str = option("", "file to train on; without it, the topics of Python's own help()")
    model: str = option(SMALL, "small, or (GPUs) a published model; sets the defaults of the flags below")
    num_layers: int = _positive(4, "transformer layers")
    hidden_size: int = _positive(128, "width of the residual stream")
    ffn_hidden_size: int = _positive(384, "width inside the SwiGLU MLP")
    num_attention_heads: int = _positive(8, "query heads")
    num_query_groups: int = _positive(4, "key and value heads (GQA)")
    seq_length: int = _positive(128, "bytes in a sample")
    tp: int = _count(0, "tensor-parallel ranks, sequence parallel too; 0: as many as --cp and --num-query-groups allow")
    cp: int = _positive(1, "context-parallel ranks (Ulysses): each has a part of every sequence")
    distributed_timeout_minutes: int = _positive(10, "how long Megatron's and torch's own collectives wait for a rank")
    micro_batch_size: int = _positive(8, "samples of one forward and backward pass on one rank")
    global_batch_size: int = _positive(16, "samples of one optimizer step, over all ranks")
    train_iters: int = _positive(400, "optimizer steps in all, those before --load included")
    lr: float = option(3e-3, "highest learning rate; a cosine ends at a tenth", parse=flags.positive_float)
    lr_warmup_iters: int = _count(30, "steps of linear warm-up, at most a quarter of --train-iters")
    recompute: str = option(
        "none", "again in backward: nothing, the core attention, or whole layers", choices=RECOMPUTE
    )
    lora: int = _count(
        0, "features of low-rank adapters around linears whose weights stay frozen; 0: train the weights"
    )
    cuda_graph: int = _count(0, "1: forward and backward as one CUDA graph (GPUs, host-bound runs)")
    deterministic: int = _count(0, "1: the same bits on every run, at some cost in speed")
    seed: int = _count(1234, "seed of weights, data order and sample")
    log_interval: int = _positive(10, "steps between iteration lines")
    eval_iters: int = _positive(100, "most global batches in the validation at the end")
    sample_bytes: int = _count(240, "bytes of generated text at the end; 0: none")
    save: str = option("", "folder to write checkpoints to")
    save_interval: int = _count(0, "steps between checkpoints; 0: only at the end")
    load: str = option("", "where to resume: a --save folder, or an iter_ folder in it")

    # What a published model has beside its shape, by Megatron's names, and what compare_mfu sets. These fields are no flags.
    title: str = "small GPT"
    vocab_size: int = 256
    kv_channels: int | None = None  # width of a head; None: hidden_size / num_attention_heads
    layernorm_epsilon: float = 1e-5
    rotary_base: int = 10000
    qk_layernorm: bool = False
    gradient_accumulation_fusion: bool = False
    sequence_parallel: bool = True

    @property
    def vocabulary_rows(self) -> int:
        """Rows of the embedding: the vocabulary rounded up to a multiple of 64 and of `tp`."""
        step = math.lcm(64, max(1, self.tp))
        return -(-self.vocab_size // step) * step


# How every published model is trained unless flags say otherwise.
_PUBLISHED: dict[str, Any] = dict(
    seq_length=4096, micro_batch_size=1, global_batch_size=8, train_iters=200, lr=3e-4, lr_warmup_iters=20, eval_iters=4,
    sample_bytes=64,
)  # fmt: skip
SHAPE = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")


def _published(name: str, **others: Any) -> dict[str, Any]:
    return {size: getattr(models.MODELS[name], size) or None for size in (*SHAPE, "vocab_size")} | others


# What differs from Settings(). Sources of the sizes: overlap_train/tools/measure/models.py.
MODELS: dict[str, dict[str, Any]] = {
    SMALL: {},
    "llama3-8b": _published("llama3-8b", title="Llama-3 8B", rotary_base=500000),
    "llama3-70b": _published("llama3-70b", title="Llama-3 70B", rotary_base=500000),
    "qwen3-32b": _published("qwen3-32b", title="Qwen3-32B", layernorm_epsilon=1e-6, rotary_base=1000000, qk_layernorm=True),
}  # fmt: skip

# The small model gives a GPU something to do, too.
_SMALL_ON_GPU: dict[str, Any] = dict(
    num_layers=8, hidden_size=1024, ffn_hidden_size=2816, num_attention_heads=16, num_query_groups=8, seq_length=1024,
    micro_batch_size=4, global_batch_size=16, train_iters=150, lr=6e-4, lr_warmup_iters=20,
)  # fmt: skip


def defaults(on_gpu: bool, model: str = SMALL) -> Settings:
    """The defaults of this machine. A published `model` brings its shape, and a batch and learning rate that suit it."""
    if model not in MODELS:
        raise RecipeError(f"--model {model} is not one of {', '.join(MODELS)}")
    if model != SMALL:
        return replace(Settings(), model=model, **MODELS[model], **_PUBLISHED)
    return replace(Settings(), **_SMALL_ON_GPU) if on_gpu else Settings()


def read_flags(
    arguments: list[str], description: str | None, ranks: int, on_gpu: bool
) -> tuple[Settings, OverlapConfig | None]:
    """Settings that obey the rules, and the overlap that was asked for (None without --overlap-train). Raises RecipeError for
    flags that are wrong by themselves, contradict each other, or ask for what this machine cannot do."""
    parser = flags.Parser("pretrain_gpt", usage=USAGE, description=description)
    named = argparse.ArgumentParser(add_help=False, allow_abbrev=False)  # --model decides the defaults of other flags
    named.add_argument("--model", default=SMALL)
    with refused_by_rule():
        initial = defaults(on_gpu, named.parse_known_args(arguments)[0].model)
        args = flags.add_flags(flags.add_options(parser, initial)).parse_args(arguments)
        overlap = flags.read_config(args)
    settings = resolve(flags.from_args(initial, args), ranks)
    if problem := _problem(settings, overlap, on_gpu):
        raise RecipeError(problem)
    return settings, overlap


def resolve(settings: Settings, ranks: int) -> Settings:
    """Settings with `tp` filled in and a warm-up that fits, once they obey the rules for so many ranks. Raises RecipeError where
    a rule is broken."""
    cp = settings.cp
    tp = settings.tp or math.gcd(max(1, ranks // cp), settings.num_query_groups)
    warm_up = min(settings.lr_warmup_iters, settings.train_iters // 4)
    settings = replace(settings, tp=tp, lr_warmup_iters=warm_up)
    if ranks % (tp * cp):
        product = f"--tp {tp}, --cp {cp}: their product {tp * cp}"
        raise RecipeError(f"{product} does not divide the {ranks} ranks started; change one of them")
    batch = settings.micro_batch_size * (ranks // (tp * cp))
    # Ulysses gives every rank whole sequences of an equal part of the heads, and cuts a sequence into two parts for each rank.
    for name, divisor, why in (
        ("hidden_size", 2 * settings.num_attention_heads if not settings.kv_channels else 1, "heads of an even width"),
        ("num_attention_heads", settings.num_query_groups, "--num-query-groups: query heads share keys evenly"),
        ("num_query_groups", tp, "--tp: every rank has an equal part"),
        ("num_attention_heads", tp * cp, "--tp times --cp: every rank has an equal part"),
        ("ffn_hidden_size", tp, "--tp: every rank has an equal part"),
        ("seq_length", tp * (2 * cp if cp > 1 else 1), "the equal parts of a sequence that --tp and --cp make"),
        ("global_batch_size", batch, "--micro-batch-size times the data-parallel replicas"),
    ):
        if getattr(settings, name) % divisor:
            value = f"{shown(settings, name)} (--model {settings.model})"
            raise RecipeError(f"{value} must be a multiple of {divisor}, {why}; change one of them")
    return settings


def nothing_overlaps(settings: Settings) -> str | None:
    """Why no linear would overlap, and what to do; None: some would."""
    if settings.tp * settings.cp == 1:
        return "--tp 1 and --cp 1: there is nothing to overlap; start more ranks"
    if settings.tp == 1 and settings.lora:
        given = f"{shown(settings, 'lora')}, --tp 1 and {shown(settings, 'cp')}"
        return f"{given}: a linear with an adapter does not exchange over --cp; take --tp 2 or more"
    return None


def _problem(settings: Settings, overlap: OverlapConfig | None, on_gpu: bool) -> str | None:
    """Which flags contradict each other, or what this machine without GPUs cannot do."""
    if settings.save_interval and not settings.save:
        return f"{shown(settings, 'save_interval')} without --save would save nothing; add --save DIR"
    if settings.cuda_graph and settings.recompute != "none":
        return f"{shown(settings, 'recompute')} reads the random state, which no CUDA graph captures; use none"
    if overlap is not None and overlap.on_unsupported == "error" and (why := nothing_overlaps(settings)):
        return f"--overlap-train with {why}, or leave it out"
    if settings.lora and settings.recompute == "full":
        return f"{shown(settings, 'lora')} with --recompute full: no gradient reaches the first layer's input; use selective"
    needs_gpus = {
        "--cuda-graph": settings.cuda_graph,
        shown(settings, "model"): settings.model != SMALL,
        f"--overlap-train-method {overlap and overlap.method}": overlap and overlap.method not in ON_CPUS,
    }
    for given, is_given in needs_gpus.items():
        if is_given and not on_gpu:
            return f"{given} needs GPUs, and there are none; leave it out"
    return None
