"""Which calls share a plan, and how the calls of a plan are told apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from overlap_train import OverlapConfig
from overlap_train.cache import BoundedCache
from overlap_train.ops import plan_cache as plan_book
from overlap_train.ops import plan_cache as settled
from overlap_train.ops.plan import make_plan
from overlap_train.ops.plan_cache import PlanBook, Planned, other_table
from overlap_train.ops.spec import ALL_GATHER_LINEAR, LINEAR_REDUCE_SCATTER
from overlap_train.schedule.order import Topology
from overlap_train.select.table import UNTUNED

X, W, BIAS = torch.empty(4, 8), torch.empty(6, 8), torch.empty(6)
CONFIG = OverlapConfig(method="chunked")


def book() -> PlanBook:
    one = object.__new__(PlanBook)
    one.plans = BoundedCache(8)
    return one


def key(spec: Any = ALL_GATHER_LINEAR, x: Any = X, w: Any = W, bias: Any = None, config: Any = CONFIG) -> Any:
    return book().look_up(spec, x, w, bias, config)[0]


def test_calls_that_differ_have_plans_of_their_own() -> None:
    keys = [
        key(),
        key(spec=LINEAR_REDUCE_SCATTER),
        key(x=torch.empty(2, 2, 8)),
        key(x=X.double()),
        key(bias=BIAS),
        key(config=OverlapConfig(method="fused")),
        key(config=None),
        key(x=torch.empty(4, 8, requires_grad=True)),
        key(w=torch.empty(6, 8, requires_grad=True)),
    ]
    with torch.no_grad():
        keys.append(key())
    assert len(set(keys)) == len(keys)
    assert key(x=X.clone(), w=W.clone(), config=OverlapConfig(method="chunked")) == key()


def test_weights_that_lie_otherwise_have_plans_of_their_own() -> None:
    """But one key: peers need not know how this rank's weight lies in memory."""
    one = book()
    found, none = one.look_up(ALL_GATHER_LINEAR, X, W, None, CONFIG)
    assert none is None
    planned: Any = object()
    one.plans.put(found, {(W.stride(), W.data_ptr() % 16): planned})
    assert one.look_up(ALL_GATHER_LINEAR, X, W.clone(), None, CONFIG) == (found, planned)
    for other in (torch.empty(8, 6).t(), torch.empty(49)[1:].view(6, 8)):
        assert one.look_up(ALL_GATHER_LINEAR, X, other, None, CONFIG) == (found, None)


def test_passes_and_linears_have_tags_of_their_own() -> None:
    plan: Any = SimpleNamespace(
        spec=ALL_GATHER_LINEAR, wgrad=None, request=SimpleNamespace(what="input [4, 8], method chunked")
    )
    planned = Planned(None, plan)  # type: ignore[arg-type]
    tags = [tag for name in ("layers.0.linear_fc1", "layers.1.linear_fc1") for tag in _tags(planned, name)]
    assert len({tag.fingerprint for tag in tags}) == 6
    assert tags[0].op == "layers.0.linear_fc1/fprop" and tags[0].what == "all_gather_linear, input [4, 8]"
    assert planned.linear("output_layer").tags.ranges == ("output/fprop", "output/dgrad", "output/wgrad")


def _tags(planned: Planned, name: str) -> list[Any]:
    tags = planned.linear(name).tags
    return [tags.fprop, tags.dgrad, tags.wgrad]


def test_another_folder_of_measurements_is_refused() -> None:
    domain: Any = SimpleNamespace(config=CONFIG)
    assert other_table(domain, OverlapConfig(method="fused")) is None
    assert "'/elsewhere', but the group's domain" in (other_table(domain, OverlapConfig(tuning_dir="/elsewhere")) or "")


@pytest.mark.parametrize(("wants_dx", "wants_dw", "slots"), [(True, True, 2), (True, False, 1), (False, True, 1)])
def test_a_backward_has_the_slots_of_what_is_wanted(wants_dx: bool, wants_dw: bool, slots: int) -> None:
    """And a linear makes its brackets once."""
    told: list[tuple[Any, ...]] = []
    domain: Any = SimpleNamespace(operator=lambda *settings: told.append(settings) or object())
    x, w = torch.empty(4, 8, device="meta"), torch.empty(6, 8, device="meta")
    plan = make_plan(ALL_GATHER_LINEAR, CONFIG, UNTUNED, Topology(1, 2, 0), x, w)
    linear = Planned(domain, plan).linear("layers.0.linear_fc1")
    assert linear.backward(wants_dx, wants_dw) is linear.backward(wants_dx, wants_dw)
    assert linear.forward is linear.forward
    (_, taken, _, shown_as), (tag, forward, _, _) = told
    assert (taken, shown_as) == (slots, "fc1/dgrad") and (tag, forward) == (linear.tags.fprop, 1)


@pytest.mark.parametrize(
    ("nodes", "method", "connects"), [(2, "chunked", True), (2, "collective", False), (1, "chunked", False)]
)
def test_nodes_are_connected_only_for_plans_that_send_between_them(nodes: int, method: str, connects: bool) -> None:
    """Connecting measures the network."""
    connected: list[OverlapConfig] = []
    one, config = book(), OverlapConfig(method=method)
    one.table, one.agreed, one.before = UNTUNED, BoundedCache(8), BoundedCache(8)
    one.domain = SimpleNamespace(  # type: ignore[assignment]
        world_size=2, topology=Topology(nodes, 2 // nodes, 0), device=X.device, config=config,
        nodes=SimpleNamespace(problem=None), book=one,
        settled=lambda config: connected.append(config) or config, network_gbs=2.5,
    )  # fmt: skip
    agreed = mock.patch.object(plan_book, "prepare")
    with agreed, mock.patch.object(settled, "make_plan", wraps=make_plan) as plans:
        one.agree(one.look_up(ALL_GATHER_LINEAR, X, W, None, config)[0], ALL_GATHER_LINEAR, X, W, None, config, "fc1")
    assert connected == [config] * connects
    assert plans.call_args.kwargs == ({"network_gbs": 2.5} if connects else {}), "what was measured counts"
