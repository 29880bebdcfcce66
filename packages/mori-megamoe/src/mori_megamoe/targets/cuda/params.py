"""`params.cuh` in ctypes: the same fields in the same order. The kernels' own sizes are compared when they
are loaded."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_uint, c_uint64, c_void_p

from mori_shmem.jit.driver import TensorMap

from mori_megamoe.targets.cuda.limits import MAX_RANKS

COUNT_WORDS = 16  # of Tiles::counts
NUM_ITEMS, NUM_TILES, NUM_ROWS, NUM_UNITS, SEND_HEAD, TICKETS, EPOCH, NUM_MOVES, MOVE_HEAD = range(9)
WAIT_COUNTS, WAIT_ROWS, WAIT_TILE, TOO_MANY_ROWS, WAIT_PARTIALS, WAIT_SLOT = range(0xD0001, 0xD0007)
UNIT_BYTES = MOVE_BYTES = 20
PAIR_BIT = 20  # of an item


class Tiles(ctypes.Structure):
    _fields_ = [
        (name, c_void_p) for name in ("counts", "items", "expert", "row_base", "input_base", "sources")
    ]


class Arrivals(ctypes.Structure):
    _fields_ = [
        *[(name, c_void_p) for name in ("arrived", "due", "ready")],
        ("timeout_ns", c_uint64),
        ("fault", c_void_p),
        *[(name, c_int) for name in ("world", "rank", "experts")],
    ]


class Gemm1Params(ctypes.Structure):
    _fields_ = [
        ("nbytes", c_uint),
        ("num_steps", c_int),
        ("width", c_int),
        ("pairs", c_uint),
        ("pairs_inverse", c_uint),
        ("sixteen", c_uint),
        ("limit", c_float),
        *[(name, c_void_p) for name in ("weights", "base", "row_scale")],
        ("tiles", Tiles),
        *[(name, c_void_p) for name in ("scales", "shuffled_scales", "sums")],
        ("arrivals", Arrivals),
    ]


class Gemm1Maps(ctypes.Structure):
    _fields_ = [("rows", TensorMap), ("out", TensorMap)]


class Landing(ctypes.Structure):
    _fields_ = [
        ("window", c_void_p * MAX_RANKS),
        *[
            (name, c_uint64)
            for name in (
                *("at_rows", "at_row_scale", "at_source", "at_weight"),
                *("at_arrived", "at_counts", "at_told", "at_returned", "at_partials"),
            )
        ],
    ]


class Slots(ctypes.Structure):
    _fields_ = [
        *[(name, c_int) for name in ("experts", "per_rank", "number", "rank")],
        *[(name, c_uint) for name in ("most_rows", "rows")],
        *[(name, c_void_p) for name in ("outgoing", "incoming", "left", "packed", "came")],
    ]


class SendParams(ctypes.Structure):
    _fields_ = [
        ("nbytes", c_uint),
        *[
            (name, c_int)
            for name in (
                *("blocks", "threads", "world", "rank", "experts", "max_tokens", "top_k"),
                *("row_units", "has_scales"),
            )
        ],
        *[(name, c_void_p) for name in ("rows", "row_scale", "weights", "order", "units", "counts")],
        ("landing", Landing),
        ("slots", Slots),
        ("moves", c_void_p),
        ("due", c_void_p),
        ("fault", c_void_p),
        ("timeout_ns", c_uint64),
    ]


class PlanParams(ctypes.Structure):
    _fields_ = [
        ("nbytes", c_uint),
        *[
            (name, c_int)
            for name in (
                *("world", "rank", "experts", "max_tokens", "top_k"),
                *("tokens", "tile_rows", "pairs", "capacity"),
            )
        ],
        ("ids", c_void_p),
        ("tiles", Tiles),
        *[(name, c_void_p) for name in ("due", "order", "units")],
        ("landing", Landing),
        ("slots", Slots),
        ("moves", c_void_p),
        ("fault", c_void_p),
        ("timeout_ns", c_uint64),
    ]


class HiddenParams(ctypes.Structure):
    _fields_ = [
        ("nbytes", c_uint),
        ("pairs", c_int),
        ("tiles", Tiles),
        *[(name, c_void_p) for name in ("counts", "items")],
    ]


class BackParams(ctypes.Structure):
    _fields_ = [
        ("nbytes", c_uint),
        *[(name, c_int) for name in ("world", "rank", "max_tokens", "top_k", "model_dim")],
        ("pitch", c_uint),
        ("landing", Landing),
    ]


class CombineParams(ctypes.Structure):
    _fields_ = [
        ("nbytes", c_uint),
        *[(name, c_int) for name in ("world", "rank", "num_experts", "top_k", "model_dim", "tokens")],
        ("pitch", c_uint),
        *[(name, c_void_p) for name in ("ids", "out", "counts")],
        ("landing", Landing),
        ("fault", c_void_p),
        ("timeout_ns", c_uint64),
    ]


class RowsParams(ctypes.Structure):
    _fields_ = [
        ("nbytes", c_uint),
        ("tokens", c_int),
        ("hidden", c_int),
        *[(name, c_void_p) for name in ("input", "scales", "rows", "row_scale")],
    ]


def pairs_inverse(pairs: int) -> int:
    """For a division by `pairs` as a product: exact for tickets below 2^32 / pairs."""
    return 0 if pairs == 1 else -(-(1 << 32) // pairs)
