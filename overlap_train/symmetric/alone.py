"""The heap of a GPU that is alone in its node: nobody maps it."""

from __future__ import annotations

import torch

from .agreement import Agreement


class AloneHeap:
    """The SymmetricHeap of a GPU that is alone in its node: memory of torch that nobody maps."""

    provider = "alone"

    def __init__(self, agreement: Agreement, nbytes: int, device: torch.device) -> None:
        error = None
        try:
            self._memory = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            torch.cuda.synchronize(device)
        except RuntimeError as failure:
            error = f"{nbytes} bytes: {failure}"
        agreement.all_succeed(error, "overlap_train: allocate memory")

    def view(self, rank: int) -> torch.Tensor:
        return self._memory

    def close(self) -> None:
        del self._memory
