"""GPTs under context parallelism 2 with cp_comm_type "a2a" train as one rank does, for every kind of batch and attention."""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from overlap_train import OverlapConfig, shutdown
from overlap_train.integrations.megatron import provide_accumulation_fusion, report
from overlap_train.integrations.megatron.packed import documents_of
from overlap_train.integrations.megatron.ulysses_linears import exchanges
from tests.megatron import models, ulysses
from tests.megatron.models import FULL_RECOMPUTE, GPT2, LLAMA, Recipe
from tests.megatron.test_main_grad import GRADIENTS
from tests.megatron.ulysses import Run
from tests.megatron.workers import on_ranks

CHUNKED, COLLECTIVE = OverlapConfig(method="chunked"), OverlapConfig(method="collective")

NORMED = {**LLAMA, "qk_layernorm": True}

# What is trained, and how its linears overlap.
CASES = {
    "grouped queries, enabled": (Run(), CHUNKED),
    "collective": (Run(), COLLECTIVE),
    "without overlap": (Run(), None),
    "one key and value head for two ranks": (Run(architecture={**LLAMA, "num_query_groups": 1}), CHUNKED),
    "biases, every head its own keys": (Run(architecture=GPT2), CHUNKED),
    "query and key norms": (Run(architecture=NORMED), CHUNKED),
    "query and key norms that begin at zero": (
        Run(architecture={**NORMED, "layernorm_zero_centered_gamma": True, "rotary_interleaved": True}),
        CHUNKED,
    ),
    "query and key norms of another kind": (Run(architecture={**GPT2, "qk_layernorm": True}), CHUNKED),
    "full recomputation": (Run(architecture={**LLAMA, **FULL_RECOMPUTE}), CHUNKED),
    "core attention recomputed": (Run(architecture={**LLAMA, "recompute_granularity": "selective"}), CHUNKED),
    "packed": (Run(packed=True), CHUNKED),
    "packed, cut into contiguous parts": (Run(packed=True, cut="contiguous"), CHUNKED),
    "packed, cut as one sequence": (Run(packed=True, cut="zigzag_pack"), CHUNKED),
    "packed, query and key norms, without overlap": (Run(packed=True, architecture=NORMED), None),
    "only the output projection": (Run(), replace(CHUNKED, slots=("proj",))),
}


def difference(run: Recipe, overlap: OverlapConfig | None) -> float:
    """The largest difference of a gradient between context parallelism 2 and 1, as a part of its largest element."""
    expected = ulysses.gradients(run)
    actual = ulysses.gradients(replace(run, context_parallel=2, overlap=overlap))
    return ulysses.difference(actual, expected, relative=True)


@pytest.mark.parametrize("case", CASES)
@on_ranks
def test_gradients_are_those_of_one_rank(case: str) -> None:
    assert difference(*CASES[case]) < 5e-6  # some tens of roundings


@on_ranks
def test_weights_that_are_gathered_in_forward_hooks_are_waited_for() -> None:
    """A step is what it would be with weights that were there from the beginning: forward pre-hooks of the projections bring
    them, as those of Megatron's DDP do that gathers parameters while others are in use."""
    run = Run(context_parallel=2, overlap=CHUNKED)
    expected = ulysses.gradients(run)
    build = ulysses.gpt

    def gathering(run: Recipe) -> Any:
        model = build(run)
        for module in model.modules():
            if exchanges(module):
                hook = functools.partial(_bring, module.weight.data.clone())
                module.register_forward_pre_hook(hook, with_kwargs=True)
                module.weight.data.fill_(torch.nan)
        return model

    with mock.patch.object(ulysses, "gpt", gathering):
        actual = ulysses.gradients(run)
    assert all(torch.equal(actual[name], x) for name, x in expected.items())


def _bring(weight: torch.Tensor, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    pickle.dumps((args, kwargs))  # as Megatron's activation logging does
    module.weight.data.copy_(weight)  # type: ignore[union-attr]


@pytest.mark.parametrize("packed", [False, True])
@on_ranks
def test_ten_steps_follow_one_rank(packed: bool) -> None:
    alone, model = models.train(Run(packed=packed), 10)
    weights = ulysses.weights(model)
    losses, model = models.train(Run(packed=packed, context_parallel=2, overlap=CHUNKED), 10)
    assert losses == pytest.approx(alone, rel=2e-6) and losses[-1] < losses[0], "it learns"
    for name, weight in ulysses.weights(model).items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=2e-5, msg=lambda t, n=name: f"{n}: {t}")


