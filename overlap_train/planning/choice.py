"""Which method runs, and why. The reason is part of the answer: what ran is never silent (docs/design.md, rule 8)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..methods import TRAITS
from .low_latency import LOW_LATENCY, pays
from .passes import SCATTER_AND_WGRAD, Pass
from .schedule.kinds import A2A_GEMM, EXCHANGES, GATHER, SCATTER
from .table import Table, Winner
from .variants import PLAIN, Variant
from .waves import fills_a_wave, fills_tiles, on_hopper, saves_a_wave, waits_in_a_wave

# SMALL_M: up to here the GEMM and the copies together take less than a call's host time, and NCCL's path for small messages
# wins (4 x H200: by 1.3 to 2 at M = 256, by up to 1.1 at M = 512). SMALL_M_DIRECT: where a rank's rows fill a tile, NCCL wins
# only up to here, because direct is one launch. Over NCCL + cuBLAS it is 1.1 times as fast at M = 512 (0.82 to 1.22), and 0.9
# times at M = 256 (0.73 to 1.17). These are medians and ranges of 20 passes on 2 x H200, a fast host; on slow ones it wins at
# 256, too.
SMALL_M, SMALL_M_DIRECT = 512, 256
# Where copies take more than this part of the GEMM's time, each push costs more than chunks shorten the tail (8B qkv forward:
# 0.204 ms with whole blocks, 0.226 with chunks; by chunked, in twice the host time, 0.209; its backward: 0.357 and 0.380).
COPIES_THAT_SHOW = 0.75
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
# A split reduction pays where a column's backward sends x and its partials for this many times as long as it multiplies before
# the own tiles: at 1.58 it gained 7 % (11008 x 4096), at 1.41 it cost 2 and 8 % (8B qkv on 2 GPUs), at 1.21 it cost 3 % (4 GPUs).
LATE = 1.5
# (microseconds, how many times as long one side of the weight is as the other): where both are at least these, as in output
# layers. 8B's on 2 ranks has 6600 and 16, on 4 ranks 3300 and 8. A training step of 8B is 1.050 and 1.051 times as fast as
# Megatron-Core's with `chunked` there, 1.042 and 1.038 times with `fused` (2 x H200, two runs each in turns). On 4 x H100, with
# `fused` in the output layer, `auto` took 0.09 ms less in a layer than `chunked`, and 4.6 ms more in a step of four layers and
# four micro-batches: the output layer lost 1.5 ms in each. Why is not known. MLPs of 405B, 10.5 ms, are not like that:
# `chunked` takes 2 to 3 % longer than `fused` on one host, 5 to 9 % on another (bursts). fc1 of Qwen3 32B, five times as long
# as wide, takes as long by either with 16384 rows, and by `chunked` 3 % longer with 8192.
LONG_AND_NARROW = ((6000.0, 4), (3000.0, 6))
# Up to here A2A + GEMM runs by direct: 8192 x 4096 x 4096 takes 0.190 ms, by fused 0.202. Long sequences come in parts whose
# blocks lie apart (ulysses/parts.py), and direct would have to copy them first. GEMM + A2A is slower by direct (8192 x 6144 x
# 4096: 0.333 ms, by fused 0.303; 2 x H200).
SHORT_RECEIVE_US = 300.0
# Skewed ranks hit the same destination, halve its ingress bandwidth, and stay skewed. Where a column linear's backward gathers
# and scatters for longer than it multiplies, it starts with a barrier, which takes 10 microseconds: Llama-3 8B qkv by chunked
# took 0.385 ms after a barrier and 0.484 to 0.512 without (whole backward passes in the tuner, four runs before and one after,
# 4 x H200). Shorter copies gain nothing: at half of these rows, in blocks of 8 MiB, 0.288 ms and 0.255 to 0.261. A gather has
# one round of pushes. Where these outweigh the product, a barrier gained 8.6, 0.8, 1.9 and 1.8 % and lost 0.5 % (4 x H200); where
# they do not, it lost up to 7 %.
LONG_COPY_US = 150.0

# Between nodes of GPUs each block is an exchange of its own, which takes the host and the network's latency: a shorter one
# goes by NCCL. Else `fused`, whose kernel multiplies all blocks; `chunked` has a product for each rank, which may leave SMs idle.
# A2A + GEMM is the other way round where a tile waits for several exchanges: `chunked` multiplies several blocks side by side.
# An exchange keeps the host for 0.2 to 0.4 ms (machines.py: host_exchange_us), in which a NIC of 25 to 50 GB/s carries 5 to 20
# MB. 2877 planned passes (Llama-3 8B to 405B and Qwen3 32B on 2 and 4 nodes of 1, 4 and 8 H200, H800 and H20): those with
# blocks of 4 to 8 MiB would take 1.33 times as long as NCCL + cuBLAS with 0.34 ms an exchange, and 1.04 times with 0.2; those
# with 8 to 16 MiB are 1.09 and 1.21 times as fast. From 8 MiB on 22 % of all passes take more than 3 % longer than by the best
# of the three, and the mean loss is 4.8 %; from 4 MiB on 27 and 10 %, from 16 on 28 and 6.5 %. With 0.2 ms the mean loss is
# least with 8 MiB, too. On two H200 that play two nodes `fused` took 0.91 of the time of `chunked` in the mean, for blocks of
# 32 MiB; shorter ones were not measured.
LEAST_BLOCK = 8 << 20


@dataclass(frozen=True)
class Choice:
    """A method of one operator pass, its variant, and the reason for both."""

    method: str
    reason: str
    variant: Variant = PLAIN


def choose(requested: str, pass_: Pass, device: torch.device, table: Table, nodes: int = 1) -> Choice:
    """The method for a pass: the one asked for, or for `auto` the measured winner, or a model-based default.

    nodes: that the group spans. What a group of another number has measured says nothing about it.
    """
    winner = winner_of(pass_, device, table, nodes)
    choice = _method(requested, pass_, device, winner, nodes)
    variant = _variant(choice.method, pass_, device, winner, nodes)
    return replace(choice, reason=f"{choice.reason}{variant}", variant=variant)


def _variant(method: str, pass_: Pass, device: torch.device, winner: Winner | None, nodes: int) -> Variant:
    """The variant in which a method runs a pass: the measured one, else the model's."""
    measured = None if winner is None else winner.variant_of(method)
    if nodes > 1:  # on CPUs, too: into how many chunks blocks are cut depends on the network
        return measured or PLAIN
    if device.type != "cuda":
        return PLAIN
    collides = _collides(pass_, method)
    # Rows that share a measurement may have other waves. One variant, as a trial times it, says nothing about splitting: what ran
    # there is what the model takes.
    is_its_own = winner is not None and measured is not None and winner.measured == pass_
    splits = TRAITS[method].splits and not is_its_own and saves_a_wave(pass_, device)
    if measured is None:
        return Variant(_outweighs(pass_, method), splits or _is_late(pass_, method), collides)
    measured = replace(measured, split_reduction=splits or measured.split_reduction)
    # Backward passes that follow each other wait for each other anyway, for their slots: the tuner cannot tell what a barrier
    # gains.
    return replace(measured, barrier_first=collides) if pass_.kind == SCATTER_AND_WGRAD else measured


