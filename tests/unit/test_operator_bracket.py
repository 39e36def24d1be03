"""The bracket of an operator that cannot begin: whatever it has pushed is joined, and no slot counts as free."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from overlap_train.domain import _Operator


def test_a_begin_that_raises_ends_as_the_operator_would() -> None:
    domain = Mock()
    domain.workspace.begin.side_effect = RuntimeError("the CUDA driver refused")
    with pytest.raises(RuntimeError, match="refused"):
        _Operator(domain, "fc1/dgrad", 2, True).__enter__()
    domain.engine.join.assert_called_once_with()
    domain.workspace.use.doubt.assert_called_once_with()
