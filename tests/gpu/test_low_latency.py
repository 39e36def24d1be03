"""The low-latency protocol on GPUs: exact in every dtype, the same bits as a sum in rank order, mistakes named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from overlap_train import OverlapConfig
from overlap_train.group.domain import OverlapDomain
from overlap_train.group.memory import Request, prepare
from overlap_train.group.registry import domain_of
from overlap_train.group.signals import Tag
from overlap_train.ops import low_latency
from overlap_train.select.method import ONE_SHOT, TWO_SHOTS, WORDS, flagged_bytes
from tests.gpu import test_mismatched_calls
from tests.linear_cases import ALL_REDUCING, OPERATORS, SHAPES, Case, same_bits

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LARGER = {"few rows": ((64, 1), 4096, 1024), "many parts": ((512, 1), 2048, 256)}


@pytest.fixture
def few(group: dist.ProcessGroup, device: torch.device, provider: str, wait_s: float) -> Case:
    config = OverlapConfig(method="low_latency", provider=provider, timeout_s=wait_s)
    return Case(group, device, config, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("operator", ["column", "row"])
@pytest.mark.parametrize("gathered_input", ["regather", "keep"])
def test_every_shape_is_exact(few: Case, operator: str, dtype: torch.dtype, gathered_input: str) -> None:
    case = replace(few, dtype=dtype, config=replace(few.config, gathered_input=gathered_input))
    for seed, shape in enumerate((SHAPES | LARGER).values()):
        for repeat in range(3):  # slots come again
            OPERATORS[operator](case, *shape, seed=seed + repeat, bias=repeat == 0)


@pytest.mark.parametrize("operator", ALL_REDUCING)
def test_all_reduces_are_exact(few: Case, operator: str) -> None:
    for seed, shape in enumerate(2 * [*(SHAPES | LARGER).values()]):
        ALL_REDUCING[operator](few, *shape, seed=seed, bias=seed % 2 == 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shots", [WORDS, ONE_SHOT, TWO_SHOTS])
def test_all_reduces_of_any_length_are_exact(few: Case, shots: str, dtype: torch.dtype) -> None:
    """Bits as of a sum in rank order, in fp32, rounded once."""
    domain, tag = memory_for(few, 2 << 20), Tag("all_reduce", f"{shots} {dtype}")
    for seed, (rows, n) in enumerate(3 * [(1, 1), (3, 7), (33, 4096), (300, 1111), (256, 2048), (512, 1024)]):
        generator = torch.Generator(few.device).manual_seed(seed)
        of_all = torch.randn(few.world, rows, n, generator=generator, device=few.device).to(dtype)
        bias = torch.randn(n, generator=generator, device=few.device).to(dtype)
        with domain.operator(tag, 1):
            y = low_latency.all_reduce(domain, tag, of_all[few.rank], shots, 0, bias)
        right = torch.zeros(rows, n, device=few.device)
        for partial in of_all:
            right += partial.float()
        assert torch.equal(y, (right + bias.float()).to(dtype)), f"{rows} x {n}, call {seed}"


@pytest.mark.parametrize("rows", [1, 512])
def test_all_reduces_have_the_same_bits_on_every_rank_and_run(few: Case, rows: int) -> None:
    """As words, and, of 512 rows, by stores."""
    same_bits(few, rows)


def memory_for(case: Case, received: int) -> OverlapDomain:
    domain = domain_of(case.group, case.config, case.device)
    words = flagged_bytes(case.world * received, case.world)
    request = Request("test", f"{received} bytes", case.world * (received + 256), words)
    prepare(domain, request, None, "test_low_latency")
    return domain


@pytest.mark.parametrize("shots", [ONE_SHOT, TWO_SHOTS])
def test_hundreds_of_all_reduces_of_ranks_that_are_not_in_step(few: Case, shots: str) -> None:
    """As the next one. Integers: sums are exact in bf16."""
    most, tag = 192, Tag("all_reduce", shots)
    domain = memory_for(few, most * 1024 * 2)
    x = (torch.arange(most * 1024, device=few.device) % 16).to(torch.bfloat16).view(most, 1024)
    wrong = torch.zeros((), dtype=torch.int64, device=few.device)
    for number in range(300):
        rows = 1 + 37 * number % most
        if number % 50 == few.rank:
            torch.cuda._sleep(2_000_000)
        with domain.operator(tag, 1):
            y = low_latency.all_reduce(domain, tag, x[:rows] + (number + few.rank) % 16, shots, 0)
        wrong += (y != sum(x[:rows] + (number + rank) % 16 for rank in range(few.world))).sum()
    assert int(wrong) == 0


def test_a_thousand_calls_of_ranks_that_are_not_in_step(few: Case) -> None:
    """New numbers and another length each time; now and then one rank is a millisecond late."""
    domain, most = memory_for(few, few.world * 96 * 1024 * 2), 96
    x = torch.arange(most * 1024, device=few.device, dtype=torch.int32).to(torch.bfloat16).view(most, 1024)
    wrong = torch.zeros((), dtype=torch.int64, device=few.device)
    for number in range(1000):
        rows, tag = 1 + 37 * number % most, Tag("gather", f"{1 + 37 * number % most}")
        if number % 50 == few.rank:
            torch.cuda._sleep(2_000_000)
        with domain.operator(tag, 1):
            got = low_latency.gather(domain, tag, x[:rows] + (number + few.rank) % 128, sm_margin=0)
        for source in range(few.world):
            wrong += (got[source * rows : (source + 1) * rows] != x[:rows] + (number + source) % 128).sum()
    assert int(wrong) == 0


@pytest.mark.parametrize("mistake", [each for each in test_mismatched_calls.MISTAKES if each != "swaps exchanges"])
def test_mistakes_are_named(few: Case, mistake: str) -> None:
    test_mismatched_calls.test_every_rank_raises_and_one_names_both_calls(few, mistake)
