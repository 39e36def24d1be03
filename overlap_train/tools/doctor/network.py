"""What can carry data between nodes, one transport after the other: is a piece whole as soon as its signal is there, and how fast
do pieces go?

    gloo      between CPU processes
    nccl      between GPUs: send and receive, in a communicator of its own
    nvshmem   between GPUs: puts

All ranks gather what each of them has (gathers.py), by the engine that a column linear has there.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace

import torch.distributed as dist

from ... import OverlapConfig
from ...group.domain import OverlapDomain
from ...group.registry import domain_of
from ..measure import timing
from ..measure.world import World
from .gathers import CHUNKS, Gathers, Trial, connected
from .report import Finding, fail, ok, warn

NAME = "network"
GLOO, NCCL, NVSHMEM = "gloo", "nccl", "nvshmem"  # those of GPUs as OverlapConfig.network names them
_LIBRARIES = {NVSHMEM: ("nvshmem.core", "nvshmem.bindings")}
_PACE = timing.Pace(3, 2)
_TIMEOUT_S = 30.0
_ELSEWHERE = "failed on another rank"  # see World.attempt
_NODES_FIX = "what the line says; until then groups that span these nodes train with --overlap-train-method collective"
_LACKING_FIX = "--network auto checks what serves these ranks; see docs/multi-node.md for what each transport needs"
_NVSHMEM_FIX = (
    "NVSHMEM_DEBUG=INFO says why; pip install nvshmem4py-cu13 cuda-core on every host. Groups that span nodes need it only with "
    "--overlap-train-network nvshmem"
)
_ERROR_FIX = (
    "see docs/troubleshooting.md for the message; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME name the interface that all hosts "
    "share"
)
_WRONG_FIX = (
    "keep groups inside a node, or train with --overlap-train-method collective; file an issue with this report"
)


@dataclass(frozen=True)
class Settings:
    """The settings of the checks between nodes. node_ranks, provider: see OverlapConfig. network: the transport that was asked
    for; auto: all that serve the ranks. seconds: for each transport. call_s: see Agreement."""

    node_ranks: int
    provider: str
    network: str
    seconds: float
    call_s: float | None = None

    def transports(self, on_gpu: bool) -> tuple[str, ...]:
        """The transports to check, by their names here."""
        if self.network != "auto":
            return (self.network,)
        return (NCCL, NVSHMEM) if on_gpu else (GLOO,)

    def config(self, transport: str) -> OverlapConfig:
        """The settings of a group whose nodes this transport joins."""
        network = "auto" if transport == GLOO else transport
        provider = NVSHMEM if transport == NVSHMEM else self.provider
        return OverlapConfig(provider=provider, network=network, node_ranks=self.node_ranks, timeout_s=_TIMEOUT_S)

    def needs(self, transport: str) -> bool:
        """Whether it is a failure if this transport cannot run: groups take it by default, or it was asked for by name."""
        return transport in (GLOO, NCCL, self.network)


def name_of(transport: str) -> str:
    """The name of a transport's line."""
    return f"{NAME} {transport}"


def check_network(here: World, transport: str, settings: Settings) -> list[Finding]:
    """Check, then time, what one transport carries between the nodes of all ranks; nothing where they are in one node.
    Collective. here: all ranks of the job."""
    name, config = name_of(transport), settings.config(transport)
    domain = domain_of(dist.new_group(), config, here.device)  # the ranks of a host have a domain of their own
    domain.agreement.call_s = settings.call_s
    if domain.nodes.problem is not None:
        return [warn(name, f"cannot run here: {domain.nodes.problem}", "nodes with as many ranks each", _NODES_FIX)]
    if domain.topology.nodes == 1:
        return []
    lacking = _lacking(here, transport, settings.provider)
    if lacking is not None:
        return _unless_elsewhere(lacking, warn(name, f"cannot run here: {lacking}", "", _LACKING_FIX))
    return _prove(here, name, domain, needed=settings.needs(transport), seconds=settings.seconds)


def _prove(here: World, name: str, domain: OverlapDomain, needed: bool, seconds: float) -> list[Finding]:
    """Connect the ranks, and prove and time what they send. needed: whether it is a failure if they cannot be connected."""
    made: list[Gathers] = []
    error = here.attempt(lambda: made.append(connected(domain)))
    if error is not None and not needed:
        return _unless_elsewhere(error, warn(name, f"cannot run here: {error}", "", _NVSHMEM_FIX))
    if error is None:
        trial = Trial(here, made[0])
        error = trial.run(seconds)
    if error is not None:
        return _unless_elsewhere(error, fail(name, f"failed: {error}", "all pieces arrive", _ERROR_FIX))
    if here.any(bool(trial.counts.any())):
        return judge(here, name, trial, None)
    times = timing.measure({name: trial.gathers.send}, _PACE, here.group, here.device)
    return judge(here, name, trial, times[name].ms)


def _lacking(here: World, transport: str, provider: str) -> str | None:
    """What the ranks lack for a transport, in the words of `World.attempt`; None: nothing.

    Asked before anything collective of its library: a rank that cannot load it must not leave its peers in a rendezvous.
    """
    if transport == GLOO:
        return None
    if here.device.type != "cuda":
        return f"{transport} carries data between GPUs, and these ranks have none"
    if transport == NVSHMEM and provider not in ("auto", NVSHMEM):
        return f"nvshmem sends from NVSHMEM's own symmetric memory, which --provider {provider} leaves out"
    return here.attempt(lambda: [importlib.import_module(name) for name in _LIBRARIES.get(transport, ())])


def _unless_elsewhere(error: str, finding: Finding) -> list[Finding]:
    """The finding; nothing where another rank knows what went wrong, and says so."""
    return [] if error == _ELSEWHERE else [finding]


def judge(here: World, name: str, trial: Trial, ms: float | None) -> list[Finding]:
    """The finding about what this rank saw. ms: of a gather; None: a piece of some rank was not whole."""
    gathers, topology = trial.gathers, trial.gathers.topology
    pieces = f"{trial.rounds * gathers.far_pieces} pieces of {gathers.block_bytes // CHUNKS >> 10} KiB"
    broken = [source for source, count in enumerate(trial.counts.tolist()) if count]
    if broken:
        ranks = ", ".join(here.who(source) for source in broken)
        wrong = f"failed: {int(trial.counts.sum())} of {pieces} were not whole when their signals came, from {ranks}"
        return [fail(name, wrong, "data first", _WRONG_FIX)]
    if ms is None:
        return []
    gbs = (topology.nodes - 1) * gathers.block_bytes / ms / 1e6
    where = f"proved between {topology.nodes} nodes of {topology.local}"
    found = ok(name, f"{where}: {pieces} were whole when their signals came; {gbs:.3g} GB/s out of each rank")
    return [replace(found, figure=gbs)]
