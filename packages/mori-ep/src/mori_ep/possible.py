"""Whether an op could be made for a problem of mori-tune. Asked before any rank is started, so that what
every rank would refuse is one line; the checks are the op's own."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from mori_shmem.errors import MoriError
from mori_tune import Problem

from mori_ep import formats
from mori_ep.bench.__main__ import DTYPES
from mori_ep.config import EpDispatchCombineConfig, EpDispatchCombineKernelType
from mori_ep.targets import TARGETS, target_for
from mori_ep.tunable import across_nodes, hidden_of, number


class Ranks(NamedTuple):
    """As much of a communicator as a configuration is made from."""

    rank: int
    world_size: int


def dtypes_of(problem: Problem) -> tuple[torch.dtype, torch.dtype]:
    """Of dispatch and combine."""
    dispatch, combine = (getattr(torch, DTYPES[str(problem[name])]) for name in ("dtype", "combine_dtype"))
    return dispatch, combine


def config_of(problem: Problem, comm: Any) -> EpDispatchCombineConfig:
    """What the op is made for in every visit."""
    dispatch, combine = dtypes_of(problem)
    return EpDispatchCombineConfig.for_comm(
        comm,
        num_experts=number(problem, "experts"),
        data_type=dispatch,
        combine_dtype=combine,
        hidden_dim=max(hidden_of(problem, "dispatch"), number(problem, "hidden")),
        max_num_inp_token_per_rank=max(1, number(problem, "tokens")),
        num_experts_per_token=number(problem, "topk"),
        max_token_type_size=max(dispatch.itemsize, combine.itemsize),
        scale_dim=number(problem, "scale_dim"),
        scale_type_size=4,
        kernel_type=EpDispatchCombineKernelType[str(problem["kernel_type"])],
        quant_type=str(problem["quant_type"]),
        use_external_inp_buf=not problem["zero_copy"],
        gpu_per_node=number(problem, "ranks_per_node") if across_nodes(problem) else 8,
    )


def why_impossible(problem: Problem, backend: str) -> str | None:
    """The reason against a problem, or None. Where this package has no target, only what holds on any."""
    topk, experts = number(problem, "topk"), number(problem, "experts")
    if topk > experts:
        return f"topk={topk} of experts={experts}: a token's experts differ"
    if problem["dtype"] == "fp4" and number(problem, "hidden") % 2:
        return f"hidden={problem['hidden']} of fp4: two numbers are one element"
    dispatch, combine = dtypes_of(problem)
    try:
        config = config_of(problem, Ranks(0, number(problem, "world_size")))
        config.check()
    except MoriError as refusal:
        return str(refusal)
    reason = formats.why_not(dispatch, combine, config.quant_type)
    if reason is None and backend in TARGETS:
        where = "internode" if backend == "host" and across_nodes(problem) else backend
        reason = target_for(where).why_not(config, dispatch, combine)
    return reason