@on_ranks
def test_the_table_says_what_is_exchanged_and_names_are_megatrons() -> None:
    run = Run(context_parallel=2, overlap=CHUNKED)
    _, model = models.train(run, 1)
    rows = {row.slot: row for row in report(model).linears}
    qkv, proj = ((row.fprop, row.dgrad, row.wgrad, row.method, row.calls) for row in (rows["qkv"], rows["proj"]))
    passes = "GEMM + A2A (CP 2)", "A2A(dy) + GEMM (CP 2)", "GEMM with the received dy"
    assert qkv == (*passes, "chunked", "overlapped 2")
    passes = "A2A(x) + GEMM (CP 2)", "GEMM + A2A (CP 2)", "A2A(x) under dgrad, then GEMM"
    assert proj == (*passes, "chunked", "overlapped 2")
    assert rows["output"].reason == "tensor-parallel size 1: nothing to communicate"
    with torch.no_grad():
        models.forward_step(run, models.batches(), model.eval())
    calls = {row.calls for row in report(model).linears if row.slot in ("qkv", "proj")}
    assert calls == {"overlapped 3"} and ulysses.counted(model) > 0
    assert list(model.module.state_dict()) == list(ulysses.gpt(Run()).state_dict())


@pytest.mark.parametrize("overlap", [None, CHUNKED], ids=["without overlap", "overlapped"])
@on_ranks
def test_training_goes_on_after_inference(overlap: OverlapConfig | None) -> None:
    """What layers share is made in inference mode then."""
    run = Run(context_parallel=2, overlap=overlap)
    expected, model = ulysses.gradients(run), models.wrap(run, ulysses.gpt(run))
    with torch.inference_mode():
        models.forward_step(run, models.batches(), model.eval())
    models.forward_backward(run, model.train(), models.batches())
    assert all(torch.equal(expected[name], p.main_grad) for name, p in model.module.named_parameters())


@on_ranks
def test_projections_whose_methods_take_turns_say_so(tmp_path: Path) -> None:
    shutdown()
    run, rows = Run(context_parallel=2, overlap=OverlapConfig(tuning_dir=str(tmp_path), tune_steps=10)), []
    with contextlib.redirect_stderr(io.StringIO()):
        for steps in (5, 1):  # of two micro-batches
            _, model = models.train(run, steps)
            rows.append([row for row in report(model).linears if row.slot in ("qkv", "proj")])
    shutdown()
    trying, tuned = rows
    assert len(trying) == len(tuned) > 0
    for row in trying:
        assert row.method == "in turn" and row.reason.startswith("auto: tries ") and "chunked" in row.reason
    assert all(row.method != "in turn" and row.reason.startswith("auto: tuned for ") for row in tuned)


@pytest.mark.parametrize("fusion", [False, True], ids=["unfused", "fused"])
@pytest.mark.parametrize(("main_grad", "dtype"), GRADIENTS, ids=str)
@on_ranks
def test_calls_that_fall_back_add_to_the_same_gradient(fusion: bool, main_grad: str, dtype: torch.dtype) -> None:
    provide_accumulation_fusion()
    overlap, architecture = replace(CHUNKED, main_grad=main_grad), {**LLAMA, "gradient_accumulation_fusion": fusion}
    model = ulysses.gpt(Run(context_parallel=2, overlap=overlap, architecture=architecture)).to(dtype)
    ends = torch.tensor([0, 16], dtype=torch.int32)
    alone = PackedSeqParams("thd", ends, ends, max_seqlen_q=16, max_seqlen_kv=16, local_cp_size=1)
    bound = 1e-6 if dtype == torch.float32 else 2**-7  # each sum is rounded
    assert ulysses.error_of_two_kinds_of_call(model, alone) < bound


@on_ranks
def test_rows_of_no_document_stay_out() -> None:
    """Rows of padding at the end of a document, and beyond the last, give nothing and get no gradient."""
    real, padded = (torch.tensor(ends, dtype=torch.int32) for ends in ([0, 5, 15], [0, 8, 24]))
    packed = PackedSeqParams("thd", real, real, padded, padded, 16, 16)
    documents = documents_of(packed)
    assert documents is documents_of(packed), "read once"
    real += 1
    assert documents_of(packed).lengths == (5, 10) and documents_of(packed) is not documents
    model = ulysses.gpt(Run(context_parallel=2, overlap=CHUNKED))
    attention = model.decoder.layers[0].self_attention.eval()
    torch.manual_seed(torch.distributed.get_rank())
    x = torch.randn(16, 1, 32, requires_grad=True)  # this rank's half of 32 rows
    y, _ = attention(x, None, packed_seq_params=packed)
    y.square().sum().backward()
    # chunks of 2, of 4 and of 2 rows; rank 0 has the first and the last of each document
    counts = [4, 8, 4]
    first, second, rest = y.detach().split(counts)
    assert not rest.any() and not x.grad.split(counts)[2].any()
    rank = torch.distributed.get_rank()
    real_rows = [sum(r < 5 for r in rows) for rows in ((0, 1, 6, 7), (2, 3, 4, 5))][rank]
    assert first.abs().sum((1, 2)).count_nonzero() == real_rows
    assert second.any()
