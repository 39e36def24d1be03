"""Fixtures of the unit tests."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest

from tests.unit import hopper_ptx


@pytest.fixture(scope="session")
def compiling() -> Iterator[ProcessPoolExecutor]:
    """One process where kernels are compiled, for all files that ask for it: the protocol tests of this one interpret them."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=hopper_ptx.leave_the_interpreter) as process:
        yield process
