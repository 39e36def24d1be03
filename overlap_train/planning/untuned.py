"""Which method `auto` takes inside one node where nobody has measured a pass: a model of the hardware, by what was seen on H200.

All rules in their order, as a table: docs/design.md, "What auto takes untuned".
"""

from __future__ import annotations

import torch

from ..schedule.order import A2A_GEMM, EXCHANGES, GATHER
from ..select.low_latency import LOW_LATENCY, pays
from ..select.passes import Pass
from .untuned_variant import is_late, outweighs
from .waves import fills_a_wave, fills_tiles, on_hopper, waits_in_a_wave

# SMALL_M: up to here the GEMM and the copies together take less than a call's host time, and NCCL's path for small messages
# wins (4 x H200: by 1.3 to 2 at M = 256, by up to 1.1 at M = 512). SMALL_M_DIRECT: where a rank's rows fill a tile, NCCL wins
# only up to here, because direct is one launch. Over NCCL + cuBLAS it is 1.1 times as fast at M = 512 (0.82 to 1.22), and 0.9
# times at M = 256 (0.73 to 1.17). These are medians and ranges of 20 passes on 2 x H200, a fast host; on slow ones it wins at
# 256, too.
SMALL_M, SMALL_M_DIRECT = 512, 256
# direct costs 22 microseconds of host time, fused 70, and with the gather of a column's backward 127. Copies that fused is to
# hide must take longer than that: a backward of 4096 x 4096 x 1536 on 4 x H200, copies of 84 us each way, took 0.271 ms by direct
# and 0.308 by fused, with twice the rows 0.500 and 0.362.
FUSED_HOST_US, FUSED_BACKWARD_HOST_US = 70.0, 127.0
# In gathers up to here direct is best (2048 x 5120 x 8192: 0.235 ms, by fused 0.248; 1024 x 6144 x 4096: 0.068 and 0.082), if
# their copies are short, too (FUSED_HOST_US): the warps that store a shard take time from the product. 8192 x 2048 x 4096, copies
# of 112 us beside a product of 211: 0.203 and 0.192 in one run, 0.193 and 0.186 in another (2 x H200).
SHORT_GATHER_US = 300.0
# The limit of a scatter is lower, because direct stores its result at NVLink's pace: 4096 x 4096 x 2048 takes 0.108 ms by fused
# and 0.123 by direct (GEMM 106 us), 2048 x 4096 x 2048 0.077 and 0.068 (53 us).
SHORT_SCATTER_US = 100.0
# With few rows direct is best for longer products, too: in 24 of them with M = 512 and 1024 it was 1.03 to 1.24 times as fast as
# NCCL + cuBLAS. fused took 0.96 to 1.11 times as long as direct, and chunked, in products above a millisecond, 1.00 to 1.18 (2 x
# H200).
FEW_ROWS = 1024
# Where a rank has at most this many rows, reading the weight takes longer than multiplying them (3.35 TB/s of an H100, 4.8 of an
# H200, 650 TFLOP/s: 194 and 135 rows). A gather's tiles follow the blocks as they arrive, so each block may read a weight again
# that L2 cannot hold. M = 512 on 4 GPUs, weights of 117 to 436 MB: by collective 0.78 to 0.90 of the time by direct on H100, 0.96
# to 1.03 on H200. With weights of 23 and 29 MB it took 1.3 to 1.6 times as long. Not measured with other ranks and rows.
ROWS_A_READ, L2_BYTES = 128, 50 << 20
# (microseconds, how many times as long one side of the weight is as the other): where both are at least these, as in output
# layers. 8B's on 2 ranks has 6600 and 16, on 4 ranks 3300 and 8. A training step of 8B is 1.050 and 1.051 times as fast as
# Megatron-Core's with `chunked` there, 1.042 and 1.038 times with `fused` (2 x H200, two runs each in turns). On 4 x H100, with
# `fused` in the output layer, `auto` took 0.09 ms less in a layer than `chunked`, and 4.6 ms more in a step of four layers and
# four micro-batches: the output layer lost 1.5 ms in each. Why is not known. MLPs of 405B, 10.5 ms, are not like that:
# `chunked` takes 2 to 3 % longer than `fused` on one host, 5 to 9 % on another (bursts). fc1 of Qwen3 32B, five times as long
# as wide, takes as long by either with 16384 rows, and by `chunked` 3 % longer with 8192.
LONG_AND_NARROW = ((6000.0, 4), (3000.0, 6))
# Up to here A2A + GEMM runs by direct. Rows of a rank, N, K, us of the product by this model, ms by direct and by fused:
#     2 x H200   4096, 4096, 4096    211   0.192   0.193        4 x H200   8192, 4096, 4096     423   0.391   0.462
#                4096, 4096, 6144    317   0.284   0.283                   2048, 8192, 10240    529   0.483   0.507
#                16384, 4096, 4096   846   0.821   0.789                   8192, 4096, 6144     634   0.599   0.678
# Long sequences come in parts whose blocks lie apart (ulysses/parts.py), and direct would have to copy them first: 131072, 2048,
# 2048, four parts of 423 us, takes 2.296 ms by direct and 1.580 by fused (2 x H200). A pass does not know whether it is a part.
# But parts receive 85 to 170 MiB by default, and only the last one less. What receives more than MOST_RECEIVED goes by fused:
# 16384, 4096, 6144 in two parts (96 MiB each) takes 1.385 ms by direct and 1.212 by fused (2 x H200). For 8192, 4096, 6144, a
# whole call of 96 MiB, fused is not the faster one (above).
SHORT_RECEIVE_US = 700.0
MOST_RECEIVED = 80 << 20
# Up to here GEMM + A2A does: 2048, 6144, 4096 (159 us) takes 0.218 ms by direct and 0.322 by fused, each as long as its host
# needs (4 x H200, a slow one). direct stores its result at NVLink's pace: with twice the rows it takes 0.339 ms, fused 0.307 (2 x
# H200).
SHORT_SEND_US = 160.0


