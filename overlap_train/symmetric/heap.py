"""What every provider of symmetric memory returns."""

from __future__ import annotations

from collections.abc import Callable

import torch


class SymmetricHeap:
    """Zeroed bytes on every rank of a group, each mapped into every rank; of a group of several nodes, into those of its node.

    provider: its name. views: uint8 [nbytes] of each mapped rank, the first of which is `first`. keeps: what keeps them mapped.
    free: gives back what the provider does not by itself.
    """

    def __init__(
        self, provider: str, views: list[torch.Tensor], first: int, keeps: object = None,
        free: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self.provider, self._views, self._first, self._keeps, self._free = provider, views, first, keeps, free

    def view(self, rank: int) -> torch.Tensor:
        """uint8 [nbytes]: the memory of group rank `rank`, as seen from this process."""
        return self._views[rank - self._first]

    def close(self) -> None:
        """Give the memory back. Collective over the group for nvshmem. Views must not be used afterwards."""
        free, self._free = self._free, lambda: None  # it holds memory, too
        self._views, self._keeps = [], None
        free()
