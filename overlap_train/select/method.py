"""The methods: in which ways an operator's pass can run, each with its options. When to take which: docs/choosing.md.

              pushes  cuts  splits  kernels  multiplies  crosses  few_rows
fused           x      x      x        x         x          x
direct                                 x         x
low_latency                            x                             x
chunked         x                                           x
collective                                                  x
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config import METHODS

NAMES = METHODS[1:]  # without auto
CHUNK_COUNTS = (1, 2, 4, 8)  # of a block; a slot has signals for eight


@dataclass(frozen=True)
class Method:
    """A method and the options with which it runs.

    whole: every block in one piece, where `fused` would cut it into chunks (fewer pushes, a longer tail).
    split_reduction: `fused` leaves a scatter's partials to a second kernel, after what its caller does meanwhile: a column
    linear's weight gradient. Own rows may then share tiles with those of peers, which can save a wave of tiles, or half of one.
    barrier_first: the ranks meet before they begin, because the pushes of skewed ranks collide.
    chunks: one of CHUNK_COUNTS, where a group spans nodes: into how many each block is cut. 0: as many as the plan works out.
    """

    name: str
    whole: bool = False
    split_reduction: bool = False
    barrier_first: bool = False
    chunks: int = 0

    @property
    def pushes(self) -> bool:
        """The copy engine sends its blocks; pushes of skewed ranks collide."""
        return self.name in ("fused", "chunked")

    @property
    def cuts(self) -> bool:
        """It cuts blocks into chunks; sending them whole is an option."""
        return self.name == "fused"

    @property
    def splits(self) -> bool:
        """Its reduction may run in a second kernel."""
        return self.name == "fused"

    @property
    def kernels(self) -> bool:
        """It runs kernels of ours, which CPUs have in Triton's interpreter only."""
        return self.name in ("fused", "direct", "low_latency")

    @property
    def multiplies(self) -> bool:
        """It multiplies in such kernels, and not by the library."""
        return self.name in ("fused", "direct")

    @property
    def crosses(self) -> bool:
        """It serves groups that span nodes."""
        return self.name in ("fused", "chunked", "collective")

    @property
    def few_rows(self) -> bool:
        """It serves short gathers and scatters of tensor parallelism only (select/low_latency.py)."""
        return self.name == "low_latency"

    @property
    def is_plain(self) -> bool:
        """Whether it runs without options."""
        return self == Method(self.name)

    @property
    def options(self) -> str:
        """The options in words: "; whole blocks; barrier first"."""
        return (
            "; whole blocks" * (self.whole or self.chunks == 1)
            + f"; blocks in {self.chunks} chunks" * (self.chunks > 1)
            + "; split reduction" * self.split_reduction
            + "; barrier first" * self.barrier_first
        )

    def __str__(self) -> str:
        """ "fused whole barrier first", "chunked in 4"."""
        cut = " whole" * self.whole + f" in {self.chunks}" * bool(self.chunks)
        return self.name + cut + " split" * self.split_reduction + " barrier first" * self.barrier_first


PLAIN = {name: Method(name) for name in NAMES}
