"""The calls that tests/gpu/test_operators.py and test_nodes.py make, as far as their kernels differ."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from overlap_train.select.tiling import equal_chunks

Shape = tuple[tuple[int, ...], int, int]  # rows, k, n: as of tests/linear_cases.py


@dataclass(frozen=True)
class Task:
    """One operator at one shape, forward and backward. chunks: 0, as many as the plan takes. node_ranks: 0, all in one node."""

    world: int
    operator: str
    method: str
    dtype: torch.dtype
    shape: Shape
    chunks: int = 0
    node_ranks: int = 0

    @property
    def ranks(self) -> range:
        """Whose kernels are compiled. Kernels know which addresses 16 divides. Across nodes a rank's own block is one of several
        in memory, and begins elsewhere than that of another rank."""
        rows, k, n = self.shape
        row_bytes = math.prod(rows) * self.dtype.itemsize
        aligned = row_bytes * k % 16 == row_bytes * n % 16 == 0
        return range(self.world if self.node_ranks and not aligned else 1)

    def __str__(self) -> str:
        nodes = f" in nodes of {self.node_ranks}" if self.node_ranks else ""
        rows, k, n = self.shape
        chunks = f", {self.chunks} chunks" if self.chunks else ""
        return f"{self.world} ranks{nodes}, {self.operator} by {self.method}, {self.dtype}, {rows} x {k} x {n}{chunks}"


def of_operators(worlds: list[int]) -> Iterator[Task]:
    from tests.gpu.test_operators import SHAPES_OF_TILES
    from tests.linear_cases import OPERATORS

    ragged = [((rows, 1), 264, 520) for rows in (65, 129, 997, 4100)]
    chunks_within_tiles = {"row": (264, 4136), "to_heads": (264, 4136), "column": (4136, 264), "to_rows": (4136, 264)}
    for world, operator, method in itertools.product(worlds, OPERATORS, ("fused", "direct")):
        task = Task(world, operator, method, torch.bfloat16, ((1088, 1), 264, 2040))
        for name, shape in SHAPES_OF_TILES.items():
            if name == "two chunks" and world > 2:  # its fp64 tensors are too large for many a host
                continue
            dtypes = (
                (torch.bfloat16, torch.float16, torch.float32) if name in ("odd", "many tiles") else (torch.bfloat16,)
            )
            yield from (replace(task, dtype=dtype, shape=shape) for dtype in dtypes)
        if operator in ("row", "to_heads"):
            yield task
        if world <= 4:  # as the test
            yield replace(task, shape=((4060, 1), *chunks_within_tiles[operator]))
        yield from (replace(task, shape=shape) for shape in ragged)
        if (world, operator, method) == (2, "row", "fused"):  # a split reduction forward
            yield replace(task, shape=((2050, 1), 4096, 4096))
        for rows, chunks in itertools.product((66, 130, 190, 196), (1, 2, 4)):
            shape = ((rows, 1), 272 + 8 * chunks, 528 + 8 * chunks)
            yield replace(task, shape=shape, chunks=math.gcd(rows, chunks))
    # Sums of partials: their kernel knows which sizes and addresses 16 divides.
    sums = [*ragged, *(shape for name, shape in SHAPES_OF_TILES.items() if name != "two chunks")]
    for world, operator, shape in itertools.product(worlds, ("column", "row"), sums):
        yield Task(world, operator, "chunked", torch.bfloat16, shape)


def of_nodes(worlds: list[int]) -> Iterator[Task]:
    """Two nodes, of half of the ranks each. Of the tests' other shapes only one asks for kernels that these do not have: with the
    rest 16 divides the same numbers."""
    from tests.gpu.test_nodes import LARGE
    from tests.linear_cases import OPERATORS, SHAPES

    shapes = [*LARGE.values(), *SHAPES.values()]
    for world, method, operator in itertools.product(worlds, ("fused", "chunked"), OPERATORS):
        task = Task(world, operator, method, torch.bfloat16, ((64, 1), 128, 64), node_ranks=world // 2)
        for shape in shapes:
            yield replace(task, shape=shape, dtype=torch.float32)
            yield from (replace(task, shape=shape, chunks=chunks) for chunks in _chunk_counts(shape))
        if operator == "column":  # after a twin that goes wrong
            yield task


def _chunk_counts(shape: Shape) -> set[int]:
    """As the plan has it, and as test_every_number_of_chunks_that_the_tuner_may_find_is_exact."""
    return {0, *(equal_chunks(math.prod(shape[0]), most) for most in (1, 2, 8))}
