"""From a geometry that is asked for to the grid that a cuda kernel is launched with. Pure integers: the
launch, the tuner and the tests read the same.

    kernel            few tokens                        many tokens
    dispatch          dispatch_packets                  dispatch_rows
    combine           combine_packets                   combine_pull
A block of a kernel for few tokens has as many threads as its rows need and may have; one for many has as many
as it is allowed. Blocks wait for each other, so a grid is never larger than what is resident together.
"""

from __future__ import annotations

from typing import NamedTuple

from mori_ep.plan import Geometry

LANES = 32  # of a warp
MOST_THREADS = {"dispatch_packets": 640, "combine_packets": 640, "dispatch_rows": 512, "combine_pull": 256}
UNITS_A_PASS = 96  # 16-byte units that a warp carries as packets in one go: three a lane (protocol.cuh)
MOST_LANES_A_ROW = 512
DISPATCH_ROWS_THREADS = 256
PULL_THREADS, PULL_THREADS_FEW = 256, 128
WARP_A_TOKEN = 2048  # tokens from which on a warp a token beats 128 threads in a pull (an earlier study)
LEAST_BLOCKS = 2  # dispatch_packets: one that sends rows, one that sends the header


class Grid(NamedTuple):
    kernel: str
    blocks: int
    threads: int  # of a block
    threads_a_row: int  # of those, how many share a row or a token


def lanes_of(num_units: int) -> int:
    """Threads that carry a row of so many units as packets in one go."""
    return -(-num_units // UNITS_A_PASS) * LANES


def threads_a_row(num_units: int, most: int) -> int:
    """Threads that carry a row as packets: all of it at once, or in even passes."""
    lanes = lanes_of(num_units)
    passes = -(-lanes // min(most, MOST_LANES_A_ROW))
    return -(-lanes // passes // LANES) * LANES


def dispatch_grid(tokens: int, num_units: int, few: bool, resident: int, asked: Geometry) -> Grid:
    """`num_units` of a row with everything that goes along; `resident` blocks at most."""
    blocks = blocks_of(resident, asked)
    if few:
        return packets_grid("dispatch_packets", 2 * tokens, num_units, blocks, asked)  # sent and received
    threads = threads_of("dispatch_rows", DISPATCH_ROWS_THREADS, asked)
    widest = threads_a_row(num_units, MOST_THREADS["dispatch_packets"])  # what came as packets is unpacked
    return Grid("dispatch_rows", blocks, threads, min(widest, threads))


def combine_grid(tokens: int, num_units: int, few: bool, resident: int, asked: Geometry) -> Grid:
    """The same of a combine."""
    blocks = blocks_of(resident, asked)
    if few:
        return packets_grid("combine_packets", tokens, num_units, blocks, asked)
    planned = PULL_THREADS if tokens > blocks else PULL_THREADS_FEW
    threads = threads_of("combine_pull", planned, asked)
    return Grid("combine_pull", blocks, threads, min(32 if tokens >= WARP_A_TOKEN else 128, threads))


def packets_grid(kernel: str, rows: int, num_units: int, blocks: int, asked: Geometry) -> Grid:
    most = threads_of(kernel, MOST_THREADS[kernel], asked)
    width = threads_a_row(num_units, most)
    return Grid(kernel, blocks, width * max(1, min(-(-rows // blocks), most // width)), width)


def blocks_of(resident: int, asked: Geometry) -> int:
    return resident if asked.blocks <= 0 else max(LEAST_BLOCKS, min(asked.blocks, resident))


def threads_of(kernel: str, planned: int, asked: Geometry) -> int:
    return planned if asked.warps <= 0 else min(LANES * asked.warps, MOST_THREADS[kernel])
