"""A pass to be simulated: its plan, its sizes, and what its parts take on a machine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ....ops.plan import EnginePlan
from ....planning import cost
from ....planning.machines import System
from ....schedule.order import A2A_GEMM, EXCHANGES, GEMM_A2A, Topology
from ....select.passes import Pass
from .timeline import Token, arrived

STARTED = "started"
FP32, BF16 = 4, 2  # bytes
ANGLE_BYTES = 8  # of one feature of one row: cos and sin in fp32


@dataclass(frozen=True)
class AttentionSide:
    """What the attention has of a projection: rows in the order of the sequence, which ranks share as a zigzag.

    angle_bytes: of QKV, whose rows are packed as heads: of cos and sin for all rows, which q and k are rotated by. None: of the
    output projection.
    """

    angle_bytes: float | None = None


@dataclass(frozen=True)
class Work:
    """A pass to be simulated: its plan, its sizes, and the machine. what: its signals are known by.

    operator: its number among those of one program. parts: of a product, one after the other, of which this is one; power is that
    of all. x_blocks: blocks of columns in which x of the weight gradient lies, each a product of its own. side: of a
    projection of Ulysses, what the attention has of it; None: rows as they are exchanged, rank after rank. follows: whether
    exchanges of what is gathered again cross before its own.
    """

    system: System
    plan: EnginePlan
    pass_: Pass
    topology: Topology
    what: str = "call"
    operator: int = 0
    parts: int = 1
    x_blocks: int = 1
    side: AttentionSide | None = None
    follows: bool = False

    @cached_property
    def call(self) -> str:
        """What its signals are known by among those of all operators."""
        return f"{self.what} {self.operator}" if self.operator else self.what

    @property
    def begun(self) -> Token:
        """What comes before the first product or push of its operator."""
        return ("begun", self.operator)

    @property
    def started(self) -> Token:
        """The start of its kernel, where that stores at peers. Its launches, if there are several, have it in common."""
        return (STARTED, self.operator)

    @property
    def world(self) -> int:
        return self.topology.world

    @property
    def m_shard(self) -> int:
        return self.pass_.m // self.world

    @property
    def block_columns(self) -> int:
        """The columns of what one rank computes for one rank: all n, or in GEMM + A2A that rank's n/W."""
        return self.pass_.n // (self.world if self.plan.kind == GEMM_A2A else 1)

    @property
    def shard_bytes(self) -> float:
        """Bytes of one block that a peer sends."""
        return float(self.m_shard * self.pass_.row_features * self.pass_.dtype.itemsize)

    @property
    def collective_us(self) -> float:
        what = cost.all_to_all_us if self.pass_.kind in EXCHANGES else cost.collective_us
        return what(self.system, (self.world - 1) * self.shard_bytes, self.world, self.topology.nodes)

    @property
    def kernel_sms(self) -> int:
        """The SMs of a persistent kernel: all but those that it leaves to what runs beside it."""
        return self.system.sms - self.plan.spared_sms

    @property
    def gemm_us(self) -> float:
        """Microseconds of the whole product by the library."""
        return cost.library_gemm_us(self.system, self.pass_.rows, self.pass_.n, self.pass_.k, self.parts)

    @property
    def part_us(self) -> float:
        """Microseconds of one of W parts of the product: one rank's rows, one rank's columns (GEMM + A2A), or the terms of one
        rank (A2A + GEMM)."""
        return self.chunk_us(1)

    def chunk_us(self, chunks: int, late_waves: int = 0) -> float:
        """Microseconds of one of `chunks` equal parts of one rank's part of the product (part_us)."""
        depth = self.pass_.k // (self.world if self.plan.kind == A2A_GEMM else 1)
        rows, parts = self.m_shard // chunks, self.world * chunks * self.parts
        spared = self.plan.spared_sms
        return cost.library_gemm_us(self.system, rows, self.block_columns, depth, parts, spared, late_waves)

    def rows_us(self, chunks: int, late_waves: int = 0) -> float:
        """Microseconds of the product of one of `chunks` equal parts of the rows of A2A + GEMM, of all ranks' terms at once."""
        rows, parts, spared = self.m_shard // chunks, chunks * self.parts, self.plan.spared_sms
        return cost.library_gemm_us(self.system, rows, self.pass_.n, self.pass_.k, parts, spared, late_waves)

    def terms_us(self, blocks: int, chunks: int, is_first: bool, late_waves: int = 0) -> float:
        """Microseconds of the product of `blocks` ranks' terms in A2A + GEMM, or of one of `chunks` equal parts of it. Their sum
        is in fp32: the first product writes twice the bytes of another product, later ones read and write it."""
        rows, k = self.m_shard // chunks, self.pass_.k // self.world * blocks
        parts = self.world * chunks // blocks
        product = cost.library_gemm_us(self.system, rows, self.pass_.n, k, parts, self.plan.spared_sms, late_waves)
        more = FP32 - BF16 if is_first else 2 * FP32 - BF16
        return product + cost.sum_us(self.system, more * rows * self.pass_.n)

    def arrivals(self, chunk: int) -> tuple[Token, ...]:
        """The arrivals of one chunk of every peer's block."""
        return tuple(arrived(self.call, source, chunk) for source in self.plan.sources)

    def all_arrivals(self) -> tuple[Token, ...]:
        return tuple(token for chunk in range(self.plan.chunks) for token in self.arrivals(chunk))
