"""MX numbers, bit for bit: blocks of 32 values that share a power of two.

    codes.py    what a code of e4m3fn, e2m1 or e8m0 stands for, and the code of a value
    rules.py    which power of two a block gets: three rules, one for each place where the layer quantises
    layouts.py  where a byte of weights or scales lies in memory: five closed forms, there and back

Everything is made of exact torch operations (integers, powers of two, one rounding where a rule says so), so
the same call gives the same bytes on every device.
"""

from mori_megamoe.mx.codes import (
    BLOCK,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    pack_e2m1,
    unpack_e2m1,
)
from mori_megamoe.mx.layouts import (
    ActivationScales,
    Layout,
    W1Bytes,
    W1Scales,
    W2Bytes,
    W2Scales,
    padded_columns,
)
from mori_megamoe.mx.rules import (
    dequantize,
    dequantize_partial,
    quantize_hidden,
    quantize_input,
    quantize_partial,
    quantize_weight,
)

__all__ = [
    "BLOCK",
    "ActivationScales",
    "Layout",
    "W1Bytes",
    "W1Scales",
    "W2Bytes",
    "W2Scales",
    "decode_e2m1",
    "decode_e4m3",
    "decode_e8m0",
    "dequantize",
    "dequantize_partial",
    "encode_e2m1",
    "encode_e4m3",
    "pack_e2m1",
    "padded_columns",
    "quantize_hidden",
    "quantize_input",
    "quantize_partial",
    "quantize_weight",
    "unpack_e2m1",
]