def method_in_node(pass_: Pass, device: torch.device) -> tuple[str, str]:
    """(method, why)."""
    if device.type != "cuda":
        return "chunked", "CPU tensors"
    if fills_a_wave(pass_, device):
        return "direct", "its tiles are one wave of all SMs"
    if pays(pass_):
        return LOW_LATENCY, f"M={pass_.m}: few bytes, which arrive soonest as words with flags"
    served = on_hopper(pass_, device)
    small_m = SMALL_M_DIRECT if served and fills_tiles(pass_) else SMALL_M
    if pass_.m <= small_m:
        return "collective", f"M={pass_.m} is at most {small_m}"
    if not served:
        return "chunked", "no Hopper kernel for this GPU, dtype or shape"
    if pass_.kind in EXCHANGES:
        return _of_exchange(pass_)
    if _hides_long_copies(pass_):
        return "fused", "long copies beside the GEMM"
    if _reads_again(pass_):
        return "collective", "each rank's few rows would read the weight again"
    if pass_.m <= FEW_ROWS:
        return "direct", f"M={pass_.m} is at most {FEW_ROWS}"
    if _is_short(pass_):
        return "direct", "a short GEMM"
    if waits_in_a_wave(pass_, device):
        return "direct", "own tiles would wait for the peers' sums"
    if _is_narrow(pass_):
        return "chunked", "a long GEMM with a narrow weight"
    return "fused", "the Hopper kernels serve it"


def _of_exchange(pass_: Pass) -> tuple[str, str]:
    """(method, why) for an all-to-all that the Hopper kernels serve."""
    if pass_.gemm_us < SHORT_SEND_US or (pass_.kind == A2A_GEMM and _is_short_receive(pass_)):
        return "direct", "a short GEMM"
    return "fused", "the Hopper kernels serve it"


def _is_short_receive(pass_: Pass) -> bool:
    """Whether an A2A + GEMM is short, and no part of a long sequence."""
    received = pass_.m * pass_.row_features * pass_.dtype.itemsize
    return pass_.gemm_us < SHORT_RECEIVE_US and received <= MOST_RECEIVED


def _hides_long_copies(pass_: Pass) -> bool:
    """Whether fused has copies to hide that take long beside the product, and longer than its launches."""
    if pass_.kind == GATHER:
        return outweighs(pass_, "fused") and pass_.copy_us > FUSED_HOST_US
    return is_late(pass_, "fused") and pass_.copy_us > FUSED_BACKWARD_HOST_US


def _is_narrow(pass_: Pass) -> bool:
    """Whether a product is long and its weight narrow, as that of an output layer is."""
    short, long = sorted((pass_.n, pass_.k))
    return any(pass_.gemm_us >= us and long >= times * short for us, times in LONG_AND_NARROW)


def _reads_again(pass_: Pass) -> bool:
    """Whether a gather by a kernel would read its weight once for each rank's rows, for longer than it multiplies them."""
    weight = pass_.n * pass_.k * pass_.dtype.itemsize
    return pass_.kind == GATHER and pass_.m <= ROWS_A_READ * pass_.world and weight > L2_BYTES


def _is_short(pass_: Pass) -> bool:
    """Whether a gather or scatter is so short that direct, which is one launch, is the fastest."""
    if pass_.kind == GATHER:
        return pass_.gemm_us < SHORT_GATHER_US and pass_.copy_us < FUSED_HOST_US
    return pass_.gemm_us < max(SHORT_SCATTER_US, pass_.copy_us)
