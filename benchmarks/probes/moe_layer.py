"""One MoE layer, router to combine, forward and backward: Megatron-Core's `alltoall` on TransformerEngine's modules, with grouped
products and fused permutations, beside ours.

    torchrun --standalone --nproc-per-node 4 benchmarks/probes/moe_layer.py --model qwen3 --micro-batch 1

Expert parallelism over all ranks, 4096 tokens a micro-batch and rank, weight gradients added to fp32 main_grad on all sides.
Prints of each variant milliseconds and microseconds of host time, on the slowest rank, the median burst; how far its output,
input gradient and weight gradients are from Megatron's (relative norm); and whether a second run of it has the same bits.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from overlap_train import OverlapConfig, shutdown
from overlap_train.integrations.megatron.experts import turn_experts
from overlap_train.tools.measure.timing import Pace, measure
from overlap_train.tools.measure.world import join

MODELS = {  # hidden size, features of an expert, experts, top-k
    "qwen3": (2048, 768, 128, 8),
    "mixtral": (4096, 14336, 8, 2),
}
TOKENS = 4096


def layer_of(model: str, method: str, world: int) -> Any:
    """Megatron's MoELayer with the same weights at each call; ours by `method`, which may end in _fp8 (scales of blocks), unless
    that is `megatron`."""
    hidden, ffn, experts, top = MODELS[model]
    config = TransformerConfig(
        num_layers=1, hidden_size=hidden, num_attention_heads=16, num_moe_experts=experts, moe_router_topk=top,
        moe_ffn_hidden_size=ffn, moe_grouped_gemm=True, moe_permute_fusion=True, moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=1e-3, expert_model_parallel_size=world,
        expert_tensor_parallel_size=1, gated_linear_unit=True, activation_func=torch.nn.functional.silu, add_bias_linear=False,
        bias_activation_fusion=True, bf16=True, params_dtype=torch.bfloat16, gradient_accumulation_fusion=True,
    )  # fmt: skip
    model_parallel_cuda_manual_seed(1234)
    torch.manual_seed(1234)
    spec = get_gpt_layer_with_transformer_engine_spec(num_experts=experts, moe_grouped_gemm=True)
    layer = spec.submodules.mlp(
        config=config, pg_collection=ProcessGroupCollection.use_mpu_process_groups(), is_mtp_layer=False
    )
    layer.set_layer_number(1)
    layer.cuda().bfloat16()
    for weight in layer.parameters():
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight, dtype=torch.float32), False
        edge = weight.view_as(weight).grad_fn.next_functions[0][0]
        # as Megatron's data parallelism does
        edge.register_hook(lambda *_, weight=weight: setattr(weight, "grad", None))
        layer.edges = [*getattr(layer, "edges", ()), edge]
    if method != "megatron":
        fp8 = "blockwise" if method.endswith("_fp8") else "off"
        config = OverlapConfig(method=method.removesuffix("_fp8"), fp8=fp8, symmetric_mib=8192)
        turn_experts(layer, config, f"experts.{method}")
    return layer


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="qwen3")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--methods", default="fused,chunked,collective")
    parser.add_argument("--rounds", type=int, default=7)
    a = parser.parse_args()
    here = join("torchrun --standalone --nproc-per-node 4 benchmarks/probes/moe_layer.py")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=here.size, expert_tensor_parallel_size=1)
    names = ["megatron", *a.methods.split(",")]
    layers = {name: layer_of(a.model, name, here.size) for name in names}
    generator = torch.Generator(here.device).manual_seed(here.rank)
    shape = (TOKENS, a.micro_batch, MODELS[a.model][0])
    x, dy = (torch.randn(shape, generator=generator, device=here.device).bfloat16() for _ in range(2))

    def run(name: str) -> list[torch.Tensor]:
        leaf = x.detach().requires_grad_()
        y, _ = layers[name](leaf)
        y.backward(dy)
        return [y.detach(), leaf.grad]

    def of_one_step(name: str) -> list[torch.Tensor]:
        for weight in layers[name].parameters():
            weight.main_grad.zero_()
        found = run(name)
        return [*found, torch.cat([weight.main_grad.flatten() for weight in layers[name].experts.parameters()])]

    right = of_one_step("megatron")
    for name in names:
        found, again = of_one_step(name), of_one_step(name)
        off = [float((one - other).norm() / other.norm()) for one, other in zip(found, right, strict=True)]
        same = all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
        here.say(
            f"{name:12s} y, dx, dw from Megatron's {' '.join(f'{value:.4f}' for value in off)}; twice the same: {same}"
        )
    del right, found, again
    timings = measure(
        {name: lambda _, name=name: run(name) for name in names}, Pace(a.rounds, 4), here.group, here.device
    )
    for name, timing in timings.items():
        over = timings["megatron"].ms / timing.ms
        here.say(
            f"{a.model} x {a.micro_batch} {name:12s} {timing.ms:8.3f} ms, host {timing.host_us:8.0f} us, {over:.3f} x Megatron's"
        )
    shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
