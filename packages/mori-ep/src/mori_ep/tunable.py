"""The op as mori-tune sees it:  mori-tune run --op ep --tokens 8,128,4096 --save

A problem is one shape of call; a candidate is one geometry, and where a call has two ways which of them, for
both phases together. A visit compares dispatch and combine with the reference, with two sets of rows in
turn; times rounds; and compares again. A round is a dispatch and the combine that belongs to it, each timed
by itself:

    host   ranks meet before each of the two; the time until the call returns
    cuda   pairs queued behind a kernel that only takes time, so that the host is out of the way, with events
           between the phases; the first pair, in which the ranks find each other, is dropped

torch is imported where a problem is checked, and in the ranks' processes.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from mori_tune import (
    EP_COMBINE,
    EP_DISPATCH,
    Candidate,
    Constraint,
    Device,
    Place,
    Problem,
    Query,
    Session,
    Space,
    SpaceError,
    ep_space,
    hardware_of,
    host_device,
    torch_device,
)
from mori_tune.spaces.ep import INTRA_WARPS

from mori_ep.config import QUANT_TYPES, EpDispatchCombineKernelType
from mori_ep.grids import Grid, combine_grid, dispatch_grid
from mori_ep.keys import PHASES, geometry_of, query_for

PACKAGE = "mori_ep"
KINDS = [kind.name for kind in EpDispatchCombineKernelType]
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8_e4m3": 1, "fp8_e4m3_fnuz": 1, "fp4": 1}  # of an element
SIZES = {  # by backend: tokens, hidden, experts, dispatch dtype, unless asked
    "host": ((64,), (1024,), 64, "bf16"),
    "cuda": ((8, 128, 4096), (7168,), 256, "fp8_e4m3"),
    "rocm": ((8, 128, 4096), (7168,), 256, "fp8_e4m3"),
}
PACKET_TOKENS = 512  # of a rank, that the cuda target can send as packets at all
PLANNED_HERE = {"block_num": 0, "rdma_block_num": 0, "warp_per_block": 0}
ONE_WORKER = {"block_num": 1, "rdma_block_num": 0, "warp_per_block": 1}


def words_of(allowed: Sequence[str]) -> Any:
    """An option type: words from `allowed`, with commas between."""

    def parse(text: str) -> tuple[str, ...]:
        words = tuple(text.split(","))
        if not set(words) <= set(allowed) or len(set(words)) != len(words):
            raise argparse.ArgumentTypeError(f"{text!r}: wanted one or more of {', '.join(allowed)}")
        return words

    return parse


def whole(low: int) -> Any:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r}: wanted a whole number of at least {low}")
        return int(text)

    return parse


def number(problem: Problem, name: str) -> int:
    value = problem[name]
    assert isinstance(value, int)
    return value


def across_nodes(problem: Problem) -> bool:
    return EpDispatchCombineKernelType[str(problem["kernel_type"])].across_nodes


def has_two_ways(problem: Problem, backend: str) -> bool:
    """Whether a call of this problem could go by the way for few tokens and by that for many."""
    if backend == "host":
        return problem["kernel_type"] in ("IntraNode", "InterNode")
    return backend == "cuda" and not across_nodes(problem) and number(problem, "tokens") <= PACKET_TOKENS


class Ep:
    """What mori-tune asks; see mori_tune.tunable."""

    name = "ep"
    package = PACKAGE
    formats = (EP_DISPATCH, EP_COMBINE)
    preload = ("torch.distributed", "mori_shmem.comm", "mori_ep.tuning")

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("what is exchanged (LIST: one problem each)")
        group.add_argument("--topk", type=whole(1), default=8, help="experts per token (8)")
        group.add_argument("--experts", type=whole(1), help="of all ranks (256 on a GPU, 64 on the host)")
        group.add_argument(
            *("--kernel-type", "--kernel-types"),
            dest="kernel_types",
            type=words_of(KINDS),
            default=("IntraNode",),
            metavar="LIST",
            help=", ".join(KINDS),
        )
        group.add_argument("--dtype", choices=tuple(BYTES), help="of dispatch (fp8_e4m3 on a GPU, else bf16)")
        group.add_argument("--combine-dtype", choices=tuple(BYTES), default="bf16", help="(bf16)")
        group.add_argument("--quant-type", choices=QUANT_TYPES, default="none")
        group.add_argument("--scale-dim", type=whole(0), help="fp32 scales a row (fp8: one per 128 elements)")
        group.add_argument(
            *("--zero-copy", "--zero-copies"),
            dest="zero_copies",
            type=words_of(("0", "1")),
            metavar="LIST",
            help="1: combine reads the registered buffer (1; quantised transports 0)",
        )
        group.add_argument(
            "--ranks-per-node", type=whole(1), help="of kernel types across nodes (1 on the host)"
        )
        group.add_argument(
            "--engine", choices=("nixl", "gloo"), default="gloo", help="what carries rows between nodes"
        )

    def problems(self, options: argparse.Namespace, device: Device) -> Sequence[Problem]:
        return self.asked_for(options, device.backend)

    def check_options(self, options: argparse.Namespace, backends: Sequence[str]) -> None:
        from mori_ep.possible import why_impossible

        reasons = []
        for backend in backends:
            against = ((p, why_impossible(p, backend)) for p in self.asked_for(options, backend))
            reason = next((f"{problem}: {why}" for problem, why in against if why is not None), None)
            if reason is None:
                return
            reasons.append(reason)
        raise SpaceError(reasons[0])

    def check_rule(self, phase: str, params: Mapping[str, Any], place: str) -> None:
        geometry_of(params, place)

    def asked_for(self, options: argparse.Namespace, backend: str) -> list[Problem]:
        """The problems that options name, sensible or not."""
        tokens, hidden, experts, dtype = SIZES[backend]
        dtype = options.dtype or dtype
        zero_copies = options.zero_copies or ("1" if options.quant_type == "none" else "0",)
        ranks = options.world_size or 2
        found = [
            {
                "kernel_type": kind,
                "tokens": n,
                "hidden": h,
                "topk": options.topk,
                "experts": options.experts or -(-experts // ranks) * ranks,
                "dtype": dtype,
                "combine_dtype": options.combine_dtype,
                "quant_type": options.quant_type,
                "zero_copy": zero_copy == "1",
                "scale_dim": scales_of(options.scale_dim, dtype, h),
                "world_size": ranks,
                "ranks_per_node": options.ranks_per_node or (1 if backend == "host" else 8),
                "engine": options.engine,
            }
            for kind in options.kernel_types
            for zero_copy in zero_copies
            for h in options.hidden or hidden
            for n in options.tokens or tokens
        ]
        return [Problem(values) for values in found]

    def query(self, problem: Problem, phase: str, device: Device) -> Query:
        return query_for(
            phase,
            str(problem["dtype" if phase == "dispatch" else "combine_dtype"]),
            kernel_type=str(problem["kernel_type"]),
            num_ranks=number(problem, "world_size"),
            hidden=hidden_of(problem, phase),
            topk=number(problem, "topk"),
            tokens=number(problem, "tokens"),
            zero_copy=bool(problem["zero_copy"]),
            quant_type=str(problem["quant_type"]),
            device=device,
        )

    def space(self, problem: Problem, device: Device) -> Space:
        hardware, ways = hardware_of(device), has_two_ways(problem, device.backend)
        if device.backend == "host":
            if not ways:
                raise SpaceError(
                    f"kernel type {problem['kernel_type']} has nothing to tune on the host, its defaults "
                    "suffice: one worker a rank, one way for its rows. IntraNode and InterNode have two ways"
                )
            return ep_space(hardware, nodes="worker", ways=True)
        if across_nodes(problem):
            return ep_space(hardware, nodes="inter")
        added = (Constraint("same", same_launch(problem)),) if device.backend == "cuda" else ()
        return ep_space(hardware, nodes="intra", ways=ways, constraints=added)

    def default(self, problem: Problem, device: Device) -> Candidate | None:
        """What runs without a rule, in the words of the space; None where no target runs."""
        ways = has_two_ways(problem, device.backend)
        if device.backend == "host":
            return Candidate.of({**ONE_WORKER, "low_latency": host_way(problem)})
        if device.backend != "cuda" or across_nodes(problem):
            return None
        return Candidate.of({**PLANNED_HERE, "low_latency": "planned"} if ways else PLANNED_HERE)

    def saved_as(self, problem: Problem, phase: str, winner: Candidate, device: Device) -> Candidate:
        """On cuda: no more warps than the phase's kernel uses."""
        values = winner.as_dict()
        if device.backend != "cuda" or not values["warp_per_block"]:
            return winner
        which = PHASES.index(phase)
        launched = grids_of(problem, values, device.compute_units)[which]
        for warps in sorted(w for w in INTRA_WARPS if w < int(values["warp_per_block"])):
            fewer = {**values, "warp_per_block": warps}
            if grids_of(problem, fewer, device.compute_units)[which] == launched:
                return Candidate.of(fewer)
        return winner

    def device(self, backend: str) -> Device:
        from mori_shmem.comm import backend_of

        found = backend_of(backend)
        if found not in ("host", "cuda"):
            raise SpaceError(f"{found}: mori-ep has no such target, so nothing can be measured on it")
        if found == "host":
            return host_device()
        from mori_ep.tuning import own_gpu

        return torch_device(own_gpu())

    def open(self, problem: Problem, device: Device, place: Place) -> Session:
        from mori_ep.tuning import open_session

        return open_session(problem, device, place)


