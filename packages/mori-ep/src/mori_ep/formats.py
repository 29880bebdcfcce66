"""The dtypes of rows, and which combinations of them can be combined.

Dispatch moves rows of any of these dtypes as they are, scales beside them. Combine adds in fp32, so it takes
dtypes that have a value of their own: bf16, fp16, fp32 and the two 8-bit floats. A packed fp4 row has none
without its scales. The quantised transports are ways for bf16 rows to travel.

The two e4m3 variants give the same byte different values: they are never taken for one another.
"""

from __future__ import annotations

import torch

DTYPES = {  # by the code that ranks compare
    1: torch.bfloat16,
    2: torch.float16,
    3: torch.float32,
    4: torch.float8_e4m3fn,
    5: torch.float8_e4m3fnuz,
    6: torch.float4_e2m1fn_x2,
    7: torch.uint8,  # packed fp4 of engines that know no dtype for it
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
COMBINED = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e4m3fnuz)
QUANTISED = {"fp8_direct_cast", "fp8_blockwise", "fp4_blockwise"}


def names(dtypes: object) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)  # type: ignore[attr-defined]


def header_text(field: str, value: int) -> str:
    """A field of a dispatch's header (layout.HEADER) as errors name it."""
    if field == "dtype" and value in DTYPES:
        return names([DTYPES[value]])
    if field == "replay":
        return "none" if not value else f"of dispatch {value}" if value > 0 else "of an unknown dispatch"
    return str(value)


def combine_dtype_for(data_type: torch.dtype) -> torch.dtype:
    """What rows dispatched as `data_type` are combined in, unless the configuration says so itself."""
    return data_type if data_type in (torch.bfloat16, torch.float16, torch.float32) else torch.bfloat16


def why_not(dispatch: torch.dtype, combine: torch.dtype, quant_type: str) -> str | None:
    """The reason against the triple on any target, or None."""
    if dispatch not in CODES:
        return f"dispatch moves rows of {names(CODES)}"
    if combine not in COMBINED:
        return f"combine adds rows of {names(COMBINED)}"
    if quant_type in QUANTISED and combine != torch.bfloat16:
        return f"{quant_type} is a transport for bfloat16 rows"
    return None


def triple(dispatch: torch.dtype, combine: torch.dtype, quant_type: str) -> str:
    """The triple as errors name it."""
    return f"(dispatch {names([dispatch])}, combine {names([combine])}, quant_type {quant_type})"
