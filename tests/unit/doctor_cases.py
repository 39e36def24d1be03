"""What the doctor's tests share: a rank on the second of two nodes, and picking a finding by its status."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from overlap_train.tools.doctor.report import Finding
from overlap_train.tools.measure.world import World


def world(rank: int = 1, size: int = 4, device: str = "cuda") -> World:
    """Rank `rank` of a group on host node1, number 4 + rank in the job. Its group cannot communicate."""
    return World(object(), torch.device(device), rank, size, ("node1",) * size, tuple(range(4, 4 + size)))  # type: ignore[arg-type]


def only(findings: Iterable[Finding], status: str) -> Finding:
    """The one finding that has this status."""
    (finding,) = [finding for finding in findings if finding.status == status]
    return finding
