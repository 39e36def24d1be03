"""compare_mfu's variants of TransformerEngine, over a stand-in for it, in two fresh processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.megatron import te_stand_in
from tests.processes import run_ranks, values
from tests.recipes.recipe_runs import joined

VARIANTS = ("megatron", "te", "te_again", "te_userbuffers", "te_userbuffers_ring", "te_overlap")
LINE = f"--model small --layers 1 --seq-length 32 --steps 1 --round-steps 1 --variants {','.join(VARIANTS)}"


def everything(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Called in each process: the facts of one comparison. TransformerEngine must be there before Megatron is."""
    te_stand_in.install()
    import os

    from compare_mfu import compare
    from transformer_engine.pytorch.module import base

    from mfu import transformer_engine

    os.environ["WORLD_SIZE"] = str(world)
    names: dict[str, dict[str, set[str]]] = {}
    original = transformer_engine.build

    def build(name: str, *given: Any) -> Any:
        model = original(name, *given)
        for linear in model.modules() if "userbuffers" in name else ():
            if getattr(linear, "ub_name", None) is not None:
                names.setdefault(name, {}).setdefault(linear.parallel_mode, set()).add(linear.ub_name)
        return model

    with patch.object(transformer_engine, "build", build), joined():
        compare([*LINE.split(), "--out", str(folder)])
    return {"made": base.made, "names": names, "released": base._ub_communicators is None}


def test_transformer_engines_variants_train_the_same_model_with_one_set_of_userbuffers(tmp_path: Path) -> None:
    """A process cannot have two sets: both configurations are told apart by the names of communicators."""
    for facts in values(run_ranks(2, everything, tmp_path, limit_s=250.0)):
        (made,) = facts["made"]
        assert (made["shape"], made["tp_size"], made["quantization_modes"]) == ([32, 128], 2, ["none"])
        assert {name: how["method"] for name, how in made["ub_cfgs"].items()} == {
            "qkv_dgrad": "ring_exchange",
            "proj_fprop": "ring_exchange",
        }
        assert facts["names"] == {
            "te_userbuffers": {"column": {"fc1"}, "row": {"fc2"}},
            "te_userbuffers_ring": {"column": {"qkv"}, "row": {"proj"}},
        }
        assert facts["released"]
    rows = {row["variant"]: row for row in json.loads((tmp_path / "mfu.json").read_text())["rows"]}
    assert tuple(rows) == VARIANTS
    for name, row in rows.items():
        assert row["losses"] == pytest.approx(rows["megatron"]["losses"], rel=1e-5), name
        assert (row["exposed_ms"] is None) == (name != "megatron"), "what TransformerEngine exposes is unknown"
