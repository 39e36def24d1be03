"""Memory that all ranks of a group allocate, or none of them: one that has no room is named on every rank."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..config import flag_name
from .agreement import Agreement


def allocated(make: Callable[[], torch.Tensor], nbytes: int, agreement: Agreement, what: str) -> torch.Tensor:
    """The memory that `make` returns, of `nbytes` bytes. Collective. what: what the ranks do here, for errors.

    Raises:
        RuntimeError: on every rank, if one of them has no room.
    """
    memory, error = None, None
    try:
        memory = make()
    except Exception as failure:  # torch raises RuntimeError, nvshmem4py a class of its own
        error = (
            f"{nbytes} bytes: {failure}; leave more room on its GPU, with fewer rows in a call or less memory for exchanges "
            f"({flag_name('exchange_mib')}), or take another provider ({flag_name('provider')})"
        )
    agreement.all_succeed(error, what)
    assert memory is not None
    return memory
