"""What both benchmarks are told."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..config import OverlapConfig


@dataclass(frozen=True)
class Settings:
    """methods: of OverlapConfig.method, each a row; dtype: of all inputs; quick: fewer and shorter rounds."""

    methods: tuple[str, ...]
    dtype: torch.dtype
    quick: bool
    config: OverlapConfig
