"""A small gather and a small exchange that follow the design's rules, to test the scheduler itself on."""

import triton
import triton.language as tl


@triton.jit
def wait(flag_ptr, epoch, fault_ptr, spin_limit):
    """Poll until the flag has reached the epoch; at the spin limit write the flag's value + 1 to `fault_ptr`."""
    spins = 0
    seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    while (seen < epoch) & (spins < spin_limit):
        seen = tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
        spins += 1
    if seen < epoch:
        tl.store(fault_ptr, seen + 1)


@triton.jit
def push(x_ptr, slots_ptr, flags_ptr, rank, epoch, SLOTS: tl.constexpr, WORLD: tl.constexpr, SIZE: tl.constexpr):
    """Copy x [SIZE] to chunk `rank` of every peer's slot, then signal.

    slots [WORLD, SLOTS, WORLD, SIZE]; flags [WORLD, WORLD].
    """
    peer = (rank + tl.program_id(0)) % WORLD
    slot = epoch % SLOTS
    i = tl.arange(0, SIZE)
    tl.store(slots_ptr + ((peer * SLOTS + slot) * WORLD + rank) * SIZE + i, tl.load(x_ptr + i))
    tl.debug_barrier()
    tl.atomic_add(flags_ptr + peer * WORLD + rank, 1, sem="release", scope="sys")


@triton.jit
def collect(y_ptr, slots_ptr, flags_ptr, claim_ptr, fault_ptr, rank, epoch, spin_limit,
            SLOTS: tl.constexpr, WORLD: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """y [WORLD, SIZE] = twice the chunks of this rank's slot, claimed in order of arrival."""
    first = (epoch - 1) * (WORLD + tl.num_programs(0))
    slot = epoch % SLOTS
    i = tl.arange(0, SIZE)
    turn = tl.atomic_add(claim_ptr, 1) - first
    while turn < WORLD:
        source = (rank + WORLD - turn) % WORLD
        wait(flags_ptr + rank * WORLD + source, epoch, fault_ptr, spin_limit)
        chunk = slots_ptr + ((rank * SLOTS + slot) * WORLD + source) * SIZE
        tl.store(y_ptr + source * SIZE + i, tl.load(chunk + i) + tl.load(chunk + i))
        turn = tl.atomic_add(claim_ptr, 1) - first


@triton.jit
def exchange(y_ptr, slots_ptr, flags_ptr, claim_ptr, fault_ptr, rank, epoch, spin_limit,
             TILES: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """Two ranks: TILES tiles for the peer first, then TILES own tiles, each of which needs all of the peer's.

    slots [2 ranks, 2, TILES, SIZE]; flags [2 ranks] count tiles; y [TILES, SIZE] = 10 * tile + 1 of the peer.
    """
    first = (epoch - 1) * (2 * TILES + tl.num_programs(0))
    slot = epoch % 2
    peer = 1 - rank
    i = tl.arange(0, SIZE)
    turn = tl.atomic_add(claim_ptr, 1) - first  # first turn
    while turn < 2 * TILES:
        tile = turn % TILES
        if turn < TILES:
            tl.store(
                slots_ptr + ((peer * 2 + slot) * TILES + tile) * SIZE + i, tl.full([SIZE], 0.0, tl.float32) + 10 * tile
            )
            tl.debug_barrier()
            tl.atomic_add(flags_ptr + peer, 1, sem="release", scope="sys")
        else:
            wait(flags_ptr + rank, epoch * TILES, fault_ptr, spin_limit)
            tl.store(y_ptr + tile * SIZE + i, tl.load(slots_ptr + ((rank * 2 + slot) * TILES + tile) * SIZE + i) + 1)
        turn = tl.atomic_add(claim_ptr, 1) - first
