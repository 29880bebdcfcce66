"""Which copy engine serves which peer. Pure: numbers in, numbers out.

A GPU has two ordinary engines (0 and 1) and fourteen for the links to its peers (2 to 15); each serves
several queues. The driver recommends engines for each link, one bit each:

  * all eight GPUs of a board: the two engines that sit at that link (`MI355X_ENGINES`, by the place of the
    two GPUs on the board, holds the first of each two);
  * fewer GPUs: the whole pool. Then the peers share it evenly, in their order.

The first of a peer's engines is for the host's queue, the next for the kernels' queue, so that a program of
the host which waits for a flag does not stand in the way of a kernel's puts. A rank's queue to itself uses
the ordinary engines.
"""

from __future__ import annotations

NUM_ORDINARY = 2
MOST_TRIED = 4  # engines, before the answer is that there is no queue to be had
_WHOLE_POOL = 0xFFFC

# The kernel driver's table for eight GPUs: [from][to].
MI355X_ENGINES = (
    (-1, 14, 12, 2, 4, 8, 10, 6),
    (14, -1, 2, 10, 8, 4, 6, 12),
    (10, 2, -1, 12, 14, 6, 4, 8),
    (2, 12, 10, -1, 6, 14, 8, 4),
    (4, 8, 14, 6, -1, 10, 12, 2),
    (8, 4, 6, 14, 12, -1, 2, 10),
    (10, 6, 4, 8, 12, 2, -1, 14),
    (6, 12, 8, 4, 2, 10, 14, -1),
)


def candidates(recommended: int, rank: int, peer: int, world_size: int, *, for_kernels: bool) -> list[int]:
    """Engines to ask for, the best first."""
    engines = [engine for engine in range(32) if recommended >> engine & 1]
    if rank == peer or not engines:
        engines = list(range(NUM_ORDINARY))
    elif len(engines) > 2:  # a pool for all peers
        share = max(len(engines) // max(world_size - 1, 1), 1)
        first = (peer - (peer > rank)) * share % len(engines)
        engines = engines[first:] + engines[:first]
    if for_kernels:
        engines = engines[1:] + engines[:1]
    return engines[:MOST_TRIED]


def differs_from_table(recommended: int, place: int, peer_place: int, num_gpus: int) -> str:
    """What the driver's recommendation has against the table, for a warning; "" if they agree. The places
    are those of the board, which are the ordinals where nothing is hidden or reordered."""
    if num_gpus != len(MI355X_ENGINES) or place == peer_place or recommended in (0, _WHOLE_POOL):
        return ""
    first = MI355X_ENGINES[place][peer_place]
    if recommended >> first & 1:
        return ""
    return (
        f"the driver recommends engines {recommended:#x} for copies from GPU {place} to GPU {peer_place}, "
        f"the table of an MI355X board has engine {first}"
    )
