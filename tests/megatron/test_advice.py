"""What the launcher says of a user's arguments when its model is built."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("megatron.training")

from megatron.training import global_vars

from overlap_train.integrations.megatron.launcher import advice

FLAG = "--no-create-attention-mask-in-dataloader"


@pytest.mark.parametrize(
    ("tokens", "makes_masks", "size"),
    [
        (32768, True, "1 GiB"),
        (131072, True, "16 GiB"),
        (16384, True, "0.25 GiB"),
        (32768, False, None),
        (8192, True, None),
    ],
)
def test_large_masks_that_nobody_needs_are_named(
    tokens: int,
    makes_masks: bool,
    size: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    args = SimpleNamespace(seq_length=tokens, create_attention_mask_in_dataloader=makes_masks)
    monkeypatch.setattr(global_vars, "get_args", lambda: args)
    advice.say_what_masks_cost()
    said = capsys.readouterr().out
    assert said.count("\n") == (size is not None)
    if size is not None:
        assert f"{tokens} x {tokens} ({size})" in said and FLAG in said


def test_masks_that_separate_documents_are_needed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    args = SimpleNamespace(seq_length=32768, create_attention_mask_in_dataloader=True, reset_attention_mask=True)
    monkeypatch.setattr(global_vars, "get_args", lambda: args)
    advice.say_what_masks_cost()
    assert capsys.readouterr().out == ""


def test_a_script_without_megatrons_arguments_is_left_alone(capsys: pytest.CaptureFixture[str]):
    advice.say_what_masks_cost()
    assert capsys.readouterr().out == ""