def _outweighs(pass_: Pass, method: str) -> bool:
    """Whether copies take so long beside the product that each push costs more than chunks shorten the tail."""
    return TRAITS[method].cuts and pass_.kind != SCATTER and pass_.copy_us > COPIES_THAT_SHOW * pass_.gemm_us


def _is_late(pass_: Pass, method: str) -> bool:
    """Whether the peers' partials arrive when a fused scatter's last tiles already wait for them: they follow the blocks of x.

    Added after the weight gradient they took 8B qkv from 0.513 to 0.357 ms, 70B qkv from 1.219 to 1.118, a column of 11008 x
    4096 from 0.670 to 0.623. Where they come in time it costs 1 % (4 x H200, whole backward passes in the tuner), as it does
    with gathered_input=keep, where no blocks of x go before them.
    """
    until_own = (pass_.world - 1) / pass_.world * pass_.gemm_us
    return pass_.kind == SCATTER_AND_WGRAD and TRAITS[method].splits and 2 * pass_.copy_us > LATE * until_own


def alone(choice: Choice, pass_: Pass, device: torch.device) -> Choice:
    """The choice for a pass that nothing comes after: a reduction that is split to let a weight gradient run first is not."""
    splits = choice.variant.split_reduction and saves_a_wave(pass_, device)
    variant = replace(choice.variant, split_reduction=splits)
    return replace(choice, reason=f"{choice.reason.removesuffix(str(choice.variant))}{variant}", variant=variant)


