"""Which ranks form a node, and who acts there for ranks of other nodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """`nodes` nodes of `local` ranks each, numbered node by node, of which this is rank `rank`."""

    nodes: int
    local: int
    rank: int

    @property
    def world(self) -> int:
        return self.nodes * self.local

    @property
    def node(self) -> int:
        """The node of this rank."""
        return self.rank // self.local

    def twin(self, node: int) -> int:
        """The rank of `node` with the same local rank as this one."""
        return node * self.local + self.rank % self.local

    def ranks_of(self, node: int) -> range:
        """All ranks of `node`."""
        return range(node * self.local, (node + 1) * self.local)

    def sender(self, block: int) -> int:
        """Who writes block `block` of this rank's slots, in every call: rank `block` if that is a twin, else its twin here."""
        return block if block == self.twin(block // self.local) else self.node * self.local + block % self.local

    def receiver(self, target: int) -> int:
        """Who takes from the network what this rank sends to `target` of another node: the only rank there that it is connected
        with."""
        return self.twin(target // self.local)
