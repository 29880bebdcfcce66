"""`params.cuh` in ctypes: the same fields in the same order. The kernels' own sizes are compared when they
are loaded."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_uint, c_uint64, c_void_p

MAX_RANKS = 8
MAX_TOP_K = 32
MASK_WORDS = 16
HEADER_PACKETS = 16
SEND, RECEIVE = 1, 2  # phases
BOTH = SEND | RECEIVE
ROWS_AS_PACKETS, COMBINE_BY_PACKETS = 1, 2  # flags of a header
STATE_WORDS, EPOCH, GAVE_UP = 64, 0, 5
META_MINE, META_SENT, META_WORDS = 16, 24, 32
PACKET_TOKENS = 32 * MASK_WORDS


class Common(ctypes.Structure):
    _fields_ = [
        ("nbytes", c_uint),
        ("phases", c_uint),
        *[(name, c_int) for name in ("world", "rank", "tokens", "max_tokens", "top_k", "capacity")],
        ("threads_a_row", c_int),
        ("alive", c_uint),
        ("window", c_void_p * MAX_RANKS),
        ("state", c_void_p),
        ("fault", c_void_p),
        ("timeout_ns", c_uint64),
    ]


class RowShape(ctypes.Structure):
    _fields_ = [
        (name, c_int)
        for name in (
            *("payload_units", "scale_bytes", "scale_words", "num_ids", "num_weights"),
            *("tail_words", "tail_units", "aligned"),
        )
    ]


class RowArrays(ctypes.Structure):
    _fields_ = [(name, c_void_p) for name in ("payload", "scales", "ids", "weights")]


class DispatchParams(ctypes.Structure):
    _fields_ = [
        ("c", Common),
        ("shape", RowShape),
        ("input", RowArrays),
        ("replay", c_void_p),
        ("mask_packets", c_int),
        ("room", c_int),
        ("experts_a_rank", c_uint),
        ("experts_inverse", c_uint),
        ("flags", c_uint),
        *[(name, c_uint64) for name in ("at_header", "at_slots", "slots_a_source", "at_done")],
        *[(name, c_uint64) for name in ("at_payload", "at_scales", "at_ids", "at_weights", "at_source")],
        *[(name, c_void_p) for name in ("table", "meta", "count", "block_counts")],
    ]


class CombineParams(ctypes.Structure):
    _fields_ = [
        ("c", Common),
        ("y", c_void_p),
        ("weights", c_void_p),
        *[
            (name, c_int)
            for name in ("y_rows", "payload_units", "wire_units", "scale_units", "stages", "guard")
        ],
        ("sign", c_uint),
        ("at_slots", c_uint64),
        ("slots_a_source", c_uint64),
        *[(name, c_uint64) for name in ("at_y", "at_y_scales", "at_y_weights")],
        *[(name, c_uint64) for name in ("at_entered", "at_ready", "at_finished")],
        *[(name, c_void_p) for name in ("table", "source", "meta", "count", "out", "out_weights")],
    ]


def units(nbytes: int) -> int:
    """16-byte units, rounded up."""
    return -(-nbytes // 16)


def slot_bytes(num_units: int) -> int:
    """A row of so many units as packets: see protocol.cuh."""
    return -(-num_units // 96) * 2048


def row_shape(payload_bytes: int, scale_bytes: int, top_k: int, *, weights: bool) -> RowShape:
    """Of a dispatched row. `aligned` says that the tail's parts are whole units; pointers are for the caller
    to see to."""
    scale_words, num_weights = -(-scale_bytes // 4), top_k if weights else 0
    words = scale_words + top_k + num_weights
    aligned = scale_bytes % 16 == 0 and top_k % 4 == 0
    return RowShape(
        payload_bytes // 16, scale_bytes, scale_words, top_k, num_weights, words, -(-words // 4), int(aligned)
    )
