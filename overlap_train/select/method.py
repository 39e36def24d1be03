"""One pass of one operator, as the choice of a method sees it, and the methods by which it can run, each with its options.
When to take which: docs/choosing.md.

              pushes  cuts  kernels  multiplies  crosses
fused           x      x      x         x          x
direct                        x         x
low_latency                   x
chunked         x                                  x
collective                                         x

pushes: the copy engine sends its blocks; pushes of skewed ranks collide. cuts: it cuts blocks into chunks, and adds a scatter's
partials in its kernel; `whole` and `split_reduction` are options. kernels: it runs kernels of ours, which CPUs have in Triton's
interpreter only. multiplies: it multiplies in such kernels, and not by the library. crosses: it serves groups that span nodes.
low_latency serves short gathers and scatters only (`serving`), and all-reduces.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from ..config import METHODS, flag_name
from ..schedule.kinds import Kind

NAMES = METHODS[1:]  # without auto
CHUNK_COUNTS = (1, 2, 4, 8)  # of a block; a slot has signals for eight
LOW_LATENCY = "low_latency"
# Of what low_latency gathers or scatters: 1024 rows of 16384 features in bf16 (Llama-3 405B). Its words are twice as large, in
# each of three slots: 192 MiB.
MOST_BYTES = 32 << 20
# How low_latency all-reduces, in one kernel: each rank sends all partials to all others, as words with flags, or by stores with
# signals; or each sends shares, and the sum of its own.
WORDS, ONE_SHOT, TWO_SHOTS = "words", "one shot", "two shots"
_WORD_BYTES, _DATA_BYTES = 8, 4  # of a word, and of its data

Bucket = tuple[str, str, int, int, int, int]


@dataclass(frozen=True)
class Pass:
    """One product of one rank, and what it sends or receives.

    kind                       the rank multiplies           a block that a peer sends
    gather    AG + GEMM        [m, k] @ [k, n]               [m/W, k]
    scatter   GEMM + RS        [m, k] @ [k, n]               [m/W, n]
    a2a_gemm  A2A + GEMM       [m/W, k] @ [k, n]             [m/W, k/W]
    gemm_a2a  GEMM + A2A       [m/W, k] @ [k, n]             [m/W, n/W]

    "scatter, wgrad" is a column linear's dgrad, whose reduce-scatter may run under the weight gradient that comes after it.
    m: global rows. dtype: of the result. fp8: both operands have one byte an element. blockwise: and a scale for each block.
    twice: what is sent is by rows and by columns, for a weight gradient, too.
    """

    kind: Kind
    m: int
    n: int
    k: int
    dtype: torch.dtype
    world: int
    fp8: bool = False
    blockwise: bool = False
    twice: bool = False

    @property
    def dgrad(self) -> Pass:
        """The dgrad that goes with this fprop: dy [m, n] @ b.T [n, k], by the other engine."""
        kind = self.kind.dgrad
        return replace(self, kind=kind, n=self.k, k=self.n, twice=self.blockwise and kind.receives)

    @property
    def rows(self) -> int:
        """The rows that this rank multiplies: m, or m/W in an all-to-all."""
        return self.m // self.world if self.kind.exchanges else self.m

    @property
    def row_features(self) -> int:
        """The features of one row of a block that a peer sends."""
        features = self.k if self.kind.receives else self.n
        return features // self.world if self.kind.exchanges else features

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of a block that a peer sends: of an operand, or of partial sums."""
        if not (self.fp8 and self.kind.receives):
            return self.row_features * self.dtype.itemsize
        return packed_bytes(self.row_features) * (1 + self.twice) if self.blockwise else self.row_features

    @property
    def received_bytes(self) -> int:
        """Bytes of the blocks of all ranks."""
        return self.m * self.row_bytes

    @property
    def sent_bytes(self) -> float:
        """Bytes that one rank sends to all others."""
        return (self.world - 1) / self.world * self.received_bytes

    @property
    def bucket(self) -> Bucket:
        """Passes with the same bucket share a measurement: sizes within a factor of 1.5 of each other."""
        dtype = dtype_name(self.dtype) + "/fp8" * self.fp8 + "/blockwise" * self.blockwise + "/twice" * self.twice
        return self.kind, dtype, self.world, rounded_up(self.m), rounded_up(self.n), rounded_up(self.k)

    def __str__(self) -> str:
        return f"M={self.m} N={self.n} K={self.k}"


