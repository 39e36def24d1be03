"""What the suite of GPU tests takes for granted, and nothing on a machine without a GPU would notice."""

from __future__ import annotations

import importlib
import pkgutil

from overlap_train import ops as operators
from tests.gpu import conftest


def test_it_cuts_the_sms_of_every_module_that_counts_them() -> None:
    modules = [
        importlib.import_module(f"{operators.__name__}.{each.name}")
        for each in pkgutil.iter_modules(operators.__path__)
    ]
    assert set(conftest.COUNTING) == {module for module in modules if hasattr(module, "multiprocessors")}
