"""Four CPU processes: Ulysses 4, and tensor parallelism 2 with Ulysses 2, train and save as one rank does.

Over tensor parallelism and Ulysses a sequence as short as here stays whole. In parts: as if it were long.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import run_ranks, values

STEPS = 20  # of two micro-batches
LAYOUTS = {"ulysses 4": (1, 4), "tp 2 x ulysses 2": (2, 2), "tp 2 x ulysses 2 in parts": (2, 2)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What `everything` found in each process."""
    return values(run_ranks(4, everything, tmp_path_factory.mktemp("checkpoints"), limit_s=250.0))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_twenty_steps_are_those_of_one_rank(ranks: list[dict[str, Any]], layout: str):
    for facts in (rank[layout] for rank in ranks):
        assert facts["losses"] == pytest.approx(facts["losses alone"], rel=2e-6)
        assert facts["losses"][-1] < 0.9 * facts["losses"][0], "it learns"
        assert facts["weights"] < 2e-5
        assert facts["gradients"] < 5e-6
        assert facts["gradients packed"] < 5e-6
        assert facts["gradients with inputs kept"] < 5e-6


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_of_the_one_loads_in_the_other(ranks: list[dict[str, Any]], layout: str):
    for facts in (rank[layout] for rank in ranks):
        assert facts["saved by one rank"] and facts["loaded by one rank"]


def test_the_table_tells_what_tensor_parallelism_overlaps_from_what_is_exchanged(ranks: list[dict[str, Any]]):
    methods = {name: (method, reason) for name, method, reason in ranks[0]["tp 2 x ulysses 2"]["table"]}
    exchanged = "all-to-all over 2 CP ranks not overlapped: too short to be cut into parts"
    assert methods["decoder.layers.0.self_attention.linear_qkv"] == ("chunked", f"{exchanged}; asked for")
    assert methods["decoder.layers.1.self_attention.linear_proj"] == ("chunked", f"{exchanged}; asked for")
    assert methods["decoder.layers.0.mlp.linear_fc1"] == ("chunked", "asked for")
    alone = {name: (method, reason) for name, method, reason in ranks[0]["ulysses 4"]["table"]}
    assert alone["decoder.layers.0.self_attention.linear_qkv"] == ("chunked", "asked for")


def test_the_table_says_that_parts_hide_each_others_exchange(ranks: list[dict[str, Any]]):
    for facts in (rank["tp 2 x ulysses 2 in parts"] for rank in ranks):
        hidden = "2 parts that hide exchanges; asked for"
        rows = {name.rpartition(".layers.")[2]: row for name, *row in facts["rows"]}
        assert rows["0.self_attention.linear_qkv"] == [
            "AG(x) + GEMM (TP 2), A2A (CP 2)", "A2A(dy) (CP 2), GEMM + RS (TP 2)", "AG(x) under dgrad, then GEMM", hidden,
            f"overlapped {2 * STEPS}",
        ]  # fmt: skip
        assert rows["1.self_attention.linear_proj"] == [
            "A2A(x) (CP 2), GEMM + RS (TP 2)", "AG(dy) + GEMM (TP 2), A2A (CP 2)", "A2A(x) under dgrad, then GEMM", hidden,
            f"overlapped {2 * STEPS}",
        ]  # fmt: skip


def test_the_table_keeps_saying_why_nothing_hides_an_exchange_after_validation(ranks: list[dict[str, Any]]):
    exchanged = "all-to-all over 2 CP ranks not overlapped: too short to be cut into parts"
    for facts in (rank["tp 2 x ulysses 2"] for rank in ranks):
        assert facts["reasons, evaluated"] == {f"{exchanged}; asked for"}


def test_validation_runs_the_linear_over_tensor_parallelism_and_a_collective(ranks: list[dict[str, Any]]):
    for facts in (rank["tp 2 x ulysses 2 in parts"] for rank in ranks):
        assert facts["evaluated"] == {f"overlapped {2 * STEPS}, evaluation mode 1"}


def test_the_table_is_there_before_anything_is_exchanged(ranks: list[dict[str, Any]]):
    """Micro-batches may have no context parallelism (local_cp_size 1 of packed_seq_params)."""
    for rank in ranks:
        assert rank["nothing exchanged"] == [
            "all-to-all over 2 CP ranks not overlapped: context-parallel size 1: nothing to communicate; asked for"
        ] * 2  # fmt: skip


def test_the_group_may_change_with_the_call(ranks: list[dict[str, Any]]):
    """Of a model with context parallelism 4 a micro-batch may be cut over two ranks (cp_group of packed_seq_params)."""
    for rank in ranks:
        assert rank["group of a call"] < 1e-6


