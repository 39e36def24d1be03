"""Fixtures of the Megatron-Core tests; the whole folder is skipped where megatron-core is not installed."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest

# Megatron-Core hands small functions to torch.compile, whose C++ compiler takes up to 20 seconds in each of the processes here.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from tests.megatron.workers import Workers

    @pytest.fixture(scope="session")
    def workers() -> Iterator[Workers]:
        """Two CPU processes in one gloo group."""
        pool = Workers()
        yield pool
        pool.stop()
