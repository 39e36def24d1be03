"""What compare_mfu is told: the variants and what each is compared with, the flags, and the settings of each model."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from gpt.program import RecipeError, refused_by_rule
from gpt.settings import MODELS, SMALL, Settings, defaults, nothing_overlaps, resolve
from overlap_train import OverlapConfig
from overlap_train.config import METHODS
from overlap_train.flags import (
    Parser,
    add_flags,
    add_options,
    from_args,
    option,
    positive_int,
    positive_int_or_0,
    read_config,
)  # fmt: skip

WARM_UP_STEPS = 3
USAGE = "torchrun --standalone --nproc-per-node RANKS recipes/compare_mfu.py [flags]"

# As many layers as leave room for three variants with their optimizers on four GPUs of 141 GB.
FEW_LAYERS = {SMALL: 2, "llama3-8b": 4, "llama3-70b": 2, "qwen3-32b": 2}

# Baselines first; nccl: our modules by NCCL and cuBLAS, one after the other, which is the method collective.
VARIANTS = (
    *("megatron", "megatron_graph", "nccl", "nccl_graph"),
    *(method for method in METHODS if method not in ("auto", "collective")),
    *("te", "te_again", "te_userbuffers", "te_userbuffers_ring", "te_overlap"),
    *("overlap", "overlap_fp8", "overlap_graph"),
)
USERBUFFERS = ("te_userbuffers", "te_userbuffers_ring")
DEFAULTS = ("megatron", "overlap")
ULYSSES_DEFAULTS = ("nccl", "chunked", "fused", "direct", "overlap")


def is_graph(name: str) -> bool:
    """Whether a variant replays a CUDA graph."""
    return name.endswith("_graph")


def baseline_of(names: Collection[str], name: str) -> str | None:
    """What a variant is compared with: the first baseline among `names`. A graph is compared with a graph."""
    baselines = ("megatron_graph", "nccl_graph") if is_graph(name) else ("megatron", "nccl", "te")
    return next((baseline for baseline in baselines if baseline in names), None)


@dataclass(frozen=True)
class Plan:
    """Every field is a flag. `model` and `layers` go together, one entry a model."""

    model: tuple[str, ...] = option(("llama3-8b",), "what to train", choices=tuple(MODELS))
    layers: tuple[int, ...] = option((), "one number a model; without it, a few", parse=positive_int, metavar="N,...")
    seq_length: int = option(8192, "tokens in a sample", parse=positive_int)
    tp: int = option(0, "tensor-parallel ranks; 0: all that --cp leaves")
    cp: int = option(1, "context-parallel ranks (Ulysses): each has a part of every sequence", parse=positive_int)
    no_sequence_parallel: bool = option(False, "every rank has all rows, which linears all-reduce, on all sides")
    lora: int = option(0, "features of low-rank adapters around frozen linears; 0: none", parse=positive_int_or_0)
    deterministic: bool = option(False, "deterministic kernels on all sides: the same bits on every run")
    micro_batch_size: int = option(1, "samples of one forward and backward pass on one rank", parse=positive_int)
    global_batch_size: int = option(0, "samples of one step; 0: one micro-batch for each data-parallel replica")
    steps: int = option(30, "timed steps of each variant", parse=positive_int)
    round_steps: int = option(5, "steps of a variant before the next one has its turn", parse=positive_int)
    variants: tuple[str, ...] = option(
        (),
        f"what to compare; without it, {','.join(DEFAULTS)}, with --cp {','.join(ULYSSES_DEFAULTS)}",
        choices=VARIANTS,
    )
    weight_gradient_fusion: str = option(
        "on",
        "whether linears add weight gradients into the fp32 buffer inside the GEMM, on all sides",
        choices=("on", "off"),
    )
    te_fp8: str = option(
        "off", "TransformerEngine's recipe, in all its variants", choices=("off", "tensorwise", "delayed", "blockwise")
    )
    seed: int = option(1234, "of weights and the order of samples, the same for all variants", parse=positive_int_or_0)
    quick: bool = option(False, "10 steps in rounds of 2, and fewer rounds for exposed communication")
    peak_tflops: float = option(0.0, "MFU is against this; 0: the data sheet's dense bf16 figure")
    out: str = option("runs/mfu", "folder for JSON, Markdown and the picture")

    @property
    def rounds(self) -> int:
        """How many rounds of steps there are. In each a variant first makes a step that is not timed: ranks come together."""
        return -(-self.steps // self.round_steps)

    @property
    def trained_steps(self) -> int:
        """How many optimizer steps every variant makes."""
        return WARM_UP_STEPS + self.rounds * (self.round_steps + 1)


def read_flags(arguments: list[str], description: str | None = None) -> tuple[Plan, OverlapConfig]:
    """The checked plan and the settings of the overlapped variant. Raises RecipeError for what is unknown, or does not go
    together."""
    parser = Parser("compare_mfu", usage=USAGE, description=description)
    add_flags(add_options(parser, Plan))
    with refused_by_rule():
        args = parser.parse_args(["--overlap-train", *arguments])  # it is always compared
        overlap = read_config(args)
    assert overlap is not None
    plan = from_args(Plan(), args)
    main_grad = "accumulate" if plan.weight_gradient_fusion == "on" else "off"
    if getattr(args, "overlap_train_main_grad", main_grad) != main_grad:
        given = (
            f"--overlap-train-main-grad {overlap.main_grad} with --weight-gradient-fusion {plan.weight_gradient_fusion}"
        )
        raise RecipeError(f"{given}, which decides for all sides; leave the former out")
    overlap = replace(overlap, main_grad=main_grad)
    few = [FEW_LAYERS[model] // (2 if plan.cp > 1 else 1) or 1 for model in plan.model]  # Ulysses leaves weights whole
    plan = replace(
        plan,
        layers=plan.layers or tuple(few),
        variants=tuple(dict.fromkeys(plan.variants)) or (ULYSSES_DEFAULTS if plan.cp > 1 else DEFAULTS),
        **({"steps": 10, "round_steps": 2} if plan.quick else {}),
    )
    if len(plan.layers) != len(plan.model):
        raise RecipeError(f"--layers has {len(plan.layers)} numbers for {len(plan.model)} models; give one for each")
    if plan.no_sequence_parallel and plan.cp > 1:
        raise RecipeError(
            f"--no-sequence-parallel with --cp {plan.cp}: Ulysses does not overlap without; leave one out"
        )
    for name in plan.variants:
        if plan.cp > 1 and name.startswith("megatron"):
            instead = name.replace("megatron", "nccl")
            raise RecipeError(f"--variants {name} with --cp {plan.cp}: it has no context parallelism; take {instead}")
        if name in USERBUFFERS and (plan.cp > 1 or len(plan.model) > 1):
            why = "they have no context parallelism" if plan.cp > 1 else "a process can make them for one --model"
            raise RecipeError(f"--variants {name}: {why}; leave it out")
        if plan.no_sequence_parallel and name in (*USERBUFFERS, "overlap_fp8"):
            raise RecipeError(
                f"--variants {name} with --no-sequence-parallel: it needs sequence parallelism; leave it out"
            )
        if name in USERBUFFERS and plan.te_fp8 == "blockwise":
            raise RecipeError(f"--variants {name} with --te-fp8 blockwise: they have no such buffers; leave it out")
        if name.startswith("te") and plan.lora:
            raise RecipeError(f"--variants {name}: --lora puts adapters around Megatron-Core's linears; leave it out")
    return plan, overlap


def settings_for(plan: Plan, number: int, ranks: int) -> Settings:
    """The settings of the plan's model of this number. Raises RecipeError where they break a rule of the recipe."""
    tp = plan.tp or max(1, ranks // plan.cp)
    settings = replace(
        defaults(plan.model[number] != SMALL, plan.model[number]),
        num_layers=plan.layers[number],
        seq_length=plan.seq_length,
        tp=tp,
        cp=plan.cp,
        micro_batch_size=plan.micro_batch_size,
        global_batch_size=plan.global_batch_size or plan.micro_batch_size * max(1, ranks // (tp * plan.cp)),
        train_iters=plan.trained_steps,
        seed=plan.seed,
        lr=3e-4,
        lr_warmup_iters=20,
        lora=plan.lora,
        deterministic=int(plan.deterministic),
        gradient_accumulation_fusion=plan.weight_gradient_fusion == "on",
        sequence_parallel=not plan.no_sequence_parallel,
    )
    settings = resolve(settings, ranks)
    if plan.cp > 1 and (why := nothing_overlaps(settings)):
        raise RecipeError(f"nothing to compare with {why}")
    if plan.cp > 1 and tp == 1 and "overlap_fp8" in plan.variants:
        given = f"--variants overlap_fp8 with --cp {plan.cp} and --tp 1"
        raise RecipeError(f"{given}: a linear that exchanges is not in fp8; take --tp 2 or more, or leave it out")
    return settings