def _collides(pass_: Pass, method: str) -> bool:
    """Whether skewed ranks' pushes to several peers would cost time: two rounds of them, longer than the products, or a gather's
    whole blocks, which outweigh it."""
    if pass_.world <= 2 or not TRAITS[method].pushes:
        return False
    if pass_.kind == GATHER:
        return _outweighs(pass_, method)
    return pass_.kind == SCATTER_AND_WGRAD and pass_.copy_us > max(LONG_COPY_US, pass_.gemm_us)


def may_choose(method: str, nodes: int) -> bool:
    """Whether `auto` and the tuner may choose a method in a group that spans so many nodes."""
    return nodes == 1 or TRAITS[method].crosses


def _method(requested: str, pass_: Pass, device: torch.device, winner: Winner | None, nodes: int) -> Choice:
    if requested != "auto":
        return Choice(requested, "asked for")
    if winner is not None:
        return Choice(winner.method, f"auto: tuned for {winner.measured}")
    return untuned(pass_, device, nodes)


def winner_of(pass_: Pass, device: torch.device, table: Table, nodes: int) -> Winner | None:
    """What was measured for a pass. A bucket may hold features that the Hopper kernels serve and others: a measurement of one
    kind says nothing about the other. They serve any number of rows: rows that end within a tile count as whole tiles do."""
    winner = table.find(pass_) if table.nodes == nodes else None
    fits = winner is not None and on_hopper(winner.measured, device) == on_hopper(pass_, device)
    return winner if fits else None


def _across_nodes(pass_: Pass, device: torch.device) -> Choice:
    """`fused`, for A2A + GEMM of more than two ranks `chunked`; for short blocks `collective`."""
    default, block = "auto: not tuned:", pass_.m // pass_.world * pass_.row_features * pass_.dtype.itemsize
    if device.type != "cuda":
        return Choice("chunked", f"{default} CPU tensors on several nodes")
    if block < LEAST_BLOCK:
        return Choice(
            "collective", f"{default} blocks of {block / 2**20:.2g} MiB are too short to cross nodes one by one"
        )
    # A tile of A2A + GEMM needs a chunk of every rank. Of two ranks that is one exchange: it took 0.91 to 1.02 of the time of
    # `chunked`, which adds its products up in fp32, mean 0.97 (24 passes on 2 x H200).
    waits_for_many = pass_.kind == A2A_GEMM and pass_.world > 2
    if not waits_for_many and on_hopper(pass_, device):
        return Choice("fused", f"{default} GPUs on several nodes, one kernel for all blocks")
    return Choice("chunked", f"{default} GPUs on several nodes")


def untuned(pass_: Pass, device: torch.device, nodes: int = 1) -> Choice:
    """What `auto` takes where nothing was measured: a model of the hardware, with what was seen on H200."""
    if nodes > 1:
        return _across_nodes(pass_, device)
    method, why = _model(pass_, device)
    return Choice(method, f"auto: not tuned: {why}")


def _model(pass_: Pass, device: torch.device) -> tuple[str, str]:
    """(method, reason)."""
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
        return _model_of_exchange(pass_)
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


def _hides_long_copies(pass_: Pass) -> bool:
    """Whether fused has copies to hide that take long beside the product, and longer than its launches."""
    if pass_.kind == GATHER:
        return _outweighs(pass_, "fused") and pass_.copy_us > FUSED_HOST_US
    return _is_late(pass_, "fused") and pass_.copy_us > FUSED_BACKWARD_HOST_US


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


def _model_of_exchange(pass_: Pass) -> tuple[str, str]:
    """(method, reason) for an all-to-all that the Hopper kernels serve."""
    if pass_.kind == A2A_GEMM and pass_.gemm_us < SHORT_RECEIVE_US:
        return "direct", "a short GEMM"
    return "fused", "the Hopper kernels serve it"
