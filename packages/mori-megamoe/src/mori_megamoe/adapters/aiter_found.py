"""What aiter is there, and what of it Stage1 over copy engines cannot go into. Nothing is asked by version.

Three kinds of trees have the layer:
    plan inside Stage1    `_s1_mega` alone; the counts and the plan are made by the Stage1 kernel itself
    plan before Stage1    besides `_s1_mega_bundle`, `_s1_prepare`; a pair of experts of each rank shares rows
    later                 the same names, and more entries in the dispatch table
Only the last two leave a place for another Stage1. Entries of the table are known by their names in the enum
DispatchSlot: their numbers are others in every tree.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mori_shmem

from mori_megamoe.stage1.options import Options

PACKAGE = "aiter.ops.flydsl.kernels.mega_moe"
LAYER_MODULES = ("mega_moe_v2", "intra_node", "backend")  # where trees have the class
STAGE1_ARGUMENTS = 18  # before a variant, where there is one, and the stream
BLOCKS_M = (64, 128)
MAX_RANKS = 8
INDEXED_FROM = 32768  # tokens for which later trees store a row once and gather it
NEEDED = ("_s1_mega", "_s1_mega_bundle", "_s1_prepare")
SLOTS = (  # of the dispatch table, that kernels read
    *("PAIR_BASE", "PAIR_ORDER", "ROUTE_SEGMENT", "LOCAL_HIST", "COUNT_MATRIX"),
    *("TASK_ROW_BASE", "GROUP_TASK_BASE", "PLAN_READY", "FANOUT_PAIR_CONFIG"),
    *("P2P_WEIGHT", "P2P_SRCMAP", "TILE_INPUT_BASE", "EXPERT_TILE_END", "WORK_HEAD"),
)
SIZES = ("rank", "world_size", "model_dim", "inter_dim", "topk", "mtpr", "_s1_nvm")


@dataclass(frozen=True)
class Found:
    """Of one layer."""

    aiter: str | None  # version, to be shown only; None: not installed
    layer: str | None  # the module that has MegaMoEV2
    arch: str | None  # of this GPU, as the driver says it; None: no AMD GPU
    attributes: frozenset[str] = frozenset()  # of NEEDED
    fixed_slot: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)
    slots: Mapping[str, int] = field(default_factory=dict)  # of SLOTS, their numbers in this tree
    arities: Mapping[str, int] = field(
        default_factory=dict
    )  # arguments before the stream; of what can be told
    fused_gemm1: bool = False  # build_fused_gemm1 is there, with what packing in the launch needs

    @staticmethod
    def of(moe: Any) -> Found:
        """Look; never raises for what is not there."""
        slots = getattr(_module(f"{PACKAGE}.dispatch"), "DispatchSlot", None)
        members = getattr(slots, "__members__", {})
        return Found(
            aiter=_version(),
            layer=next((name for name in LAYER_MODULES if _has_layer(name)), None),
            arch=_arch(),
            attributes=frozenset(name for name in NEEDED if callable(getattr(moe, name, None))),
            fixed_slot=bool(getattr(moe, "_s1_fixed_slot", False)),
            sizes={name: int(getattr(moe, name)) for name in SIZES if hasattr(moe, name)},
            slots={name: int(members[name]) for name in SLOTS if name in members},
            arities={
                name: count for name in NEEDED[:2] if (count := _arity(getattr(moe, name, None))) is not None
            },
            fused_gemm1=_has_fused_gemm1(),
        )

    @property
    def row_bytes(self) -> int:
        """Of one routed row, scales included."""
        return self.sizes["model_dim"] + self.sizes["model_dim"] // 32

    @property
    def slab_bytes(self) -> int:
        """Symmetric memory for rows that wait to be sent."""
        return self.sizes["mtpr"] * self.sizes["topk"] * self.row_bytes

    @property
    def landing_bytes(self) -> int:
        """And for those that have come."""
        return self.sizes["_s1_nvm"] * self.row_bytes

    def __str__(self) -> str:
        """For people."""
        if self.aiter is None:
            return "no aiter"
        layer = f"MegaMoEV2 in {self.layer}" if self.layer else "no MegaMoEV2"
        names = ", ".join(sorted(self.attributes)) or "none of its Stage1 callables"
        return f"aiter {self.aiter}, {layer}, {names}, GPU {self.arch or 'none'}"


def reasons_against(found: Found, options: Options, comm: mori_shmem.Communicator) -> list[str]:
    """A sentence for everything that is in the way."""
    if found.aiter is None or found.layer is None:
        return [_no_layer(found)]
    reasons = [*_of_the_tree(found, options), *_of_the_place(found, comm)]
    return reasons + _of_the_shape(found) if not found.sizes.keys() ^ set(SIZES) else reasons


def _no_layer(found: Found) -> str:
    there = "aiter is not installed" if found.aiter is None else f"aiter {found.aiter} has no MegaMoEV2"
    return (
        f"{there}: a source tree with {PACKAGE} is needed. No amd-aiter wheel on the package index has it, "
        "the newest is of 2025"
    )


def _of_the_tree(found: Found, options: Options) -> list[str]:
    reasons = []
    missing = [name for name in NEEDED if name not in found.attributes]
    if missing:
        reasons.append(
            f"the layer has no {', '.join(missing)}: trees that plan inside the Stage1 kernel leave no place "
            "for another; one with mega_moe_prepare.py is needed"
        )
    absent = [name for name in SIZES if name not in found.sizes]
    if absent:
        reasons.append(f"the layer has no {', '.join(absent)}: it is no MegaMoEV2 that this adapter knows")
    unknown = [name for name in SLOTS if name not in found.slots]
    if unknown:
        reasons.append(
            f"DispatchSlot has no {', '.join(unknown)}: the kernels read these entries of the table"
        )
    for name, extra in (("_s1_mega", 0), ("_s1_mega_bundle", 1)):
        count = found.arities.get(name, STAGE1_ARGUMENTS + extra)
        if count != STAGE1_ARGUMENTS + extra:
            reasons.append(
                f"{name} takes {count} arguments before its stream, {STAGE1_ARGUMENTS + extra} are known"
            )
    if options.packs_in_launch and not found.fused_gemm1:
        reasons.append(
            f"gemm1={options.gemm1!r} needs aiter's gemm1.py with build_fused_gemm1(tib_rsrc=, "
            "indirect_input=), which this tree has not"
        )
    return reasons


def _of_the_place(found: Found, comm: mori_shmem.Communicator) -> list[str]:
    reasons = []
    if found.arch is None or not found.arch.startswith("gfx95"):
        reasons.append(f"this GPU is {found.arch or 'no AMD GPU'}: the layer's formats are those of gfx950")
    if comm.backend != "rocm":
        reasons.append(f"the communicator's backend is {comm.backend!r}: its queues must be the GPU's (rocm)")
    place, given = (comm.rank, comm.world_size), (found.sizes.get("rank"), found.sizes.get("world_size"))
    if place != given:
        reasons.append(
            f"the layer is rank {given[0]} of {given[1]}, the communicator rank {place[0]} of {place[1]}"
        )
    if comm.world_size > MAX_RANKS:
        reasons.append(f"{comm.world_size} ranks: at most {MAX_RANKS}, those of one node")
    return reasons


def _of_the_shape(found: Found) -> list[str]:
    reasons, tokens = [], found.sizes["mtpr"]
    if found.fixed_slot:
        reasons.append(
            f"max_tok_per_rank={tokens} gives every expert fixed slots: there is a Stage1 over copy engines "
            "for the compact layout only, from 256 on"
        )
    if tokens >= INDEXED_FROM:
        reasons.append(
            f"max_tok_per_rank={tokens}: from {INDEXED_FROM} on rows are stored by token and gathered, which "
            "copies of whole segments cannot do"
        )
    for name in ("model_dim", "inter_dim"):
        if found.sizes[name] % 256:
            reasons.append(f"{name}={found.sizes[name]}: a multiple of 256 is needed")
    return reasons


# ---- looking ----


def _module(name: str) -> Any:
    """A module, or None if it, or something that it imports, is not there."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _version() -> str | None:
    aiter = _module("aiter")
    return None if aiter is None else str(getattr(aiter, "__version__", "of unknown version"))


def _has_layer(name: str) -> bool:
    return hasattr(_module(f"{PACKAGE}.{name}"), "MegaMoEV2")


def _arch() -> str | None:
    import torch

    if not torch.version.hip or not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).gcnArchName)


def _arity(call: Callable[..., Any] | None) -> int | None:
    """Positional parameters before `stream`; None if the signature does not tell."""
    if call is None:
        return None
    try:
        parameters = list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError):
        return None
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return names.index("stream") if "stream" in names else None


def _has_fused_gemm1() -> bool:
    build = getattr(_module(f"{PACKAGE}.gemm1"), "build_fused_gemm1", None)
    if build is None:
        return False
    parameters = inspect.signature(build).parameters
    return {"tib_rsrc", "indirect_input"} <= parameters.keys()
