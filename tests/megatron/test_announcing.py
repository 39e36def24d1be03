"""The second table: printed behind the first step where a linear ran otherwise than announced, and only then."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from overlap_train.choice import Choice
from overlap_train.integrations.megatron import announcing, reporting
from overlap_train.tuned.ways import Way

FUSED, CHUNKED = Choice("fused", "any M"), Choice("chunked", "a long GEMM")


@pytest.fixture
def linear(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An overlapped linear as far as announcing.py looks at it, of a model with no other."""
    linear = SimpleNamespace(
        weight=None, overlap=SimpleNamespace(fallback_calls=Counter()), ran=(FUSED, FUSED), standing=None
    )
    monkeypatch.setattr(announcing, "OVERLAPPED", {"Megatron's": SimpleNamespace})
    monkeypatch.setattr(announcing, "named_linears", lambda chunk: [("fc1", linear)])
    monkeypatch.setattr(announcing, "choices", lambda linear: linear.ran)
    monkeypatch.setattr(announcing, "expected_choices", lambda linear: (FUSED, FUSED))
    monkeypatch.setattr(announcing, "standing_reason", lambda linear, weight: linear.standing)
    monkeypatch.setattr(announcing, "report", lambda chunks: reporting.Report(()))
    return linear


def printed(capsys: pytest.CaptureFixture[str]) -> bool:
    announcing.announce_changes(torch.nn.Identity())
    return "what has run, now that sizes are known:" in capsys.readouterr().out


def test_what_ran_as_announced_is_not_said_again(linear: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    linear.ran = (Choice("fused", "another reason"), FUSED)
    assert not printed(capsys)


@pytest.mark.parametrize("ran", [(FUSED, CHUNKED), (FUSED, Choice("fused", "any M", Way(in_step=True)))])
def test_another_method_or_another_way_is(
    linear: SimpleNamespace, ran: tuple[Choice, Choice], capsys: pytest.CaptureFixture[str]
) -> None:
    linear.ran = ran
    assert printed(capsys)


def test_a_call_that_fell_back_is(linear: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    linear.overlap.fallback_calls["autocast"] += 1
    assert printed(capsys)
    linear.standing = "generalized tensor parallelism"  # which the first table said
    assert not printed(capsys)
