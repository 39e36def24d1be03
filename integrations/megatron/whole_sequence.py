"""What a Ulysses attention needs of other ranks beside its operators: parts of what each has, and exchanges by collectives.

Megatron gives each rank its part of the rotary frequencies and of the mask. After the exchange a rank has all rows, therefore the
parts are put together again, once for all layers of a forward, by all ranks in the same calls, within bounded time.

The exchange of finished q, k, v and context by torch.distributed's all-to-all serves where no operator multiplies and exchanges
at once: sequences over TP that are too short for parts, and linears that have no overlapped form.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.mappings import all_to_all

from overlap_train import OverlapConfig, OverlapTimeoutError, Rotary
from overlap_train.group.registry import made_domain
from overlap_train.group.signals import poll
from overlap_train.integrations.megatron.packed import Documents
from overlap_train.integrations.megatron.ulysses_linears import Exchange, Heads
from overlap_train.ops.collective import all_gather_single
from overlap_train.ranks.peers import warn_after
from overlap_train.warn import warn_user


@torch.no_grad()
def gathered(x: torch.Tensor, dim: int, exchange: Exchange, timeout_s: float) -> torch.Tensor:
    """The parts of all ranks along `dim`, in the order of the sequence. Raises OverlapTimeoutError; nothing waits while a CUDA
    graph is captured."""
    part = x.movedim(dim, 0).contiguous()
    sent = part.view(torch.uint8) if part.dtype == torch.bool else part
    whole = torch.empty(exchange.ranks * len(sent), *sent.shape[1:], dtype=sent.dtype, device=sent.device)
    assert exchange.group is not None
    if sent.is_cuda and torch.cuda.is_current_stream_capturing():
        all_gather_single(whole, sent, group=exchange.group)
    else:
        _gather_in_time(whole, sent, exchange.group, timeout_s)
    return whole.index_select(0, exchange.places).view(part.dtype).movedim(0, dim)


def _gather_in_time(whole: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup, timeout_s: float) -> None:
    """Gather, or give up. The host waits, because nothing else can give up on a collective of torch's: for frequencies once for
    each new length, for a mask in each micro-batch that brings one."""
    if sent.is_cuda:
        torch.cuda.current_stream().synchronize()  # what comes before is not this wait's
    work = all_gather_single(whole, sent, group=group, async_op=True)
    rank, ranks = dist.get_rank(), ", ".join(map(str, dist.get_process_group_ranks(group)))
    parts = f"for the rotary frequencies or the mask of ranks {ranks} of the job"
    warned, where = list[bool](), f"Ulysses attention: rank {rank}"
    domain, peers = made_domain(group), [peer for peer in range(group.size()) if peer != dist.get_rank(group)]

    def late(waited: float) -> None:
        error = None if domain is None else domain.agreement.peers.error(where, peers)
        if error is not None:
            raise error
        if waited > warn_after(timeout_s) and not warned:
            warned.append(True)
            warn_user(f"{where} has waited {waited:.3g} s {parts}; it gives up after timeout_s={timeout_s:g}")

    if not poll(work.is_completed, timeout_s, late=late, turn_s=5e-5):
        raise OverlapTimeoutError(
            f"{where} waited {timeout_s:g} s {parts}. One of them is dead, stopped, or in another "
            f"call; if it is only slow, raise timeout_s (--overlap-train-timeout-s)."
        )
    work.wait()


def collective_to_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, exchange: Exchange) -> Heads:
    """q [s, b, query/W, dim], k and v [s, b, max(1, kv/W), dim] in the order of the sequence from [s/W, b, heads, dim]. k and v
    of a head that several ranks need go to each of them; autograd adds their gradients."""
    ranks = exchange.ranks
    if ranks == 1:
        return q, k, v
    copies = max(1, ranks // k.size(2))
    k, v = (x.repeat_interleave(copies, dim=2) if copies > 1 else x for x in (k, v))
    sizes = [x.size(2) // ranks for x in (q, k, v)]
    sent = torch.cat([x.unflatten(2, (ranks, -1)) for x in (q, k, v)], dim=3).permute(2, 0, 1, 3, 4)
    received = all_to_all(exchange.group, sent).flatten(0, 1)
    in_order = received.index_select(0, exchange.places)
    return tuple(x.contiguous() for x in in_order.split(sizes, dim=2))  # type: ignore[return-value]


def collective_to_rows(context: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """[s/W, b, K], a sequence shard with all heads, from [s, b, K/W] in the order of the sequence."""
    if exchange.ranks == 1:
        return context
    sent = context.index_select(0, exchange.order).unflatten(0, (exchange.ranks, -1))
    received = all_to_all(exchange.group, sent)
    return received.permute(1, 2, 0, 3).flatten(2)


_MASK, _FREQS, _ROTARY = "mask", "freqs", "rotary"
# Few of each kind, because they are large, and may be new with each micro-batch: a mask [b, 1, s, s] has 1 GiB at 32768 tokens,
# the frequencies of a pack, their cosines and their sines 64 MiB each at 131072. Where micro-batches alternate (recomputation in
# a pipeline), each change makes them again. Two: of q and of k.
_MOST_KEPT = {_MASK: 1, _FREQS: 2, _ROTARY: 2}


class WholeSequence:
    """One for the layers of a model: keeps the last few answers of each kind, which a key begins with. timeout_s: how long ranks
    wait for each other's parts."""

    def __init__(self, timeout_s: float = OverlapConfig.timeout_s) -> None:
        self.timeout_s = timeout_s
        self._masked: set[int] = set()  # layers that have the mask which is kept
        self._first = math.inf  # the first layer that asks for masks: also where only later ones are recomputed
        self._answers: dict[str, OrderedDict[Any, tuple[Any, Any]]] = {kind: OrderedDict() for kind in _MOST_KEPT}

    def mask(self, mask: torch.Tensor, exchange: Exchange, layer: int) -> torch.Tensor:
        """[b, 1, s, s] from the rows that this rank has, [b, 1, s/W, s]; anything else as it is. layer: that asks. Where it has
        this mask already, a new forward begins: what a loader wrote into a buffer of its own by `.data` has the old identity."""
        if mask.dim() < 3 or mask.size(-2) * exchange.ranks != exchange.rows or exchange.ranks == 1:
            return mask
        key = (_MASK, *_identity(mask), exchange.group, exchange.layout)
        self._first = min(self._first, layer)
        if layer in self._masked or layer == self._first or key not in self._answers[_MASK]:
            self._answers[_MASK].clear()
            self._masked.clear()
        self._masked.add(layer)
        return self._kept(key, mask, lambda: gathered(mask, mask.dim() - 2, exchange, self.timeout_s))

    def frequencies(
        self, freqs: torch.Tensor, exchange: Exchange, documents: Documents | None, whole_pack: bool
    ) -> torch.Tensor:
        """Rotary frequencies [s, 1 or b, 1, r], a row for each row of the sequence. Raises ValueError for another number of rows.

        freqs: Megatron's: [s/W, ...], this rank's part, or [longest document, ...] of packed sequences. whole_pack: whether freqs
        of as many rows as all documents have count on from document to document.
        """
        rows = exchange.rows
        key = (_FREQS, *_identity(freqs), rows, exchange.group, exchange.layout, documents, whole_pack)
        if documents is not None:
            positions = partial(_positions, len(freqs), rows, documents, whole_pack)
            return self._kept(key, freqs, lambda: freqs[positions().to(freqs.device)])
        if len(freqs) == rows:
            return freqs
        if len(freqs) * exchange.ranks != rows:
            raise ValueError(
                f"rotary_pos_emb has {len(freqs)} rows: this rank has {rows // exchange.ranks} of the {rows} rows of the "
                f"sequence; pass frequencies of these or of all"
            )
        return self._kept(key, freqs, lambda: gathered(freqs, 0, exchange, self.timeout_s))

    def rotary(self, freqs: torch.Tensor, mscale: float, interleaved: bool) -> Rotary:
        """cos and sin [s, r] times mscale, of frequencies [s, 1, 1, r]."""

        def answer() -> Rotary:
            angles = freqs.float().flatten(1)
            return Rotary(angles.cos() * mscale, angles.sin() * mscale, interleaved)

        return self._kept((_ROTARY, *_identity(freqs), mscale, interleaved), freqs, answer)

    def _kept(self, key: Any, holds: Any, answer: Callable[[], Any]) -> Any:
        """`holds`: the tensor whose address is in the key; while it is held, no other has that address. As in ulysses/layout.py
        (kept) no answer is an inference tensor, and a CUDA graph makes its own."""
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return answer()
        kept = self._answers[key[0]]
        if key not in kept:
            while len(kept) >= _MOST_KEPT[key[0]]:
                kept.popitem(last=False)  # before another is made: both may not fit
            with torch.inference_mode(False):
                kept[key] = answer(), holds
        kept.move_to_end(key)
        return kept[key][0]


def _identity(x: torch.Tensor) -> tuple[Any, ...]:
    """A key for what a tensor holds: address, shape, strides and version. It is the same for a tensor and for what checkpointing
    detaches from it."""
    return x.data_ptr(), x.shape, x.stride(), 0 if x.is_inference() else x._version


def _positions(count: int, rows: int, documents: Documents, whole_pack: bool) -> torch.Tensor:
    """Which of `count` frequencies each row takes; rows beyond the last document any."""
    if whole_pack and count == documents.end:
        return torch.arange(rows).clamp(max=count - 1)
    starts = torch.tensor(documents.with_rest(rows))
    places = torch.arange(rows)
    places -= starts[torch.searchsorted(starts, places, right=True) - 1]
    places[documents.end :] = 0
    return places
