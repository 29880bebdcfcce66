"""The phases of a layer, and a tuned rule for one: its key, and what it may hold. Without torch: the command
line asks for it, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mori_tune import EP_COMBINE, EP_DISPATCH, Device, Query, RulesError

from mori_ep.plan import Geometry

FORMATS = {"dispatch": EP_DISPATCH, "combine": EP_COMBINE}
PHASES = tuple(FORMATS)  # of a layer, in the order in which they are called
LOW_LATENCY = {"planned": -1, "no": 0, "yes": 1}
MOST_BLOCKS, MOST_WARPS = 1024, 32  # that any sweep tries, on any device


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


def geometry_of(params: Mapping[str, Any], place: str) -> Geometry:
    """A rule's values; RulesError for what no sweep could have found."""
    numbers = [params.get(name) for name in EP_DISPATCH.params]
    way = params.get("low_latency", "planned")
    limits = (MOST_BLOCKS, MOST_BLOCKS, MOST_WARPS)
    right = all(type(n) is int and 0 <= n <= most for n, most in zip(numbers, limits, strict=True))
    if not right or way not in LOW_LATENCY:
        given = " ".join(f"{name}={value!r}" for name, value in params.items())
        raise RulesError(
            f"{place}: {given}: wanted 0 (as planned) to {MOST_BLOCKS} blocks, 0 to {MOST_WARPS} warps, and "
            f"low_latency one of {', '.join(LOW_LATENCY)}; tune again, or remove the rule"
        )
    blocks, network_blocks, warps = (n or -1 for n in numbers)
    return Geometry(blocks, network_blocks, warps, LOW_LATENCY[way])
