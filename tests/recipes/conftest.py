"""The recipes: training, checkpoints, compare_mfu; and the benchmark against a stand-in for
TransformerEngine. Skipped without megatron-core."""

from __future__ import annotations

import importlib.util
import os

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # why: tests/megatron/conftest.py

if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from tests.megatron.conftest import workers  # noqa: F401 -- a fixture
