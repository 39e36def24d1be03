"""Which shapes the benchmarks measure, by the names of models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...schedule.order import A2A_GEMM, GEMM_A2A
from .cases import Case, cases_of, check_divisible
from .models import MODELS, TINY

# Weights of Tables 1 and 2 (M = 8192) of the Ditron paper; Tables 4 and 5 have the same at M = 32768.
TABLES_1_2 = ("llama-7b", "llama3-8b", "llama3-70b", "llama3-405b", "qwen2-72b")
PUBLISHED = tuple(name for name in MODELS if name != TINY)
PARTS = ("", "-qkv", "-proj")
WEIGHTS = tuple(name + part for part in PARTS for name in PUBLISHED)


def weight_of(name: str) -> tuple[int, int]:
    """(features inside, features outside) of `llama3-8b`: one product of its MLP; `-qkv`, `-proj`: its attention's linears."""
    model = MODELS[name.removesuffix("-qkv").removesuffix("-proj")]
    if name.endswith("-qkv"):
        return model.linears["qkv"]
    return model.linears["proj"][1] if name.endswith("-proj") else model.ffn_hidden_size, model.hidden_size


def cases(
    models: Sequence[str], ops: Sequence[str], passes: Sequence[str], ms: Sequence[int], world: int
) -> list[Case]:
    """Every combination, shape by shape, largest M first: buffers are allocated once. "all" names all published weights.

    Raises:
        ValueError: a size cannot be sharded over the ranks.
    """
    return [
        case
        for m in sorted(ms, reverse=True)
        for op in ops
        for name in (WEIGHTS if "all" in models else models)
        for weight in (weight_of(name) if op == "ag_gemm" else weight_of(name)[::-1],)
        for case in cases_of(name, op, weight, m, world, name, passes, "--rows")
    ]


# Table 6 of the Ditron paper: (sequence, heads), of 128 features each; one of q, k and v.
TABLE_6 = tuple((tokens, heads) for heads in (64, 32, 16) for tokens in (262144, 491520))


def exchange_cases(models: Sequence[str], tokens: Sequence[int], passes: Sequence[str], world: int) -> list[Case]:
    """The projections of a Ulysses attention: of models, and of `table6`, which has sequence lengths of its own.

    Raises:
        ValueError: a size cannot be shared by the ranks.
    """
    found = []
    for name in models:
        if name == "table6":
            shapes = [(m, (heads * 128, heads * 128), (heads * 128, heads * 128)) for m, heads in TABLE_6]
        else:
            shapes = [(m, MODELS[name].linears["qkv"], MODELS[name].linears["proj"]) for m in tokens]
        for m, qkv, proj in shapes:
            found += cases_of(name, GEMM_A2A, qkv, m, world, name, passes)
            found += cases_of(name, A2A_GEMM, proj, m, world, name, passes)
    return found


@dataclass(frozen=True)
class Layer:
    """One column-parallel and one row-parallel linear: x [s, K1] -> [s, N1], h [s, K2] -> [s, N2]; global sizes.

    What a model computes between the two is left out.
    """

    name: str
    column_n: int
    column_k: int
    row_n: int
    row_k: int

    def flops(self, sequence: int, world: int) -> float:
        """Floating-point operations of one rank's six GEMMs."""
        return 6 * sequence * (self.column_n * self.column_k + self.row_n * self.row_k) / world


LAYERS = {
    f"{name}-{half}": Layer(f"{name}-{half}", *model.linears[column], *model.linears[row])
    for name, model in MODELS.items()
    for half, column, row in (("mlp", "fc1", "fc2"), ("attn", "qkv", "proj"))
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


def layer_cases(names: Sequence[str], sequences: Sequence[int], world: int) -> list[tuple[Layer, int]]:
    """(layer, sequence) pairs; neither given: the defaults, only sequences given: every default layer with each.

    Raises:
        ValueError: a size cannot be sharded over the ranks.
    """
    if names or sequences:
        names = names or list(dict.fromkeys(name for name, _ in DEFAULT_LAYERS))
        pairs = [(name, sequence) for name in names for sequence in sequences or [8192]]
    else:
        pairs = list(DEFAULT_LAYERS)
    for name, sequence in pairs:
        check_divisible("--seq", sequence, world)
        for size in (LAYERS[name].column_n, LAYERS[name].row_k):
            check_divisible(f"{name}: features", size, world)
    return [(LAYERS[name], sequence) for name, sequence in pairs]
