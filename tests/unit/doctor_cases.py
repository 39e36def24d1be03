"""What the doctor's tests share: a rank on the second of two nodes, and picking a finding by its status."""

from __future__ import annotations

import torch

from overlap_train.doctor.place import Place
from overlap_train.doctor.report import Finding


def place(rank: int = 1, size: int = 4, device: str = "cuda") -> Place:
    """Rank `rank` of a group on host node1, number 4 + rank in the job. Its group cannot communicate."""
    return Place(rank, size, object(), torch.device(device), ("node1",) * size, tuple(range(4, 4 + size)))  # type: ignore[arg-type]


def only(findings: list[Finding], status: str) -> Finding:
    """The one finding that has this status."""
    (finding,) = [finding for finding in findings if finding.status == status]
    return finding
