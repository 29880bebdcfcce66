"""What a call or a configuration is held to before any rank waits for another. Messages carry the values."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import mori_shmem
import torch
from mori_shmem.arguments import described
from mori_shmem.errors import ArgumentError, LayoutError, UnsupportedShape

from mori_ep import formats
from mori_ep.arguments import (
    check_dtype,
    check_flags,
    check_geometry,
    check_rows,
    check_shaped,
    check_slots,
    check_tensor,
    check_whole,
)
from mori_ep.config import EpDispatchCombineConfig
from mori_ep.keys import PHASES
from mori_ep.plan import Geometry
from mori_ep.routing import EpDispatchRoutingHandle
from mori_ep.targets import CombineShape, DispatchShape

# ---- when an op is made ----


def check_made_of(config: object, comm: object) -> None:
    """An op is made of a configuration and a communicator, or None."""
    if not isinstance(config, EpDispatchCombineConfig):
        raise ArgumentError(
            f"config is {described(config)}: an EpDispatchCombineConfig is needed "
            "(EpDispatchCombineConfig.for_comm makes one)"
        )
    if comm is not None:
        check_comm(comm)


def check_by_hand(geometry: object, kernels: str = "own") -> None:
    """Launch geometry by phase, or None."""
    if geometry is None:
        return
    if kernels != "own":
        raise ArgumentError(
            f"geometry has no effect with kernels={kernels!r} (MORI_EP_KERNELS): leave one of the two out"
        )
    unknown = sorted(map(str, set(geometry) - set(PHASES))) if isinstance(geometry, Mapping) else []
    if unknown:
        raise ArgumentError(
            f"geometry has {', '.join(unknown)}: its keys are {', '.join(PHASES)}, one of them is needed"
        )
    if not isinstance(geometry, Mapping) or not all(isinstance(g, Geometry) for g in geometry.values()):
        raise ArgumentError(
            f"geometry is {described(geometry)}: a mapping from {' or '.join(PHASES)} to "
            "mori_ep.plan.Geometry is needed"
        )


def check_comm(comm: object) -> None:
    """What mori_shmem.init or mori_ep.internode.join returned."""
    if not all(hasattr(comm, name) for name in ("backend", "rank", "world_size", "alloc", "all_gather")):
        raise ArgumentError(
            f"comm is {described(comm)}: a communicator is needed, of mori_shmem.init or "
            "mori_ep.internode.join"
        )


def check_place(config: EpDispatchCombineConfig, comm: mori_shmem.Communicator) -> None:
    """The configuration is for this rank of this communicator."""
    if (config.rank, config.world_size) != (comm.rank, comm.world_size):
        raise ArgumentError(
            f"the configuration says rank={config.rank} of world_size={config.world_size}, the communicator "
            f"is "
            f"rank {comm.rank} of {comm.world_size}"
        )


def check_triple(
    target: ModuleType, config: EpDispatchCombineConfig, dispatch: torch.dtype, combine: torch.dtype
) -> None:
    """The dtypes that the op was made for, and the transport of combine, go together on this target."""
    reason = formats.why_not(dispatch, combine, config.quant_type) or target.why_not(
        config, dispatch, combine
    )
    if reason:
        raise UnsupportedShape(
            f"{formats.triple(dispatch, combine, config.quant_type)} with {config.kernel_type.name}: {reason}"
        )
    for name, dtype in (("dispatch", dispatch), ("combine", combine)):
        if dtype.itemsize > config.max_token_type_size:
            raise UnsupportedShape(
                f"max_token_type_size={config.max_token_type_size}, but {name} is called with {dtype}: "
                f"{dtype.itemsize} bytes per element"
            )


def compare_ranks(
    config: EpDispatchCombineConfig,
    comm: mori_shmem.Communicator,
    geometry: Mapping[str, Geometry] | None = None,
    kernels: str = "own",
) -> None:
    """Collective: raise on every rank if any of them was given something else."""
    by_hand = None if geometry is None else {phase: tuple(geometry[phase]) for phase in sorted(geometry)}
    given = comm.all_gather({**config.compared(), "geometry": by_hand, "kernels": kernels})
    differing = [
        f"{name} is " + ", ".join(f"{values[name]!r} on rank {rank}" for rank, values in enumerate(given))
        for name in given[0]
        if any(values.get(name) != given[0][name] for values in given)
    ]
    if differing:
        raise ArgumentError(
            "the ranks were given different configurations, all but `rank` must be the same: "
            + "; ".join(differing)
        )


# ---- calls that have passed before ----
# All that the checks below look at in tensors. What has passed them once need not be looked at again, which
# takes half of the host's time in a call of a few tokens. None: something is no tensor, or has no strides,
# and will not pass. Written out, since a function for each tensor costs a third more.


def dispatch_kinds(
    x: torch.Tensor, weights: torch.Tensor | None, scales: torch.Tensor | None, ids: torch.Tensor
) -> tuple[object, ...] | None:
    """Of a dispatch."""
    try:
        return (
            (x.shape, x.dtype, x.device, x.is_contiguous()),
            (ids.shape, ids.dtype, ids.device, ids.is_contiguous()),
            None
            if weights is None
            else (weights.shape, weights.dtype, weights.device, weights.is_contiguous()),
            None if scales is None else (scales.shape, scales.dtype, scales.device, scales.is_contiguous()),
        )
    except (AttributeError, RuntimeError):
        return None


def combine_kinds(
    num_tokens: int, external: bool, y: torch.Tensor, weights: torch.Tensor | None, ids: torch.Tensor
) -> tuple[object, ...] | None:
    """Of a combine."""
    try:
        return (
            (num_tokens, external),
            (y.shape, y.dtype, y.device, y.is_contiguous()),
            (ids.shape, ids.dtype, ids.device, ids.is_contiguous()),
            None
            if weights is None
            else (weights.shape, weights.dtype, weights.device, weights.is_contiguous()),
        )
    except (AttributeError, RuntimeError):
        return None


# ---- what all calls have ----


def check_options(asked: tuple[int, int, int] = (-1, -1, -1), **flags: object) -> None:
    """Blocks, network blocks and warps that a caller asks for, and flags that are True or False."""
    check_geometry(*asked)
    check_flags(**flags)


# ---- dispatch ----


def dispatch_shape(
    config: EpDispatchCombineConfig,
    device: torch.device,
    x: torch.Tensor,
    weights: torch.Tensor | None,
    scales: torch.Tensor | None,
    indices: torch.Tensor,
) -> DispatchShape:
    """The shape of a dispatch, once everything about its tensors is in order."""
    n = check_rows("input", x, device)
    hidden, dtype = x.shape[1], x.dtype
    if n > config.max_num_inp_token_per_rank:
        raise UnsupportedShape(
            f"input has {n} tokens, this op was made for max_num_inp_token_per_rank="
            f"{config.max_num_inp_token_per_rank}: make one with a larger value, or pass fewer tokens at a "
            f"time"
        )
    if dtype not in formats.CODES:
        raise UnsupportedShape(f"input is {dtype}: allowed are {formats.names(formats.CODES)}")
    check_hidden(config, hidden, dtype)
    check_slots("indices", indices, torch.int32, n, config.num_experts_per_token, device)
    if weights is not None:
        check_slots("weights", weights, torch.float32, n, config.num_experts_per_token, device)
    if scales is None:
        return DispatchShape(hidden, dtype, 0, None, weights is not None)
    if check_rows("scales", scales, device) != n:
        raise LayoutError(f"scales has {scales.shape[0]} rows, input has {n}: as many are needed")
    scale_dim = scales.shape[1]
    if scale_dim * scales.dtype.itemsize > config.scale_bytes:
        raise UnsupportedShape(
            f"scales has {scale_dim} of {scales.dtype} per row: {scale_dim * scales.dtype.itemsize} bytes, "
            f"this "
            f"op was made for scale_dim={config.scale_dim} of scale_type_size={config.scale_type_size}"
        )
    return DispatchShape(hidden, dtype, scale_dim, scales.dtype, weights is not None)


def check_ids(config: EpDispatchCombineConfig, indices: torch.Tensor) -> None:
    """With MORI_EP_CHECK_IDS: refuse ids that mean nothing. Looks at the values, so it waits for a device."""
    if indices.numel() == 0:
        return
    if indices.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    wrong = ((indices < -1) | (indices >= config.num_experts)).nonzero()
    if len(wrong):
        token, slot = wrong[0].tolist()
        raise ArgumentError(
            f"indices[{token}, {slot}] is {int(indices[token, slot])}: experts are "
            f"0..{config.num_experts - 1}, "
            "and -1 is no expert (MORI_EP_CHECK_IDS looks for this; without it such slots are dropped)"
        )


def check_handle(
    routing: object, op_number: int, config: EpDispatchCombineConfig, device: torch.device
) -> None:
    """A routing handle is one that this very op has made: its maps are places in the op's memory."""
    if not isinstance(routing, EpDispatchRoutingHandle):
        raise ArgumentError(
            f"routing is {type(routing).__name__}: the handle that dispatch of this op returned with "
            "return_routing=True is needed, or None"
        )
    if routing.op_number != op_number:
        raise ArgumentError(
            f"this routing handle is of op {routing.op_number} of this process, this is op {op_number}: pass "
            "the handle that dispatch of this op returned with return_routing=True"
        )
    n = check_whole("cur_rank_num_token", routing.cur_rank_num_token, 0, config.max_num_inp_token_per_rank)
    ranks = (config.world_size,)
    for name, shape in (
        ("disp_dest_tok_id_map", (n, config.num_experts_per_token)),
        ("disp_tok_id_to_src_tok_id", (config.recv_capacity,)),
        ("recv_count", (1,)),
        ("recv_per_source", ranks),
        ("sent_per_rank", ranks),
        ("first_rows", ranks),
    ):
        check_shaped(f"routing.{name}", getattr(routing, name), torch.int32, shape, device)


