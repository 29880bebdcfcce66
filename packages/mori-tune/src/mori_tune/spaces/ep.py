"""Grids for expert-parallel dispatch and combine: blocks, the blocks that serve the network, warps a block.

One sweep serves both phases with the same geometry; each phase keeps its own winner. More blocks than
compute units are never tried: all blocks meet at barriers, and one that is not resident never arrives.

Where a call has a way for few tokens and one for many, `low_latency` says which, "yes" or "no"; a target's
own choice is called "planned" there, and 0 in the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mori_tune.errors import SpaceError
from mori_tune.spaces.hardware import Hardware
from mori_tune.spaces.space import Constraint, Parameter, Space

INTRA_WARPS = (4, 5, 6, 8, 10, 12, 14, 15, 16)
INTER_WARPS = (4, 6, 8, 12, 16)
QUICK_WARPS = (4, 8, 16)
NEAR = (0, 1, 4, 8, 16, 32)  # the neighbourhoods of 224 and 256 blocks, where shipped winners cluster


def powers_of_two(low: int, high: int) -> set[int]:
    return {1 << e for e in range(low.bit_length() - 1, high.bit_length()) if low <= 1 << e <= high}


def inter_blocks(hardware: Hardware, chosen: Mapping[str, Any]) -> list[int]:
    units = hardware.compute_units
    return sorted(b for b in {8, 16, units} | powers_of_two(32, units) if b <= units)


def intra_blocks(hardware: Hardware, chosen: Mapping[str, Any]) -> list[int]:
    units = hardware.compute_units
    near = {centre + sign * step for centre in (224, 256) for sign in (-1, 1) for step in NEAR}
    every = set(range(32, units + 1, 8)) | powers_of_two(32, units) | near | {units}
    return sorted(b for b in every if b <= units)


def intra_blocks_quick(hardware: Hardware, chosen: Mapping[str, Any]) -> list[int]:
    return sorted(powers_of_two(32, hardware.compute_units) | {hardware.compute_units})


def network_blocks(hardware: Hardware, chosen: Mapping[str, Any]) -> list[int]:
    blocks = chosen["block_num"]
    return sorted({v for v in (blocks // 4, blocks // 2, 2 * blocks // 3) if 1 <= v < blocks})


def network_blocks_quick(hardware: Hardware, chosen: Mapping[str, Any]) -> list[int]:
    blocks = chosen["block_num"]
    return sorted({v for v in (max(blocks // 2, 1), 2 * blocks // 3) if 1 <= v < blocks})


def too_many_threads(values: Mapping[str, Any], hardware: Hardware) -> str | None:
    threads = values["warp_per_block"] * hardware.lanes
    if threads > hardware.max_threads:
        warps = f"{values['warp_per_block']} warps of {hardware.lanes}"
        return f"{warps} are {threads} threads, a block has at most {hardware.max_threads}"
    return None


def not_resident(values: Mapping[str, Any], hardware: Hardware) -> str | None:
    blocks, units = values["block_num"], hardware.compute_units
    if blocks > units:
        return f"{blocks} blocks on {units} compute units would wait for each other"
    return None


def one_side_empty(values: Mapping[str, Any], hardware: Hardware) -> str | None:
    blocks, network = values["block_num"], values["rdma_block_num"]
    if network and not 1 <= network < blocks:
        return f"{network} of {blocks} blocks for the network leave {blocks - network} for the rest"
    return None


CONSTRAINTS = (
    Constraint("threads", too_many_threads),
    Constraint("residency", not_resident),
    Constraint("workers", one_side_empty),
)
INTER = (
    Parameter("block_num", inter_blocks),
    Parameter("rdma_block_num", network_blocks, network_blocks_quick),
    Parameter("warp_per_block", INTER_WARPS, QUICK_WARPS),
)
INTRA = (
    Parameter("block_num", intra_blocks, intra_blocks_quick),
    Parameter("rdma_block_num", (0,)),
    Parameter("warp_per_block", INTRA_WARPS, QUICK_WARPS),
)


def num_threads(values: Mapping[str, Any]) -> tuple[int, ...]:
    return values["block_num"] * values["warp_per_block"], values["block_num"], values["rdma_block_num"]


WORKER = (  # of a target whose ranks are single workers: no geometry, perhaps a choice between two ways
    Parameter("block_num", (1,)),
    Parameter("rdma_block_num", (0,)),
    Parameter("warp_per_block", (1,)),
)
GRIDS = {"intra": INTRA, "inter": INTER, "worker": WORKER}
LOW_LATENCY = Parameter("low_latency", ("no", "yes"))


def ep_space(
    hardware: Hardware, *, nodes: str, ways: bool = False, constraints: tuple[Constraint, ...] = ()
) -> Space:
    """`nodes` is "intra" (all ranks in one node), "inter" (some blocks serve the network) or "worker" (no
    grid at all). `ways`: both ways of a call are tried. `constraints`: what the target adds to ours."""
    if nodes not in GRIDS:
        raise SpaceError(f"nodes={nodes!r}: wanted one of {', '.join(GRIDS)}")
    parameters = (*GRIDS[nodes], LOW_LATENCY) if ways else GRIDS[nodes]
    return Space(f"ep-{nodes}", hardware, parameters, (*CONSTRAINTS, *constraints), num_threads)
