"""`bench hierarchical` in which `chunked` multiplies one chunk at a time, as it did before, and `auto` several in one product.

    benchmarks/lent/steady_wire.sh 40gbit torchrun --standalone --nproc-per-node 2 benchmarks/probes/one_chunk_at_a_time.py \
        --node-ranks 1 --methods auto,chunked --ops ag_gemm,a2a_gemm --passes fprop [further arguments of bench hierarchical]

Between two nodes `auto` takes `chunked` for both operators. So rows of `chunked` are how `auto` was, in turns in the same run.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from overlap_train.cli import main
from overlap_train.nodes.ops import NodeStreamAllToAllGemm
from overlap_train.nodes.process_ops import NodeGather
from overlap_train.ops.a2a_gemm import add_product_in_fp32, product_in_fp32

gather_now, rows_now = NodeGather.matmul, NodeStreamAllToAllGemm._multiply_rows


def gather(self: NodeGather, b_kn: torch.Tensor) -> torch.Tensor:
    """y [2 x M/2, N]: the own rows, then each chunk of the peer's."""
    if self._plan.reason.startswith("auto"):
        return gather_now(self, b_kn)
    call, (peer,) = self._call, self._plan.sources
    blocks = self._own.new_empty(2, len(self._own), b_kn.shape[1])
    torch.mm(self._own, b_kn, out=blocks[self._domain.rank])
    for chunk in range(call.chunks):
        self._go_ahead(call.chunks + chunk, 2 * call.chunks)
        self._bring(chunk + 1)
        rows = call.wait_chunks(peer, range(chunk, chunk + 1))
        torch.mm(call.blocks[peer][rows], b_kn, out=blocks[peer][rows])
    self._arrived = True
    return blocks.flatten(0, 1)


def multiply_rows(self: NodeStreamAllToAllGemm, b_kn: torch.Tensor, y: torch.Tensor) -> None:
    """y [M/2, N]: of the first chunk the own terms, then the peer's; of each further one both blocks side by side."""
    if self._plan.reason.startswith("auto"):
        rows_now(self, b_kn, y)
        return
    own, peer, call = self._domain.rank, 1 - self._domain.rank, self._call
    total = product_in_fp32(self._sent[own][call.chunk_rows(0)], self._b_blocks[own])
    for chunk in range(call.chunks):
        self._crossings.bring(chunk + 1)
        rows = call.wait_chunks(peer, range(chunk, chunk + 1))
        blocks: dict[int, Any] = {own: self._sent[own][rows], peer: call.blocks[peer][rows]}
        if chunk == 0:
            add_product_in_fp32(total, blocks[peer], self._b_blocks[peer])
            y[rows].copy_(total)
        else:
            torch.mm(torch.cat([blocks[0], blocks[1]], 1), b_kn, out=y[rows])


if __name__ == "__main__":
    NodeGather.matmul, NodeStreamAllToAllGemm._multiply_rows = gather, multiply_rows  # type: ignore[method-assign]
    sys.argv[1:1] = ["bench", "hierarchical"]
    sys.exit(main())
