"""Every reason that the table of linears can show is short, with the longest names and largest sizes that are plausible.

An exchange's reason comes first.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Iterator
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.attention import CrossAttention, SelfAttention
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention

from overlap_train import OverlapConfig
from overlap_train.integrations.megatron.attention import conditions as of_attention
from overlap_train.integrations.megatron.attention import in_model as attentions
from overlap_train.integrations.megatron.enabling import reporting
from overlap_train.integrations.megatron.enabling.table import LinearReport, Report
from overlap_train.integrations.megatron.linears import conditions, in_model, transformer_engine, two_groups, ulysses
from overlap_train.schedule.order import A2A_GEMM, GATHER, GEMM_A2A, SCATTER
from overlap_train.select.autotune import methods_to_try
from overlap_train.select.choose import choose
from overlap_train.select.method import CHUNK_COUNTS, Method
from overlap_train.select.passes import Pass
from overlap_train.select.table import UNTUNED, Table, Winner

BF16, GPU, CPU = torch.bfloat16, torch.device("cuda", 0), torch.device("cpu")
# 1 Mi tokens; Qwen's vocabulary; Llama-3 405B's feed-forward layer. 1024 ranks, and a class with a long name.
M, N, K, RANKS = 1 << 20, 152064, 53248, 1024
LONG_NAME = "TransformerEngineLayerNormColumnParallelLinear"
# Characters of a reason: at most five lines of the table's narrowest column.
LONGEST = 160
HOLE = max(LONG_NAME, "torch.bfloat16", f"{M}", key=len)


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    card = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)


def untuned() -> Iterator[str]:
    """Of linears of all kinds that were never measured."""
    kinds, rows = (GATHER, SCATTER, A2A_GEMM, GEMM_A2A), (8, 256, 512, 1024, 4096, 16384, M)
    sizes = itertools.product(
        kinds, rows, (1024, 6144, N, 4097), (1024, 16384, K, 4097), (2, 8, 64), (1, 2), (GPU, CPU)
    )
    for kind, m, n, k, world, nodes, device in sizes:
        fprop = Pass(kind, m, n, k, BF16, world)
        for method in ("auto", "fused", "direct", "low_latency", "chunked", "collective"):
            both = (choose(method, one, device, UNTUNED, nodes).reason for one in (fprop, fprop.dgrad))
            yield reporting._both(*both)


def tuned() -> Iterator[str]:
    """Of linears that were measured, forward and backward in sizes of their own and in every variant."""
    inside = [Method("fused", *options) for options in itertools.product((False, True), repeat=3)]
    across = [Method("fused", chunks=count) for count in CHUNK_COUNTS]
    for nodes, first, second in [
        (n, *pair) for n, ways in ((1, inside), (2, across)) for pair in itertools.product(ways, repeat=2)
    ]:
        fprop = Pass(GATHER, M, N, K, BF16, 64)
        measured = Pass(GATHER, M - 1, N - 64, K - 64, BF16, 64), fprop.dgrad
        winners = [
            Winner(one, way, {Method("fused"): 2.0, way: 1.0})
            for one, way in zip(measured, (first, second), strict=True)
        ]
        table = Table({winner.measured.bucket: winner for winner in winners}, nodes)
        both = [choose("auto", one, GPU, table, nodes).reason for one in (fprop, fprop.dgrad)]
        assert all("tuned for" in reason for reason in both)
        yield reporting._both(*both)


def in_turn(monkeypatch: pytest.MonkeyPatch, is_over: bool) -> str:
    methods = methods_to_try(Pass(GATHER, 256, 4096, 4096, BF16, 8), GPU, 1)
    assert len(methods) == 5
    trial = SimpleNamespace(methods=methods, steps=10**6)
    return reason_of(monkeypatch, trial=trial, trials=SimpleNamespace(is_under_way=lambda trial: not is_over))


def in_two_groups(reason: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a linear whose parts hide exchanges."""
    monkeypatch.setattr(reporting, "in_two_groups", lambda linear: True)
    return reason_of(monkeypatch, reason, parts=128)


def reason_of(
    monkeypatch: pytest.MonkeyPatch, reason: str = "", trials: Any = None, trial: Any = None, parts: int = 1
) -> str:
    """Of a linear that has run by a plan for this reason."""
    monkeypatch.setattr(reporting, "made_cache", lambda domain: SimpleNamespace(trials=trials))
    monkeypatch.setattr(reporting, "groups_of", lambda linear: [None])
    ran = SimpleNamespace(method="", reason=reason)
    overlap = SimpleNamespace(plan=SimpleNamespace(fprop=ran, dgrad=ran), trial=trial, parts=parts)
    return reporting._method_and_reason(SimpleNamespace(overlap=overlap))[1]


def texts_of(*functions: FunctionType) -> list[str]:
    """What functions return as text, each variable part as long as the longest name."""
    found = []
    for function in functions:
        for node in ast.walk(ast.parse(inspect.getsource(function))):
            if isinstance(node, ast.Return) and isinstance(node.value, ast.Constant | ast.JoinedStr):
                pieces = getattr(node.value, "values", [node.value])
                found.append("".join(str(p.value) if isinstance(p, ast.Constant) else HOLE for p in pieces))
    return [text for text in found if " " in text]


NO_REASONS = (conditions.bad_combination, conditions._sentence)  # these are raised, or printed in a line of their own
STANDING = (
    conditions.fallback_reason, conditions.exchange_reason, conditions._placement_reason, conditions._feature_reason,
    conditions._weight_reason, conditions._call_reason, conditions._input_reason, in_model.why_not, ulysses.why_no_exchange,
    transformer_engine.te_feature, reporting._method_and_reason,
)  # fmt: skip


