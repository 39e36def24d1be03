"""attention_layout.py with an RMSNorm of each head of q and of k between bias and rotation: still one read and one write.

    unpack   x = packed + bias             n = x / rms(x)     y = n * weight                       q, k = rotated y     v = x
    pack     dy = dq, dk rotated back      g = dy * weight    packed = (g - n mean(g n)) / rms(x)  dweight = sum of dy n

    before   [s, b, (query + kv) DIM], x of the heads of q and k, per KV head its query heads and k: written by unpack, for pack

A program has whole heads, because rms is over all DIM features. So a feature's partner in rotation comes by a second load, out of
the L1 cache. x, y and dy are rounded to the dtype of the activations, as the separate passes round them.

The weights' gradients need no atomics: a program of pack takes ROWS rows one after the other, and writes one sum. torch adds
these. Order and bits are the same in every run.
"""

import triton
import triton.language as tl

from .attention_layout import load_heads, packed_features, place_of, store_heads


@triton.jit
def unpack_normed_kernel(
    packed_ptr, bias_ptr, before_ptr, q_weight_ptr, k_weight_ptr, eps, rows_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, batch,
    q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head,
    HEADS: tl.constexpr, PER_GROUP: tl.constexpr, DIM: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    HAS_BIAS: tl.constexpr, KEEPS: tl.constexpr, ZERO_CENTERED: tl.constexpr, BLOCK_H: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """q, k, v from packed + bias. KEEPS: write before. WIDTH: a power of two not below DIM. The rest: see unpack_kernel."""
    number, item, head = place_of(tl.program_id(0), batch, BLOCK_H)
    row = tl.load(rows_ptr + number)
    dtype = packed_ptr.dtype.element_ty
    packed_ptr += (number * batch + item) * HEADS * DIM
    q = (q_ptr + row * q_row + item * q_batch, q_head)
    k = (k_ptr + row * k_row + item * k_batch, k_head)
    v = (v_ptr + row * v_row + item * v_batch, v_head)
    feature = tl.arange(0, WIDTH)
    inside = (head < HEADS)[:, None] & (feature < DIM)[None, :]
    x = _rounded(packed_features(packed_ptr, bias_ptr, head, feature, inside, DIM, HAS_BIAS), dtype)
    if KEEPS:
        place, is_kept = _place_before(row * batch + item, head, feature, inside & (row >= 0), HEADS, PER_GROUP, DIM)
        tl.store(before_ptr + place, x.to(dtype), mask=is_kept)
    inverse = _inverse_rms(x, head, eps, PER_GROUP, DIM)
    y = _rounded(x * inverse * _scales(q_weight_ptr, k_weight_ptr, head, feature, PER_GROUP, DIM, ZERO_CENTERED), dtype)
    if ROTATED > 0:
        other, sign = _partners(feature, ROTATED, INTERLEAVED)
        x2 = _rounded(packed_features(packed_ptr, bias_ptr, head, other, inside, DIM, HAS_BIAS), dtype)
        scales = _scales(q_weight_ptr, k_weight_ptr, head, other, PER_GROUP, DIM, ZERO_CENTERED)
        cos, sin = _angles(cos_ptr, sin_ptr, row, head, feature, feature, PER_GROUP, ROTATED)
        y = y * cos + _rounded(x2 * inverse * scales, dtype) * sin * sign
    store_heads(q, k, v, head, feature, y, inside & (row >= 0), PER_GROUP)


@triton.jit
def pack_normed_kernel(
    packed_ptr, before_ptr, q_weight_ptr, k_weight_ptr, sums_ptr, eps, count, rows_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr,
    batch, q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head,
    HEADS: tl.constexpr, PER_GROUP: tl.constexpr, DIM: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, BLOCK_H: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """packed, and sums fp32 [programs, 2, DIM] for the gradients of both weights. count: packed rows x batch."""
    head, feature = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, WIDTH)
    scales = _scales(q_weight_ptr, k_weight_ptr, head, feature, PER_GROUP, DIM, ZERO_CENTERED)
    dtype = packed_ptr.dtype.element_ty
    total = tl.zeros([BLOCK_H, WIDTH], tl.float32)
    for step in range(ROWS):
        index = tl.program_id(0).to(tl.int64) * ROWS + step
        number, item, _ = place_of(index, batch, BLOCK_H)
        row = tl.load(rows_ptr + number, mask=index < count, other=0)
        q = (q_ptr + row * q_row + item * q_batch, q_head)
        k = (k_ptr + row * k_row + item * k_batch, k_head)
        v = (v_ptr + row * v_row + item * v_batch, v_head)
        inside = (head < HEADS)[:, None] & (feature < DIM)[None, :] & (index < count)
        there = inside & (row >= 0)
        dy = load_heads(q, k, v, head, feature, there, PER_GROUP)
        if ROTATED > 0:
            other, sign = _partners(feature, ROTATED, INTERLEAVED)
            dy2 = load_heads(q, k, v, head, other, there, PER_GROUP)
            cos, sin = _angles(cos_ptr, sin_ptr, row, head, feature, other, PER_GROUP, ROTATED)
            dy = _rounded(dy * cos - dy2 * sin * sign, dtype)
        place, is_kept = _place_before(row * batch + item, head, feature, there, HEADS, PER_GROUP, DIM)
        # of v there is none: with 0 its gradient passes as it is
        x = tl.load(before_ptr + place, mask=is_kept, other=0.0).to(tl.float32)
        inverse = _inverse_rms(x, head, eps, PER_GROUP, DIM)
        normalised, g = x * inverse, dy * scales
        mean = tl.sum(g * normalised, 1) / DIM
        dx = (g - normalised * mean[:, None]) * inverse
        tl.store(packed_ptr + (index * HEADS + head)[:, None] * DIM + feature[None, :], dx.to(dtype), mask=inside)
        total += dy * normalised
    _store_sums(sums_ptr, total, head, feature, PER_GROUP, DIM)


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    """fp32 x as it is in memory of another dtype."""
    return x.to(dtype).to(tl.float32)


@triton.jit
def _place_before(
    row, head, feature, inside, HEADS: tl.constexpr, PER_GROUP: tl.constexpr, DIM: tl.constexpr
):  # fmt: skip
    """(where features of heads of q and k are in before, mask): of PER_GROUP + 2 heads the last one, v, is not there."""
    group, part = head // (PER_GROUP + 2), head % (PER_GROUP + 2)
    kept: tl.constexpr = HEADS // (PER_GROUP + 2) * (PER_GROUP + 1)
    place = (row * kept + group * (PER_GROUP + 1) + part)[:, None] * DIM + feature[None, :]
    return place, inside & (part <= PER_GROUP)[:, None]


@triton.jit
def _inverse_rms(x, head, eps, PER_GROUP: tl.constexpr, DIM: tl.constexpr):
    """[BLOCK_H, 1] of heads x; 1 for v. What lies beyond DIM is 0."""
    inverse = tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)
    return tl.where(head % (PER_GROUP + 2) <= PER_GROUP, inverse, 1.0)[:, None]


