"""TransformerEngine as a baseline, where it is importable. What goes wrong in it is a note, and it has a time limit.

Ours are measured and saved first. Then all take turns once more, with it among them (layers.py, attention.py).
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..measure.runs import Session

LIMIT_S = 240.0  # beside what timing takes: it compiles its own code at its first call, which takes up to a minute


def load(session: Session) -> Any:
    """`transformer_engine.pytorch`; None on all ranks, with a note, where it cannot be imported on one of them. Collective."""
    problem = session.world.attempt(_module)
    if problem is None:
        return _module()
    session.results.note(f"te: {problem}", failure=False)  # the same words for each layer: notes are printed once
    return None


def _module() -> Any:
    if importlib.util.find_spec("transformer_engine") is None:
        raise RuntimeError("transformer_engine is not installed")
    os.environ["UB_SKIPMC"] = "1"  # userbuffers over CUDA IPC and never NVLink multicast, which machines may forbid
    os.environ.setdefault("UB_TIMEOUT", "20")  # seconds that one of its kernels waits for a peer; 110 by itself
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("transformer_engine.pytorch")


@contextmanager
def limited(without_s: float) -> Iterator[None]:
    """End this process where the work within takes too long, with the stack of each thread; torchrun then ends the other ranks.

    An exception would not do: userbuffers wait in C++, for a rank that may have failed. Rows of before are saved by then.
    without_s: what the same timing took without it.
    """
    faulthandler.dump_traceback_later(LIMIT_S + 3 * without_s, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
