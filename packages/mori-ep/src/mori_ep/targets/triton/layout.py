"""Where the Triton kernels' buffers lie in the window, in bytes. The same on every rank.

    headers       [source] int64: what the source brings to this dispatch (HEADER), and its rows for each rank
    signs         [source] int64: what the source brings to this combine (signs.py)
    recv_count, out*        what dispatch returns
    y, y_weights            what peers read in combine; y is the registered input buffer
    result, result_weights  what combine returns

Nothing exists twice: launch.py says who may write what, and when.
"""

from __future__ import annotations

from dataclasses import dataclass

from mori_ep.config import EpDispatchCombineConfig
from mori_ep.layout import HEADER, Region, aligned
from mori_ep.plan import Plan

WORD_BYTES = 8


@dataclass(frozen=True)
class Layout:
    """The regions of one rank's part of the window, by name, in the order in which they lie."""

    named: tuple[tuple[str, Region], ...]

    @property
    def nbytes(self) -> int:
        """The size of the window."""
        return self.named[-1][1].end_bytes

    def regions(self) -> dict[str, Region]:
        return dict(self.named)


def layout_for(config: EpDispatchCombineConfig, plan: Plan) -> Layout:
    """The layout for every shape up to the configuration's capacities."""
    ranks, rows, slots = config.world_size, config.recv_capacity, 4 * config.num_experts_per_token
    tokens = config.max_num_inp_token_per_rank
    sizes = {
        "headers": ranks * (len(HEADER) + ranks) * WORD_BYTES,
        "signs": ranks * WORD_BYTES,
        "recv_count": 4,
        "out": rows * config.row_bytes,
        "out_scales": rows * config.scale_bytes,
        "out_weights": rows * slots,
        "out_indices": rows * slots,
        "out_positions": rows * 4,
        "y": rows * config.row_bytes,
        "y_weights": rows * slots,
        "result": tokens * config.row_bytes,
        "result_weights": tokens * slots,
    }
    offset, named = 0, []
    for name, nbytes in sizes.items():
        named.append((name, Region(offset, nbytes)))
        offset += aligned(nbytes)
    return Layout(tuple(named))
