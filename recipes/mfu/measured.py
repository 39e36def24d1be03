"""What is known of one model of a comparison, variant by variant."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

from gpt.settings import Settings
from mfu.layer_timeline import Span
from mfu.names import OVERLAP, is_graph, speed_baseline
from overlap_train.tools.measure.world import World


@dataclass
class Measured:
    """What is known of one model. Keys are names of variants; times are milliseconds, the slowest rank's."""

    settings: Settings
    absent: dict[str, str] = field(default_factory=dict)  # why a variant did not run
    step_ms: dict[str, list[float]] = field(default_factory=dict)  # of each round
    passes_ms: dict[str, float] = field(default_factory=dict)  # forward and backward, without the optimizer
    alone_ms: dict[str, float] = field(default_factory=dict)  # and without the linears' communication; see has_alone
    losses: dict[str, list[float]] = field(default_factory=dict)  # of each step
    same: dict[str, bool] = field(default_factory=dict)  # whether a repeated variant ended with the same bits
    held_bytes: dict[str, int] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    symmetric_bytes: dict[str, int] = field(default_factory=dict)
    calls: dict[str, tuple[int, int]] = field(default_factory=dict)  # overlapped, fallen back
    spans: dict[str, list[Span]] = field(default_factory=dict)

    @property
    def baseline(self) -> str:
        """The variant that the times of others are compared with, but for steps of graphs."""
        return speed_baseline(self.step_ms) or next(iter(self.step_ms), OVERLAP)

    def speed_up(self, name: str) -> float | None:
        """Of a step over the baseline's; of a graph over a graph, and None where no graph of a baseline ran."""
        baseline = speed_baseline(self.step_ms, name) if is_graph(name) else self.baseline
        return None if baseline is None else self.median_ms(baseline) / self.median_ms(name)

    def exposed_ms(self, name: str) -> float | None:
        """How much shorter forward and backward are without the linears' communication; None where that is unknown."""
        return self.passes_ms[name] - self.alone_ms[name] if name in self.alone_ms else None

    def median_ms(self, name: str) -> float:
        return statistics.median(self.step_ms[name])

    def leave_out(self, name: str, problem: str, world: World) -> None:
        """Go on without a variant, and say why."""
        world.say(f" {self.settings.model}: without {name}: {problem}")
        self.absent[name] = problem

    @property
    def reasons(self) -> str:
        """Why each variant that is absent did not run."""
        return "; ".join(f"{name}: {problem}" for name, problem in self.absent.items())
