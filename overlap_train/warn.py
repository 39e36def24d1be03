"""Warnings of one rank, in the middle of what all ranks of a group do."""

from __future__ import annotations

import sys
import warnings


def warn_user(text: str) -> None:
    """Warn the user. Where warnings are errors (python -W error), print the text: a rank that raised here would leave its peers
    alone, and their next calls would meet calls of this rank that are not the same."""
    try:
        warnings.warn(text, stacklevel=3)
    except Warning:
        print(f"overlap_train: {text}", file=sys.stderr, flush=True)
