"""What was measured and what is planned, side by side."""

from __future__ import annotations

from dataclasses import dataclass

HOST = "host"  # until the call returned
WHAT = ("gemm", "comm", "sequence", HOST)  # columns of rows besides the method's


@dataclass(frozen=True)
class Compared:
    """One figure of a record, predicted and measured. what: a method, or one of WHAT. is_fitted: it is among those that the
    figures were fitted to."""

    record: str
    case: str
    what: str
    predicted_us: float
    measured_us: float
    is_fitted: bool = False

    @property
    def error(self) -> float:
        """+0.1: the prediction is 10 % too long."""
        return self.predicted_us / self.measured_us - 1

    @property
    def is_method(self) -> bool:
        return self.what not in WHAT
