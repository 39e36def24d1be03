"""Gathers between nodes, with which the doctor proves that a piece is whole as soon as its signal is there.

Each piece is multiplied by the identity right after the wait for its signal. So the product shows what was there at that moment.
Every number differs from those of earlier rounds, so that late data are wrong everywhere.
"""

from __future__ import annotations

import time
from functools import partial

import torch

from ... import check as check_timeouts
from ...group.domain import OverlapDomain
from ...group.memory import Request, prepare
from ...group.signals import Tag
from ...ops.table import start_gather
from ...select.choose import Choice
from ...select.method import CHUNK_COUNTS, Method
from ..measure.cases import Case
from ..measure.operands import Operands
from ..measure.runs import plan_of
from ..measure.world import World

CHUNKS = CHUNK_COUNTS[2]  # of a block
FEATURES = 8  # of a row: multiplying by the identity takes little beside the network
NUMBERS = 251  # prime; 1 to 251 are exact in bf16
ROUNDS = 5  # between two looks at the clock
_MOST_BYTES = {"cpu": 1 << 20, "cuda": 32 << 20}  # of a block
_MOST_SLOT_BYTES = 512 << 20


class Gathers:
    """Gathers of a group that spans nodes, as this rank sees them. dtype: whose numbers up to 251 are exact."""

    def __init__(self, domain: OverlapDomain, block_bytes: int, dtype: torch.dtype) -> None:
        self._domain, self.topology = domain, domain.topology
        rows = block_bytes // (FEATURES * dtype.itemsize * CHUNKS) * CHUNKS
        self.block_bytes = rows * FEATURES * dtype.itemsize
        self._eye = torch.eye(FEATURES, dtype=dtype, device=domain.device)
        self._numbers = (torch.arange(rows * FEATURES + NUMBERS, device=domain.device) % NUMBERS + 1).to(dtype)
        self._own = self.numbers(self.topology.rank, 0).clone()
        case = Case("", "ag_gemm", "fprop", rows * domain.world_size, FEATURES * domain.world_size, FEATURES)
        choice = Choice(Method("chunked", chunks=CHUNKS), "the doctor's")
        self._plan = plan_of(case, domain, choice, Operands(self._own, self._eye, self._own))
        self._tag = Tag("doctor/network", f"blocks of {rows} x {FEATURES}")

    @property
    def far_pieces(self) -> int:
        """How many pieces one rank gets over the network in a round, itself or by way of another rank of its node."""
        return (self.topology.world - self.topology.local) * CHUNKS

    def numbers(self, source: int, turn: int) -> torch.Tensor:
        """The block [rows, FEATURES] of a rank in a round: a view."""
        first, size = (37 * source + 101 * turn) % NUMBERS, len(self._numbers) - NUMBERS
        return self._numbers[first : first + size].view(-1, FEATURES)

    def broken(self, turn: int) -> torch.Tensor:
        """bool [W, CHUNKS]: which pieces were not whole when their signals were there."""
        own = self.numbers(self.topology.rank, turn).clone()  # aligned
        with self._domain.operator(self._tag, self._plan.slots):
            seen = start_gather(self._domain, self._plan, self._tag, own).matmul(self._eye)
        blocks = seen.chunk(self.topology.world)
        wrong = [(block != self.numbers(source, turn)).view(CHUNKS, -1) for source, block in enumerate(blocks)]
        return torch.stack(wrong).any(dim=2)

    def send(self, turn: int) -> None:
        """Run one gather of a round without its product."""
        with self._domain.operator(self._tag, self._plan.slots):
            start_gather(self._domain, self._plan, self._tag, self._own).gathered_view()


class Trial:
    """Rounds of gathers, and what was wrong in them. counts: int64 [W], pieces that were not whole, by their ranks."""

    def __init__(self, here: World, gathers: Gathers) -> None:
        self._here, self.gathers, self.rounds = here, gathers, 0
        self.counts = torch.zeros(gathers.topology.world, dtype=torch.int64, device=here.device)

    def run(self, seconds: float) -> str | None:
        """Run rounds until the time is up or a piece was not whole, on any rank. Returns what went wrong besides, or None.
        Collective."""
        deadline, error = time.monotonic() + seconds, None
        while error is None:
            error = self._here.attempt(partial(self._some, range(self.rounds, self.rounds + ROUNDS)))
            self.rounds += ROUNDS
            if self._here.any(bool(self.counts.any()) or time.monotonic() > deadline):
                return error
        return error

    def _some(self, turns: range) -> None:
        for turn in turns:
            self.counts += self.gathers.broken(turn).sum(dim=1)
        self._here.synchronize()  # a wait on the GPU gives up there; its output is NaN then, but the reason is the time-out
        check_timeouts()


def connected(domain: OverlapDomain) -> Gathers:
    """Gathers as large as the ranks have memory for, with symmetric memory in each node and connections between. Collective."""
    most = min(_MOST_BYTES[domain.device.type], _MOST_SLOT_BYTES // domain.world_size)
    gathers = Gathers(domain, most, torch.bfloat16 if domain.device.type == "cuda" else torch.float32)
    nbytes = gathers.block_bytes * domain.world_size
    prepare(domain, Request("network", f"blocks of {gathers.block_bytes} bytes", nbytes), None, "overlap-train doctor")
    return gathers
