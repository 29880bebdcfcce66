"""Rows of every dtype, with and without scales, and combine's transports: each triple holds or is refused."""

from __future__ import annotations

import itertools
from typing import Any

import mori_shmem
import pytest
import torch
from mori_ep import EpDispatchCombineConfig, EpDispatchCombineKernelType, EpDispatchCombineOp, reference
from mori_ep.config import QUANT_TYPES
from mori_ep.formats import CODES, COMBINED
from mori_ep.reference import RankInput, bytes_of
from mori_ep.testing import apply_experts, expected, fixture
from mori_shmem.errors import ArgumentError, UnsupportedShape

KINDS = ("IntraNode", "IntraNodeLL", "AsyncLL")
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
TOPK, EXPERTS, HIDDEN = 6, 12, 384


def config_for(comm: mori_shmem.Communicator, **changes: Any) -> EpDispatchCombineConfig:
    given: dict[str, Any] = {
        "data_type": torch.bfloat16,
        "hidden_dim": HIDDEN,
        "num_experts": EXPERTS,
        "num_experts_per_token": TOPK,
        "max_num_inp_token_per_rank": 32,
        "max_token_type_size": 4,
        "scale_dim": 12,
        "scale_type_size": 4,
    }
    return EpDispatchCombineConfig.for_comm(comm, **{**given, **changes})


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_dtype_come_as_they_are_with_any_scales(kind: str) -> None:
    """fp8 and fp4 codes are bytes to dispatch: all 256 of them, NaN codes too."""

    def rank() -> None:
        with mori_shmem.init() as comm:
            scale_kinds = (None, torch.float32, torch.float8_e8m0fnu, torch.uint8)
            for dtype in CODES:
                config = config_for(comm, data_type=dtype, kernel_type=EpDispatchCombineKernelType[kind])
                with EpDispatchCombineOp(config, comm) as op:
                    for scale_dtype in scale_kinds:
                        ranks = [some_rows(r, dtype, scale_dtype) for r in range(comm.world_size)]
                        want = reference.dispatch(ranks, EXPERTS // comm.world_size)[comm.rank]
                        given = ranks[comm.rank]
                        rows, _, scales, _, count = op.dispatch(given.x, None, given.scales, given.ids)
                        assert rows.dtype == dtype
                        assert int(count) == want.count
                        assert torch.equal(bytes_of(rows[: want.count]), bytes_of(want.rows))
                        assert (scales is None) == (scale_dtype is None)
                        if scales is not None:
                            assert want.scales is not None
                            assert scales.dtype == scale_dtype
                            assert torch.equal(bytes_of(scales[: want.count]), bytes_of(want.scales))

    mori_shmem.run_ranks(rank, 2)


def some_rows(rank: int, dtype: torch.dtype, scale_dtype: torch.dtype | None) -> RankInput:
    g = torch.Generator().manual_seed(rank)
    n = 9 + rank
    x = torch.randint(0, 256, (n, HIDDEN * dtype.itemsize), generator=g, dtype=torch.uint8).view(dtype)
    ids = torch.randint(0, EXPERTS, (n, TOPK), generator=g, dtype=torch.int32)
    scales = None
    if scale_dtype is not None:
        scales = torch.randint(0, 256, (n, 12 * scale_dtype.itemsize), generator=g, dtype=torch.uint8)
        scales = scales.view(scale_dtype)
    return RankInput(x, ids, None, scales)


def test_fp4_rows_are_half_as_many_elements() -> None:
    """float4_e2m1fn_x2 of model hidden 7168 is 3584 elements of a byte each."""

    def rank() -> None:
        with mori_shmem.init() as comm:
            config = config_for(
                comm, data_type=torch.float4_e2m1fn_x2, hidden_dim=3584, max_token_type_size=2
            )
            with EpDispatchCombineOp(config, comm) as op:
                x = torch.randint(0, 256, (3, 3584), dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
                rows, _, _, _, count = op.dispatch(x, None, None, torch.zeros(3, TOPK, dtype=torch.int32))
                assert (rows.shape, rows.dtype) == ((32, 3584), torch.float4_e2m1fn_x2)
                assert torch.equal(bytes_of(rows[: int(count)]), bytes_of(x))

    mori_shmem.run_ranks(rank, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_EP_5_every_triple_holds_or_is_refused_by_name(kind: str) -> None:
    def rank() -> int:
        held = 0
        with mori_shmem.init() as comm:
            for dispatch, combine, quant in itertools.product(CODES, CODES, QUANT_TYPES):
                config = config_for(
                    comm,
                    data_type=dispatch,
                    combine_dtype=combine,
                    quant_type=quant,
                    kernel_type=EpDispatchCombineKernelType[kind],
                )
                right = combine in COMBINED and (quant == "none" or combine == torch.bfloat16)
                if kind == "AsyncLL" and quant == "fp4_blockwise":
                    right = False
                if right:
                    with EpDispatchCombineOp(config, comm) as op:
                        holds(op, dispatch, combine, quant)
                    held += 1
                else:
                    names = [str(d).removeprefix("torch.") for d in (dispatch, combine)]
                    with pytest.raises(
                        UnsupportedShape, match=f"dispatch {names[0]}, combine {names[1]}, quant_type {quant}"
                    ):
                        EpDispatchCombineOp(config, comm)
        return held

    per_dispatch = len(COMBINED) + (2 if kind == "AsyncLL" else 3)
    assert mori_shmem.run_ranks(rank, 2, timeout_s=120)[0] == len(CODES) * per_dispatch


def holds(op: EpDispatchCombineOp, dispatch: torch.dtype, combine: torch.dtype, quant: str) -> None:
    """The round trip of RT: rows that bf16 holds are exact; what fp8 and fp4 lose is bounded."""
    given = fixture(op.config.rank, 13, TOPK, EXPERTS, HIDDEN)
    if dispatch in (torch.float4_e2m1fn_x2, torch.uint8):
        return  # the rows have no value of their own; that they come as they are is tested above
    x = given.x.to(dispatch)
    rows, weights, _, ids, count = op.dispatch(x, given.weights, None, given.ids)
    n = int(count)
    y = apply_experts(rows[:n].float(), ids[:n], weights[:n], op.config).to(combine)
    out, _ = op.combine(y, None, given.ids)
    assert out.dtype == combine
    want = expected(RankInput(x.float(), given.ids, given.weights), EXPERTS)
    error = reference.rel_l2(out[:13].float(), want)
    if combine in FP8:
        # The rows are rounded to fp8 before combine sees them, and their sum once more.
        assert error <= 6e-2
    else:
        assert (
            error <= {"none": 0, "fp8_direct_cast": 3e-2, "fp8_blockwise": 3e-2, "fp4_blockwise": 0.15}[quant]
        )


@pytest.mark.parametrize(
    ("kind", "quant"),
    [pair for pair in itertools.product(KINDS, QUANT_TYPES[1:]) if pair != ("AsyncLL", "fp4_blockwise")],
)
def test_quantised_transports_give_the_bytes_of_the_reference(kind: str, quant: str) -> None:
    """The owner adds what the transport makes of each row, in fp32, and rounds once."""

    def rank() -> None:
        with mori_shmem.init() as comm:
            config = config_for(comm, quant_type=quant, kernel_type=EpDispatchCombineKernelType[kind])
            with EpDispatchCombineOp(config, comm) as op:
                for hidden in (HIDDEN, 130, 2):
                    ranks = [some_rows(r, torch.bfloat16, None) for r in range(comm.world_size)]
                    received = reference.dispatch(ranks, EXPERTS // comm.world_size)
                    op.dispatch(ranks[comm.rank].x, None, None, ranks[comm.rank].ids)
                    y = []
                    for r, got in enumerate(received):
                        g = torch.Generator().manual_seed(r + 5)
                        rows = torch.randn(got.count, hidden, generator=g) * torch.logspace(-5, 2, hidden)
                        y.append(rows.bfloat16())
                    out, _ = op.combine(y[comm.rank], None, ranks[comm.rank].ids)
                    want = reference.combine(
                        ranks, received, y, EXPERTS // comm.world_size, lambda part: on_the_wire(part, quant)
                    )[comm.rank]
                    assert torch.equal(bytes_of(out[: want.shape[0]]), bytes_of(want))
                    if quant == "fp8_blockwise":
                        exact = reference.combine(ranks, received, y, EXPERTS // comm.world_size)[comm.rank]
                        assert reference.rel_l2(out[: want.shape[0]].float(), exact.float()) <= 3e-2

    mori_shmem.run_ranks(rank, 2)


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def on_the_wire(rows: torch.Tensor, quant: str) -> torch.Tensor:
    """What a transport makes of bf16 rows, as fp32."""
    x = rows.float()
    if quant == "fp8_direct_cast":
        return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    block, largest = (128, 448.0) if quant == "fp8_blockwise" else (32, 6.0)
    made = torch.empty_like(x)
    for begin in range(0, x.shape[1], block):
        part = x[:, begin : begin + block]
        top = part.abs().amax(1, keepdim=True) if part.numel() else torch.ones(x.shape[0], 1)
        scaled = (part * (torch.tensor(largest) / top)).clamp(-largest, largest)
        codes = scaled.to(torch.float8_e4m3fn).float() if quant == "fp8_blockwise" else nearest_e2m1(scaled)
        made[:, begin : begin + block] = codes * (top / largest)
    return made


def nearest_e2m1(x: torch.Tensor) -> torch.Tensor:
    """To the nearest value, ties to the even code."""
    middle = (E2M1[1:] + E2M1[:-1]) / 2
    below, above = torch.bucketize(x.abs(), middle), torch.bucketize(x.abs(), middle, right=True)
    index = torch.where(below % 2 == 0, below, above)
    return E2M1[index] * x.sign()


def test_one_infinity_stays_in_its_block_and_its_row() -> None:
    def rank() -> None:
        with mori_shmem.init() as comm:
            op = EpDispatchCombineOp(config_for(comm, quant_type="fp8_blockwise"), comm)
            ids = torch.zeros(2, TOPK, dtype=torch.int32)
            x = torch.ones(2, HIDDEN).bfloat16()
            rows, *_, count = op.dispatch(x, None, None, ids)
            y = rows[: int(count)].clone()
            y[0, 130] = torch.inf
            out, _ = op.combine(y, None, ids)
            assert bool(out[0, 128:256].isnan().all())
            assert torch.equal(out[0, :128], x[0, :128])
            assert torch.equal(out[1], x[1])

    mori_shmem.run_ranks(rank, 1)


def test_scales_per_row_are_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """MORI_FP8_COMBINE_SCALE_DIM: more scales, less error; too many do not fit into a row and are refused."""

    def rank() -> float:
        with mori_shmem.init() as comm:
            op = EpDispatchCombineOp(config_for(comm, quant_type="fp8_blockwise"), comm)
            ids = torch.zeros(4, TOPK, dtype=torch.int32)
            g = torch.Generator().manual_seed(1)
            x = (torch.randn(4, HIDDEN, generator=g) * torch.logspace(-4, 4, HIDDEN)).bfloat16()
            rows, *_ = op.dispatch(x, None, None, ids)
            out, _ = op.combine(rows, None, ids)
            small = slice(0, 128)
            return reference.rel_l2(out[:4, small].float(), x[:, small].float())

    coarse = mori_shmem.run_ranks(rank, 1)[0]
    monkeypatch.setenv("MORI_FP8_COMBINE_SCALE_DIM", "48")
    assert mori_shmem.run_ranks(rank, 1)[0] < coarse
    monkeypatch.setenv("MORI_FP8_COMBINE_SCALE_DIM", "384")
    with pytest.raises(ArgumentError, match="MORI_FP8_COMBINE_SCALE_DIM=384 is too large"):
        mori_shmem.run_ranks(rank, 1)


def test_a_quantised_transport_and_the_registered_buffer_are_refused() -> None:
    def rank() -> None:
        with mori_shmem.init() as comm:
            with pytest.raises(UnsupportedShape, match="use_external_inp_buf=False would be ignored"):
                EpDispatchCombineOp(
                    config_for(comm, quant_type="fp8_direct_cast", use_external_inp_buf=False), comm
                )
            with EpDispatchCombineOp(config_for(comm, quant_type="fp8_direct_cast"), comm) as op:
                ids = torch.zeros(2, TOPK, dtype=torch.int32)
                op.dispatch(torch.ones(2, HIDDEN).bfloat16(), None, None, ids)
                y = op.get_registered_combine_input_buffer(torch.bfloat16)
                with pytest.raises(UnsupportedShape, match="no copy to save"):
                    op.combine(y, None, ids, use_external_inp_buf=0)
                with pytest.raises(UnsupportedShape, match="fp8_direct_cast is a transport for bfloat16"):
                    op.combine(y.half(), None, ids)

    mori_shmem.run_ranks(rank, 1)
