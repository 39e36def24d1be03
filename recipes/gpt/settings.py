"""Settings of the recipe: one frozen dataclass, whose flags' defaults are those of the model that --model names.

The text is always bytes. A published vocabulary counts by its size only: the embedding and the output layer have as many rows
as in the real model and cost as much.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gpt.program import RecipeError
from overlap_train.flags import option
from overlap_train.tools.measure import models

SMALL = "small"
RECOMPUTE = ("none", "selective", "full")

# One maker of flags for each heading of --help.
_data, _model, _parallel, _training, _report, _checkpoint = (
    partial(option, group=name) for name in ("data", "model", "parallel", "training", "report", "checkpoint")
)


@dataclass(frozen=True)
class Settings:
    """A GPT with RMSNorm, rotary positions, grouped queries and a gated MLP, dense or of experts, and how to train it.

    These defaults train on two CPU cores in some minutes.
    """

    text: str = _data("", "file to train on; without it, the topics of Python's own help()")
    model: str = _model(SMALL, "small, or a published model; sets the defaults of the flags below")
    num_layers: int = _model(4, "transformer layers")
    hidden_size: int = _model(128, "width of the residual stream")
    ffn_hidden_size: int = _model(384, "width inside the SwiGLU MLP, or inside each expert")
    num_attention_heads: int = _model(4, "query heads")
    num_query_groups: int = _model(2, "key and value heads (GQA)")
    seq_length: int = _model(128, "bytes in a sample")
    variable_seq_length: int = _model(0, "1: micro-batches of half of --seq-length up to all of it")
    tp: int = _parallel(0, "tensor-parallel ranks, with sequence parallelism; 0: all that --pp and --cp leave")
    cp: int = _parallel(1, "context-parallel ranks (Ulysses): each has a part of every sequence")
    pp: int = _parallel(1, "pipeline stages, each with an equal share of the layers")
    distributed_timeout_minutes: int = _parallel(10, "how long Megatron's and torch's own collectives wait for a rank")
    micro_batch_size: int = _training(8, "samples of one forward and backward pass on one rank")
    global_batch_size: int = _training(16, "samples of one optimizer step, over all ranks")
    train_iters: int = _training(400, "optimizer steps in all, those before --load included")
    lr: float = _training(3e-3, "highest learning rate")
    min_lr: float = _training(3e-4, "learning rate at the end of the cosine")
    lr_warmup_iters: int = _training(30, "steps of linear warm-up; a quarter of --train-iters where they do not fit")
    weight_decay: float = _training(0.1, "AdamW weight decay")
    clip_grad: float = _training(1.0, "largest gradient norm; 0: no clipping")
    recompute: str = _training(
        "none",
        "what backward computes again instead of keeping it from forward: nothing, the core attention, or whole layers",
        choices=RECOMPUTE,
    )
    cuda_graph: int = _training(0, "1: forward and backward as one CUDA graph (GPUs, host-bound runs)")
    deterministic: int = _training(0, "1: the same bits on every run, at some cost in speed")
    seed: int = _training(1234, "seed of weights, data order and sample")
    log_interval: int = _report(10, "steps between iteration lines")
    tensorboard_dir: str = _report("", "folder for loss, step time and tokens/s: TensorBoard and metrics.jsonl")
    eval_interval: int = _report(200, "steps between validations; 0: only at the end")
    eval_iters: int = _report(100, "most global batches in a validation")
    prompt: str = _report("The ", "text that the sample continues")
    sample_bytes: int = _report(240, "bytes of generated text at the end; 0: none")
    temperature: float = _report(0.7, "of the sample; 0: always the likeliest byte")
    save: str = _checkpoint("", "folder to write checkpoints to")
    save_interval: int = _checkpoint(0, "steps between checkpoints; 0: only at the end")
    keep_checkpoints: int = _checkpoint(3, "newest checkpoints to keep in --save; 0: all")
    load: str = _checkpoint("", "where to resume: a --save folder (its newest good checkpoint), or an iter_ folder")

    # What a published model has beside its shape. These fields are no flags.
    title: str = "small GPT"
    vocab_size: int = 256
    kv_channels: int = 0  # width of a head; 0: hidden_size / num_attention_heads
    norm_eps: float = 1e-5
    rope_base: int = 10000
    has_qk_norm: bool = False
    experts: int = 0  # 0: a dense MLP
    experts_per_token: int = 0
    expert_balance: float = 0.0

    @property
    def replica_ranks(self) -> int:
        """How many ranks train one model together. Replicas of them are data parallel."""
        return self.tp * self.cp * self.pp

    @property
    def sequence_parts(self) -> int:
        """The number of equal parts into which a sequence is cut. Context parallelism makes two parts for each of its ranks."""
        return self.tp * (2 * self.cp if self.cp > 1 else 1)

    @property
    def head_width(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def vocabulary_rows(self) -> int:
        """Rows of the embedding: the vocabulary rounded up to a multiple of 64 and of `tp`."""
        step = math.lcm(64, max(1, self.tp))
        return -(-self.vocab_size // step) * step

    @property
    def parameters(self) -> int:
        """How many parameters the model has: embedding and output layer, the matrices of each layer, norms."""
        queries, keys = self.num_attention_heads * self.head_width, self.num_query_groups * self.head_width
        mlps = 3 * self.ffn_hidden_size * max(1, self.experts) + self.experts  # the last: the router
        norms = 2 * self.hidden_size + 2 * self.head_width * self.has_qk_norm
        layer = self.hidden_size * (2 * queries + 2 * keys + mlps) + norms
        return self.num_layers * layer + 2 * self.vocab_size * self.hidden_size + self.hidden_size


# How every published model is trained unless flags say otherwise.
_PUBLISHED: dict[str, Any] = dict(
    seq_length=4096, micro_batch_size=1, global_batch_size=8, train_iters=200, lr=3e-4, min_lr=3e-5, lr_warmup_iters=20,
    eval_interval=0, eval_iters=4, sample_bytes=64,
)  # fmt: skip
_SIZES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "vocab_size",
    "kv_channels",
)


def _published(name: str, **others: Any) -> dict[str, Any]:
    return {size: getattr(models.MODELS[name], size) for size in _SIZES} | others


# What differs from Settings(). Sources of the others: overlap_train/tools/measure/models.py. mixtral: Mixtral of Experts,
# arXiv 2401.04088, table 1, and config.json of mistralai/Mixtral-8x7B-v0.1.
MODELS: dict[str, dict[str, Any]] = {
    SMALL: {},
    "llama3-8b": _published("llama3-8b", title="Llama-3 8B", rope_base=500000),
    "llama3-70b": _published("llama3-70b", title="Llama-3 70B", rope_base=500000),
    "qwen3-32b": _published("qwen3-32b", title="Qwen3-32B", norm_eps=1e-6, rope_base=1000000, has_qk_norm=True),
    "mixtral-8x7b": dict(
        title="Mixtral 8x7B", num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32,
        num_query_groups=8, vocab_size=32000, rope_base=1000000, experts=8, experts_per_token=2, expert_balance=0.02,
    ),
}  # fmt: skip

# The small model gives a GPU something to do, too.
_SMALL_ON_GPU: dict[str, Any] = dict(
    num_layers=8, hidden_size=1024, ffn_hidden_size=2816, num_attention_heads=16, num_query_groups=8, seq_length=1024,
    micro_batch_size=4, global_batch_size=16, train_iters=150, lr=6e-4, min_lr=6e-5, lr_warmup_iters=20, eval_interval=50,
)  # fmt: skip


def defaults(on_gpu: bool, model: str = SMALL) -> Settings:
    """The defaults of this machine. A published `model` brings its shape, and a batch and learning rate that suit it.

    Raises:
        RecipeError: there is no such model.
    """
    if model not in MODELS:
        raise RecipeError(f"--model {model} is not one of {', '.join(MODELS)}")
    if model != SMALL:
        return replace(Settings(), model=model, **MODELS[model], **_PUBLISHED)
    return replace(Settings(), **_SMALL_ON_GPU) if on_gpu else Settings()


def named_model(arguments: list[str]) -> str:
    """What follows `--model` among the words of a command line; it decides the defaults of other flags."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model", default=SMALL)
    return str(parser.parse_known_args(arguments)[0].model)
