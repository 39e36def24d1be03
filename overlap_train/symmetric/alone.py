"""The heap of a GPU that is alone in its node: nobody maps it."""

from __future__ import annotations

import torch

from .agreement import Agreement, allocated


class AloneHeap:
    """The SymmetricHeap of a GPU that is alone in its node: memory of torch that nobody maps."""

    provider = "alone"

    def __init__(self, agreement: Agreement, nbytes: int, device: torch.device) -> None:
        def make() -> torch.Tensor:
            memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            torch.cuda.synchronize(device)
            return memory

        self._memory = allocated(make, nbytes, agreement, "overlap_train: allocate memory")

    def view(self, rank: int) -> torch.Tensor:
        return self._memory

    def close(self) -> None:
        del self._memory
