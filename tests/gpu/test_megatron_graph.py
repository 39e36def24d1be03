"""The recipe's passes of a whole step in a CUDA graph on GPUs: replays train like eager steps, in turns with them on one heap.

Both trainers start from the same weights and read the same batches. Attention and the embedding add in the order of arrival, so
that figures are compared within what bf16 rounds, not to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core")

from megatron.core import parallel_state

from gpt.data import Batch, part_of_rank
from gpt.model import build_model
from gpt.settings import Settings, defaults
from gpt.training import EAGER_STEPS, Trainer, micro_batches
from overlap_train import OverlapConfig, all_gather_linear, check, forget_graphs
from overlap_train.config import SLOTS
from overlap_train.integrations.megatron import report

SEQUENCE, BYTES, REPLAYS = 1024, 256, 5


@pytest.fixture(scope="module", params=["tp", "cp"])
def settings(group: dist.ProcessGroup, request: pytest.FixtureRequest) -> Iterator[Settings]:
    """A small model, two micro-batches a step; with --domain-size 2 on four GPUs gradients are reduced under backward. Tensor
    parallel, or context parallel by Ulysses."""
    parallel = dist.get_world_size(group)
    sizes = {"tp": 1, "cp": 1, request.param: parallel}
    parallel_state.initialize_model_parallel(sizes["tp"], context_parallel_size=sizes["cp"])
    replicas = dist.get_world_size() // parallel
    yield replace(
        defaults(True),
        num_layers=2,
        seq_length=SEQUENCE,
        **sizes,
        micro_batch_size=2,
        global_batch_size=4 * replicas,
        lr=3e-4,
        lr_warmup_iters=1,
    )
    parallel_state.destroy_model_parallel()


def batches(settings: Settings, device: torch.device, seed: int = 0) -> Iterator[Batch]:
    """This rank's part of bytes that count up from a random one; every other label of the first half does not count."""
    generator = torch.Generator().manual_seed(100 * seed + parallel_state.get_data_parallel_rank())
    rows = settings.micro_batch_size
    mask = torch.ones(rows, SEQUENCE)
    mask[:, : SEQUENCE // 2 : 2] = 0.0
    positions = torch.arange(SEQUENCE).expand(rows, -1)
    while True:
        start = torch.randint(BYTES, (rows, 1), generator=generator)
        text = (start + torch.arange(SEQUENCE + 1)) % BYTES
        batch = {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": mask, "position_ids": positions}
        yield {key: value.contiguous().to(device) for key, value in part_of_rank(batch).items()}


@pytest.fixture
def trainers() -> Iterator[list[Trainer]]:
    """Those put into the list are freed at the end, also after a failure: NCCL does not end while a graph holds its calls."""
    made: list[Trainer] = []
    yield made
    for trainer in made:
        trainer.release()
    for group in (parallel_state.get_tensor_model_parallel_group(), parallel_state.get_context_parallel_group()):
        forget_graphs(group)


def trainer_of(settings: Settings, overlap: OverlapConfig | None, device: torch.device) -> Trainer:
    return Trainer(settings, build_model(settings, overlap, device))


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: parameter.main_grad.clone() for name, parameter in trainer.bare.named_parameters()}


@pytest.mark.parametrize("is_overlapped", [True, False], ids=["overlapped", "Megatron's linears"])
def test_replays_are_like_eager_passes(
    settings: Settings,
    trainers: list[Trainer],
    device: torch.device,
    provider: str,
    method: str,
    is_overlapped: bool,
    wait_s: float,
) -> None:
    if not is_overlapped and (method != "fused" or settings.cp > 1):
        pytest.skip("the method means nothing to Megatron's linears, which have no context parallelism")
    overlap = OverlapConfig(method=method, provider=provider, timeout_s=wait_s) if is_overlapped else None
    eager = trainer_of(settings, overlap, device)
    graphed = trainer_of(replace(settings, cuda_graph=1), overlap, device)
    trainers.append(graphed)
    ours, theirs = batches(settings, device), batches(settings, device)
    for number in range(EAGER_STEPS + REPLAYS):
        total, expected = graphed.forward_backward(ours), eager.forward_backward(theirs)
        assert (graphed.graph is not None) == (number >= EAGER_STEPS)
        assert total[1] == expected[1], "the bytes that count"
        assert abs(total[0] - expected[0]) < 2**-8 * expected[0], f"pass {number}"
        wanted = gradients(eager)
        for name, gradient in gradients(graphed).items():
            error = (gradient - wanted[name]).norm() / wanted[name].norm()
            assert error < 2**-5, f"pass {number}, {name}: {error:.4f}"
    steps = [(graphed.step(ours)[0], eager.step(theirs)[0]) for _ in range(REPLAYS)]  # back to back
    losses = [[(total[0] / total[1]).item() for total in pair] for pair in steps]
    assert losses[-1][0] < losses[0][0], f"the model learns: {losses}"
    assert all(abs(ours - theirs) < 0.1 * theirs for ours, theirs in losses), losses
    check()
    slots = ("qkv", "proj") if settings.cp > 1 else SLOTS
    calls = [linear.overlapped_calls for linear in report(graphed.bare).linears if linear.slot in slots]
    # eager passes and one capture: replays call nothing
    assert calls == [(EAGER_STEPS + 1) * micro_batches(settings) * is_overlapped] * len(calls)


def test_an_operator_outside_the_bracket_is_refused(
    group: dist.ProcessGroup, device: torch.device, provider: str, wait_s: float
) -> None:
    config = OverlapConfig(method="chunked", provider=provider, timeout_s=wait_s)
    x, weight = (torch.ones(rows, 64, device=device, dtype=torch.bfloat16) for rows in (128, 64))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = all_gather_linear(x, weight, group=group, config=config)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match=r"not inside overlap_train.graphed\(group\)"),
        torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
    ):
        all_gather_linear(x, weight, group=group, config=config)
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(all_gather_linear(x, weight, group=group, config=config), expected), "eager calls go on"