def test_all_that_says_why_a_linear_does_not_overlap_is_looked_at() -> None:
    """Whoever adds a function of reasons adds it here."""
    for module in (conditions, transformer_engine):
        functions = {function for _, function in inspect.getmembers(module, inspect.isfunction)}
        speaking = {function for function in functions if function.__module__ == module.__name__ and texts_of(function)}
        assert speaking <= {*STANDING, *NO_REASONS}


@pytest.mark.parametrize("text", texts_of(*STANDING), ids=lambda text: text[:40])
def test_reasons_not_to_overlap_fit(text: str) -> None:
    assert len(text) <= LONGEST


def test_reasons_of_methods_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {*untuned(), *tuned(), *(in_turn(monkeypatch, is_over) for is_over in (False, True))}
    longest = max(reasons, key=len)
    assert len(reasons) > 50 and len(longest) <= LONGEST, longest


def test_reasons_of_parts_that_hide_exchanges_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    for reason in (*untuned(), f"auto: tuned for M={M} N={N} K={K} / M={M} N={K} K={N}"):
        text = in_two_groups(reason, monkeypatch)
        assert reason in text and text.index("128 parts") == 0 and len(text) <= LONGEST, text


def attention(kind: type, core: str = "DotProductAttention", cp: int = RANKS, **settings: Any) -> Any:
    """One under context parallelism, as far as why_not_turned looks at it."""
    config = dict(
        tensor_model_parallel_size=1, num_attention_heads=RANKS, num_query_groups=RANKS, kv_channels=128, cp_comm_type="a2a",
    )  # fmt: skip
    found = kind.__new__(kind)
    vars(found).update(
        config=SimpleNamespace(**config | settings), layer_number=1, core_attention=type(core, (), {})(),
        pg_collection=SimpleNamespace(cp=SimpleNamespace(size=lambda: cp)),
    )  # fmt: skip
    return found


def attentions_left_alone(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(of_attention, "is_transformer_engines", lambda core: "Transformer" in type(core).__name__)
    latent = type(LONG_NAME, (MultiLatentAttention,), dict(get_query_key_value_tensors=None))
    own, te = type(LONG_NAME, (SelfAttention,), {}), "TransformerEngineCore"
    settings = dict(
        attention_output_gate=True, softmax_type="off-by-one", qk_clip=True, log_max_attention_logit=True,
        multi_latent_attention=True,
    )  # fmt: skip
    return {
        **{name: attention(SelfAttention, te, **{name: value}) for name, value in settings.items()},
        "latent": attention(latent, multi_latent_attention=True),
        "query heads": attention(SelfAttention, te, cp=1000),
        "KV heads": attention(SelfAttention, te, num_attention_heads=1000, num_query_groups=200, cp=500),
        "cross": attention(type(LONG_NAME, (CrossAttention,), {})),
        "own": attention(own),
        "core": attention(SelfAttention, "FlashAttentionWithContextParallelism"),
        "another": attention(SelfAttention, cp_comm_type="a2a+p2p"),
    }


def exchange_reasons(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What the table says of the exchanges that no product hides."""
    row = LinearReport("output", "output", "-", "-", "-", "-", "")
    monkeypatch.setattr(reporting, "exchanges", lambda linear: True)
    monkeypatch.setattr(reporting, "is_ulysses", lambda found: found is ours)
    ours, found = SimpleNamespace(pg_collection=SimpleNamespace(cp=SimpleNamespace(size=lambda: RANKS))), {}
    texts = texts_of(two_groups.why_apart, two_groups._why_not_on_gpus)
    flags = [text.replace(HOLE, "--overlap-train-method") for text in texts]
    assert len(flags) == 5
    for apart in (None, *flags):
        linear = SimpleNamespace(overlap=SimpleNamespace(apart=apart))
        found[str(apart)] = reporting._with_exchange(row, linear, ours).reason
    for name, other in attentions_left_alone(monkeypatch).items():
        assert attentions.why_not_ulysses(other) is not None, name
        found[name] = reporting._with_exchange(row, None, other).reason
    return {name: reason.removesuffix("; ") for name, reason in found.items()}


def test_reasons_of_exchanges_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, reason in exchange_reasons(monkeypatch).items():
        assert len(f"{reason};") <= LONGEST, (name, reason)


def test_an_exchange_comes_first_and_both_reasons_are_there_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    for exchange, method in itertools.product(exchange_reasons(monkeypatch).values(), (*tuned(), "asked for")):
        row = LinearReport("output", "output", "-", "-", "-", "-", f"{exchange}; {method}")
        lines = [re.split(r"\s{2,}", line)[-1] for line in str(Report((row,))).splitlines()[2:]]
        assert " ".join(lines) == f"{exchange}; {method}"
    for name, exchange in exchange_reasons(monkeypatch).items():
        if exchange.startswith("all-to-all"):
            assert len(f"{exchange}; auto: not tuned: a short GEMM") <= LONGEST, name


def test_what_is_raised_says_what_the_table_says_and_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, other in attentions_left_alone(monkeypatch).items():
        why = attentions.why_not_ulysses(other)
        told = of_attention.in_full(why)
        assert told is not None and str(why) in told, name
        assert told.startswith("cp_comm_type='a2a' in the model's config, but ") and "on_unsupported='fallback'" in told
    assert of_attention.in_full(None) is None
    assert OverlapConfig().on_unsupported == "error", "who asks for nothing is told in full"
