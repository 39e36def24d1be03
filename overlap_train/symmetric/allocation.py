"""What all ranks of a group have, or none of them: memory, a library that has started, a mapping. One that has not is named on
every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from ..config import flag_name
from .agreement import Agreement

T = TypeVar("T")


def on_all_ranks(make: Callable[[], T], agreement: Agreement, what: str) -> T:
    """What `make` returns, if it returns on every rank. Collective. what: what the ranks do here, for errors.

    Raises:
        RuntimeError: on every rank, if one of them raised, with what that one said.
    """
    try:
        made = make()
    except Exception as failure:  # libraries raise classes of their own
        agreement.all_succeed(str(failure) or repr(failure), what)
        raise
    agreement.all_succeed(None, what)
    return made


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
