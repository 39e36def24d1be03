"""The plans of groups that span nodes: chunks, exchanges, and the SMs that products leave to the network."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch

from ..config import OverlapConfig, flag_name
from ..ops.plan import EnginePlan, Planner
from ..schedule.inter_node import SendRecv, send_recvs, transfers_of
from ..schedule.kinds import Kind
from ..schedule.order import Transfers
from ..select.choose import Choice
from ..select.method import Method, Pass
from .choice import WAIT_SMS, network_chunks_of


@dataclass(frozen=True)
class InterNodePlan(EnginePlan):
    """One pass in a group of `nodes` nodes.

    send_sms, reduce_sms, wait_sms: the SMs that NCCL has, sums of this node's partials, and waits of one CTA.
    """

    nodes: int = 1
    send_recvs: tuple[SendRecv, ...] = ()
    send_sms: int = 0
    reduce_sms: int = 0
    wait_sms: int = 0

    inside_node = False

    @cached_property
    def sm_margin(self) -> int:
        return self.send_sms + self.reduce_sms + self.wait_sms + self.concurrent_sms

    @cached_property
    def reduces_later(self) -> bool:
        """What a scatter adds last are sums of nodes, which a kernel of its own adds."""
        return True

    @property
    def error(self) -> str | None:
        if not self.slots or self.variant.crosses:
            return None
        return (
            f"method={self.method!r} in a group of {self.nodes} nodes: its kernels send inside one node only; use "
            f"'auto', 'fused', 'chunked' or 'collective', or a group inside one node ({flag_name('method')})"
        )


class InterNodePlanner(Planner):
    """The Planner of groups that span nodes."""

    def transfers_of(self, kind: Kind, chunks: int, tiled: bool) -> Transfers:
        return transfers_of(kind, self.topology, chunks, tiled)

    def chunks(self, how: Method, pass_: Pass, device: torch.device) -> int:
        return network_chunks_of(how, pass_, device, self.topology.nodes)

    def plan(self, choice: Choice, pass_: Pass, device: torch.device, w: torch.Tensor) -> InterNodePlan:
        plan, topology = super().plan(choice, pass_, device, w), self.topology
        tiled = plan.method == "fused"
        found = self._across(plan, send_recvs(plan.kind, topology, plan.chunks, tiled))
        if device.type != "cuda":
            return found
        config, is_nccl = self.config, plan.method == "collective"
        adds = plan.kind.reduces and topology.local > 1 and not is_nccl
        return replace(
            found,
            # The products of `collective` run before or after its NCCL, or beside a communicator whose SMs are not known here.
            send_sms=0 if is_nccl else config.network_sms,
            reduce_sms=config.reduce_sms if adds else 0,
            # A persistent kernel holds its SMs to its end. Meanwhile kernels of one CTA (wait_kernel) let something arrive or be
            # added: a few at once, which fit on one SM.
            wait_sms=WAIT_SMS * plan.variant.multiplies,
        )

    def sent_again(self, fprop: EnginePlan) -> InterNodePlan:
        assert isinstance(fprop, InterNodePlan)
        exchanges = send_recvs(fprop.kind, self.topology, chunks=1)
        return replace(self._across(super().sent_again(fprop), exchanges), send_sms=fprop.send_sms)

    def exchange(self, pass_: Pass, config: OverlapConfig, device: torch.device, w: torch.Tensor) -> EnginePlan:
        """Beside it runs a product of another group, whose kernel may hold its SMs to its end: waits need one."""
        engine = super().exchange(pass_, config, device, w)
        return replace(engine, wait_sms=int(device.type == "cuda" and engine.slots > 0))  # type: ignore[call-arg]

    def without_product(self, config: OverlapConfig) -> Choice:
        if config.method == "auto":
            unmeasured = "auto: not tuned: all-to-alls beside a product across nodes are not measured"
            return Choice(Method("collective"), unmeasured)
        choice = super().without_product(config)
        # In one chunk: nothing multiplies a chunk while the next one comes.
        return choice if choice.method == "collective" else choice.by(chunks=1)

    def _across(self, plan: EnginePlan, exchanges: tuple[SendRecv, ...]) -> InterNodePlan:
        return InterNodePlan(
            **{part.name: getattr(plan, part.name) for part in fields(plan)},
            nodes=self.topology.nodes,
            send_recvs=exchanges,
        )
