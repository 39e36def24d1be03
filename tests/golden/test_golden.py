"""Operators return what they returned when results.json was recorded, to the bit."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.golden.cases import hashes
from tests.processes import run_ranks, values

RECORD = Path(__file__).parent / "results.json"


def measured(noise: bool) -> dict[str, str]:
    """The hashes of all cases, of all ranks side by side."""
    os.environ["TRITON_INTERPRET"] = "1"
    found: dict[str, str] = {}
    for world in (2, 4):
        ranks = values(run_ranks(world, hashes, noise, limit_s=280, grace_s=280))
        found |= {case: " ".join(rank[case] for rank in ranks) for case in ranks[0]}
    return found


def test_operators_return_the_bits_that_were_recorded() -> None:
    expected, found = json.loads(RECORD.read_text()), measured(noise=False)
    assert expected.keys() == found.keys()
    assert [case for case, hashed in expected.items() if found[case] != hashed] == []
