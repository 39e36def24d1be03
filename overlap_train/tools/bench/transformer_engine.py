"""TransformerEngine as a rival, where it is importable. What goes wrong in it is a note, and it has a time limit.

Ours are measured and saved first. Then all take turns once more, with it among them (te_linears.py, te_attention.py).
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

# It compiles its own code at its first call, which takes up to a minute; one layer or block is measured in seconds.
LIMIT_S = 240.0
# UB_SKIPMC: userbuffers over CUDA IPC and never NVLink multicast, which machines may forbid.
# UB_TIMEOUT: seconds that one of its kernels waits for a peer, by default 110.
ENVIRONMENT = {"UB_SKIPMC": "1", "UB_TIMEOUT": "20"}


def load(session: Session) -> Any:
    """`transformer_engine.pytorch`; None on all ranks, with a note, where it cannot be imported on one of them. Collective."""
    os.environ.update(ENVIRONMENT)  # read when userbuffers start
    problem = session.world.attempt(_module)
    if problem is None:
        return _module()
    session.results.note(f"te: {problem}", failure=False)  # the same words for each layer: notes are printed once
    return None


def _module() -> Any:
    if importlib.util.find_spec("transformer_engine") is None:
        raise RuntimeError("transformer_engine is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("transformer_engine.pytorch")


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """End this process where the work within takes longer, with the stack of each thread; torchrun then ends the other ranks.

    An exception would not do: userbuffers wait in C++, for a rank that may have failed. Rows of before are saved by then.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
