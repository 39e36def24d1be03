"""One clear line and a non-zero exit for what a user can put right; a traceback is for bugs only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class RecipeError(Exception):
    """A mistake of the user or of the machine, raised on every rank with the same text; rank 0 prints it as a line."""


@contextlib.contextmanager
def refused_by_rule() -> Iterator[None]:
    """Turn a library's ValueError, which names argument, value and rule, into a RecipeError."""
    try:
        yield
    except ValueError as error:
        raise RecipeError(" ".join(str(error).split())) from error
