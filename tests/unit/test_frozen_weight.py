"""The plan of a linear whose weight is frozen: nothing comes after the input gradient, so nothing of it waits."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from overlap_train import OverlapConfig
from overlap_train.ops.plan import Plan, make_plan
from overlap_train.ops.plan_cache import Planned
from overlap_train.ops.spec import ALL_GATHER_LINEAR
from overlap_train.schedule.order import Topology
from overlap_train.select import choose
from overlap_train.select.table import UNTUNED

GPU = torch.device("cuda", 0)


def plan_of_qkv(monkeypatch: pytest.MonkeyPatch, saves_a_wave: bool) -> Plan:
    """Llama-3 8B's on four H200: its partial sums arrive late, so its reduction is split."""
    for name in ("on_hopper", "saves_a_wave"):
        monkeypatch.setattr(choose, name, lambda *_, is_so=name == "on_hopper" or saves_a_wave: is_so)
    properties = mock.Mock(major=9, minor=0, multi_processor_count=132)
    properties.name = "NVIDIA H200"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    x, w = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((2048, 4096), (1536, 4096)))
    return make_plan(ALL_GATHER_LINEAR, OverlapConfig(method="fused"), UNTUNED, Topology(1, 4, 0), x, w, GPU)


def test_without_a_weight_gradient_a_reduction_is_not_split_to_let_it_run_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = plan_of_qkv(monkeypatch, saves_a_wave=False)
    assert plan.dgrad.variant.split_reduction and plan.dgrad.beside_wgrad
    assert not plan.dgrad_alone.variant.split_reduction and not plan.dgrad_alone.beside_wgrad


def test_it_is_split_where_that_saves_a_wave(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_of_qkv(monkeypatch, saves_a_wave=True).dgrad_alone.variant.split_reduction


def test_beside_another_groups_exchange_each_pass_leaves_it_its_sms(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of_qkv(monkeypatch, saves_a_wave=False)
    beside = Planned(SimpleNamespace(), plan, trains=True).beside(8).plan  # type: ignore[arg-type]
    engines = beside.fprop, beside.dgrad, beside.dgrad_alone, beside.wgrad
    assert [engine.other_sms for engine in engines if engine is not None] == [8] * 4
    assert plan.dgrad_alone.other_sms == 0
