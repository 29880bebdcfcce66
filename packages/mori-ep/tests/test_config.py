"""What an op can be made for: refused with the values, before any rank waits."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mori_ep import EpDispatchCombineConfig, EpDispatchCombineKernelType
from mori_ep.formats import CODES, combine_dtype_for, why_not
from mori_shmem.errors import UnsupportedShape


def config(**changes: Any) -> EpDispatchCombineConfig:
    given: dict[str, Any] = {
        "data_type": torch.bfloat16,
        "rank": 1,
        "world_size": 4,
        "hidden_dim": 7168,
        "scale_dim": 56,
        "scale_type_size": 4,
        "max_token_type_size": 2,
        "max_num_inp_token_per_rank": 128,
        "num_experts_per_rank": 8,
        "num_experts_per_token": 8,
    }
    return EpDispatchCombineConfig(**{**given, **changes})


def test_engines_find_the_fields_that_they_fill_in() -> None:
    """They drop what the dataclass does not have, so a missing name would be silent."""
    names = {field.name for field in dataclasses.fields(EpDispatchCombineConfig)}
    assert names >= {
        *("data_type", "rank", "world_size", "hidden_dim", "scale_dim", "scale_type_size"),
        *(
            "max_token_type_size",
            "max_num_inp_token_per_rank",
            "num_experts_per_rank",
            "num_experts_per_token",
        ),
        *("warp_num_per_block", "block_num", "max_total_recv_tokens", "use_external_inp_buf", "kernel_type"),
        *("gpu_per_node", "rdma_block_num", "num_qp_per_pe", "quant_type"),
    }
    made = config()
    assert (made.warp_num_per_block, made.block_num, made.gpu_per_node) == (8, 80, 8)
    assert made.use_external_inp_buf
    assert made.quant_type == "none"
    values = {kind.name: kind.value for kind in EpDispatchCombineKernelType}
    assert values == {
        "IntraNode": 0,
        "InterNode": 1,
        "InterNodeV1": 2,
        "InterNodeV1LL": 3,
        "AsyncLL": 4,
        "IntraNodeLL": 5,
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rank": 4}, "rank=4"),
        ({"hidden_dim": 0}, "hidden_dim=0"),
        ({"max_num_inp_token_per_rank": 0}, "max_num_inp_token_per_rank=0"),
        ({"max_num_inp_token_per_rank": 12.5}, "max_num_inp_token_per_rank=12.5"),
        ({"num_experts_per_token": 32}, "num_experts_per_token=32: at most 31"),
        (
            {"quant_type": "fp8"},
            "quant_type='fp8': one of none, fp8_direct_cast, fp8_blockwise, fp4_blockwise",
        ),
        ({"scale_type_size": 0}, "scale_dim=56 with scale_type_size=0"),
        ({"world_size": 64, "max_num_inp_token_per_rank": 1 << 20}, f"up to {1 << 32}"),
    ],
)
def test_EP_5_what_no_target_can_do_is_refused_with_the_value(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedShape, match=words.replace("(", r"\(")):
        config(**changes).check()


def test_EP_8_experts_that_cannot_be_shared_out_are_refused_with_both_numbers() -> None:
    comm = SimpleNamespace(rank=0, world_size=5)
    sizes = {"data_type": torch.bfloat16, "hidden_dim": 8, "max_num_inp_token_per_rank": 1}
    with pytest.raises(UnsupportedShape, match=r"num_experts=61 .* 5 ranks"):
        EpDispatchCombineConfig.for_comm(comm, num_experts=61, num_experts_per_token=1, **sizes)


def test_capacities_follow_from_the_fields() -> None:
    assert config().recv_per_source == 128
    assert config().recv_capacity == 512
    limited = config(max_total_recv_tokens=101)
    assert (limited.recv_per_source, limited.recv_capacity) == (26, 104)
    assert config(max_total_recv_tokens=10**6).recv_per_source == 128
    assert config().null_position == 4 * 4 * 128


def test_EP_5_every_triple_is_allowed_or_has_a_reason() -> None:
    quants = ("none", "fp8_direct_cast", "fp8_blockwise", "fp4_blockwise")
    for dispatch in CODES:
        for combine in CODES:
            for quant in quants:
                reason = why_not(dispatch, combine, quant)
                packed = combine in (torch.float4_e2m1fn_x2, torch.uint8)
                assert bool(reason) == (packed or (quant != "none" and combine != torch.bfloat16))
    assert why_not(torch.int8, torch.bfloat16, "none") is not None


def test_rows_of_8_bits_are_combined_in_bf16_unless_told() -> None:
    assert combine_dtype_for(torch.float8_e4m3fn) == torch.bfloat16
    assert combine_dtype_for(torch.float16) == torch.float16
