"""A variant in training: its model and optimizer, the batches that all variants share, and what its steps have shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
import torch.distributed as dist
from megatron.core import parallel_state

import overlap_train
from gpt.data import Batch, batches, training_samples
from gpt.graph import GraphedTrainer
from gpt.settings import Settings
from gpt.training import Trainer, data_share, micro_batches
from mfu.alone import Wholes, without_communication
from mfu.current import Layouts
from mfu.plan import WARM_UP_STEPS
from mfu.variants import Built, build_variant, settings_of
from overlap_train import OverlapConfig


@dataclass
class Trained:
    """A variant in training.

    fingerprint: of its initial weights. held_bytes: parameters, gradients, optimizer and any other memory that stays. peak_bytes:
    the most that this variant alone holds during a step, while others hold memory beside it.
    """

    name: str
    built: Built
    batches: Sequence[Batch]  # micro-batches of all steps, on the device
    fingerprint: torch.Tensor
    wholes: Wholes
    held_bytes: int = 0
    peak_bytes: int = 0
    totals: list[torch.Tensor] = field(default_factory=list)  # (Σ nats, Σ bytes) of each step

    @property
    def trainer(self) -> Trainer:
        return self.built.trainer

    def step(self, _: int = 0) -> None:
        """One optimizer step on the next global batch. A timed call is given an index, which means nothing here."""
        self.built.layout.use()
        total, _ = self.trainer.step(iter(self._micro_batches(len(self.totals))))
        self.totals.append(total)

    def forward_backward(self, _: int = 0) -> None:
        """Gradients of the first global batch; weights stay as they are."""
        self.built.layout.use()
        self.trainer.forward_backward(iter(self._micro_batches(0)))

    def forward_backward_alone(self, _: int = 0) -> None:
        """As forward_backward, without the communication of the linears."""
        with without_communication(self.trainer.model.bare, self.wholes):
            self.forward_backward()

    def capture(self) -> None:
        """Capture the passes of a graph variant; collective. The graph's memory stays, and counts from here on."""
        assert isinstance(self.trainer, GraphedTrainer)
        self.built.layout.use()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        self.trainer.capture(self._micro_batches(0))
        self.held_bytes += torch.cuda.memory_reserved() - before
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def release(self) -> None:
        """Free what the device must not hold when process groups end; collective."""
        self.trainer.release()
        if self.built.userbuffers is not None:
            self.built.userbuffers.release()

    def losses(self) -> list[float]:
        """Nats per byte of every step, over all replicas and parts of sequences; collective."""
        self.built.layout.use()
        totals = torch.stack(self.totals)
        dist.all_reduce(totals, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        return (totals[:, 0] / totals[:, 1]).tolist()

    def _micro_batches(self, step: int) -> Sequence[Batch]:
        count = micro_batches(self.trainer.settings)
        return self.batches[step * count : (step + 1) * count]


class Shared:
    """What the variants of one model have in common: settings, the overlap asked for, layouts, and batches on the device."""

    def __init__(self, settings: Settings, overlap: OverlapConfig, device: torch.device, layouts: Layouts) -> None:
        self.settings, self.overlap, self.device, self.layouts = settings, overlap, device, layouts
        self._batches: dict[int, list[Batch]] = {}

    def batches(self, settings: Settings) -> list[Batch]:
        """The micro-batches of every step that this rank sees, on the device before anything is timed; collective."""
        self.layouts.use(settings)
        if settings.cp not in self._batches:
            stream = batches(training_samples(settings), 0, settings, data_share(), self.device)
            self._batches[settings.cp] = list(islice(stream, settings.train_iters * micro_batches(settings)))
        return self._batches[settings.cp]


def start(name: str, shared: Shared) -> Trained:
    """Build a variant and take its first steps, in which kernels compile and the optimizer's state is made; collective.

    None of these steps is captured: all variants share a heap, which cannot grow once a graph knows it.
    """
    device, data = shared.device, shared.batches(settings_of(name, shared.settings))
    before = _allocated(device)
    built = build_variant(name, shared.settings, shared.overlap, device, shared.layouts)
    wholes = Wholes(shared.settings.tp, built.main_grad)
    trained = Trained(name, built, data, fingerprint(built.trainer.model.bare), wholes)
    for _ in range(WARM_UP_STEPS - 1):
        trained.step()
    during = _allocated(device)
    trained.held_bytes = during - before
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    trained.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        trained.peak_bytes = trained.held_bytes + torch.cuda.max_memory_allocated(device) - during
    overlap_train.check()
    return trained


@torch.no_grad()
def fingerprint(model: torch.nn.Module) -> torch.Tensor:
    """The sum of squares of each parameter, fp64 [parameters], the smallest first; equal for equal weights.

    Sorted, because TransformerEngine's modules have the same parameters in another order.
    """
    squares = [parameter.float().square().sum().double() for parameter in model.parameters()]
    return torch.stack(squares).sort().values


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