def check_keeps_routing(config: EpDispatchCombineConfig, return_routing: bool) -> None:
    """Handles are for ops whose rows come from the same ranks in every call."""
    if return_routing and config.elastic:
        raise UnsupportedShape(
            "return_routing=True: an elastic op keeps no routing, since which rows arrive may differ from "
            "call to call; only ops made with elastic=False do"
        )


def check_replay(routing: EpDispatchRoutingHandle, n: int) -> None:
    """A replay has the rows of the dispatch that it repeats."""
    if routing.cur_rank_num_token != n:
        raise ArgumentError(
            f"this routing handle is of a dispatch with {routing.cur_rank_num_token} tokens on this rank, "
            f"input has {n}: a replay needs the same number"
        )


# ---- combine ----


def combine_shape(
    config: EpDispatchCombineConfig,
    device: torch.device,
    rows: torch.Tensor,
    weights: torch.Tensor | None,
    indices: torch.Tensor,
    num_tokens: int,
    *,
    registered: bool,
) -> CombineShape:
    """The shape of a combine. Whether there are enough rows is for the target to see: it knows the count."""
    if num_tokens < 0:
        raise ArgumentError("combine without a dispatch before it, and without a routing handle")
    check_rows("input", rows, device)
    check_hidden(config, rows.shape[1], rows.dtype)
    check_tensor("indices", indices, device)
    if indices.dim() != 2 or indices.shape[0] != num_tokens:
        raise ArgumentError(
            f"indices is {tuple(indices.shape)}, the dispatch that this combine belongs to had {num_tokens} "
            "tokens on this rank: combine takes the very ids that dispatch was given, not those that it "
            "returned"
        )
    check_slots("indices", indices, torch.int32, num_tokens, config.num_experts_per_token, device)
    if weights is not None and check_tensor("weights", weights, device).numel() == 0:
        weights = None
    if weights is not None:
        given = check_rows("weights", weights, device)
        check_slots("weights", weights, torch.float32, given, config.num_experts_per_token, device)
    if registered and config.quant_type != "none":
        raise UnsupportedShape(
            f"quant_type={config.quant_type!r} with the registered buffer: a quantised transport makes its "
            f"own "
            "rows, so there is no copy to save. Pass rows of your own (use_external_inp_buf=1)"
        )
    return CombineShape(rows.shape[1], rows.dtype, weights is not None, registered)


