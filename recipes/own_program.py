"""A plain Megatron-Core training loop of a tiny GPT, and the three lines (+) that overlap_train adds to it.

torchrun --standalone --nproc-per-node 2 recipes/own_program.py     (GPUs, or CPU processes where there are none)
"""

import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig

import overlap_train.integrations.megatron  # (+)
from overlap_train.integrations.megatron import gpt_block_spec, run_without_cuda  # as there is no TransformerEngine

on_gpu = not run_without_cuda()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")
parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
tensor_parallel.model_parallel_cuda_manual_seed(1)
dtype = torch.bfloat16 if on_gpu else torch.float32
config = TransformerConfig(
    num_layers=2, hidden_size=256, num_attention_heads=8, normalization="RMSNorm", add_bias_linear=False, bf16=on_gpu,
    params_dtype=dtype, tensor_model_parallel_size=dist.get_world_size(), sequence_parallel=True,
)  # fmt: skip
model = GPTModel(config, gpt_block_spec(config), vocab_size=256, max_sequence_length=128).to(device)
overlap_train.integrations.megatron.enable(model, overlap_train.OverlapConfig())  # (+)
model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-3, bf16=on_gpu, params_dtype=dtype), [model])
for step in range(20):
    tokens = (torch.arange(129, device=device) + torch.arange(4, device=device).unsqueeze(1) * step) % 256
    optimizer.zero_grad()
    model.zero_grad_buffer()
    positions = torch.arange(128, device=device).expand(4, 128)
    loss = model(tokens[:, :-1].contiguous(), positions, None, labels=tokens[:, 1:].contiguous()).float().mean()
    loss.backward()
    finalize_model_grads([model])
    optimizer.step()
    if dist.get_rank() == 0:
        print(f"step {step + 1:2d}  loss {loss.item():.4f}", flush=True)
overlap_train.shutdown()  # (+)
dist.destroy_process_group()
