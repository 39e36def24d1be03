"""A pass to be simulated: its plan, its sizes, and what its parts take on a machine."""

from __future__ import annotations

from dataclasses import dataclass

from . import cost
from .machines import System
from .passes import Pass
from .plan import EnginePlan
from .schedule import A2A_GEMM, EXCHANGES, GEMM_A2A, Topology
from .timeline import Token, arrived


@dataclass(frozen=True)
class Work:
    """call: what its signals are known by."""

    system: System
    plan: EnginePlan
    pass_: Pass
    topology: Topology
    call: str = "call"

    @property
    def world(self) -> int:
        return self.topology.world

    @property
    def m_shard(self) -> int:
        return self.pass_.m // self.world

    @property
    def block_columns(self) -> int:
        """Of what one rank computes for one rank: all, or in GEMM + A2A that rank's."""
        return self.pass_.n // (self.world if self.plan.kind == GEMM_A2A else 1)

    @property
    def shard_bytes(self) -> float:
        """Of one block."""
        return float(self.m_shard * self.pass_.row_features * self.pass_.dtype.itemsize)

    @property
    def collective_us(self) -> float:
        what = cost.all_to_all_us if self.pass_.kind in EXCHANGES else cost.collective_us
        return what(self.system, (self.world - 1) * self.shard_bytes, self.world, self.topology.nodes)

    @property
    def gemm_us(self) -> float:
        """The whole product by the library."""
        return cost.library_gemm_us(self.system, self.pass_.rows, self.pass_.n, self.pass_.k)

    @property
    def part_us(self) -> float:
        """One of W parts of it: one rank's rows, one rank's columns (GEMM + A2A), or the terms of one rank (A2A + GEMM)."""
        return self.chunk_us(1)

    def chunk_us(self, chunks: int) -> float:
        """One of `chunks` equal parts of such a part."""
        depth = self.pass_.k // (self.world if self.plan.kind == A2A_GEMM else 1)
        rows, parts = self.m_shard // chunks, self.world * chunks
        return cost.library_gemm_us(self.system, rows, self.block_columns, depth, parts, self.plan.send_sms)

    def terms_us(self, blocks: int, chunks: int) -> float:
        """Of A2A + GEMM one of `chunks` parts of the product of so many ranks' terms, which is added to a sum in fp32."""
        rows, k = self.m_shard // chunks, self.pass_.k // self.world * blocks
        parts = self.world * chunks // blocks
        product = cost.library_gemm_us(self.system, rows, self.pass_.n, k, parts, self.plan.send_sms)
        return max(product, cost.sum_us(self.system, 8 * rows * self.pass_.n))

    def arrivals(self, chunk: int) -> tuple[Token, ...]:
        """That chunk of every peer."""
        return tuple(arrived(self.call, source, chunk) for source in self.plan.sources)

    def all_arrivals(self) -> tuple[Token, ...]:
        return tuple(token for chunk in range(self.plan.chunks) for token in self.arrivals(chunk))
