"""The parts of recipes/pretrain_gpt.py; `torchrun recipes/pretrain_gpt.py` puts this package's folder on sys.path."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]


def check_packages(program: str) -> None:
    """Exit with status 2 and one line of rank 0 where a package is missing. Call it before other packages are imported."""
    missing = [name for name in ("torch", "megatron.core", "overlap_train") if not _is_there(name)]
    if missing:
        if os.environ.get("RANK", "0") == "0":
            install = f"{sys.executable} -m pip install -e '{CHECKOUT}[megatron]'"
            print(f"{program}: error: {', '.join(missing)} not installed; run: {install}", file=sys.stderr)
        sys.exit(2)


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the package that `name` is in
        return False
