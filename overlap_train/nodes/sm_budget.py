"""How many SMs communication between nodes of GPUs may hold.

One rule for groups, which measure what NCCL needs (nodes/connect.py), and for estimates, which reckon with all (nodes/choice.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST_SMS = 16  # for NCCL, sums of a node and waits together: with 16 of 132 fewer a product takes 14 % longer at most
WAIT_SMS = 1  # EnginePlan.wait_sms
_SHARED = 0.9  # of what one SM alone adds, each of several does: 9 of an H100 reach 493 GB/s, one 61


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

    def for_sums(self, network: int, wire_gbs: float, sm_gbs: float) -> int:
        """Those of sums, beside NCCL's `network`: the fewest with which a sum is made as fast as the network takes it.

        For each byte that crosses, a sum reads all partials and writes the total. Sums may have half of all SMs, as if no setting
        gave NCCL more than its half. wire_gbs: of the network. sm_gbs: that one SM reads and writes.
        """
        if self.local == 1 or self.reduce_sms:
            return self.reduce_sms
        needed = math.ceil((self.local + 1) * wire_gbs / (_SHARED * sm_gbs))
        return min(max(1, needed), max(MOST_SMS // 2 - WAIT_SMS, MOST_SMS - WAIT_SMS - network))


def in_words(network: int, sums: int) -> str:
    """What communication holds, for the line that says so."""
    total = network + sums + WAIT_SMS
    limit = f"at most {MOST_SMS}" if total <= MOST_SMS else f"more than {MOST_SMS}, by network_sms or reduce_sms"
    parts = f"NCCL {network}, sums of a node {sums}, waits {WAIT_SMS}"
    return f"communication between nodes holds {total} SMs ({limit}): {parts}"
