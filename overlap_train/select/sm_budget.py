"""How many SMs communication between nodes of GPUs may hold.

One rule for groups, which measure what they need (nodes/connect.py), and for estimates, which reckon with all (cost.py).
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_SMS = 16  # for NCCL, sums of a node and waits together: with 16 of 132 fewer a product takes 14 % longer at most
WAIT_SMS = 1  # EnginePlan.wait_sms


@dataclass(frozen=True)
class SmBudget:
    """What each may hold in a group whose nodes have `local` ranks.

    network_sms, reduce_sms: settings, which hold as they are, even if they are more than MOST_SMS together; 0: not set.
    """

    local: int
    network_sms: int = 0
    reduce_sms: int = 0

    @property
    def for_network(self) -> int:
        """NCCL's. An even number: half of its CTAs send while the others receive. Where a node adds, and nobody says on how many
        SMs, NCCL has half of all: nothing crosses faster than its sum is made."""
        if self.network_sms:
            return self.network_sms
        if self.local > 1 and not self.reduce_sms:
            return MOST_SMS // 2
        left = MOST_SMS - WAIT_SMS - (self.reduce_sms if self.local > 1 else 0)
        return max(2, left - left % 2)

    def for_sums(self, network: int) -> int:
        """Those of sums, beside NCCL's `network`: at least half of all, as if no setting gave NCCL more than its half."""
        return self.reduce_sms or max(MOST_SMS // 2 - WAIT_SMS, MOST_SMS - WAIT_SMS - network)


def in_words(network: int, sums: int) -> str:
    """What communication holds, for the line that says so."""
    total = network + sums + WAIT_SMS
    limit = f"at most {MOST_SMS}" if total <= MOST_SMS else f"more than {MOST_SMS}, by network_sms or reduce_sms"
    parts = f"NCCL {network}, sums of a node {sums}, waits {WAIT_SMS}"
    return f"communication between nodes holds {total} SMs ({limit}): {parts}"


def node_sum_gbs(local: int, wire_gbs: float) -> float:
    """GB/s that the sum of a node of `local` ranks has to read and write to be as fast as a network of wire_gbs: all partials,
    and the total, for each byte that crosses."""
    return (local + 1) * wire_gbs
