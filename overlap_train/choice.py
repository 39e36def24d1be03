"""Which method runs, and why. The reason is part of the answer: what ran is never silent (docs/design.md, rule 8)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Choice:
    """A method of one operator pass and the reason for it."""

    method: str
    reason: str


def choose(requested: str, rows: int | None, device: torch.device) -> Choice:
    """The method for a pass over `rows` = M global rows (None: not known yet).

    `auto` is a model-based default until the tuner exists: below about 1024 rows the GEMMs of a layer take less time than the
    host needs for the pushes, and NCCL's own small-message path wins.
    """
    if requested != "auto":
        return Choice(requested, "asked for")
    if device.type != "cuda":
        return Choice("chunked", "auto: CPU tensors")
    if rows is None:
        return Choice("chunked", "auto: chunked, or collective where M is at most 1024")
    if rows <= 1024:
        return Choice("collective", f"auto: M={rows} is at most 1024")
    return Choice("chunked", "auto: default for M above 1024")