@triton.jit
def _scales(
    q_weight_ptr, k_weight_ptr, head, feature,
    PER_GROUP: tl.constexpr, DIM: tl.constexpr, ZERO_CENTERED: tl.constexpr,
):  # fmt: skip
    """[BLOCK_H, WIDTH], what features of heads are multiplied by; 1 for v."""
    one: tl.constexpr = 1.0 if ZERO_CENTERED else 0.0
    of_q = tl.load(q_weight_ptr + feature, mask=feature < DIM, other=0.0).to(tl.float32) + one
    of_k = tl.load(k_weight_ptr + feature, mask=feature < DIM, other=0.0).to(tl.float32) + one
    part = (head % (PER_GROUP + 2))[:, None]
    return tl.where(part < PER_GROUP, of_q[None, :], tl.where(part == PER_GROUP, of_k[None, :], 1.0))


@triton.jit
def _partners(feature, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr):
    """(the feature that each is rotated with, or itself, [1, WIDTH]: -1 for the first of a pair, 1 for the second)."""
    if INTERLEAVED:
        first = feature % 2 == 0
        other = tl.where(first, feature + 1, feature - 1)
    else:
        first = feature < ROTATED // 2
        other = tl.where(first, feature + ROTATED // 2, feature - ROTATED // 2)
    return tl.where(feature < ROTATED, other, feature), tl.where(first, -1.0, 1.0)[None, :]


@triton.jit
def _angles(cos_ptr, sin_ptr, row, head, feature, of_sin, PER_GROUP: tl.constexpr, ROTATED: tl.constexpr):
    """(cos of `feature`, sin of `of_sin`) [BLOCK_H, WIDTH] of a row; 1 and 0 for what is not rotated."""
    row = tl.maximum(row, 0)  # -1, of padding, would be in front of the tables
    cos = tl.load(cos_ptr + row * ROTATED + feature, mask=feature < ROTATED, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + row * ROTATED + of_sin, mask=feature < ROTATED, other=0.0).to(tl.float32)
    turns = (head % (PER_GROUP + 2) <= PER_GROUP)[:, None]
    return tl.where(turns, cos[None, :], 1.0), tl.where(turns, sin[None, :], 0.0)


@triton.jit
def _store_sums(sums_ptr, total, head, feature, PER_GROUP: tl.constexpr, DIM: tl.constexpr):
    """One sum over this program's heads of q, and one over those of k. total is 0 for v, and for heads that are not there."""
    program = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64)
    part = (head % (PER_GROUP + 2))[:, None]
    of_q, of_k = tl.sum(tl.where(part < PER_GROUP, total, 0.0), 0), tl.sum(tl.where(part == PER_GROUP, total, 0.0), 0)
    tl.store(sums_ptr + 2 * program * DIM + feature, of_q, mask=feature < DIM)
    tl.store(sums_ptr + (2 * program + 1) * DIM + feature, of_k, mask=feature < DIM)
