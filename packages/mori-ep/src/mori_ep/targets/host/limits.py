"""What this target can do."""

from __future__ import annotations

import torch
from mori_shmem.device.rows import RowCode
from mori_shmem.errors import LayoutError

from mori_ep.config import EpDispatchCombineConfig, EpDispatchCombineKernelType

KINDS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "e4m3fn",
    torch.float8_e4m3fnuz: "e4m3fnuz",
}
SCALE_BLOCKS = {
    "fp8_blockwise": 128,
    "fp4_blockwise": 32,
}  # numbers per scale, unless the setting says otherwise


def why_not(config: EpDispatchCombineConfig, dispatch: torch.dtype, combine: torch.dtype) -> str | None:
    """The reason why this target cannot run such an op, or None."""
    kind, quant = config.kernel_type, config.quant_type
    if kind.across_nodes:
        return f"{kind.name} joins nodes: make the op with a communicator of mori_ep.internode.join"
    if config.elastic and kind is EpDispatchCombineKernelType.AsyncLL:
        return "elastic=True goes with IntraNode and IntraNodeLL: copies under way cannot be taken back"
    if quant == "fp4_blockwise" and kind is EpDispatchCombineKernelType.AsyncLL:
        return "fp4_blockwise goes with IntraNode and IntraNodeLL"
    if quant != "none" and not config.use_external_inp_buf:
        return "a quantised transport makes its own rows: use_external_inp_buf=False would be ignored"
    return None


def wire_for(config: EpDispatchCombineConfig, hidden: int, dtype: torch.dtype, scale_dim: int) -> RowCode:
    """How rows of a combine of this op travel; they fit where rows as they are would lie."""
    quant = config.quant_type
    wire = wire_code(hidden, dtype, quant, scale_dim)
    if wire.nbytes > config.row_bytes:
        raise LayoutError(
            f"{quant} makes rows of {wire.nbytes} bytes of hidden size {hidden}, there is room for "
            f"{config.row_bytes}: MORI_FP8_COMBINE_SCALE_DIM={scale_dim} is too large"
        )
    return wire


def wire_code(hidden: int, dtype: torch.dtype, quant_type: str, scale_dim: int) -> RowCode:
    """How a row of combine's input travels. `scale_dim`: scales per row, 0 for the transport's own."""
    if quant_type == "none":
        return RowCode(KINDS[dtype], hidden)
    if quant_type == "fp8_direct_cast":
        return RowCode("e4m3fn", hidden)
    block = -(-hidden // scale_dim) if scale_dim else SCALE_BLOCKS[quant_type]
    if quant_type == "fp8_blockwise":
        return RowCode("e4m3fn", hidden, block)
    return RowCode("e2m1", hidden, block + block % 2)  # two codes share a byte
