"""The doctor's checks in their order, and what each of them needs before it can begin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from ... import shutdown
from ...symmetric.nvshmem import finalize
from ..measure.world import World, join
from . import environment, gpus, links, memory, network, operator, toolchain, versions
from .collectives import check_collectives
from .flags import Doctor
from .job import CALL_S, Job, Work
from .report import FAIL, WARN, Finding, fail, ok, warn

_LATE = "run again; if it repeats, py-spy dump the named ranks and file an issue with this report"
_DRIVER = "the driver does not answer: nvidia-smi on this host, dmesg for Xid errors"
_JOIN = (
    "NCCL or gloo cannot connect the ranks: NCCL_DEBUG=INFO says why; NCCL_SOCKET_IFNAME / GLOO_SOCKET_IFNAME name the interface "
    "that all hosts share"
)
_ON_GPUS = "GPU ranks"


class Examination:
    """The doctor's checks on this rank. variables: the environment before the doctor changed it."""

    def __init__(self, asked: Doctor, variables: Mapping[str, str], job: Job) -> None:
        self._asked, self._variables, self._job = asked, variables, job
        self._local, self._is_alone = int(variables.get("LOCAL_RANK", "0")), "RANK" not in variables
        self._on_gpu = False
        self._world: World | None = None  # the ranks of this node, once they have joined
        self._all: World | None = None  # those of the job

    def run(self) -> None:
        """Run all checks. What could not be checked is a finding, too."""
        self._check("start", self._start, "a driver that does not answer: nvidia-smi on this host, dmesg")
        self._job.findings += versions.disagreements(self._check("versions", self._versions))
        self._check("environment", lambda: environment.check_environment(self._on_gpu, self._variables))
        self._check(toolchain.NAME, lambda: toolchain.check_toolchain(self._on_gpu, self._variables))
        self._check("gpus", self._gpus, _DRIVER)
        strange = self._differing_devices()
        self._job.findings += strange
        if strange or not self._can_join():
            self._not_checked("how ranks join, symmetric memory, links, operators")
            return
        self._check("join", self._join, _JOIN)
        self._memory()
        self._check("links", self._links)
        seconds = self._asked.seconds or (30.0 if self._on_gpu else 3.0)
        self._operators(seconds)
        self._networks(self._network_settings(seconds))
        self._check("leave", leave)
        if self._job.broken:
            self._not_checked("whatever follows the check that did not end")

    def _check(self, name: str, work: Work, fix: str = _LATE, limit_s: float | None = None) -> list[Finding]:
        return self._job.run(name, work, limit_s or self._asked.limit, fix)

    def _not_checked(self, what: str) -> None:
        self._job.findings.append(Finding("not checked", WARN, what, "", "repair what says FAIL first, then run again"))

    @property
    def _here(self) -> World:
        assert self._world is not None
        return self._world

    def _start(self) -> list[Finding]:
        """Find out whether ranks have GPUs. As the first check it also tells which ranks exist, and on which hosts."""
        self._on_gpu = torch.cuda.is_available()
        return [ok("device", _ON_GPUS if self._on_gpu else "CPU ranks: gloo and shared memory")]

    def _versions(self) -> list[Finding]:
        inventory = versions.read_inventory()
        loaded = torch.cuda.nccl.version() if self._on_gpu else None
        return [
            *versions.check_versions(inventory, self._on_gpu),
            *versions.check_driver(versions.driver_version(), inventory.torch_cuda),
            *versions.check_nccl(loaded, inventory.versions.get("nvidia-nccl-cu13")),
        ]

    def _gpus(self) -> list[Finding]:
        if not self._on_gpu:
            return [gpus.without_gpu()]
        count = torch.cuda.device_count()
        if self._local >= count:
            return [gpus.missing_gpu(self._local, count)]
        torch.cuda.set_device(self._local)
        used = range(count if self._is_alone else min(count, int(self._variables.get("LOCAL_WORLD_SIZE", count))))
        mine = used if self._is_alone else [self._local]
        read = [gpus.read_gpu(index, [other for other in used if other != index]) for index in mine]
        return gpus.check_gpus(read, gpus.read_smi())

    def _differing_devices(self) -> list[Finding]:
        """A finding for each rank without a GPU, if other ranks have one: they would start other backends than these."""
        devices = [finding for finding in self._job.findings if finding.name == "device"]
        if len({finding.measured for finding in devices}) <= 1:
            return []
        strange = fail("device: ranks differ", "", _ON_GPUS, "see this rank's line `gpu visible`")
        return [
            replace(strange, measured=found.measured, rank=found.rank, host=found.host)
            for found in devices
            if found.measured != _ON_GPUS
        ]

    def _can_join(self) -> bool:
        """Whether all checks have ended so far, and no rank misses its GPU."""
        has_no_gpu = any(found.name == "gpu visible" and found.status == FAIL for found in self._job.findings)
        return not (self._job.broken or has_no_gpu)

    def _join(self) -> list[Finding]:
        world = join(may_be_alone=True)
        self._world, self._all = world.node(tuple(self._job.hosts)), replace(world, hosts=tuple(self._job.hosts))
        return check_collectives(world, nodes=len(set(self._job.hosts)))

    def _memory(self) -> None:
        """Check each provider of symmetric memory that ranks may use here."""
        providers = ["torch", "nvshmem"] if self._on_gpu else ["host"]
        for provider in providers if self._asked.provider == "auto" else [self._asked.provider]:
            check = partial(memory.check_memory, provider=provider, call_s=self._asked.limit + CALL_S)
            work = self._needs_ranks(f"rendezvous {provider}", check)
            self._check(f"rendezvous {provider}", work, memory.FIXES[provider])

    def _links(self) -> list[Finding]:
        if self._on_gpu and self._here.size == 1:
            return links.check_alone(self._here, torch.cuda.device_count() if self._is_alone else 1)
        return links.check_links(self._here, self._asked.provider, self._asked.limit + CALL_S)

    def _operators(self, seconds: float) -> None:
        """Check the operators for so many seconds."""

        limit_s = 2 * self._asked.limit + seconds  # kernels are compiled there

        def check(here: World) -> list[Finding]:
            trial = operator.trial_of(here, seconds, self._asked.provider)
            return operator.check_trial(here, replace(trial, call_s=limit_s + CALL_S))

        self._check("operators", self._needs_ranks("operators", check), limit_s=limit_s)

    def _network_settings(self, seconds: float) -> network.Settings:
        asked, call_s = self._asked, self._asked.limit + seconds + CALL_S
        return network.Settings(asked.node_ranks, asked.provider, asked.network, seconds, call_s)

    def _networks(self, settings: network.Settings) -> None:
        """Check what goes between the nodes of the job, by one transport after the other; nothing where it has one rank."""

        def check(transport: str) -> list[Finding]:
            assert self._all is not None
            return network.check_network(self._all, transport, settings) if self._all.size > 1 else []

        for transport in settings.transports(self._on_gpu):
            name = network.name_of(transport)
            self._check(f"before {name}", free)  # NVSHMEM has one world, which until now was of other ranks
            self._check(name, partial(check, transport), limit_s=self._asked.limit + settings.seconds)

    def _needs_ranks(self, name: str, check: Callable[[World], list[Finding]]) -> Work:
        """The check, or, on a node with one GPU rank, a line that says what it needs."""

        def work() -> list[Finding]:
            if self._here.size > 1 or not self._on_gpu:
                return check(self._here)
            ranks = max(2, torch.cuda.device_count())
            fix = f"torchrun --standalone --nproc-per-node {ranks} -m overlap_train doctor"
            return [warn(name, "not checked: one rank on this node", "a rank for each GPU", fix)]

        return work


def free() -> list[Finding]:
    """Free symmetric memory."""
    shutdown()
    finalize()  # memory checks open NVSHMEM without a domain
    return []


def leave() -> list[Finding]:
    """Free symmetric memory and end torch.distributed."""
    free()
    dist.destroy_process_group()
    return []
