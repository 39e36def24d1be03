"""The shapes that are measured: weights of operators and pairs of linears of layers.

Operators: Tables 1, 2 (M = 8192), 4 and 5 (M = 32768) of the Ditron paper. Sizes are global: AG+GEMM shards N, GEMM+RS
shards K.
"""

from __future__ import annotations

from dataclasses import dataclass

OPS = ("ag_gemm", "gemm_rs")
PASSES = ("fprop", "dgrad", "wgrad")

# model -> (features inside the MLP, features outside it)
MODELS = {
    "llama-7b": (11008, 4096),
    "llama3-8b": (14336, 4096),  # Mistral-7B has the same shape
    "qwen3-32b": (25600, 5120),
    "seed-oss-36b": (27648, 5120),
    "llama3-70b": (28672, 8192),
    "qwen2-72b": (29568, 8192),
    "gpt3-175b": (49152, 12288),
    "llama3-405b": (53248, 16384),
    # attention: (features of q, k and v together, features outside); the output projection
    "llama3-8b-qkv": (6144, 4096),
    "llama3-8b-proj": (4096, 4096),
    "llama3-70b-qkv": (10240, 8192),
    "llama3-70b-proj": (8192, 8192),
}
TABLES_1_2 = ("llama-7b", "llama3-8b", "llama3-70b", "llama3-405b", "qwen2-72b")
TINY_MODELS = {"tiny": (64, 32)}


@dataclass(frozen=True)
class Case:
    """One pass of one operator: x [M, K], weight [N, K], global sizes.

    op, pass_: ag_gemm is all_gather_linear, gemm_rs linear_reduce_scatter; the dgrad of one runs the engine of the
    other, with N and K still those of the weight.
    """

    model: str
    op: str
    pass_: str
    m: int
    n: int
    k: int

    @property
    def name(self) -> str:
        return f"{self.op} {self.pass_} {self.model} M={self.m} N={self.n} K={self.k}"

    @property
    def kind(self) -> str:
        """What the pass does: gather (AG + GEMM), scatter (GEMM + RS) or weight (the weight gradient)."""
        if self.pass_ == "wgrad":
            return "weight"
        return "gather" if (self.op == "ag_gemm") == (self.pass_ == "fprop") else "scatter"

    def flops(self, world: int) -> float:
        """Of one rank's GEMM; the same in all three passes."""
        return 2 * self.m * self.n * self.k / world


def cases(
    models: list[str], ops: list[str], passes: list[str], ms: list[int], world: int, tiny: bool = False
) -> list[Case]:
    """Every combination, shape by shape, largest M first so that buffers are allocated once.

    Raises:
        ValueError: a model is unknown, or a size cannot be sharded over the ranks.
    """
    table = TINY_MODELS if tiny else MODELS
    unknown = [model for model in models if model not in table]
    if unknown:
        raise ValueError(f"--shapes: {unknown[0]!r} is not one of {', '.join(table)}, all")
    found = []
    for m in sorted(ms, reverse=True):
        check_divisible("--m", m, world)
        for op in ops:
            for model in models:
                inside, outside = table[model]
                check_divisible(f"{model}: features", inside, world)
                n, k = (inside, outside) if op == "ag_gemm" else (outside, inside)
                found += [Case(model, op, pass_, m, n, k) for pass_ in passes]
    return found


@dataclass(frozen=True)
class Layer:
    """One column-parallel and one row-parallel linear: x [s, K1] -> [s, N1], h [s, K2] -> [s, N2]; global sizes.

    Gated MLPs have N1 = 2 K2; attention has the heads' q, k and v in N1. What lies between the two linears is left out.
    """

    name: str
    column_n: int
    column_k: int
    row_n: int
    row_k: int

    def flops(self, sequence: int, world: int) -> float:
        """Of one rank's six GEMMs."""
        return 6 * sequence * (self.column_n * self.column_k + self.row_n * self.row_k) / world


LAYERS = {
    layer.name: layer
    for layer in (
        Layer("llama3-8b-mlp", 2 * 14336, 4096, 4096, 14336),
        Layer("llama3-70b-mlp", 2 * 28672, 8192, 8192, 28672),
        Layer("llama3-8b-attn", 6144, 4096, 4096, 4096),
        Layer("llama3-70b-attn", 10240, 8192, 8192, 8192),
        Layer("qwen3-32b-mlp", 2 * 25600, 5120, 5120, 25600),
        Layer("qwen3-32b-attn", 10240, 5120, 5120, 8192),
        Layer("llama3-405b-mlp", 2 * 53248, 16384, 16384, 53248),
        Layer("llama3-405b-attn", 18432, 16384, 16384, 16384),
        Layer("tiny", 64, 32, 32, 32),
    )
}

# (layer, sequence): the rows of the table of goals first
DEFAULT_LAYERS = (
    ("llama3-8b-mlp", 8192),
    ("llama3-70b-mlp", 8192),
    ("llama3-8b-mlp", 4096),
    ("llama3-8b-attn", 8192),
    ("llama3-70b-attn", 8192),
    ("qwen3-32b-mlp", 8192),
)


def layer_cases(names: list[str], sequences: list[int], world: int) -> list[tuple[Layer, int]]:
    """(layer, sequence) pairs; neither given: the defaults, only sequences given: every default layer with each.

    Raises:
        ValueError: a layer is unknown, or a size cannot be sharded over the ranks.
    """
    unknown = [name for name in names if name not in LAYERS]
    if unknown:
        raise ValueError(f"--layers: {unknown[0]!r} is not one of {', '.join(LAYERS)}")
    if names or sequences:
        names = names or list(dict.fromkeys(name for name, _ in DEFAULT_LAYERS))
        pairs = [(name, sequence) for name in names for sequence in sequences or [8192]]
    else:
        pairs = list(DEFAULT_LAYERS)
    for name, sequence in pairs:
        check_divisible("--seq", sequence, world)
        layer = LAYERS[name]
        for size in (layer.column_n, layer.row_k):
            check_divisible(f"{name}: features", size, world)
    return [(LAYERS[name], sequence) for name, sequence in pairs]


def check_divisible(what: str, size: int, world: int) -> None:
    """Raises ValueError."""
    if size < world or size % world:
        raise ValueError(
            f"{what}: {size} must be divisible by the {world} ranks; choose another size or number of ranks"
        )
