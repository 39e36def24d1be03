"""A board on which ranks post what they found, over the job's key-value store: a dead rank blocks nobody."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..protocol.watchdog import poll

_LAUNCHER = ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Board:
    """Values by name and rank; JSON. Reading never waits."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self.rank, self.size = store, rank, size

    def post(self, name: str, value: Any) -> None:
        self._store.set(f"{name}/{self.rank}", json.dumps(value))

    def missing(self, name: str) -> list[int]:
        """Ranks that have not posted under `name`."""
        return [rank for rank in range(self.size) if not self._store.check([f"{name}/{rank}"])]

    def read(self, name: str) -> dict[int, Any]:
        """What has been posted under `name`, by rank."""
        absent = self.missing(name)
        ranks = [rank for rank in range(self.size) if rank not in absent]
        return {rank: json.loads(self._store.get(f"{name}/{rank}")) for rank in ranks}

    def wait(self, name: str, limit_s: float, ranks: Iterable[int] | None = None) -> list[int]:
        """Of `ranks` (None: all) those that have still not posted after `limit_s` seconds; [] as soon as all have."""
        wanted = set(range(self.size) if ranks is None else ranks)
        poll(lambda: not wanted.intersection(self.missing(name)), limit_s, lambda _: time.sleep(0.02))
        return sorted(wanted.intersection(self.missing(name)))


def open_board(limit_s: float) -> Board:
    """The board of this job; of this process alone where no launcher has set RANK.

    Connects as torch.distributed does (MASTER_ADDR, MASTER_PORT; torchrun's agent or rank 0 serves) but waits for nobody, so
    that a rank that never came is named later.

    Raises:
        RuntimeError: the store did not answer within `limit_s` seconds.
        ValueError: the launcher's environment is incomplete.
    """
    if "RANK" not in os.environ:
        return Board(dist.HashStore(), 0, 1)
    missing = [name for name in _LAUNCHER if name not in os.environ]
    if missing:
        raise ValueError(f"RANK is set, but {', '.join(missing)} not: start the ranks with torchrun")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    served_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        size,
        rank == 0 and not served_by_agent,
        timedelta(seconds=limit_s),
        wait_for_workers=False,
        multi_tenant=True,
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # a restarted job finds the keys of the earlier one
    return Board(dist.PrefixStore(f"overlap_train.doctor/{attempt}", store), rank, size)
