"""In which variant a method runs a pass where nobody has measured it: what is known of copies, and of the ranks' skew."""

from __future__ import annotations

import torch

from ..methods import TRAITS
from ..schedule.order import GATHER, SCATTER
from ..select.passes import SCATTER_AND_WGRAD, Pass
from .variants import Variant
from .waves import saves_a_wave

# Where copies take more than this part of the GEMM's time, each push costs more than chunks shorten the tail (8B qkv forward:
# 0.204 ms with whole blocks, 0.226 with chunks; by chunked, in twice the host time, 0.209; its backward: 0.357 and 0.380).
COPIES_THAT_SHOW = 0.75
# A split reduction pays where a column's backward sends x and its partials for this many times as long as it multiplies before
# the own tiles: at 1.58 it gained 7 % (11008 x 4096), at 1.41 it cost 2 and 8 % (8B qkv on 2 GPUs), at 1.21 it cost 3 % (4 GPUs).
LATE = 1.5
# Skewed ranks hit the same destination, halve its ingress bandwidth, and stay skewed. Where a column linear's backward gathers
# and scatters for longer than it multiplies, it starts with a barrier, which takes 10 microseconds: Llama-3 8B qkv by chunked
# took 0.385 ms after a barrier and 0.484 to 0.512 without (whole backward passes in the tuner, four runs before and one after,
# 4 x H200). Shorter copies gain nothing: at half of these rows, in blocks of 8 MiB, 0.288 ms and 0.255 to 0.261. A gather has
# one round of pushes. Where these outweigh the product, a barrier gained 8.6, 0.8, 1.9 and 1.8 % and lost 0.5 % (4 x H200); where
# they do not, it lost up to 7 %.
LONG_COPY_US = 150.0


def untuned_variant(pass_: Pass, method: str, device: torch.device) -> Variant:
    """The variant of a method inside one node of GPUs."""
    splits = splits_for_a_wave(pass_, method, device) or is_late(pass_, method)
    return Variant(outweighs(pass_, method), splits, collides(pass_, method))


def splits_for_a_wave(pass_: Pass, method: str, device: torch.device) -> bool:
    """Whether a split reduction saves the method a wave of tiles, or half of one."""
    return TRAITS[method].splits and saves_a_wave(pass_, device)


def outweighs(pass_: Pass, method: str) -> bool:
    """Whether copies take so long beside the product that each push costs more than chunks shorten the tail."""
    return TRAITS[method].cuts and pass_.kind != SCATTER and pass_.copy_us > COPIES_THAT_SHOW * pass_.gemm_us


def is_late(pass_: Pass, method: str) -> bool:
    """Whether the peers' partials arrive when a fused scatter's last tiles already wait for them: they follow the blocks of x.

    Added after the weight gradient they took 8B qkv from 0.513 to 0.357 ms, 70B qkv from 1.219 to 1.118, a column of 11008 x
    4096 from 0.670 to 0.623. Where they come in time it costs 1 % (4 x H200, whole backward passes in the tuner), as it does
    with gathered_input=keep, where no blocks of x go before them.
    """
    until_own = (pass_.world - 1) / pass_.world * pass_.gemm_us
    return pass_.kind == SCATTER_AND_WGRAD and TRAITS[method].splits and 2 * pass_.copy_us > LATE * until_own


def collides(pass_: Pass, method: str) -> bool:
    """Whether skewed ranks' pushes to several peers would cost time: two rounds of them, longer than the products, or a gather's
    whole blocks, which outweigh it."""
    if pass_.world <= 2 or not TRAITS[method].pushes:
        return False
    if pass_.kind == GATHER:
        return outweighs(pass_, method)
    return pass_.kind == SCATTER_AND_WGRAD and pass_.copy_us > max(LONG_COPY_US, pass_.gemm_us)