def check_external(value: object) -> bool:
    """use_external_inp_buf of a call that is not as configured (-1)."""
    if type(value) not in (bool, int) or value not in (0, 1):
        raise ArgumentError(
            f"use_external_inp_buf={described(value)}: allowed are -1 (as configured), 0 (input is the "
            "registered buffer) and 1 (it is not)"
        )
    return bool(value)


def check_combine_dtype(config: EpDispatchCombineConfig, dispatch: torch.dtype, dtype: torch.dtype) -> None:
    """Rows of this dtype can be combined."""
    check_dtype("dtype", dtype)
    reason = formats.why_not(dispatch, dtype, config.quant_type)
    if reason:
        raise UnsupportedShape(f"{formats.triple(dispatch, dtype, config.quant_type)}: {reason}")


def check_hidden(
    config: EpDispatchCombineConfig, hidden: int, dtype: torch.dtype, name: str = "input"
) -> None:
    """A row of so many elements fits."""
    if type(hidden) is not int or not 1 <= hidden <= config.hidden_dim:
        raise UnsupportedShape(
            f"{name} has hidden size {described(hidden)}: this op was made for "
            f"1..hidden_dim={config.hidden_dim}"
        )
    if dtype.itemsize > config.max_token_type_size:
        raise UnsupportedShape(
            f"{name} is {dtype}, {dtype.itemsize} bytes per element: this op was made for "
            f"max_token_type_size={config.max_token_type_size}"
        )


