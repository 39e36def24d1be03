"""How much a gathering kernel that stores its rows at the peers should have in flight, where copies are as long as the product.

    torchrun --standalone --nproc-per-node 2 benchmarks/probes/stored_gathers.py

On two GPUs a gather of N features of one rank moves as much beside its product as one of 1.5 N on four: 1024 here are the qkv of
Llama-3 8B there, 768 the backward of its proj, 1792 the qkv of 70B. Prints microseconds of a call: by the copy engine, in chunks
and whole, and by `direct` with hopper.STEP elements in flight in each SM.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from overlap_train import OverlapConfig, shutdown
from overlap_train.operators import hopper
from overlap_train.operators.all_gather_gemm import start_all_gather
from overlap_train.planning.variants import PLAIN, Way
from overlap_train.runtime.domain import Demand, OverlapDomain
from overlap_train.runtime.registry import check, domain_of
from overlap_train.tools.bench.baselines import baselines_of
from overlap_train.tools.measure.cases import Case
from overlap_train.tools.measure.operands import Operands, make_operands
from overlap_train.tools.measure.timing import Pace, measure
from overlap_train.tools.measure.world import World

CASES = [
    Case("8B qkv of four GPUs", "ag_gemm", "fprop", 8192, 2048, 4096),
    Case("8B proj of four GPUs", "gemm_rs", "dgrad", 8192, 4096, 1536),
    Case("70B qkv of four GPUs", "ag_gemm", "fprop", 8192, 3584, 8192),
    Case("8B qkv of two GPUs", "ag_gemm", "fprop", 8192, 6144, 4096),
]
STEPS = (512, 1024, 2048, 4096)

Run = Callable[[Operands], torch.Tensor]


@dataclass(frozen=True)
class Variant:
    """A method, the way in which it runs, and what it has in flight; a name of its own, so that launches are built for it."""

    name: str
    method: str
    way: Way = PLAIN
    step: int = hopper.STEP

    def run_in(self, domain: OverlapDomain, case: Case) -> Run:
        op = f"{case.model}/{self.name}"

        def run(o: Operands) -> torch.Tensor:
            hopper.STEP = self.step  # read when the launch is built, in the first run
            with domain.operator(op, calls=1):
                return start_all_gather(domain, o.left, self.method, op, self.way).matmul(o.right)

        return run


def variants() -> Iterator[Variant]:
    yield Variant("fused", "fused")
    yield Variant("fused whole", "fused", Way(whole=True))
    for step in STEPS:
        yield Variant(f"direct {step}", "direct", step=step)


def measure_case(case: Case, domain: OverlapDomain, world: World) -> str:
    """All variants and the baselines in one line, in microseconds."""
    sets = [make_operands(case, world, torch.bfloat16, seed) for seed in range(3)]
    baselines = baselines_of(case, world, sets)
    runs = {variant.name: variant.run_in(domain, case) for variant in variants()}
    exact = baselines["sequence"](sets[0])
    for name, run in runs.items():
        run(sets[1])
        torch.testing.assert_close(run(sets[0]), exact, atol=0.5, rtol=2**-6, msg=f"{case.name}: {name} is wrong")
    check()
    runs |= {"cuBLAS": baselines["gemm"], "NCCL": baselines["comm"]}
    calls = {name: (lambda index, run=run: run(sets[index % len(sets)])) for name, run in runs.items()}
    timings = measure(calls, Pace(rounds=7, burst=16), world.group, world.device)
    return ", ".join(f"{name} {1e3 * timing.ms:.0f}" for name, timing in timings.items())


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(seconds=90), device_id=device)
    world = World(dist.group.WORLD, device, dist.get_rank(), dist.get_world_size())
    domain = domain_of(world.group, OverlapConfig(timeout_s=10.0), device)
    domain.prepare(Demand("stored_gathers", "the largest case", 8192 * 8192 * torch.bfloat16.itemsize), None)
    for case in CASES:
        world.say(f"{case.name}: {measure_case(case, domain, world)}")
    shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
