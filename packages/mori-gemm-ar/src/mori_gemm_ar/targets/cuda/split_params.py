"""`split.cuh` in ctypes: the same fields in the same order; the kernels' own sizeof is compared when they are
loaded."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_uint, c_uint64, c_void_p

from mori_gemm_ar.targets.cuda.params import MAX_RANKS


class SplitParams(ctypes.Structure):
    _fields_ = [
        ("nbytes", c_uint),
        *[(name, c_int) for name in ("n", "world", "rank")],
        ("start", c_int * (MAX_RANKS + 1)),
        *[(name, c_int) for name in ("row_scale", "groups")],
        *[(name, c_void_p * MAX_RANKS) for name in ("c", "out", "codes", "scales", "tell_c", "tell_slice")],
        *[(name, c_void_p) for name in ("heard_c", "heard_slice", "step", "exits", "fault")],
        ("timeout_ns", c_uint64),
    ]
