"""What this target can do, and the numbers that it was tuned to. How they were measured: docs/h200-ep.md.

Which kernel carries a call is decided here from the call's own tokens, on each rank for itself, unless a
tuned rule says which: headers tell the others (dispatch.cu, combine.cu). All give the same rows, order and
maps.
"""

from __future__ import annotations

import torch

from mori_ep.config import EpDispatchCombineConfig
from mori_ep.plan import NOTHING_SAID, FewTokens, Plan, Way
from mori_ep.targets.cuda.params import MAX_RANKS, PACKET_TOKENS

# Bytes of rows that a rank may send to all its peers as packets: beyond, their tags (a third more bytes)
# cost more than knowing all counts first. 2x H200, Nov 2026, packets / rows in us: fp8 9.0 / 12.6 at 128
# tokens, 12.6 / 15.5 at 256; bf16 12.2 / 15.1 at 128. Where they meet was not reached; more than one peer is
# a guess.
DISPATCH_PACKET_BYTES = 2_500_000
# Bytes of rows that come home to a rank as packets: beyond, reading them where they are is faster. That needs
# no copy when they are in the registered buffer already. The same run, packets / pull: 6.8 / 7.5 at 16
# tokens, 8.2 / 8.1 at 32, 10.1 / 9.1 at 64 (registered); 9.9 / 12.2 at 64, 13.5 / 14.8 at 128 (other rows).
COMBINE_PACKET_BYTES = {True: 2_500_000, False: 450_000}  # by use_external_inp_buf
MOST_EXPERTS_A_RANK = 16384  # up to here the rank of an expert is exact by one multiplication


def plan_for(config: EpDispatchCombineConfig, few: FewTokens = NOTHING_SAID) -> Plan:
    """Rows go to where counts say, and are pulled home; packets are chosen by the size of a call, and by
    rules."""
    return Plan(Way.COUNTS, Way.PULL, few=few)


def why_not(config: EpDispatchCombineConfig, dispatch: torch.dtype, combine: torch.dtype) -> str | None:
    """The reason against a configuration here, or None."""
    if config.kernel_type.across_nodes:
        return f"kernel_type {config.kernel_type.name} goes across nodes, which the cuda target does not"
    if config.world_size > MAX_RANKS:
        return f"{config.world_size} ranks: the cuda target serves one node of up to {MAX_RANKS}"
    if config.quant_type != "none" and not config.use_external_inp_buf:
        return "a quantised transport makes its own rows: use_external_inp_buf=False would be ignored"
    if config.quant_type == "fp4_blockwise":
        return "Hopper has no fp4 arithmetic; use fp8_blockwise or fp8_direct_cast"
    if config.num_experts_per_rank > MOST_EXPERTS_A_RANK:
        return f"{config.num_experts_per_rank} experts a rank: up to {MOST_EXPERTS_A_RANK} on the cuda target"
    for name, dtype in (("dispatch", dispatch), ("combine", combine)):
        if config.hidden_dim * dtype.itemsize % 16:
            return (
                f"{name} rows of {config.hidden_dim} x {dtype.itemsize} bytes: multiples of 16 bytes "
                "on the cuda target, which is what its threads move"
            )
    return None


def most_dispatch_packets(config: EpDispatchCombineConfig, row_bytes: int) -> int:
    """Tokens of a rank up to which its rows leave as packets."""
    peers = max(1, config.world_size - 1)
    by_bytes = max(1, DISPATCH_PACKET_BYTES // (peers * row_bytes))
    return within(config, by_bytes)


def within(config: EpDispatchCombineConfig, tokens: int) -> int:
    """So many tokens, or as many as can be packets at all."""
    return min(config.max_num_inp_token_per_rank, PACKET_TOKENS, tokens)


def most_combine_packets(config: EpDispatchCombineConfig, row_bytes: int) -> int:
    """Tokens of a rank up to which its rows come home as packets."""
    if config.quant_type != "none":
        return 0
    peers = max(1, config.world_size - 1)
    by_bytes = max(1, COMBINE_PACKET_BYTES[config.use_external_inp_buf] // (peers * row_bytes))
    return within(config, by_bytes)


def room_for_combine_packets(config: EpDispatchCombineConfig, few: FewTokens) -> int:
    """Tokens of a rank whose rows can come home as packets: there is memory for them."""
    if config.quant_type != "none":
        return 0
    return max(most_combine_packets(config, config.row_bytes), within(config, few.combine))
