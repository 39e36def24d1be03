"""Which method `auto` takes where nobody has measured a pass, in a group that spans nodes."""

from __future__ import annotations

import torch

from ..schedule.order import A2A_GEMM, GATHER
from ..select.passes import Pass
from .waves import on_hopper

# Between nodes of GPUs each block is an exchange of its own, which takes the host and the network's latency: a shorter one
# goes by NCCL. Else the library multiplies what one exchange brings (`chunked`). One kernel (`fused`) multiplies where that would
# be several products: what the ranks of a node bring of a gather; what leaves chunk by chunk.
# An exchange keeps the host for 0.2 to 0.4 ms (machines.py: host_exchange_us), in which a NIC of 25 to 50 GB/s carries 5 to 20
# MB. By the rule before 9b58449, 2877 planned passes (Llama-3 8B to 405B and Qwen3 32B on 2 and 4 nodes of 1, 4 and 8 H200, H800
# and H20): those with blocks of 4 to 8 MiB would take 1.33 times as long as NCCL + cuBLAS with 0.34 ms an exchange, and 1.04
# times with 0.2; those with 8 to 16 MiB are 1.09 and 1.21 times as fast. From 8 MiB on 22 % of all passes take more than 3 %
# longer than by the best of the three, and the mean loss is 4.8 %; from 4 MiB on 27 and 10 %, from 16 on 28 and 6.5 %. With 0.2
# ms the mean loss is least with 8 MiB, too. On two H200 that play two nodes 32 MiB were measured, and nothing shorter.
LEAST_BLOCK = 8 << 20


def method_across_nodes(pass_: Pass, device: torch.device, nodes: int) -> tuple[str, str]:
    """(method, why): for short blocks `collective`; `chunked` for A2A + GEMM and gathers of one rank a node; else `fused`."""
    if device.type != "cuda":
        return "chunked", "CPU tensors on several nodes"
    block = pass_.m // pass_.world * pass_.row_features * pass_.dtype.itemsize
    if block < LEAST_BLOCK:
        return "collective", f"blocks of {block / 2**20:.2g} MiB are too short to cross nodes one by one"
    # Gathers between two nodes of one H200 took 0.95 of the time of `fused` (six passes, 0.88 to 1.02): both multiplied the same
    # rows at a time, and beside NCCL cuBLAS is faster than our kernel. More nodes are planned, not measured. A2A + GEMM by rows
    # (EnginePlan.by_rows, a network below 10 GB/s) took 0.97 to 0.99. That was with one chunk a product (schedule/order.py has
    # several). Rank by rank A2A + GEMM took 1.06 there; over 25 and 50 GB/s, where blocks have four chunks, 0.83 to 1.01 of
    # `fused` are planned. Of more ranks a tile of `fused` waits for several exchanges.
    at_once = pass_.kind == A2A_GEMM or (pass_.kind == GATHER and nodes == pass_.world)
    if not at_once and on_hopper(pass_, device):
        return "fused", "GPUs on several nodes, one kernel for all blocks"
    return "chunked", "GPUs on several nodes"
