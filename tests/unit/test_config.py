"""OverlapConfig and the flags generated from it."""

from __future__ import annotations

import argparse

import pytest

from overlap_train import OverlapConfig
from overlap_train.flags import add_flags, config_from_args


def _parse(*arguments: str) -> argparse.Namespace:
    return add_flags(argparse.ArgumentParser()).parse_args(arguments)


def test_no_flag_means_no_overlap() -> None:
    assert config_from_args(_parse()) is None


def test_the_switch_alone_gives_the_defaults() -> None:
    assert config_from_args(_parse("--overlap-train")) == OverlapConfig()


def test_flags_reach_the_config() -> None:
    config = config_from_args(
        _parse(
            "--overlap-train", "--overlap-train-slots", "qkv, fc2", "--overlap-train-method", "chunked",
            "--overlap-train-timeout-s", "2.5", "--overlap-train-symmetric-mib", "64",
        )
    )  # fmt: skip
    assert config == OverlapConfig(slots=("qkv", "fc2"), method="chunked", timeout_s=2.5, symmetric_mib=64)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--overlap-train-method fused", "--overlap-train-method given without --overlap-train"),
        ("--overlap-train --overlap-train-timeout-s -1", "timeout_s=-1.0 must be a positive and finite number"),
    ],
)
def test_flags_that_cannot_be_followed_are_one_line(
    flags: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As argparse's own errors, in programs that only call `add_flags` and `config_from_args`."""
    monkeypatch.setattr("sys.argv", ["/home/me/train.py"])
    with pytest.raises(SystemExit, match="2"):
        config_from_args(_parse(*flags.split()))
    said = capsys.readouterr().err
    assert said.startswith("train.py: error: ") and message in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slots": ("qkv", "fc3")}, r"slots=\('qkv', 'fc3'\): 'fc3' is not one of .*--overlap-train-slots"),
        ({"slots": ()}, "slots=.*empty"),
        ({"slots": "qkv"}, "slots='qkv' must be a tuple of"),
        ({"method": ("fused",)}, r"method=\('fused',\) must be one of"),
        ({"method": "magic"}, "method='magic'.*fused"),
        ({"symmetric_mib": 0}, "symmetric_mib=0 must be a positive"),
        ({"symmetric_mib": True}, "symmetric_mib=True must be a positive"),
        ({"exchange_mib": "512"}, "exchange_mib='512' must be a positive"),
        ({"tuning_dir": ""}, "tuning_dir='' must name a folder"),
        (
            {"tune_steps": 20, "method": "chunked"},
            "tune_steps=20 with method='chunked': only auto tries.*--overlap-train-method",
        ),
        ({"network_sms": 6, "network": "nvshmem"}, "network_sms=6 with network='nvshmem', which takes no SMs"),
        ({"timeout_s": 0.0}, "timeout_s=0.0 must be a positive"),
        ({"network_sms": 33}, "network_sms=33 must"),
        ({"reduce_sms": 33}, "reduce_sms=33 must be a number from 1 to 32, or 0.*--overlap-train-reduce-sms"),
        ({"timeout_s": float("nan")}, "timeout_s=nan must be a positive and finite number"),
        ({"timeout_s": "60"}, "timeout_s='60' must be a positive and finite number"),
    ],
)
def test_bad_values_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OverlapConfig(**settings)  # type: ignore[arg-type]


def test_by_a_method_nothing_is_tried() -> None:
    assert OverlapConfig(tune_steps=20).by("chunked") == OverlapConfig(method="chunked")
