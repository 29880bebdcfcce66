"""`params.cuh` in ctypes: the same fields in the same order. The kernel's own sizeof is compared when it is
loaded."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_uint, c_uint64, c_void_p

from mori_shmem.jit.driver import TensorMap

MAX_RANKS = 8
MAX_BANDS = 128


class Divisor(ctypes.Structure):
    """x / d for 0 <= x < 2^31 as a product: multiplier = ceil(2^(32 + shift) / d), 2^shift >= d / 2."""

    _fields_ = [("multiplier", c_uint), ("shift", c_uint)]

    @classmethod
    def of(cls, d: int) -> Divisor:
        if d <= 1:
            return cls(0, 32)  # x itself
        shift = (d - 1).bit_length() - 1
        return cls(-(-(1 << (32 + shift)) // d), shift)


class Params(ctypes.Structure):
    _fields_ = [
        ("nbytes", c_uint),
        *[(name, c_int) for name in ("n", "k", "world", "rank")],
        ("start", c_int * (MAX_RANKS + 1)),
        *[(name, c_int) for name in ("band", "bands", "lag")],
        *[(name, Divisor) for name in ("by_band_tiles", "by_band", "by_others", "by_world")],
        ("toggles", c_int),
        *[(name, c_int) for name in ("num_outs", "num_q_sinks", "num_listeners", "widens")],
        ("a_scale", c_void_p),
        ("b_scale", c_void_p),
        ("a_scale_pitch", c_int64),
        ("b_scale_pitch", c_int64),
        *[(name, c_void_p * MAX_RANKS) for name in ("sink", "inbox", "q_sink", "q_inbox")],
        ("out", c_void_p),
        *[(name, c_void_p * MAX_RANKS) for name in ("scatter_flag", "gather_flag", "arrived", "gathered")],
        *[(name, c_void_p) for name in ("count", "step", "exits", "tickets", "fault")],
        ("timeout_ns", c_uint64),
    ]


class Maps(ctypes.Structure):
    _fields_ = [("a", TensorMap), ("b", TensorMap), ("out", TensorMap * MAX_RANKS)]
