"""The sum of each token's rows, which have come back from its experts.

rows [*, H]     of a slot; index [N] says which of them are of token 0, in order of expert, then of token 1, ...
ends [T + 1]    where each token's begin in index, and the last one's end
y [T, H]        the sums: in that order, in fp32, rounded once; NaN if a wait gave up
"""

import triton
import triton.language as tl


@triton.jit
def sum_of_tokens_kernel(rows_ptr, index_ptr, ends_ptr, y_ptr, features, abort_ptr, BLOCK: tl.constexpr):
    """A program for each token."""
    failed = tl.load(abort_ptr, volatile=True) != 0
    token = tl.program_id(0).to(tl.int64)
    first = tl.load(ends_ptr + token)
    end = tl.load(ends_ptr + token + 1)
    for start in range(0, features, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < features
        total = tl.zeros((BLOCK,), tl.float32)
        for place in range(first, end):
            row = tl.load(index_ptr + place)
            total += tl.load(rows_ptr + row * features + cols, mask=inside, other=0.0).to(tl.float32)
        total = tl.where(failed, float("nan"), total)
        tl.store(y_ptr + token * features + cols, total.to(y_ptr.dtype.element_ty), mask=inside)
