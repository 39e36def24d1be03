"""Four CPU processes: Ulysses 4, and tensor parallelism 2 with Ulysses 2, train and save as one rank does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.processes import run_ranks, values

LAYOUTS = {"ulysses 4": (1, 4), "tp 2 x ulysses 2": (2, 2)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What `everything` found in each process."""
    return values(run_ranks(4, everything, tmp_path_factory.mktemp("checkpoints"), limit_s=250.0))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_twenty_steps_are_those_of_one_rank(ranks: list[dict[str, Any]], layout: str):
    for facts in (rank[layout] for rank in ranks):
        assert facts["losses"] == pytest.approx(facts["losses alone"], rel=2e-6)
        assert facts["losses"][-1] < 0.75 * facts["losses"][0], "it learns"
        assert facts["weights"] < 2e-5
        assert facts["gradients"] < 5e-6
        assert facts["gradients packed"] < 5e-6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_of_the_one_loads_in_the_other(ranks: list[dict[str, Any]], layout: str):
    for facts in (rank[layout] for rank in ranks):
        assert facts["saved by one rank"] and facts["loaded by one rank"]


def test_the_table_tells_what_tensor_parallelism_overlaps_from_what_is_exchanged(ranks: list[dict[str, Any]]):
    methods = {name: (method, reason) for name, method, reason in ranks[0]["tp 2 x ulysses 2"]["table"]}
    exchanged = "; all-to-all over 2 context-parallel ranks: collective, not overlapped"
    assert methods["decoder.layers.0.self_attention.linear_qkv"] == ("chunked", "asked for" + exchanged)
    assert methods["decoder.layers.1.self_attention.linear_proj"] == ("chunked", "asked for" + exchanged)
    assert methods["decoder.layers.0.mlp.linear_fc1"] == ("chunked", "asked for")
    alone = {name: (method, reason) for name, method, reason in ranks[0]["ulysses 4"]["table"]}
    assert alone["decoder.layers.0.self_attention.linear_qkv"] == ("chunked", "asked for")


def everything(rank: int, world: int, folder: Path) -> dict[str, Any]:
    from tests.megatron import layout, ulysses

    layout.prepare()
    one = ulysses.Run()
    expected = {
        "gradients": ulysses.gradients(one),
        "packed": ulysses.gradients(ulysses.Run(packed=True)),
        "trained": ulysses.train(one, 20),
    }
    ulysses.save(expected["trained"][1].module, folder / "one")
    expected["weights"] = ulysses.weights(expected["trained"][1])
    facts = {name: compare(expected, folder, name, *sizes) for name, sizes in LAYOUTS.items()}
    layout.leave()
    return facts


def compare(expected: dict[str, Any], folder: Path, name: str, tensor: int, context: int) -> dict[str, Any]:
    """Facts about one layout; `expected` of one rank, which has saved its weights."""
    from overlap_train import OverlapConfig
    from overlap_train.integrations.megatron import report
    from tests.megatron import ulysses

    run = ulysses.Run(tensor, context, OverlapConfig(method="chunked"))
    packed = ulysses.Run(tensor, context, OverlapConfig(method="collective"), packed=True)
    facts: dict[str, Any] = {"gradients packed": difference(ulysses.gradients(packed), expected["packed"], True)}
    facts["gradients"] = difference(ulysses.gradients(run), expected["gradients"], True)
    facts["losses"], model = ulysses.train(run, 20)
    facts["losses alone"] = expected["trained"][0]
    facts["weights"] = difference(ulysses.weights(model), expected["weights"])
    facts["table"] = [(linear.name, linear.method, linear.reason) for linear in report(model).linears]
    ulysses.save(model.module, folder / name)
    trained = ulysses.weights(model)
    ulysses.load(model.module, folder / "one")
    facts["saved by one rank"] = difference(ulysses.weights(model), expected["weights"]) == 0
    alone = ulysses.wrapped(ulysses.gpt(ulysses.Run()))
    ulysses.load(alone.module, folder / name)
    facts["loaded by one rank"] = difference(ulysses.weights(alone), trained) == 0
    return facts


def difference(actual: Any, expected: Any, relative: bool = False) -> float:
    assert actual.keys() == expected.keys()
    return max(
        float((actual[name] - x).abs().max() / (x.abs().max() if relative else 1)) for name, x in expected.items()
    )