# ---- rows by expert ----


def check_spread(
    config: EpDispatchCombineConfig,
    device: torch.device,
    rows: torch.Tensor,
    ids: torch.Tensor,
    scales: torch.Tensor | None,
    needed: int,
) -> None:
    """What is to be laid out by expert can be what a dispatch of this op returned."""
    _check_enough("dispatch_out_x", rows, needed, device)
    if rows.dtype not in formats.CODES:
        raise UnsupportedShape(f"dispatch_out_x is {rows.dtype}: allowed are {formats.names(formats.CODES)}")
    check_hidden(config, rows.shape[1], rows.dtype, "dispatch_out_x")
    _check_enough("dispatch_out_topk_idx", ids, needed, device)
    check_slots("dispatch_out_topk_idx", ids, torch.int32, len(ids), config.num_experts_per_token, device)
    if scales is None:
        return
    _check_enough("dispatch_out_scales", scales, needed, device)
    nbytes = scales.shape[1] * scales.dtype.itemsize
    if nbytes > config.scale_bytes:
        raise UnsupportedShape(
            f"dispatch_out_scales has {nbytes} bytes per row, this op was made for scale_dim="
            f"{config.scale_dim} of scale_type_size={config.scale_type_size}"
        )


def check_packed(config: EpDispatchCombineConfig, device: torch.device, packed: torch.Tensor) -> None:
    """Rows by expert, of the size that they are laid out in."""
    if not isinstance(packed, torch.Tensor) or packed.dim() != 3:
        given = tuple(packed.shape) if isinstance(packed, torch.Tensor) else described(packed)
        raise ArgumentError(f"packed_recv_x is {given}: [experts, rows, hidden] is needed")
    wanted = (config.num_experts_per_rank, config.recv_capacity, packed.shape[2])
    check_shaped("packed_recv_x", packed, packed.dtype, wanted, device)


def check_factors(
    config: EpDispatchCombineConfig, device: torch.device, weights: torch.Tensor, needed: int
) -> None:
    """Weights that rows by expert are multiplied by: of every row that came, as dispatch returned them."""
    _check_enough("weights", weights, needed, device)
    check_slots("weights", weights, torch.float32, len(weights), config.num_experts_per_token, device)


def _check_enough(name: str, x: torch.Tensor, needed: int, device: torch.device) -> None:
    if check_rows(name, x, device) < needed:
        raise LayoutError(
            f"{name} has {x.shape[0]} rows, {needed} are needed: pass the tensor that dispatch returned"
        )
