"""What pictures say of the machine."""

from __future__ import annotations

from typing import Any

import pytest

from overlap_train.tools.pictures.machine import EMULATED, about_nodes, gpus_of, machine_of

H100 = {"device": "NVIDIA H100 80GB HBM3"}


@pytest.mark.parametrize(
    ("found", "name"),
    [
        (H100, "4 x H100"),
        ({"device": "NVIDIA H200"}, "4 x H200"),
        ({"device": "NVIDIA A100-SXM4-80GB"}, "4 x A100"),
        ({"device": "NVIDIA Graphics Device"}, "4 x NVIDIA Graphics Device"),
        ({"device": "cpu"}, "4 CPU processes"),
        ({}, "4 GPUs"),
    ],
)
def test_a_title_names_the_gpus(found: dict[str, Any], name: str) -> None:
    assert gpus_of(found, 4) == name
    assert machine_of({"hardware": found, "rows": [{"world": 4}]}) == name
    assert about_nodes({"hardware": found, "rows": [{"world": 4}]}) == ()


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"nodes": 2, "emulated": True}, f"2 nodes of 2 GPUs{EMULATED}."),
        ({"nodes": 2, "emulated": False}, "2 nodes of 2 GPUs."),
        ({"nodes": 4, "emulated": False}, "4 nodes of one rank."),
        ({}, f"2 nodes of 2 GPUs{EMULATED}."),  # older rows
    ],
)
def test_nodes_are_named_and_whether_they_were_played(row: dict[str, Any], told: str) -> None:
    record = {"hardware": H100, "rows": [{"world": 4, "network_sms": 2, **row}]}
    assert about_nodes(record) == (told,)
    assert machine_of(record) == f"4 x H100 as {told[0]} nodes"
