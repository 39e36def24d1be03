"""What torch lets users do around an operator: modes of autograd, autocast, hooks, errors that they catch and go on from."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from overlap_train import (
    OverlapConfig,
    OverlapMismatchError,
    OverlapPeerError,
    all_gather_linear,
    all_to_all_linear,
    dispatch_linear,
    expert_routing,
    linear_all_to_all,
    linear_combine,
    linear_reduce_scatter,
    shutdown,
)
from overlap_train.group import domain
from overlap_train.group.registry import made_domain, tell_peers
from overlap_train.ops.a2a_gemm import ChunkedAllToAllGemm
from overlap_train.ops.ag_gemm import ChunkedAllGatherGemm
from overlap_train.ranks.agreement import Agreement
from overlap_train.symmetric import host, nvshmem
from tests.linear_cases import OPERATORS, Case
from tests.processes import refusal, run_ranks, values

Operator = Callable[..., torch.Tensor]


def _case(method: str = "chunked", **settings: Any) -> Case:
    return Case(dist.group.WORLD, torch.device("cpu"), OverlapConfig(method=method, timeout_s=20.0, **settings))


def _all(*cases: Case) -> list[tuple[partial[torch.Tensor], torch.Tensor, torch.nn.Parameter]]:
    """Each operator in each case, with an input and a weight: [4 W, 8] and [8, 8] integers, or [8, 8 W] where features come from
    all ranks."""
    return [
        (
            partial(linear, group=case.group, config=case.config),
            case.integers(4 * case.world, 8, seed=case.rank).float().requires_grad_(),
            torch.nn.Parameter(torch.ones(8, 8 * case.world if linear is all_to_all_linear else 8)),
        )
        for case in cases
        for linear in (all_gather_linear, linear_reduce_scatter, linear_all_to_all, all_to_all_linear)
    ]


def _exact(case: Case, rows: int = 4) -> None:
    for operator in OPERATORS.values():
        operator(case, (rows, 2), 24, 16)


def _after_memory_ran_out(rank: int, world: int) -> None:
    case = _case()
    _exact(case)

    with mock.patch.object(domain, "heap_by", side_effect=MemoryError("none left")), pytest.raises(MemoryError):
        _exact(case, rows=400)
    _exact(case)
    _exact(case, rows=400)


def _raised_in_different_places(rank: int, world: int) -> str:
    """All ranks raise, but one before its slot was used: memory does not run out everywhere in the same place. The slot would
    stay one use apart, and the blocks of an earlier call would count as those of the next."""
    case, place = _case(), (ChunkedAllGatherGemm, "matmul" if rank else "__init__")
    x, w = torch.ones(4, 8), torch.ones(8, 8)

    def refuse(*_: Any) -> None:
        raise MemoryError("none left")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(*place, refuse)
        with pytest.raises(MemoryError):
            all_gather_linear(x, w, group=case.group, config=case.config)
    with pytest.raises(OverlapMismatchError) as caught:
        all_gather_linear(x, w, group=case.group, config=case.config)
    shutdown()
    _exact(case)
    return str(caught.value)


def _begins_where_the_store_is_gone(rank: int, world: int) -> bool:
    """An error before an operator began has been told to the peers. When the next one begins, the store does not take it back."""
    case, x, w = _case(), torch.ones(4, 8), torch.ones(8, 8)
    _exact(case)
    domain = made_domain(case.group)
    assert domain is not None
    peers = domain.agreement.peers
    peers.takes_back = True
    with mock.patch.object(peers, "_store", mock.Mock(delete_key=mock.Mock(side_effect=dist.DistNetworkError("gone")))):
        _exact(case)
    peers.takes_back = True
    with mock.patch.object(peers, "go_on", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        all_gather_linear(x, w, group=case.group, config=case.config)
    return domain.in_use._is_owned()  # type: ignore[attr-defined]


def test_an_operator_that_cannot_begin_keeps_no_lock() -> None:
    assert values(run_ranks(2, _begins_where_the_store_is_gone, limit_s=60)) == [False] * 2


def test_ranks_that_raised_in_different_places_do_not_go_on() -> None:
    first, second = values(run_ranks(2, _raised_in_different_places, limit_s=60))
    assert "rank 0 is in all_gather_linear/fprop/barrier [barrier after an error, slots used 0, 0, 0 times]" in first
    assert "rank 1 is in all_gather_linear/fprop/barrier [barrier after an error, slots used 1, 0, 0 times]" in second


def _backward_after_shutdown(rank: int, world: int) -> None:
    for linear, x, w in _all(_case()):
        y = linear(x, w)
        shutdown()
        with pytest.raises(RuntimeError, match=r"the symmetric memory of its group is gone, by shutdown\(\)"):
            y.sum().backward()


def _shutdown_in_an_operator(rank: int, world: int) -> None:
    """In a signal handler, or in another thread: it is refused, and the operator goes on. Its copy engine would be gone."""
    case, matmul, said = _case(), ChunkedAllGatherGemm.matmul, list[str]()

    def end() -> None:
        try:
            shutdown()
        except RuntimeError as error:
            said.append(str(error))

    def ended_within(*arguments: Any) -> torch.Tensor:
        end()
        (thread := threading.Thread(target=end)).start()
        thread.join()
        return matmul(*arguments)

    with mock.patch.object(ChunkedAllGatherGemm, "matmul", ended_within):
        _exact(case)
    assert len(said) >= 2 and all("an operator is under way" in text for text in said)
    made_domain(case.group).heap.provider = "nvshmem"  # type: ignore[union-attr] # whose world then ends, too
    with mock.patch.object(nvshmem, "finalize") as finalize:
        shutdown()
    assert finalize.call_count == 1


def _inference_first(rank: int, world: int) -> None:
    """What a domain keeps is written to by training later."""
    for linear, x, w in _all(_case()):
        with torch.inference_mode():
            seen = linear(x, w)
        assert torch.equal(seen, linear(x, w))
    _exact(_case())


def _inference_in_parts(rank: int, world: int) -> None:
    """The copy engine's thread pulls into a tensor that was made in inference mode."""
    x, w = torch.ones(1024, 64), torch.ones(512 * world, 64)
    case = _case(exchange_mib=1)
    for _ in range(2):
        with torch.inference_mode():
            y = linear_all_to_all(x, w, group=case.group, config=case.config)
        assert (y == 64).all()


