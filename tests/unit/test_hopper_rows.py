"""Any number of rows: the tiles of the Hopper kernels store each element once, nothing beyond a chunk, from the right rows."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("triton")

from overlap_train.operators import hopper
from overlap_train.operators.kernel_args import GatherOperands, ScatterOperands
from overlap_train.planning.schedule import A2A_GEMM, GATHER, GEMM_A2A, SCATTER
from overlap_train.planning.tiling import HOPPER_TILE
from tests.unit.hopper_model import Product, Stored, run_gather, run_scatter

# (rows of a rank, chunks): within a tile, around one, of many; chunks that end within tiles, too
ROWS = [(1, 1), (65, 1), (127, 1), (128, 1), (129, 1), (997, 1), (1400, 2), (1024, 2), (4100, 4), (200, 8)]
RANKS = [(1, 0), (2, 1), (3, 0), (4, 2)]
WIDE = 264  # two tiles of columns, the second of 8


def check(stored: Stored, first_row: int, first_col: int = 0) -> None:
    """Each element once, row by row from row `first_row` of a on and column by column from column `first_col` of b on."""
    chunks, rows, cols = stored.times.shape
    assert (stored.times == 1).all(), "each element once"
    assert torch.equal(stored.rows.view(-1, cols)[:, 0], first_row + torch.arange(chunks * rows))
    assert (stored.rows == stored.rows[..., :1]).all()
    assert (stored.cols == first_col + torch.arange(cols)).all()


def part_of(stored: Stored, block: int, chunks: int) -> Stored:
    """One block of several."""
    part = Stored(0, 0, 0)
    for name in ("times", "rows", "cols"):
        setattr(part, name, getattr(stored, name)[block * chunks : (block + 1) * chunks])
    return part


@pytest.mark.parametrize("exchange", [False, True])
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(("world", "rank"), RANKS)
@pytest.mark.parametrize(("m_shard", "chunks"), ROWS)
def test_a_scatter_stores_every_row_of_every_block_once(
    m_shard: int, chunks: int, world: int, rank: int, direct: bool, exchange: bool
) -> None:
    p = Product(world, rank, chunks, m_shard, WIDE)
    _, own, places, counted, goals = run_scatter(p, direct, exchange)

    def begins(target: int) -> tuple[int, int]:
        return (0, target * WIDE) if exchange else (target * m_shard, 0)

    check(own, *begins(rank))
    peers = [(rank + distance) % world for distance in range(1, world)]
    for distance, target in enumerate(peers):
        block = places[distance] if direct else part_of(places[0], target, chunks)
        check(block, *begins(target))
    if not direct:
        assert (part_of(places[0], rank, chunks).times == 0).all(), "the own block is not staged"
    tiles = HOPPER_TILE.count(m_shard // chunks, WIDE)  # what copies wait for (FusedScatter)
    assert counted == {target * 8 + chunk: tiles for target in peers for chunk in range(chunks)}
    assert goals == ({tiles} if direct and peers else set())


@pytest.mark.parametrize(("world", "rank"), RANKS)
@pytest.mark.parametrize(("m_shard", "chunks"), ROWS)
def test_an_own_tile_adds_the_same_rows_of_every_peer(m_shard: int, chunks: int, world: int, rank: int) -> None:
    loads, *_ = run_scatter(Product(world, rank, chunks, m_shard, WIDE), direct=True, exchange=False)
    peers = [source for source in range(world) if source != rank]
    of_a_block = HOPPER_TILE.count(m_shard // chunks, WIDE) * chunks
    assert not any(tile.adds for tile in loads.tiles[:-of_a_block])
    for tile in loads.tiles[-of_a_block:]:
        row = tile.a_row - rank * m_shard
        assert tile.adds == [(source * m_shard + row, tile.b_col) for source in peers]


@pytest.mark.parametrize("exchange", [False, True])
@pytest.mark.parametrize(("world", "rank"), RANKS)
@pytest.mark.parametrize(("m_shard", "chunks"), ROWS)
def test_a_gather_stores_every_row_once(m_shard: int, chunks: int, world: int, rank: int, exchange: bool) -> None:
    """Few tiles are cut into halves, of 144 the last 12, and of 72 none."""
    loads, y = run_gather(Product(world, rank, chunks, m_shard, WIDE), exchange)
    if exchange:
        check(y, 0)  # of the own block, to which those of the peers are added
        return
    own = {tile.a_row for tile in loads.tiles if tile.a_desc == "own"}
    assert own <= set(range(m_shard))
    for source in range(world):
        check(part_of(y, source, chunks), 0 if source == rank else source * m_shard)


M_SHARD, N, K, CHUNKS = 130, 264, 64, 2
BLOCK = torch.empty(M_SHARD, N, dtype=torch.bfloat16)
CUT = [CHUNKS, M_SHARD // CHUNKS, N]  # one block in its chunks


def shapes_of(describe: Any, kind: str, operands: Any, world: int) -> dict[str, list[int]]:
    """Of the tensor descriptors that a launch has."""
    domain, peers = MagicMock(world_size=world, device=torch.device("cpu")), tuple(range(1, world))
    domain.config.timeout_s = 1.0
    blocks = torch.empty(world, M_SHARD, N, dtype=torch.bfloat16)
    call = MagicMock(chunks=CHUNKS, blocks=blocks, peers=peers, remote_block=lambda peer: BLOCK)
    launch = describe(domain, call, SimpleNamespace(kind=kind, variant=MagicMock()), operands)
    return {name: list(value.shape) for name, value in launch.arguments.items() if name.endswith("_desc")}


@pytest.mark.parametrize("kind", [SCATTER, GEMM_A2A])
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("direct", [False, True])
def test_what_a_scatter_stores_is_cut_into_chunks(direct: bool, world: int, kind: str) -> None:
    a, b = torch.empty(M_SHARD * world, K, dtype=torch.bfloat16), torch.empty(K, N, dtype=torch.bfloat16)
    staging = None if direct else BLOCK.new_empty(world, M_SHARD, N)
    shapes = shapes_of(hopper.scatter_launch, kind, ScatterOperands(a, b, staging, BLOCK), world)
    assert shapes["y_desc"] == CUT
    for place in range(1, 8):
        assert shapes[f"to{place}_desc"] == (CUT if direct else [world * CHUNKS, *CUT[1:]])


@pytest.mark.parametrize(("kind", "blocks"), [(GATHER, 4), (A2A_GEMM, 1)])
def test_what_a_gather_stores_is_cut_into_chunks(kind: str, blocks: int) -> None:
    own = torch.empty(M_SHARD, K, dtype=torch.bfloat16)
    own = own if kind == GATHER else own.expand(4, -1, -1).contiguous()
    operands = GatherOperands(own, torch.empty(K, N, dtype=own.dtype), own.new_empty(blocks * M_SHARD, N), sends=False)
    block = own[1] if kind == A2A_GEMM else own
    shapes = shapes_of(partial(hopper.gather_launch, block=block), kind, operands, world=4)
    assert shapes["y_desc"] == [blocks * CHUNKS, *CUT[1:]]
