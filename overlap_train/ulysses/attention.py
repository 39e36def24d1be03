"""The projections around a Ulysses attention: q, k and v of all rows and some heads, and back to a sequence shard."""

from __future__ import annotations

from typing import NoReturn

import torch
import torch.distributed as dist

from ..config import OverlapConfig
from ..linear import run_eagerly
from ..operators.attention_layout import Rotary
from ..operators.call_plan import refuse
from ..operators.planned import OnPlan
from ..operators.qk_norm import QkNorm
from ..planning.heads import AttentionHeads
from ..planning.sequence import SequenceLayout
from ..planning.spec import (
    ALL_GATHER_LINEAR,
    ALL_TO_ALL_LINEAR,
    LINEAR_ALL_TO_ALL,
    LINEAR_REDUCE_SCATTER,
    OperatorSpec,
)
from .arguments import heads_error, lengths_error, sequence_error
from .calls import Terms, heads_linear, rows_linear
from .exchange import Linear
from .groups import Groups, refuse_in_both
from .linears import apply_to_rows
from .qkv import Received, apply_qkv
from .sharded import sharded_heads_linear, sharded_rows_linear
from .shards import Shards
from .tensor_parallel import ShardedLinear

CONTIGUOUS = SequenceLayout()


def qkv_all_to_all(
    x_shard_m: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    heads: AttentionHeads,
    layout: SequenceLayout = CONTIGUOUS,
    qk_norm: QkNorm | None = None,
    rotary: Rotary | None = None,
    tp_group: dist.ProcessGroup | None = None,
    config: OverlapConfig | None = None,
    name: str = "linear_qkv",
    on_plan: OnPlan | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The QKV projection of a Ulysses attention, ready for any attention over all rows and this rank's heads.

        x_shard_m  [s/W, b, K]   a sequence shard, or [lengths[r], b, K] on rank r
        w          [N, K]        Megatron's order: for each KV head its query heads, k, v; N = (query + 2 kv) dim
        bias       [N]
        q          [s, b, query/W, dim]
        k, v       [s, b, max(1, kv/W), dim]

    One pass takes what has arrived out of symmetric memory: it adds the bias, undoes `layout`, splits q, k and v, normalises and
    rotates q and k. Backward does the inverse on the way to what is sent. Norm and rotation are computed in fp32, and each is
    rounded to the dtype of x, as separate passes would.

    For backward, `qk_norm` keeps q and k as they are before the norm: s x b x (query + kv) / W x dim elements, as many as a
    separate norm. (They cannot be worked out from its results, which may be written into, and whose weights may be 0.)

    With `tp_group` of T ranks weights are divided over it, and x over both groups: the t-th of T equal parts of what this rank's
    position in `group` has. x is [s/(W T), b, K], w [N/T, K], bias [N/T], and heads are those of one tensor-parallel rank. The
    product gathers x over `tp_group`. A long sequence passes in parts; the product of one hides the exchange of another.

    Ranks may have different numbers of rows: `SequenceLayout(lengths=...)`, s = sum(lengths). Each shard is then padded to the
    longest one, and padding is multiplied and sent as rows are: 6000 and 2000 rows on two ranks cost what 12000 rows cost.

    Args:
        layout: how the ranks share the sequence.
        qk_norm: RMSNorm of each head of q and of k. The gradients of its weights are those of this rank's heads, added in fp32
            and in a fixed order; sum them over the group, as that of the bias.
        rotary: cos and sin of the whole sequence, in its order; None: q and k as they are.
        tp_group: the tensor-parallel ranks that share this rank's rows; None: weights are whole.
        heads, group, config, name: see linear_all_to_all.
        on_plan: see all_gather_linear. Of a sequence in parts it is told the plan of the first, with `tp_group` of its product.

    Raises:
        ValueError: as linear_all_to_all; the sequence does not fit the layout.
    """
    if torch.compiler.is_compiling():
        return run_eagerly(  # type: ignore[return-value]
            qkv_all_to_all, x_shard_m, w, bias, group=group, heads=heads, layout=layout, qk_norm=qk_norm, rotary=rotary,
            tp_group=tp_group, config=config, name=name, on_plan=on_plan,
        )  # fmt: skip
    both, shards = _both(group, tp_group, name), _shards(layout, group, tp_group)
    rows = x_shard_m.shape[:1].numel() * shards.ranks * shards.tensor
    wrong = sequence_error(x_shard_m, rows, layout, rotary, shards.ranks, name)
    wrong = wrong or lengths_error(x_shard_m, layout, shards.rank, shards.tensor, name)
    wrong = wrong or heads_error(x_shard_m, heads, qk_norm, rotary, name)
    if wrong is not None:
        _refuse(wrong, LINEAR_ALL_TO_ALL, ALL_GATHER_LINEAR, both or group, x_shard_m, Terms(config, name))
    x_shard_m, s = shards.padded(x_shard_m), sum(layout.lengths) or rows
    terms = Terms(config, name, _meaning(layout, qk_norm, rotary), on_plan)
    linear: Linear | ShardedLinear
    if both is None:
        linear, own_bias = heads_linear(x_shard_m, w, bias, heads, group, terms)
    else:
        linear, own_bias = sharded_heads_linear(x_shard_m, w, bias, heads, both, terms)
    of_ranks = shards.rows(s, x_shard_m.device)
    received = Received(heads.of_rank(shards.ranks), s, of_ranks, qk_norm, rotary, torch.is_grad_enabled())
    norm_weights = (None, None) if qk_norm is None else (qk_norm.q_weight, qk_norm.k_weight)
    return apply_qkv(x_shard_m, w, own_bias, *norm_weights, linear, received)


def attention_output_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup,
    layout: SequenceLayout = CONTIGUOUS,
    tp_group: dist.ProcessGroup | None = None,
    config: OverlapConfig | None = None,
    name: str = "linear_proj",
    on_plan: OnPlan | None = None,
) -> torch.Tensor:
    """The output projection of a Ulysses attention: all_to_all_linear on the rows of a sequence that ranks share by `layout`.

        x          [s, b, K/W]   the attention's output, in the order of the sequence
        w          [N, K]
        y_shard_m  [s/W, b, N]   a sequence shard, or [lengths[r], b, N] on rank r

    With `tp_group` of T ranks x is [s, b, K/(W T)], w [N, K/T], and y [s/(W T), b, N]: the product scatters its sums over it.

    Arguments, errors: see qkv_all_to_all and all_to_all_linear.
    """
    if torch.compiler.is_compiling():
        return run_eagerly(
            attention_output_linear,
            x,
            w,
            bias,
            group=group,
            layout=layout,
            tp_group=tp_group,
            config=config,
            name=name,
            on_plan=on_plan,
        )
    both, shards = _both(group, tp_group, name), _shards(layout, group, tp_group)
    wrong = sequence_error(x, x.shape[:1].numel(), layout, None, shards.ranks, name)
    wrong = wrong or lengths_error(x, layout, None, shards.tensor, name)
    if wrong is not None:
        _refuse(wrong, ALL_TO_ALL_LINEAR, LINEAR_REDUCE_SCATTER, both or group, x, Terms(config, name))
    sent, terms = shards.as_sent(x), Terms(config, name, (layout.meaning,), on_plan)
    linear: Linear | ShardedLinear
    if both is None:
        linear = rows_linear(sent, w, bias, group, terms)
    else:
        linear = sharded_rows_linear(sent, w, bias, both, terms)
    finder = shards.finder(linear, x.shape[0], x.device)
    y = apply_to_rows(x, w, linear, finder, torch.is_grad_enabled())
    y = shards.cut(y.view(-1, x.shape[1], w.shape[0]))
    return y if bias is None else y + bias


def _refuse(
    wrong: str,
    alone: OperatorSpec,
    product: OperatorSpec,
    groups: dist.ProcessGroup | Groups,
    x: torch.Tensor,
    terms: Terms,
) -> NoReturn:
    """Raise ValueError(wrong); at the first call on every rank. alone: the operator of one group; product: of the TP group."""
    if isinstance(groups, Groups):
        refuse_in_both(wrong, product, groups, terms.config, x.device, terms.name)
    refuse(wrong, alone, groups, terms.config, x.device, terms.name)


def _meaning(layout: SequenceLayout, qk_norm: QkNorm | None, rotary: Rotary | None) -> tuple[str, ...]:
    """How ranks must understand each other's rows: those that would do something else with them are told apart."""
    return (layout.meaning, *(how.meaning for how in (qk_norm, rotary) if how is not None))


def _both(group: dist.ProcessGroup, tp_group: dist.ProcessGroup | None, name: str) -> Groups | None:
    """Both groups; None if weights are whole, because tp_group is None or has one rank."""
    if tp_group is group:
        raise ValueError(
            f"{name}: tp_group is group; they must be two groups: group exchanges, tp_group divides the weights. Leave tp_group "
            f"out where each rank of group has whole weights"
        )
    return None if tp_group is None or dist.get_world_size(tp_group) == 1 else Groups(group, tp_group)


def _shards(layout: SequenceLayout, group: dist.ProcessGroup, tp_group: dist.ProcessGroup | None) -> Shards:
    tensor = 1 if tp_group is None else dist.get_world_size(tp_group)
    return Shards(layout, dist.get_world_size(group), dist.get_rank(group), tensor)