def _twice_differentiated(rank: int, world: int) -> None:
    for linear, x, w in _all(_case("chunked"), _case("collective")):
        (dx,) = torch.autograd.grad(linear(x, w).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            dx.square().sum().backward()


def _autocast(rank: int, world: int) -> None:
    message = r"autocast to torch\.bfloat16 is on, the input has torch\.float32"
    for linear, x, w in _all(_case("chunked"), _case("collective")):
        with torch.autocast("cpu", torch.bfloat16):
            with pytest.raises(ValueError, match=message):
                linear(x, w)
            half = linear(x.bfloat16(), w.bfloat16())
        assert half.dtype == torch.bfloat16
        value = torch.rand_like(y := linear(x, w))
        expected = torch.autograd.grad(y, (x, w), value)
        y = linear(x, w)
        with torch.autocast("cpu", torch.bfloat16):
            y.backward(value)
        assert torch.equal(x.grad, expected[0]) and torch.equal(w.grad, expected[1])  # type: ignore[arg-type]


def _hooks_on_saved_tensors(rank: int, world: int) -> None:
    """They give back other objects, without main_grad."""
    for linear, x, w in _all(_case()):
        (expected,) = torch.autograd.grad(linear(x, w).sum(), w)
        w.main_grad = torch.zeros(7)  # type: ignore[assignment]
        with pytest.raises(ValueError, match=r"weight\.main_grad is \[7\], the weight \[8, "):
            linear(x, w).sum().backward()
        w.main_grad = torch.zeros_like(w)
        torch.utils.checkpoint.checkpoint(linear, x, w, use_reentrant=False).sum().backward()
        with torch.autograd.graph.save_on_cpu():
            loss = linear(x, w).sum()
        loss.backward()
        assert w.grad is None and torch.equal(w.main_grad, 2 * expected)


def _frozen_weights(rank: int, world: int) -> None:
    """LoRA's base weights: their inputs need not be kept."""
    for linear, x, w in _all(_case()):
        y = linear(x, w.requires_grad_(False))
        assert [saved is not None for saved in y.grad_fn.saved_tensors][:2] == [False, True]


def _nothing_is_kept_without_gradients(rank: int, world: int) -> None:
    gathers, _, _, receives = _all(_case(gathered_input="keep"))
    for (linear, x, w), engine, copy in (
        (gathers, ChunkedAllGatherGemm, "gathered_copy"),
        (receives, ChunkedAllToAllGemm, "received_copy"),
    ):
        with mock.patch.object(engine, copy, None), torch.no_grad():
            linear(x, w)
        linear(x, w).sum().backward()
        assert w.grad is not None


def _tensors_that_are_not_plain(rank: int, world: int) -> None:
    """What one rank passes by mistake all pass: each is refused in a sentence, and nothing of the group is spoilt."""
    case, x = _case(), torch.ones(4, 8)
    w = DTensor.from_local(torch.ones(8, 8), init_device_mesh("cpu", (world,)), [Replicate()])

    def call(x: torch.Tensor, w: torch.Tensor, bias: Any = None) -> torch.Tensor:
        return all_gather_linear(x, w, bias, group=case.group, config=case.config)

    for operands, what in (((x, None), "w_shard_n is a NoneType"), ((x, torch.ones(8, 8), [1.0]), "bias is a list")):
        with pytest.raises(ValueError, match=f"{what}; it must be a torch"):
            call(*operands)
    with pytest.raises(ValueError, match=r"x_shard_k is a ndarray; it must be a torch\.Tensor"):
        linear_reduce_scatter(x.numpy(), torch.ones(8, 8), group=case.group)  # type: ignore[arg-type]
    routing = expert_routing(torch.ones(4, world, dtype=torch.bool), group=case.group, config=case.config)
    strange: list[tuple[Callable[[], Any], str]] = [
        (lambda: linear_all_to_all(x, None, group=case.group), "w"),  # type: ignore[arg-type]
        (lambda: linear_all_to_all(None, x, group=case.group), "x_shard_m"),  # type: ignore[arg-type]
        (lambda: all_to_all_linear(None, x, group=case.group), "x_shard_k"),  # type: ignore[arg-type]
        (lambda: dispatch_linear(None, torch.ones(1, 8, 8), routing), "x"),  # type: ignore[arg-type]
        (lambda: linear_combine(None, torch.ones(1, 8, 8), routing), "a"),  # type: ignore[arg-type]
    ]
    for refused, what in strange:
        with pytest.raises(ValueError, match=rf": {what} is a NoneType; it must be a torch\.Tensor"):
            refused()
    with pytest.raises(ValueError, match=r"w_shard_n is a DTensor, .*pass its shard, w_shard_n\.to_local\(\)"):
        call(x, w)
    with FakeTensorMode(), pytest.raises(ValueError, match="x_shard_m is a FakeTensor"):
        call(torch.ones(4, 8), torch.ones(8, 8))
    with pytest.raises(ValueError, match=r"inside a transform of torch\.func"):
        torch.func.grad(lambda x: call(x, torch.ones(8, 8)).sum())(x)
    assert (call(x, w.to_local()) == 8).all()


def _a_forked_process_is_no_rank(rank: int, world: int) -> None:
    """Operators raise there, and an error that ends it does not end the peers."""
    case, x, w = _case(), torch.ones(4, 8), torch.ones(8, 8)
    all_gather_linear(x, w, group=case.group, config=case.config)
    reads, writes = os.pipe()
    if not (child := os.fork()):
        signal.alarm(20)
        try:
            all_gather_linear(x, w, group=case.group, config=case.config)
        except RuntimeError as error:
            os.write(writes, str(error).encode())
            tell_peers(error)
        finally:
            os._exit(0)
    os.close(writes)
    os.waitpid(child, 0)
    _exact(case)
    said = os.read(reads, 4096).decode()
    assert "another process's, from which this one was forked" in said, said


def _settings_of_a_group_that_differ_are_told(rank: int, world: int) -> None:
    case, x, w = _case(), torch.ones(4, 8), torch.ones(8, 8)
    all_gather_linear(x, w, group=case.group, config=case.config)
    own = replace(case.config, tuning_dir="/nowhere") if rank else case.config

    def calls() -> None:
        for _ in range(3):
            all_gather_linear(x, w, group=case.group, config=own)

    with pytest.raises(OverlapPeerError if rank == 0 else ValueError, match="tuning_dir='/nowhere'"):
        calls()


def _dtensors_that_lie_as_the_operator_means(rank: int, world: int) -> None:
    case, mesh = _case(), init_device_mesh("cpu", (world,))
    generator = torch.Generator().manual_seed(rank)
    x, w, v = (torch.randn(8, 8, generator=generator) for _ in range(3))

    def grads(x: Any, w: Any, v: Any, bias: Any) -> list[Any]:
        leaves = [each.requires_grad_() for each in (x, w, v, bias)]
        y = all_gather_linear(x, w, group=case.group, config=case.config)
        linear_reduce_scatter(y, v, bias, group=case.group, config=case.config).square().sum().backward()
        return [leaf.grad for leaf in leaves]

    whole = torch.ones(8)
    *plain, of_own_rows = grads(x.clone(), w.clone(), v.clone(), whole.clone())
    dist.all_reduce(of_own_rows)
    placed = zip((x, w, v, whole), (Shard(0), Shard(0), Shard(1), Replicate()), strict=True)
    *found, of_bias = grads(*(DTensor.from_local(each.clone(), mesh, [place]) for each, place in placed))
    assert all(torch.equal(a.to_local(), b) for a, b in zip(found, plain, strict=True))
    assert torch.equal(of_bias.full_tensor(), of_own_rows)
    *_, of_bias = grads(x, w, v, DTensor.from_local(whole.clone(), mesh, [Replicate()]))
    assert torch.equal(of_bias.full_tensor(), of_own_rows), "beside plain tensors"


def _selective_checkpointing(rank: int, world: int) -> None:
    """By the names of operations: an operator is recomputed as a whole."""
    save = [torch.ops.aten.mm.default, torch.ops.aten.mm.out]

    def policy(ctx: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in save else CheckpointPolicy.PREFER_RECOMPUTE

    def loss_of(linear: Operator, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return linear(x, w).square().sum()

    contexts = partial(create_selective_checkpoint_contexts, policy)
    for linear, x, w in _all(_case("chunked"), _case("collective")):
        expected = torch.autograd.grad(loss_of(linear, x, w), (x, w))
        loss = torch.utils.checkpoint.checkpoint(loss_of, linear, x, w, use_reentrant=False, context_fn=contexts)
        assert all(map(torch.equal, torch.autograd.grad(loss, (x, w)), expected))


def _selective_checkpointing_of_first_calls(rank: int, world: int) -> None:
    """A policy that saves everything: what only a first call does is not saved, or what is recomputed would get that."""

    def loss_of_experts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        routing = expert_routing(torch.ones(len(x), world, dtype=torch.bool), group=dist.group.WORLD)
        y, _ = dispatch_linear(x, w, routing)
        return linear_combine(y, w, routing).square().sum()

    def loss_of(linear: Operator, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return linear(x, w).square().sum()

    contexts = partial(create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE)
    x_of_experts, w_of_experts = torch.ones(4, 8, requires_grad=True), torch.ones(1, 8, 8, requires_grad=True)
    losses = [(partial(loss_of, linear), x.view(len(x) // 2, 2, -1), w) for linear, x, w in _all(_case())]
    for loss, x, w in [*losses, (loss_of_experts, x_of_experts, w_of_experts)]:
        checkpointed = torch.utils.checkpoint.checkpoint(loss, x, w, use_reentrant=False, context_fn=contexts)
        found = torch.autograd.grad(checkpointed, (x, w))
        assert all(map(torch.equal, found, torch.autograd.grad(loss(x, w), (x, w))))
        shutdown()


def _any_default_device(rank: int, world: int) -> None:
    torch.set_default_device("meta")
    x, w = torch.ones(4, 8, device="cpu", requires_grad=True), torch.ones(8, 8, device="cpu")
    for method in ("chunked", "collective"):
        all_gather_linear(x, w, group=dist.group.WORLD, config=OverlapConfig(method=method)).sum().backward()


def _settings_of_one_rank(rank: int, world: int) -> None:
    """Where a rank puts its weight gradients is its own affair; and settings are those of a call, not of whoever came first."""
    for method in ("chunked", "collective"):
        x, w = torch.ones(4, 8), torch.nn.Parameter(torch.ones(8, 8))
        w.main_grad = torch.zeros(8, 8)
        for own in ("accumulate", "off" if rank == 0 else "accumulate"):
            config = OverlapConfig(method=method, timeout_s=5.0, main_grad=own)
            all_gather_linear(x, w, group=dist.group.WORLD, config=config, name="fc1").sum().backward()
        assert (w.main_grad == 4 * world * (1 if rank == 0 else 2)).all() and (w.grad is None) == (rank > 0)
        plans = []
        all_gather_linear(x, w, group=dist.group.WORLD, on_plan=lambda plan, _: plans.append(plan))  # noqa: B023
        assert plans[0].config == OverlapConfig(timeout_s=5.0)
        shutdown()


def _inputs_written_into_are_torchs_error(rank: int, world: int) -> None:
    """What backward needs of x, [M, K] or [s, b, K], is x itself: torch's message is the one that users know."""
    for middle in ((), (2,)):
        for linear, x, w in _all(_case()):
            x = torch.ones(4 * world, *middle, x.shape[-1], requires_grad=True) * 1
            y = linear(x, w)
            x.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()


def _results_may_be_written_into(rank: int, world: int) -> None:
    for linear, x, w in _all(_case("chunked"), _case("collective")):
        linear(x, w).mul_(2).sum().backward()


@pytest.mark.parametrize(
    "body",
    [
        _after_memory_ran_out, _backward_after_shutdown, _shutdown_in_an_operator, _inference_first, _inference_in_parts,
        _twice_differentiated, _autocast,
        _hooks_on_saved_tensors, _frozen_weights, _nothing_is_kept_without_gradients, _tensors_that_are_not_plain,
        _dtensors_that_lie_as_the_operator_means, _a_forked_process_is_no_rank, _settings_of_a_group_that_differ_are_told,
        _any_default_device, _settings_of_one_rank, _selective_checkpointing,
        _selective_checkpointing_of_first_calls, _inputs_written_into_are_torchs_error,
    ],
    ids=lambda body: body.__name__.strip("_"),
)  # fmt: skip
def test_modes(body: Callable[[int, int], None]) -> None:
    values(run_ranks(2, body, limit_s=60))


@pytest.mark.parametrize("world", [1, 2])
def test_results_may_be_written_into(world: int) -> None:
    values(run_ranks(world, _results_may_be_written_into, limit_s=60))


def _refused(rank: int, world: int) -> list[str]:
    """What wrong calls say on this rank: a vector on one rank, no group, kernels without an interpreter. Calls on meta, and by
    what is no group, come first: they leave the group as it was."""
    one = torch.ones(8, 8)
    wrong = ((one.to("meta"), dist.group.WORLD, "run on cuda and cpu"), (one, "tp", "group='tp' is a str"))
    for linear, _, w in _all(_case()):
        for x, group, what in wrong:
            assert what in refusal(linear, x, w.to(x.device), group=group)
    assert "name=3 must be a str" in refusal(linear, one, w, group=dist.new_group(), name=3)
    calls = [
        (torch.ones(()) if rank == 0 else one, dist.group.WORLD, OverlapConfig(method="chunked")),
        (one, None, OverlapConfig(method="chunked")),
        (one, dist.group.WORLD, OverlapConfig(method="fused")),
        (one, dist.group.WORLD, OverlapConfig(method="direct")),
    ]
    return [
        refusal(linear, x, w, group=group, config=config, name=f"{linear.func.__name__} {number}")
        for number, (x, group, config) in enumerate(calls)
        for linear, _, w in _all(_case())
    ]


def test_wrong_calls_are_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for said in values(run_ranks(2, _refused, limit_s=60)):
        assert ["they need at least 2, and exactly 2 dimensions" in text for text in said] == [True] * 4 + [False] * 12
        assert ["group=None: pass the tensor-parallel group" in text for text in said[4:8]] == [True] * 4
        assert ["with CPU tensors: its kernels run there in Triton's" in text for text in said[8:]] == [True] * 8


def _on_two_machines(rank: int, world: int) -> str:
    host.machine = lambda: f"machine {rank}"  # type: ignore[assignment] # of this process
    with pytest.raises(RuntimeError) as raised:
        _exact(_case())
    return str(raised.value)


def test_cpu_ranks_of_several_machines_are_refused_on_all_of_them() -> None:
    said = values(run_ranks(2, _on_two_machines, limit_s=60))
    assert all("CPU ranks on several machines" in text for text in said)


def _in_a_node_of_two_machines(rank: int, world: int) -> str:
    """Ranks 0 and 1 are in one node by mistake, ranks 2 and 3 rightly."""
    host.machine = lambda: f"machine {min(rank, 2)}"  # type: ignore[assignment] # of this process
    first = rank // 2 * 2
    with pytest.raises(RuntimeError) as raised:
        host.open_host_heap(Agreement(dist.group.WORLD, 20.0), 16, range(first, first + 2))
    return str(raised.value)


def test_other_nodes_hear_of_a_node_of_two_machines() -> None:
    for text in values(run_ranks(4, _in_a_node_of_two_machines, limit_s=60)):
        assert "rank 1: group has CPU ranks on several machines" in text and "rank 2:" not in text
