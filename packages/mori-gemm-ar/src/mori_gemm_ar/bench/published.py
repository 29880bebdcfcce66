"""What the authors of mori's fused GEMM + all-reduce published for 8x MI355X, one node: N=7168, K=2048,
blockscale.

Kernel times in us, the median over 11 replays of a graph, the slowest rank; their run-to-run spread is about
2 %. None of it was measured here. `None` stands where they give no figure.
"""

from __future__ import annotations

TABLES = ("headline", "phases", "pull-grid", "granularity", "negative")
N, K, WORLD_SIZE = 7168, 2048, 8
SPREAD_PCT = 2.0

HEADLINE = {  # M: (split-sdma, fused-sdma, fused-sdma with the fp8 gather)
    4096: (398.1, 351.0, 329.5),
    8192: (722.0, 621.1, 539.3),
    16384: (1472.9, 1148.8, 979.3),
}
GEMM_ONLY_US, UNFUSED_US = 369.4, 1419.5  # at M=16384: the GEMM alone; a GEMM and NCCL's all-reduce

PHASES = {  # M=16384 within a served model, one layer: (bf16, fp8 by sdma, fp8 by lsa)
    "gemm": (441.9, 438.2, 441.3),
    "drain": (180.2, 170.9, 204.8),
    "reduce": (41.7, 42.5, 43.1),
    "quantize": (None, 11.8, 11.9),
    "gather": (437.8, 256.4, 7.5),
    "dequantize": (None, 61.0, None),
    "pull": (None, None, 230.5),
    "layer": (1101.6, 980.8, 939.1),
}

PULL_GRID = {  # workgroups of the fp8 pull, M=16384: us of the whole call
    16: 1261, 24: 1091, 32: 1006, 48: 962, 64: 959, 80: 963, 128: 1018, 256: 1138, 512: 1184,
}  # fmt: skip

GRANULARITY = {7168: 2.646e-2, 512: 2.631e-2, 256: 2.609e-2, 128: 2.572e-2, 32: 2.399e-2}  # columns: relL2
WIRE_ERRORS = {"bf16": 2.35e-3, "fp8": 2.49e-2}  # relL2 against a reference on the host

NEGATIVE_M = 16384
FUSE_QUANTIZE = {"reduce, then quantize": 957.4, "fuse_quantize": 977.1}  # fp8 by lsa
NOT_PUSHED_US = 1148.7
REDUCE_PUSH = {  # fuse_reduce_push by publish and gather_bands
    "writethrough": {1: 1162.1, 4: 1157.2, 8: 1160.3, 16: 1190.1, 32: 1323.5},
    "fence": {1: 1227.3, 4: 1380.1, 8: 1630.3, 16: 2137.2, 32: 3026.7},
}
