"""Every reason to fall back, one by one, on stand-ins for a linear: also those that no CPU process can reach."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from overlap_train import AttentionHeads, OverlapConfig
from overlap_train.integrations.megatron.linears import conditions, two_groups
from overlap_train.integrations.megatron.linears.conditions import bad_combination, fallback_reason, standing_reason


def linear(**changes: Any) -> SimpleNamespace:
    """A column-parallel linear that overlaps, as far as fallback_reason looks at it; `config__x` changes its config."""
    config = {"transformer_impl": "local", "fp8": None, "fp4": None, "cpu_offloading": False}
    config.update({name.removeprefix("config__"): v for name, v in changes.items() if name.startswith("config__")})
    settings = {
        "is_expert": False,
        "explicit_expert_comm": False,
        "tp_group": SimpleNamespace(size=lambda: 2),
        "sequence_parallel": True,
        "disable_grad_reduce": False,
        "gtp_remat_size": 1,
        "training": True,
        "overlap": SimpleNamespace(config=OverlapConfig(on_unsupported="fallback")),
        "config": SimpleNamespace(**config),
    }
    settings.update({name: value for name, value in changes.items() if not name.startswith("config__")})
    return SimpleNamespace(**settings)


def weight(**attributes: Any) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    parameter.__dict__.update(attributes)
    return parameter


X = torch.ones(2, 1, 4)


def test_nothing_against_overlap() -> None:
    assert fallback_reason(linear(), X, weight()) is None
    assert fallback_reason(linear(input_is_parallel=True), X, weight()) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_expert": True}, "expert"),
        ({"explicit_expert_comm": True}, "expert"),
        ({"tp_group": SimpleNamespace(size=lambda: 1)}, "size 1"),
        ({"sequence_parallel": False}, "no sequence parallelism"),
        ({"disable_grad_reduce": True}, "disable_grad_reduce"),
        ({"input_is_parallel": False}, "not split over the ranks"),
        ({"gtp_remat_size": 2}, "generalized tensor parallelism"),
        ({"config__transformer_impl": "inference_optimized"}, "inference_optimized"),
        ({"config__fp8": "e4m3"}, "fp8"),
        ({"config__fp4": "e2m1"}, "fp4"),
        ({"config__cpu_offloading": True}, "offloaded"),
        ({"config__fine_grained_activation_offloading": True}, "offloaded"),
        ({"training": False}, "evaluation mode"),
    ],
    ids=lambda value: value if isinstance(value, str) else ", ".join(value),
)
def test_settings_of_the_linear(changes: dict[str, Any], reason: str) -> None:
    assert reason in str(fallback_reason(linear(**changes), X, weight()))


GOOD = dict(
    tensor_model_parallel_size=2, sequence_parallel=True, tp_comm_overlap=False, transformer_impl="local", fp8=None, fp4=None,
    cpu_offloading=False, fine_grained_activation_offloading=False, use_transformer_engine_op_fuser=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value", "wanted"),
    [
        ("tensor_model_parallel_size", 1, "2 or more"),
        ("sequence_parallel", False, "True"),
        ("tp_comm_overlap", True, "False"),
        ("transformer_impl", "inference_optimized", "'local'"),
        ("use_transformer_engine_op_fuser", True, "False (leave out --use-transformer-engine-op-fuser)"),
        ("fp8", "e4m3", "None (leave out --fp8-format)"),
        ("fp4", "e2m1", "None (leave out --fp4-format)"),
        ("cpu_offloading", True, "False (leave out --cpu-offloading-num-layers)"),
        ("fine_grained_activation_offloading", True, "False (leave out --fine-grained-activation-offloading)"),
    ],
)
def test_settings_of_a_model(field: str, value: Any, wanted: str) -> None:
    problem = bad_combination(SimpleNamespace(**{**GOOD, field: value}))
    assert str(problem).startswith(f"{field}={value!r} in the model's config: ") and f"; set it to {wanted}" in problem


def test_ulysses_is_something_to_overlap_on_one_tensor_parallel_rank() -> None:
    alone = {**GOOD, "tensor_model_parallel_size": 1, "sequence_parallel": False, "context_parallel_size": 2}
    assert bad_combination(SimpleNamespace(**alone, cp_comm_type="a2a")) is None
    assert bad_combination(SimpleNamespace(**alone, cp_comm_type=["p2p", "a2a"])) is None
    for others in (None, "p2p", ["p2p", "all_gather"]):
        problem = bad_combination(SimpleNamespace(**alone, cp_comm_type=others))
        assert problem is not None and "tensor_model_parallel_size=1" in problem and "--cp-comm-type a2a" in problem


def test_a_model_of_an_older_megatron_lacks_some_settings() -> None:
    old = ("tensor_model_parallel_size", "sequence_parallel", "tp_comm_overlap")
    assert bad_combination(SimpleNamespace(**GOOD)) is None
    assert bad_combination(SimpleNamespace(**{name: GOOD[name] for name in old})) is None


def test_frozen_and_fsdp_weights() -> None:
    frozen = weight().requires_grad_(False)
    assert fallback_reason(linear(), X, frozen) == standing_reason(linear(), frozen) == "frozen weight"
    assert "FSDP" in str(fallback_reason(linear(), X, weight(__fsdp_param__=True)))
    assert standing_reason(linear(), None) is None, "the output layer's tied weight is not known before the call"


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"grad_output_buffer": []}, "deferred"),
        ({"wgrad_deferral_limit": 0}, "deferred"),
        ({"output_dtype": torch.float32}, "output_dtype=torch.float32"),
    ],
    ids=str,
)
def test_arguments_of_the_call(call: dict[str, Any], reason: str) -> None:
    assert reason in str(fallback_reason(linear(), X, weight(), call))
    assert fallback_reason(linear(), X, weight(), dict.fromkeys(call)) is None


def test_dtypes() -> None:
    assert "torch.bfloat16" in str(fallback_reason(linear(), X.bfloat16(), weight()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "autocast" in str(fallback_reason(linear(), X, weight()))
        same = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
        assert fallback_reason(linear(), X.bfloat16(), same) is None, "autocast would change nothing"


def test_linears_of_transformer_engine() -> None:
    """They lack is_expert, mark generalized tensor parallelism on the weight, and are experts without a parallel mode."""
    te = linear(parallel_mode="column", weight=weight())
    del te.is_expert, te.explicit_expert_comm, te.gtp_remat_size
    assert standing_reason(te, None) is None
    te.weight.gtp_remat_size = 2
    assert "generalized tensor parallelism" in str(standing_reason(te, None))
    te.parallel_mode = None
    assert "expert" in str(standing_reason(te, None))


def test_sequence_that_the_ranks_cannot_share() -> None:
    odd = torch.ones(3, 1, 4)
    assert "3 is not divisible by the 2 ranks" in str(fallback_reason(linear(input_is_parallel=True), odd, weight()))
    assert fallback_reason(linear(), odd, weight()) is None, "a column-parallel linear multiplies the length"


def test_cuda_graph_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = SimpleNamespace(dtype=torch.float32, device=torch.device("cuda"), is_cuda=True, size=lambda dim: 2)
    for capturing, inside in ((True, False), (True, True), (False, False)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda answer=capturing: answer)
        monkeypatch.setattr(conditions, "is_graphed", lambda group, answer=inside: answer)
        expected = "CUDA graph capture outside overlap_train.graphed" if capturing and not inside else None
        assert fallback_reason(linear(), on_gpu, weight()) == expected  # type: ignore[arg-type]
        strict = SimpleNamespace(config=OverlapConfig())
        assert fallback_reason(linear(overlap=strict), on_gpu, weight()) is None, "the operator raises"  # type: ignore[arg-type]


def _over_tp(x: Any, kv: int = 4, slot: str = "qkv", method: str = "auto", provider: str = "auto") -> str | None:
    """Of a linear of two tensor-parallel ranks, with a product of 32 heads of 128 features, and two context-parallel ranks."""
    tensor, ulysses = (SimpleNamespace(name=name, size=lambda: 2) for name in ("tensor", "ulysses"))
    heads = AttentionHeads(16, kv, 128)
    weights = {"qkv": torch.empty(24 * 128, 4096), "proj": torch.empty(4096, 16 * 128)}
    overlap = SimpleNamespace(
        slot=slot, config=OverlapConfig(method=method, provider=provider), name="layers.0.linear_qkv"
    )
    stand_in = SimpleNamespace(overlap=overlap, weight=weights[slot], tp_group=tensor)
    return two_groups.why_apart(stand_in, x, SimpleNamespace(group=ulysses, heads=heads))  # type: ignore[arg-type]


def test_products_over_tensor_parallelism_hide_exchanges_of_long_sequences() -> None:
    """4096 positions of each rank are 8192 rows of a product: 0.32 ms of linear_qkv, 0.21 of linear_proj."""
    rows = torch.empty(1, 1, 1)
    for positions, slot, shape in ((4096, "qkv", (4096, 1, 4096)), (8192, "proj", (4 * 8192, 1, 8 * 128))):
        assert _over_tp(rows.expand(shape), slot=slot) is None, positions
        half = (shape[0] // 2, *shape[1:])
        assert "too short to be cut" in str(_over_tp(rows.expand(half), slot=slot)), positions // 2
    assert "fewer KV heads than TP ranks" in str(_over_tp(rows.expand(4096, 1, 4096), kv=1))


@pytest.mark.parametrize(
    ("nodes", "named", "auto"),
    [
        ((1, 1), None, None),
        ((2, 1), None, "not measured across nodes of GPUs yet; --overlap-train-method fused tries it"),
        ((1, 2), None, "not measured across nodes of GPUs yet; --overlap-train-method fused tries it"),
        ((2, 4), "both TP and CP ranks span nodes", "both TP and CP ranks span nodes"),
    ],
)
def test_on_gpus_both_are_hidden_where_one_group_spans_nodes_at_most(
    nodes: tuple[int, int], named: str | None, auto: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a rank, this one or a peer. By auto inside one node only, until it has been measured across."""
    asked = []

    def nodes_of_groups(groups: Any, config: OverlapConfig, device: torch.device, name: str) -> tuple[int, int]:
        asked.append((groups.ulysses.name, groups.tensor.name, config.method, name))
        return nodes

    monkeypatch.setattr(two_groups, "nodes_of_groups", nodes_of_groups)
    x: Any = SimpleNamespace(
        shape=torch.Size((4096, 1, 4096)), is_cuda=True, device="cuda", element_size=lambda: 2, dim=lambda: 3
    )
    assert (_over_tp(x, method="fused"), _over_tp(x)) == (named, auto)
    assert asked == [("ulysses", "tensor", method, "layers.0.linear_qkv") for method in ("fused", "auto")]
    assert _over_tp(torch.empty(1, 1, 1).expand(4096, 1, 4096), method="fused") is None
    assert _over_tp(x, provider="nvshmem") == "NVSHMEM serves one group of a process"
    assert _over_tp(x, provider="torch") == auto and len(asked) == 3
    assert _over_tp(x, method="fused", provider="nvshmem") == named, "the operator raises, and says what to do"
    x.shape = torch.Size((512, 1, 4096))
    assert "too short" in str(_over_tp(x, method="fused"))
    assert len(asked) == 4, "ranks that have nothing to hide, or are CPU processes, ask nobody"
