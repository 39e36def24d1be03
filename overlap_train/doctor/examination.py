"""The order of the checks, and how each of them gets what it needs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from . import environment, gpus, joining, links, memory, operator, versions
from .place import Place
from .report import FAIL, WARN, Finding
from .running import Check, Runner

_LATE_FIX = "run again; if it repeats, py-spy dump the named ranks and file an issue with this report"


class Examination:
    """The checks in their order, and where they run: `place` changes when the ranks have joined."""

    def __init__(self, args: argparse.Namespace, variables: dict[str, str], runner: Runner) -> None:
        self._args, self._variables, self._runner = args, variables, runner
        self._rank, self._size = int(variables.get("RANK", "0")), int(variables.get("WORLD_SIZE", "1"))
        self._local = int(variables.get("LOCAL_RANK", "0"))
        self._alone = "RANK" not in variables
        self._place: Place | None = None

    def run(self) -> None:
        self._here()
        if not self._fit_to_join():
            self._not_checked("how ranks join, symmetric memory, links, operators")
            return
        self._check("join", self._join, joining.FIX)
        for provider in self._providers():
            self._check(f"rendezvous {provider}", partial(self._memory, provider), memory.FIXES[provider])
        self._check("links", self._links, _LATE_FIX)
        seconds = self._seconds()
        kernels_compile = 2 * self._args.limit
        self._check("operators", self._operators, _LATE_FIX, kernels_compile + seconds)
        self._check("leave", joining.leave, _LATE_FIX)
        if self._runner.broken:
            self._not_checked("whatever follows the check that did not end")

    def _here(self) -> None:
        """What needs no peer. `start` also tells which ranks exist, and on which hosts."""
        self._check("start", self._start, "a driver that does not answer: nvidia-smi on this host, dmesg")
        found = self._check("versions", self._versions, _LATE_FIX)
        self._runner.findings += versions.disagreements(found)
        self._check("environment", lambda: environment.check_environment(self.place, self._variables), _LATE_FIX)
        self._check("gpus", self._gpus, "the driver does not answer: nvidia-smi on this host, dmesg for Xid errors")

    @property
    def place(self) -> Place:
        assert self._place is not None
        return self._place

    def _check(
        self, name: str, run: Callable[[], list[Finding]], fix: str, limit_s: float | None = None
    ) -> list[Finding]:
        return self._runner.run(Check(name, run, limit_s or self._args.limit, fix))

    def _start(self) -> list[Finding]:
        device = torch.device("cuda", self._local) if torch.cuda.is_available() else torch.device("cpu")
        host = self._runner.hosts[self._rank]
        self._place = Place(0, 1, None, device, (host,), (self._rank,))
        return [self._place.ok("device", "GPU ranks" if device.type == "cuda" else "CPU ranks: gloo and shared memory")]

    def _versions(self) -> list[Finding]:
        inventory = versions.read_inventory()
        found = versions.check_versions(self.place, inventory)
        found += versions.check_driver(self.place, versions.driver_version(), inventory.torch_cuda)
        loaded = torch.cuda.nccl.version() if self.place.device.type == "cuda" else None
        return found + versions.check_nccl(self.place, loaded, inventory.versions.get("nvidia-nccl-cu13"))

    def _gpus(self) -> list[Finding]:
        if self.place.device.type != "cuda":
            return gpus.without_gpu(self.place)
        count = torch.cuda.device_count()
        if self._local >= count:
            return [gpus.missing_gpu(self.place, self._local, count)]
        torch.cuda.set_device(self.place.device)
        used = range(count if self._alone else min(count, int(self._variables.get("LOCAL_WORLD_SIZE", count))))
        return gpus.check_gpus(self.place, gpus.read_gpus(self.place, used, self._alone), gpus.read_smi())

    def _fit_to_join(self) -> bool:
        """Ranks with and without GPU would start different backends and wait for each other."""
        devices = [finding for finding in self._runner.findings if finding.name == "device"]
        if len({finding.measured for finding in devices}) > 1:
            self._runner.findings += [
                replace(
                    f,
                    name="device: ranks differ",
                    status=FAIL,
                    expected="GPU ranks",
                    fix="see this rank's line `gpu visible`",
                )
                for f in devices
                if f.measured != "GPU ranks"
            ]
            return False
        no_gpu = any(f.name == "gpu visible" and f.status == FAIL for f in self._runner.findings)
        return not (self._runner.broken or no_gpu)

    def _join(self) -> list[Finding]:
        self._place = joining.join_alone(self.place) if self._alone else joining.join_ranks(self._runner.hosts)
        return joining.check_collectives(self.place, self._size)

    def _providers(self) -> list[str]:
        if self._args.provider != "auto":
            return [self._args.provider]
        return ["torch", "nvshmem"] if torch.cuda.is_available() else ["host"]

    def _memory(self, provider: str) -> list[Finding]:
        if self._one_gpu():
            return [self._needs_ranks(f"rendezvous {provider}")]
        return memory.check_memory(self.place, provider)

    def _links(self) -> list[Finding]:
        if self._one_gpu():
            count = torch.cuda.device_count() if self._alone else 1
            return links.check_alone(self.place, count)
        return links.check_links(self.place, self._args.provider)

    def _operators(self) -> list[Finding]:
        if self._one_gpu():
            return [self._needs_ranks("operators")]
        return operator.check_operator(self.place, operator.trial_of(self.place, self._seconds(), self._args.provider))

    def _one_gpu(self) -> bool:
        return self.place.size == 1 and self.place.device.type == "cuda"

    def _needs_ranks(self, name: str) -> Finding:
        fix = f"torchrun --nproc-per-node {max(2, torch.cuda.device_count())} -m overlap_train doctor"
        return self.place.warn(name, "not checked: one rank on this node", "a rank for each GPU", fix)

    def _seconds(self) -> float:
        return self._args.seconds or (30.0 if torch.cuda.is_available() else 3.0)

    def _not_checked(self, what: str) -> None:
        self._runner.findings.append(
            Finding("not checked", WARN, what, "", "repair what says FAIL first, then run again")
        )
