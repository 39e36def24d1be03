"""What NVSHMEM is told between nodes. NVSHMEM itself is a stand-in that writes down what it is told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_train.nodes.puts import NvshmemPuts
from overlap_train.nodes.transport import Place

STREAM, SET = 77, 9


class Told:
    """The driver and NVSHMEM's bindings, in one order."""

    Signal_op = SimpleNamespace(SIGNAL_SET=SET)

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def copy(self, *arguments: int) -> int:
        self.calls.append(("copy", *arguments))
        return 0

    def check(self, status: int) -> None:
        assert status == 0

    def putmem_signal_on_stream(self, *arguments: int) -> None:
        self.calls.append(("put", *arguments))

    def signal_op_on_stream(self, *arguments: int) -> None:
        self.calls.append(("signal", *arguments))


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def puts(told: Told) -> tuple[NvshmemPuts, int]:
    """With 1000 bytes of memory, of which the last 96 are for staging; and where it starts."""
    made, memory = NvshmemPuts(told, told), torch.zeros(1000, dtype=torch.uint8)  # type: ignore[arg-type]
    made.attach(memory, 904)
    return made, memory.data_ptr()


def test_what_is_sent_is_staged_then_put_with_its_signal(told: Told, puts: tuple[NvshmemPuts, int]) -> None:
    """In one stream. Addresses are the sender's own, in which NVSHMEM finds those of the rank that is named."""
    network, start = puts
    source = torch.arange(6.0)
    network.put(source, Place(receiver=1, rank=3, data=64, signal=8), (5 << 32) + 6, STREAM)
    assert told.calls == [
        ("copy", start + 904, source.data_ptr(), 24, STREAM),
        ("put", start + 64, start + 904, 24, start + 8, (5 << 32) + 6, SET, 3, STREAM),
    ]


def test_a_barrier_puts_words_alone(told: Told, puts: tuple[NvshmemPuts, int]) -> None:
    network, start = puts
    network.put(torch.zeros(0), Place(3, 3, 64, 8), 6, STREAM)
    assert told.calls == [("signal", start + 8, 6, SET, 3, STREAM)]


def test_words_are_unsigned_to_nvshmem(told: Told, puts: tuple[NvshmemPuts, int]) -> None:
    """An epoch of 2^31 and more is a negative number in int64."""
    puts[0].put(torch.zeros(0), Place(3, 3, 64, 8), -(1 << 63) + 6, STREAM)
    assert told.calls[0][2] == (1 << 63) + 6


def test_what_does_not_fit_is_not_sent(told: Told, puts: tuple[NvshmemPuts, int]) -> None:
    for source in (torch.zeros(25), torch.zeros(4, 4).t()[:2]):
        with pytest.raises(AssertionError):
            puts[0].put(source, Place(3, 3, 64, 8), 6, STREAM)
    assert told.calls == []