def everything(rank: int, world: int, folder: Path) -> dict[str, Any]:
    from tests.megatron import layout, ulysses

    layout.prepare()
    one = ulysses.Run()
    expected = {
        "gradients": ulysses.gradients(one),
        "packed": ulysses.gradients(ulysses.Run(packed=True)),
        "trained": ulysses.train(one, STEPS),
    }
    ulysses.save(expected["trained"][1].module, folder / "one")
    expected["weights"] = ulysses.weights(expected["trained"][1])
    facts: dict[str, Any] = {"group of a call": group_of_a_call(rank), "nothing exchanged": nothing_exchanged(rank)}
    facts |= {name: compare(expected, folder, name, *sizes) for name, sizes in LAYOUTS.items()}
    layout.leave()
    return facts


def group_of_a_call(rank: int) -> float:
    """How far an attention's rows are from those of one rank, where pairs of four ranks cut two documents. 0 where Megatron-Core
    (0.16) has no group of a call."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from overlap_train import OverlapConfig, SequenceLayout
    from tests.megatron import ulysses

    if "cp_group" not in PackedSeqParams.__dataclass_fields__:
        return 0.0
    packed = partial(
        PackedSeqParams, "thd", *[torch.tensor([0, 8, 16], dtype=torch.int32)] * 2, max_seqlen_q=8, max_seqlen_kv=8
    )
    x = torch.randn(16, 1, 32, generator=torch.Generator().manual_seed(1))
    rows = SequenceLayout("zigzag", (0, 8, 16)).rows_of_ranks(16, 2, x.device)[rank % 2]
    expected, _ = ulysses.gpt(ulysses.Run()).decoder.layers[0].self_attention(x, None, packed_seq_params=packed())
    model = ulysses.gpt(ulysses.Run(1, 4, OverlapConfig(method="chunked")))
    pair = [torch.distributed.new_group([first, first + 1]) for first in (0, 2)][rank // 2]
    of_pair = packed(local_cp_size=2, cp_group=pair)
    y, _ = model.decoder.layers[0].self_attention(x[rows], None, packed_seq_params=of_pair)
    return float((y - expected[rows]).abs().max())


def nothing_exchanged(rank: int) -> list[str | None]:
    """What the table says of an attention's linears whose one call had no context parallelism."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from overlap_train import OverlapConfig
    from overlap_train.integrations.megatron import report
    from tests.megatron import ulysses

    model = ulysses.gpt(ulysses.Run(2, 2, OverlapConfig(method="chunked")))
    ends = torch.tensor([0, 16], dtype=torch.int32)
    packed = PackedSeqParams("thd", ends, ends, max_seqlen_q=16, max_seqlen_kv=16, local_cp_size=1)
    x = torch.randn(16, 1, 32, generator=torch.Generator().manual_seed(1)).chunk(2)[rank % 2]
    model.decoder.layers[0].self_attention(x, None, packed_seq_params=packed)
    return [row.reason for row in report(model).linears if row.calls == "overlapped 1"]


def compare(expected: dict[str, Any], folder: Path, name: str, tensor: int, context: int) -> dict[str, Any]:
    """Facts about one layout; `expected` of one rank, which has saved its weights."""
    from overlap_train import OverlapConfig
    from overlap_train.integrations.megatron import report
    from overlap_train.ulysses import two_groups as two_group_calls
    from tests.megatron import ulysses

    two_group_calls.parts_that_hide = lambda rows, n, k: 2 if "in parts" in name else 1
    run = ulysses.Run(tensor, context, OverlapConfig(method="chunked"))
    packed = ulysses.Run(tensor, context, OverlapConfig(method="collective"), packed=True)
    facts: dict[str, Any] = {"gradients packed": difference(ulysses.gradients(packed), expected["packed"], True)}
    facts["gradients"] = difference(ulysses.gradients(run), expected["gradients"], True)
    kept = ulysses.Run(tensor, context, OverlapConfig(method="chunked", gathered_input="keep"))
    facts["gradients with inputs kept"] = difference(ulysses.gradients(kept), expected["gradients"], True)
    facts["losses"], model = ulysses.train(run, STEPS)
    facts["losses alone"] = expected["trained"][0]
    facts["weights"] = difference(ulysses.weights(model), expected["weights"])
    facts["table"] = [(linear.name, linear.method, linear.reason) for linear in report(model).linears]
    facts["rows"] = [
        (row.name, row.fprop, row.dgrad, row.wgrad, row.reason, row.calls) for row in report(model).linears
    ]
    with torch.no_grad():
        ulysses.forward_step(ulysses.batches(run), model.eval())
    linears = [row for row in report(model).linears if row.slot in ("qkv", "proj")]
    facts["evaluated"] = {row.calls for row in linears}
    facts["reasons, evaluated"] = {row.reason for row in linears}
    model.train()
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
