"""cuBLAS of simulated GPUs that span nodes: on how many SMs each product counts, and whether the network held some meanwhile.

The real `Blas`, above a library that only remembers what it was told. As of cuBLAS, what holds when a product is enqueued counts,
and 0 stands for all SMs.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.protocol.interleaving import Scheduler
from tests.protocol.simulated_gpu import Operation
from tests.protocol.simulated_ranks import core

SMS, NETWORK_SMS = 132, 4


@dataclass
class Product:
    """A library product. sms: that it counts on. beside: an exchange of its rank was under way when it ran."""

    rank: int
    name: str
    sms: int
    beside: bool = False


class SimulatedBlas:
    """That of all ranks; a rank is the handle of its own. crossing: how many exchanges of a rank hold SMs now."""

    def __init__(self) -> None:
        self.products: list[Product] = []
        self.crossing: Counter[int] = Counter()
        self._told: dict[int, int] = {}

    def patch(self, scheduler: Scheduler) -> None:
        """Forget the run before, and give each rank its handle in this one."""
        for memory in (self.products, self.crossing, self._told):
            memory.clear()
        scheduler.patch(torch.cuda, "current_blas_handle", lambda: scheduler.running_actor().rank)

    def of_a_rank(self) -> Any:
        """The real Blas above this library."""

        def set_count(handle: int, count: int) -> int:
            self._told[handle] = count
            return 0

        def get_count(handle: int, count: Any) -> int:
            count._obj.value = self._told.get(handle, 0)
            return 0

        library = SimpleNamespace(cublasGetSmCountTarget=get_count, cublasSetSmCountTarget=set_count)
        of_gpu = SimpleNamespace(multi_processor_count=SMS)
        with (
            mock.patch.object(ctypes, "CDLL", return_value=library),
            mock.patch.object(torch.cuda, "get_device_properties", return_value=of_gpu),
        ):
            return core("gpu.driver").Blas(torch.device("cuda", 0))

    def sms(self, rank: int) -> int:
        """How many a product that the rank enqueues now counts on."""
        return self._told.get(rank, 0) or SMS

    def enqueued(self, rank: int, operation: Operation) -> Operation:
        """The operation, watched if it is a product."""
        if "mm" not in operation.name:
            return operation
        product, run = Product(rank, operation.name, self.sms(rank)), operation.run
        self.products.append(product)

        def watched() -> None:
            product.beside = self.crossing[rank] > 0
            run()

        return Operation(operation.name, watched)

    def check(self) -> None:
        """Every product left the SMs that the network held, and nothing is spared any more."""
        greedy = [product for product in self.products if product.beside and product.sms != SMS - NETWORK_SMS]
        assert not greedy, f"{len(greedy)} products beside the network, the first {greedy[0]}"
        assert not any(self._told.values()), f"products of ranks go on sparing: {self._told}"
