"""Fixtures of the unit tests."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from overlap_train.select.tiles import tma_reads
from tests.unit import hopper_ptx


@pytest.fixture
def hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """What torch says of an H200; without a GPU it would refuse to answer."""
    tma_reads.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    card = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    yield monkeypatch
    tma_reads.cache_clear()


@pytest.fixture(scope="session")
def compiling() -> Iterator[ProcessPoolExecutor]:
    """One process where kernels are compiled, for all files that ask for it: the protocol tests of this one interpret them."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=hopper_ptx.leave_the_interpreter) as process:
        yield process