def packed_bytes(features: int) -> int:
    """Of a row in fp8 with its scales of blocks (ops/blocks.py)."""
    return -(-features * 33 // 512) * 16


def rounded_up(size: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: powers of two and the middles between them."""
    power = 1 << (size - 1).bit_length()
    middle = power * 3 // 4
    return middle if power >= 4 and size <= middle else power


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Method:
    """A method and the options with which it runs.

    whole: every block in one piece, where `fused` would cut it into chunks (fewer pushes, a longer tail).
    split_reduction: `fused` leaves a scatter's partials to a second kernel, after what its caller does meanwhile: a column
    linear's weight gradient. Own rows may then share tiles with those of peers, which can save a wave of tiles, or half of one.
    barrier_first: a barrier comes first, because the pushes of skewed ranks collide.
    chunks: one of CHUNK_COUNTS, where a group spans nodes: into how many each block is cut. 0: as many as the plan works out.
    """

    name: str
    whole: bool = False
    split_reduction: bool = False
    barrier_first: bool = False
    chunks: int = 0

    @property
    def pushes(self) -> bool:
        return self.name in ("fused", "chunked")

    @property
    def cuts(self) -> bool:
        return self.name == "fused"

    @property
    def kernels(self) -> bool:
        return self.name in ("fused", "direct", LOW_LATENCY)

    @property
    def multiplies(self) -> bool:
        return self.name in ("fused", "direct")

    @property
    def crosses(self) -> bool:
        return self.name in ("fused", "chunked", "collective")

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
        """ "fused; whole blocks; barrier first"."""
        return self.name + self.options


def flagged_bytes(received: int, world: int) -> int:
    """What W blocks of `received` bytes take as the flagged words of low_latency."""
    return world * -(-received // world // _DATA_BYTES) * _WORD_BYTES


def share_bytes(nbytes: int, world: int) -> int:
    """Of so many bytes those that a rank adds up in two shots: each share begins where vector stores may."""
    return -(-nbytes // world // 256) * 256


def all_reduce_memory(received: int, world: int) -> dict[str, tuple[int, int]]:
    """(bytes of blocks, bytes of words) of a slot in which `received` bytes are all-reduced, by how."""
    return {
        WORDS: (0, flagged_bytes(world * received, world)),
        ONE_SHOT: (world * received, 0),
        TWO_SHOTS: (2 * world * share_bytes(received, world), 0),
    }


def refusal(name: str, kind: Kind, nbytes: int) -> str | None:
    """Why low_latency does not serve passes of a kind whose words take so many bytes, or None. name: of the operator."""
    what = f"{name} with method={LOW_LATENCY!r}"
    if kind.exchanges:
        return f"{what}: it serves gathers and scatters, no all-to-alls; use 'auto' or 'direct' ({flag_name('method')})"
    most = flagged_bytes(MOST_BYTES, 1)
    if nbytes > most:
        return (
            f"{what}: what is gathered or scattered takes {nbytes / 2**20:.1f} MiB as words with flags, at most "
            f"{most >> 20} are served, since it sends twice the bytes and pays below about 4 MiB; use 'auto' or 'direct' "
            f"({flag_name('method')})"
        )
    return None


def serving(methods: Iterable[str], pass_: Pass) -> list[str]:
    """Those of the given methods that serve a pass: all, but for low_latency where it does not."""
    words = flagged_bytes(pass_.received_bytes, pass_.world)
    left_out = set() if refusal("", pass_.kind, words) is None else {LOW_LATENCY}
    return [method for method in methods if method not in left_out]
