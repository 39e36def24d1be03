"""launch/run.py: the exit status says how a run ended."""

from __future__ import annotations

import runpy
import signal
import sys
from pathlib import Path

import pytest
import torch.distributed.run
from torch.distributed.elastic.multiprocessing import SignalException

RUN = Path(__file__).parents[2] / "launch" / "run.py"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_status_names_the_signal(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: object) -> None:
        raise SignalException("told to end", sigval=number)

    monkeypatch.setattr(torch.distributed.run, "run", run)
    monkeypatch.setattr(sys, "argv", [str(RUN), "program.py"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(RUN), run_name="__main__")
    assert caught.value.code == 128 + number