def scales_of(asked: int | None, dtype: str, hidden: int) -> int:
    """fp32 scales of a dispatched row."""
    if asked is not None:
        return asked
    return -(-hidden // 128) if dtype.startswith("fp8") else 0


def hidden_of(problem: Problem, phase: str) -> int:
    """Elements of a row as the op sees them: two fp4 numbers are one element."""
    hidden = number(problem, "hidden")
    return hidden // 2 if phase == "dispatch" and problem["dtype"] == "fp4" else hidden


def host_way(problem: Problem) -> str:
    """What the host does without a rule."""
    from mori_ep.settings import INTERNODE_LL_TOKENS

    few = problem["kernel_type"] == "InterNode" and number(problem, "tokens") <= INTERNODE_LL_TOKENS.default
    return "yes" if few else "no"


def grids_of(problem: Problem, values: Mapping[str, Any], resident: int) -> tuple[Grid, Grid]:
    """What the cuda target launches for a candidate, in both phases."""
    asked = geometry_of(values, "a candidate")
    tokens, topk = number(problem, "tokens"), number(problem, "topk")
    few = asked.low_latency == 1
    row_bytes = hidden_of(problem, "dispatch") * BYTES[str(problem["dtype"])]
    words = number(problem, "scale_dim") + 2 * topk  # scales, ids and weights go along
    sent = row_bytes // 16 + -(-words // 4)
    home = number(problem, "hidden") * BYTES[str(problem["combine_dtype"])] // 16
    by_packets = few and problem["quant_type"] == "none"
    return (
        dispatch_grid(tokens, sent, few, resident, asked),
        combine_grid(tokens, home, by_packets, resident, asked),
    )


def same_launch(problem: Problem) -> Any:
    """A constraint: warps that change nothing, in neither phase, are not tried again."""

    @functools.cache
    def grids(items: tuple[tuple[str, Any], ...], resident: int) -> tuple[Grid, Grid]:
        return grids_of(problem, dict(items), resident)

    def refuses(values: Mapping[str, Any], hardware: Any) -> str | None:
        own = grids(tuple(values.items()), hardware.compute_units)
        for warps in INTRA_WARPS:
            if 0 < warps < values["warp_per_block"]:
                other = {**values, "warp_per_block": warps}
                if grids(tuple(other.items()), hardware.compute_units) == own:
                    return f"launches what warp_per_block={warps} does"
        return None

    return refuses


TUNABLE = Ep()
