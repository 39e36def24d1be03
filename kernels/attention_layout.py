"""Between rows of QKV features, as an all-to-all brings or takes them, and the heads that attention wants: one read, one write.

    packed    [r, b, n], row rows[i] of the sequence at i; n = (query + 2 kv) DIM, per KV head its query heads, k, v.
              Where rows[i] is -1 there is padding: unpack leaves it out, pack writes 0
    q, k, v   [s, b, heads, DIM], any strides but that of DIM, in the order of the sequence

The first ROTATED features of each head of q and k are rotated by cos, sin [s, ROTATED], in fp32:

    unpack   y1 = x1 cos1 - x2 sin1     pack, its transpose   x1 = y1 cos1 + y2 sin2
             y2 = x2 cos2 + x1 sin2                           x2 = y2 cos2 - y1 sin1

A pair (x1, x2) lies ROTATED / 2 apart, or side by side with INTERLEAVED. A program moves BLOCK_H heads of one row.
"""

import triton
import triton.language as tl


@triton.jit
def unpack_kernel(
    packed_ptr, bias_ptr, rows_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, batch,
    q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head,
    HEADS: tl.constexpr, PER_GROUP: tl.constexpr, DIM: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """q, k, v from packed + bias. HEADS: query + 2 kv. PAIRS, REST: powers of two not below ROTATED / 2 and DIM - ROTATED."""
    number, item, head = place_of(tl.program_id(0), batch, BLOCK_H)
    row = tl.load(rows_ptr + number)
    packed_ptr += (number * batch + item) * HEADS * DIM
    q = (q_ptr + row * q_row + item * q_batch, q_head)
    k = (k_ptr + row * k_row + item * k_batch, k_head)
    v = (v_ptr + row * v_row + item * v_batch, v_head)
    if ROTATED > 0:
        first, second, inside = _pairs(head, HEADS, ROTATED, INTERLEAVED, PAIRS)
        x1 = packed_features(packed_ptr, bias_ptr, head, first, inside, DIM)
        x2 = packed_features(packed_ptr, bias_ptr, head, second, inside, DIM)
        inside &= row >= 0
        cos1, sin1, cos2, sin2 = _angles(cos_ptr, sin_ptr, row, head, first, second, inside, PER_GROUP, ROTATED)
        store_heads(q, k, v, head, first, x1 * cos1 - x2 * sin1, inside, PER_GROUP)
        store_heads(q, k, v, head, second, x2 * cos2 + x1 * sin2, inside, PER_GROUP)
    if ROTATED < DIM:
        feature, inside = _rest(head, HEADS, DIM, ROTATED, REST)
        x = packed_features(packed_ptr, bias_ptr, head, feature, inside, DIM)
        store_heads(q, k, v, head, feature, x, inside & (row >= 0), PER_GROUP)


@triton.jit
def pack_kernel(
    packed_ptr, rows_ptr, cos_ptr, sin_ptr, q_ptr, k_ptr, v_ptr, batch,
    q_row, q_batch, q_head, k_row, k_batch, k_head, v_row, v_batch, v_head,
    HEADS: tl.constexpr, PER_GROUP: tl.constexpr, DIM: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """packed from q, k, v (their gradients): the transpose of unpack_kernel."""
    number, item, head = place_of(tl.program_id(0), batch, BLOCK_H)
    row = tl.load(rows_ptr + number)
    packed_ptr += (number * batch + item) * HEADS * DIM
    q = (q_ptr + row * q_row + item * q_batch, q_head)
    k = (k_ptr + row * k_row + item * k_batch, k_head)
    v = (v_ptr + row * v_row + item * v_batch, v_head)
    dtype = packed_ptr.dtype.element_ty
    if ROTATED > 0:
        first, second, inside = _pairs(head, HEADS, ROTATED, INTERLEAVED, PAIRS)
        there = inside & (row >= 0)
        y1 = load_heads(q, k, v, head, first, there, PER_GROUP)
        y2 = load_heads(q, k, v, head, second, there, PER_GROUP)
        cos1, sin1, cos2, sin2 = _angles(cos_ptr, sin_ptr, row, head, first, second, there, PER_GROUP, ROTATED)
        places_ptr = packed_ptr + head[:, None] * DIM
        tl.store(places_ptr + first[None, :], (y1 * cos1 + y2 * sin2).to(dtype), mask=inside)
        tl.store(places_ptr + second[None, :], (y2 * cos2 - y1 * sin1).to(dtype), mask=inside)
    if ROTATED < DIM:
        feature, inside = _rest(head, HEADS, DIM, ROTATED, REST)
        y = load_heads(q, k, v, head, feature, inside & (row >= 0), PER_GROUP)
        tl.store(packed_ptr + head[:, None] * DIM + feature[None, :], y.to(dtype), mask=inside)


@triton.jit
def place_of(index, batch, BLOCK_H: tl.constexpr):
    """(packed row, item of the batch, heads [BLOCK_H] of this program) of an index that counts items within rows."""
    number = index.to(tl.int64)
    return number // batch, number % batch, tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)


@triton.jit
def _pairs(head, HEADS: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr):
    """(features x1, features x2, mask [BLOCK_H, PAIRS])."""
    pair = tl.arange(0, PAIRS)
    inside = (head < HEADS)[:, None] & (pair < ROTATED // 2)[None, :]
    if INTERLEAVED:
        return 2 * pair, 2 * pair + 1, inside
    else:
        return pair, pair + ROTATED // 2, inside


@triton.jit
def _rest(head, HEADS: tl.constexpr, DIM: tl.constexpr, ROTATED: tl.constexpr, REST: tl.constexpr):
    """(features that are not rotated, mask [BLOCK_H, REST])."""
    feature = ROTATED + tl.arange(0, REST)
    return feature, (head < HEADS)[:, None] & (feature < DIM)[None, :]


@triton.jit
def packed_features(packed_ptr, bias_ptr, head, feature, inside, DIM: tl.constexpr):
    """Features of heads in a packed row, plus bias, in fp32."""
    place = head[:, None] * DIM + feature[None, :]
    x = tl.load(packed_ptr + place, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        x += tl.load(bias_ptr + place, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def _angles(cos_ptr, sin_ptr, row, head, first, second, inside, PER_GROUP: tl.constexpr, ROTATED: tl.constexpr):
    """(cos1, sin1, cos2, sin2) of a row; 1 and 0 for heads of v."""
    turns = inside & (head % (PER_GROUP + 2) <= PER_GROUP)[:, None]
    at1, at2 = row * ROTATED + first[None, :], row * ROTATED + second[None, :]
    cos1 = tl.load(cos_ptr + at1, mask=turns, other=1.0).to(tl.float32)
    sin1 = tl.load(sin_ptr + at1, mask=turns, other=0.0).to(tl.float32)
    cos2 = tl.load(cos_ptr + at2, mask=turns, other=1.0).to(tl.float32)
    sin2 = tl.load(sin_ptr + at2, mask=turns, other=0.0).to(tl.float32)
    return cos1, sin1, cos2, sin2


@triton.jit
def store_heads(q, k, v, head, feature, values, inside, PER_GROUP: tl.constexpr):
    """Store heads of a packed row where they belong. q, k, v: (where the row begins, distance between heads)."""
    group, part = head // (PER_GROUP + 2), head % (PER_GROUP + 2)
    of_q, of_k, of_v = part < PER_GROUP, part == PER_GROUP, part > PER_GROUP
    values = values.to(q[0].dtype.element_ty)
    q_at, at = (group * PER_GROUP + part)[:, None].to(tl.int64), group[:, None].to(tl.int64)
    tl.store(q[0] + q_at * q[1] + feature[None, :], values, mask=inside & of_q[:, None])
    tl.store(k[0] + at * k[1] + feature[None, :], values, mask=inside & of_k[:, None])
    tl.store(v[0] + at * v[1] + feature[None, :], values, mask=inside & of_v[:, None])


@triton.jit
def load_heads(q, k, v, head, feature, inside, PER_GROUP: tl.constexpr):
    """The same heads from q, k and v, in fp32."""
    group, part = head // (PER_GROUP + 2), head % (PER_GROUP + 2)
    of_q, of_k, of_v = part < PER_GROUP, part == PER_GROUP, part > PER_GROUP
    q_at, at = (group * PER_GROUP + part)[:, None].to(tl.int64), group[:, None].to(tl.int64)
    values = tl.load(q[0] + q_at * q[1] + feature[None, :], mask=inside & of_q[:, None], other=0.0)
    values += tl.load(k[0] + at * k[1] + feature[None, :], mask=inside & of_k[:, None], other=0.0)
    values += tl.load(v[0] + at * v[1] + feature[None, :], mask=inside & of_v[:, None], other=0.0)
    return values.to(tl.float32)
