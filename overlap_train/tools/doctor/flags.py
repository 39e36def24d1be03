"""What the doctor is told on its command line."""

from __future__ import annotations

from dataclasses import dataclass

from ...flags import NETWORKS, PROVIDERS, option, positive_float, positive_int_or_0


@dataclass(frozen=True)
class Doctor:
    """What the doctor is told."""

    json: str = option("", "write all findings of all ranks to FILE", metavar="FILE")
    provider: str = option("auto", "check this provider of symmetric memory only; auto: all of them", choices=PROVIDERS)
    network: str = option(
        "auto", "check this transport between nodes only; auto: all that serve the ranks", choices=NETWORKS
    )
    seconds: float | None = option(
        None,
        "how long to repeat the operators, and gathers by each transport between nodes; default 30 on GPUs, 3 on CPUs",
        parse=positive_float,
        metavar="S",
    )
    limit: float = option(
        60.0,
        "longest time for one check, in seconds; operators and network have more",
        parse=positive_float,
        metavar="SECONDS",
    )
    node_ranks: int = option(
        0,
        "ranks per node, to try several nodes on one machine; 0: nodes are found",
        parse=positive_int_or_0,
        metavar="N",
    )
