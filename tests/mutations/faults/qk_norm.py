"""Faults of QK-norm in the pass between received rows and attention: torch's form, the kernels, autograd, Megatron's norms."""

from __future__ import annotations

from tests.mutations.mutation import In

ATTENTION, KERNELS = "tests/protocol/test_ulysses_attention.py", "tests/protocol/test_attention_norm_kernel.py"
BETWEEN_RANKS = f"{ATTENTION}::test_an_attention_between_ranks_is_that_of_one_process[2-kv_heads1]"
ALONE = f"{ATTENTION}::test_a_norm_alone_may_be_trained_and_gives_the_same_bits_again"
SAME = f"{KERNELS}::test_both_kernels_do_what_torch_does[heads1-8-False-zigzag]"
PADDED = SAME.replace("zigzag", "padded")
IN_FRONT = f"{KERNELS}::test_what_lies_in_front_of_the_gradients_is_not_padding"
ROUNDED = f"{KERNELS}::test_kernels_round_where_torch_rounds"

NORM = In("overlap_train/operators/qk_norm.py", ("tests/unit/test_qk_norm.py",))
LAYOUT = In("overlap_train/operators/attention_layout.py", (SAME,))
KERNEL = In("kernels/attention_norm.py", (SAME,))
PROJECTION, QKV = (In(f"overlap_train/ulysses/{file}.py", (BETWEEN_RANKS,)) for file in ("attention", "qkv"))
ROWS = In("overlap_train/ulysses/rows.py", (BETWEEN_RANKS,))
ARGUMENTS = In("overlap_train/ulysses/arguments.py", (f"{ATTENTION}::test_calls_that_do_not_fit_say_why",))

FAULTS = [
    NORM("norm: a sum and no mean", ".square().mean(", ".square().sum("),
    NORM("norm: statistics in 16 bits", "torch.rsqrt(x.float().square()", "torch.rsqrt(x.square()"),
    NORM("norm: rounded before its weight", "x.float() * self._inverse_rms(x) *", "(x * self._inverse_rms(x)).to(x.dtype) *"),
    NORM("norm: heads of q have the weight of k", "torch.cat((q.expand(heads - 1, -1), k[None]))", "k.expand(heads, -1)"),
    NORM("norm: zero-centered weights are not added to one", "+ float(self.norm.zero_centered)", "+ 0.0"),
    NORM("norm: rows are kept where they have come", "self.before[rows] = x", "self.before[: len(rows)] = x"),
    NORM("norm: rms is a constant in backward", "- normalised * (g * normalised).mean(-1, keepdim=True)", ""),
    NORM("norm: the last part's gradients replace the others", "self.weight_gradients += torch", "self.weight_gradients = torch"),
    NORM("norm: gradients of weights after the product with them",
         "        of_head = (g * normalised)", "        of_head = (g * self._scales(x.shape[3]) * normalised)"),
    NORM("norm: a head's gradient is missing", "of_head[:-1].sum(0)", "of_head[:-2].sum(0)"),
    NORM("norm: any eps", "or not self.eps > 0", "or False"),
    LAYOUT("norm: the last programs' sums are left out", "sums.sum(0)", "sums[:-1].sum(0)",
           SAME.replace("heads1-8", "heads0-16")),
    LAYOUT("norm: rows of the last program are left out", "grid = (-(-count // NORM_ROWS), blocks)",
           "grid = (max(1, count // NORM_ROWS), blocks)"),
    LAYOUT("norm: the last part's sums replace the others", "norm.weight_gradients += sums", "norm.weight_gradients = sums"),
    LAYOUT("norm: the kernel reads weights as if they lay together",
           "(norm.norm.q_weight.contiguous(), norm.norm.k_weight.contiguous())", "(norm.norm.q_weight, norm.norm.k_weight)"),
    KERNEL("norm: the kernel rounds q once, after its rotation", "_rounded(x2 * inverse * scales, dtype) * sin",
           "(x2 * inverse * scales) * sin", ROUNDED),
    KERNEL("norm: the kernel normalises v, too", "return tl.where(head % (PER_GROUP + 2) <= PER_GROUP, inverse, 1.0)[:, None]",
           "return inverse[:, None]"),
    KERNEL("norm: a feature's partner has the feature's weight", "_scales(q_weight_ptr, k_weight_ptr, head, other,",
           "_scales(q_weight_ptr, k_weight_ptr, head, feature,"),
    KERNEL("norm: gradients are turned forward", "dy * cos - dy2 * sin * sign", "dy * cos + dy2 * sin * sign"),
    KERNEL("norm: gradients are turned by the feature's sine", "head, feature, other, PER_GROUP, ROTATED)\n            dy =",
           "head, feature, feature, PER_GROUP, ROTATED)\n            dy ="),
    KERNEL("norm: programs have a row in common", ".to(tl.int64) * ROWS + step", ".to(tl.int64) * (ROWS - 1) + step"),
    KERNEL("norm: a head of k is kept as the next one of q", "group * (PER_GROUP + 1) + part)", "group * PER_GROUP + part)"),
    KERNEL("norm: the mean is over the tile", "(g * normalised, 1) / DIM", "(g * normalised, 1) / WIDTH"),
    KERNEL("norm: the kernel stores padding", "y, inside & (row >= 0), PER_GROUP", "y, inside, PER_GROUP", PADDED),
    KERNEL("norm: the kernel keeps padding", "feature, inside & (row >= 0), HEADS", "feature, inside, HEADS", PADDED),
    KERNEL("norm: padding adds to the gradients of weights", "there = inside & (row >= 0)", "there = inside", IN_FRONT),
    KERNEL("norm: padding is turned by what lies in front of the angles", "    row = tl.maximum(row, 0)  #", "    #", IN_FRONT),
    KERNEL("norm: programs write one sum over another", "(0) * tl.num_programs(1) + tl.program_id(1)", "(0)"),
    KERNEL("norm: k's gradient goes to q's weight, too", "tl.where(part < PER_GROUP, total", "tl.where(part <= PER_GROUP, total"),
    QKV("norm: nothing is kept for a frozen projection", "if received.trains and any(ctx.needs_input_grad):",
               "if received.trains and ctx.needs_input_grad[1]:", ALONE),
    PROJECTION("norm: ranks may normalise or not", "for how in (qk_norm, rotary) if", "for how in (rotary,) if",
               f"{ATTENTION}::test_ranks_that_share_the_sequence_otherwise_are_named[norm-normalised with eps 0.1]"),
    QKV("norm: the weights have no gradient", "of_norm = norm.of_weights()", "pass"),
    ROWS("norm: q and k arrive as they are", "self._rotary, self._norm)\n", "self._rotary)\n"),
    ROWS("norm: gradients leave as if there were no norm", "self._rotary, self._norm).flatten", "self._rotary).flatten"),
    ARGUMENTS("norm: its weights are not checked", "qk_norm.error(heads.dim, x.device, name)", "None"),
]  # fmt: skip
