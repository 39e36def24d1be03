"""compare_mfu's variants of TransformerEngine, over a stand-in for it, in two fresh processes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.megatron import te_stand_in
from tests.processes import run_ranks, values

VARIANTS = ("megatron", "te", "te_userbuffers", "te_userbuffers_ring", "te_overlap")
LINE = f"--model small --layers 1 --seq-length 32 --steps 1 --round-steps 1 --variants {','.join(VARIANTS)}"


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What `everything` found in each of two fresh processes: TransformerEngine must be there before Megatron is."""
    return values(run_ranks(2, everything, limit_s=250.0))


def test_all_train_the_same_model_on_the_same_data(ranks: list[dict[str, Any]]) -> None:
    for facts in ranks:
        assert facts["absent"] == {}
        assert tuple(facts["losses"]) == VARIANTS
        for values_of_steps in facts["losses"].values():
            assert values_of_steps == pytest.approx(facts["losses"]["megatron"], rel=1e-5)


def test_only_ours_overlaps_and_what_transformer_engine_exposes_is_unknown(ranks: list[dict[str, Any]]) -> None:
    for facts in ranks:
        assert {name for name, (overlapped, _) in facts["calls"].items() if overlapped} == {"te_overlap"}
        assert facts["exposed"] == {name: name == "megatron" for name in VARIANTS}


def test_one_set_of_userbuffers_has_both_configurations(ranks: list[dict[str, Any]]) -> None:
    """By the names of its communicators: a process cannot have two."""
    for facts in ranks:
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


def everything(rank: int, world: int) -> dict[str, Any]:
    """Called in each process: the facts of one comparison."""
    te_stand_in.install()
    import torch
    import torch.distributed as dist
    from transformer_engine.pytorch.module import base

    from mfu import measuring
    from mfu.current import Layouts
    from mfu.plan import read_flags
    from mfu.trained import Trained
    from overlap_train.integrations.megatron import run_without_cuda
    from overlap_train.tools.measure.world import World

    run_without_cuda()
    names: dict[str, dict[str, set[str]]] = {}
    original = Trained.step

    def step(self: Trained, _: int = 0) -> None:
        original(self)
        if "userbuffers" in self.name:
            assert base._ub_communicators is not None
            found = names[self.name] = {}
            for linear in self.trainer.model.bare.modules():
                if getattr(linear, "ub_name", None) is not None:
                    found.setdefault(linear.parallel_mode, set()).add(linear.ub_name)

    Trained.step = step  # type: ignore[method-assign]
    plan, overlap = read_flags(LINE.split())
    here = World(dist.group.WORLD, torch.device("cpu"), rank, world)  # type: ignore[arg-type]
    measured = measuring.compare(plan, 0, overlap, here, Layouts())
    return {
        "absent": measured.absent,
        "losses": measured.losses,
        "calls": measured.calls,
        "exposed": {name: measured.exposed_ms(name) is not None for name in VARIANTS},
        "made": base.made,
        "names": names,
        "released": base._ub_communicators is None,
    }
