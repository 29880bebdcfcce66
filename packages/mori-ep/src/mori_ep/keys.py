"""The key of a tuned rule. Without torch: the command line asks for it, too."""

from __future__ import annotations

from typing import Any

from mori_tune import EP_COMBINE, EP_DISPATCH, Device, Query

FORMATS = {"dispatch": EP_DISPATCH, "combine": EP_COMBINE}


def query_for(
    phase: str,
    dtype: str,
    *,
    kernel_type: str,
    num_ranks: int,
    hidden: int,
    topk: int,
    tokens: int,
    zero_copy: bool,
    quant_type: str,
    device: Device,
) -> Query:
    """The key of one phase's rule. `dtype` is that phase's own; `zero_copy`: combine reads the registered
    buffer."""
    key: dict[str, Any] = {"dtype": dtype, "hidden_dim": hidden, "topk": topk, "num_tokens": tokens}
    if phase == "combine":
        key |= {"zero_copy": zero_copy, "quant_type": quant_type}
    return Query(FORMATS[phase], device, {"kernel_type": kernel_type, "ep_size": num_ranks}, key)
