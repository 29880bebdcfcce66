"""EP-1 to EP-8: what users of systems like this one were bitten by, with the fixture RT (mori_ep.testing)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import mori_shmem
import pytest
import torch
from mori_ep import EpDispatchCombineConfig, EpDispatchCombineKernelType, EpDispatchCombineOp
from mori_ep.reference import RankInput
from mori_ep.testing import apply_experts, expected, fixture, wrong_rows
from mori_shmem.errors import ArgumentError, CollectiveMismatch, LayoutError, UnsupportedShape

KINDS = ("IntraNode", "IntraNodeLL", "AsyncLL")
every_kind = pytest.mark.parametrize("kind", KINDS)


def made(comm: mori_shmem.Communicator, kind: str = "IntraNode", **sizes: Any) -> EpDispatchCombineOp:
    given: dict[str, Any] = {
        "data_type": torch.bfloat16,
        "hidden_dim": 512,
        "num_experts": 16,
        "num_experts_per_token": 8,
        "max_num_inp_token_per_rank": 128,
        "kernel_type": EpDispatchCombineKernelType[kind],
    }
    return EpDispatchCombineOp(EpDispatchCombineConfig.for_comm(comm, **{**given, **sizes}), comm)


def round_trip(op: EpDispatchCombineOp, given: RankInput) -> tuple[torch.Tensor, int]:
    """(what combine gives for this rank's tokens, rows received)."""
    rows, weights, _, ids, count = op.dispatch(given.x, given.weights, given.scales, given.ids)
    received = int(count)
    y = apply_experts(rows[:received], ids[:received], weights[:received], op.config)
    out, _ = op.combine(y, None, given.ids)
    return out[: given.x.shape[0]], received


def check(op: EpDispatchCombineOp, given: RankInput, where: object = "") -> int:
    """Rows received; asserts that the round trip is exact, naming the rows that are not."""
    out, received = round_trip(op, given)
    wrong = wrong_rows(out, expected(given, op.config.num_experts))
    assert not wrong, f"{where}: rank {op.config.rank}, tokens {wrong[:5]}"
    return received


def on_ranks(world_size: int, body: Callable[..., Any], *args: object, timeout_s: float = 60) -> list[Any]:
    def rank() -> Any:
        with mori_shmem.init() as comm:
            return body(comm, *args)

    return mori_shmem.run_ranks(rank, world_size, timeout_s=timeout_s)


@every_kind
def test_EP_1_empty_ranks_and_one_sided_routing_again_and_again(kind: str) -> None:
    def body(comm: mori_shmem.Communicator) -> None:
        with made(comm, kind) as op:
            for tokens in ((0, 64), (64, 0), (0, 0)):
                for _ in range(20):
                    given = fixture(comm.rank, tokens[comm.rank], 8, 16, 512)
                    check(op, given, tokens)
                    weights = op.dispatch(given.x, None, None, given.ids)[1]
                    assert weights.shape == (256, 8)
            for _ in range(20):
                given = fixture(comm.rank, 128, 8, 16, 512)
                given.ids[:] = torch.arange(8, dtype=torch.int32)
                assert check(op, given, "experts 0..7") == (256 if comm.rank == 0 else 0)
        with made(comm, kind, num_experts_per_token=1) as op:
            for _ in range(20):
                given = fixture(comm.rank, 128, 1, 16, 512)
                given.ids[:] = 5
                assert check(op, given, "expert 5") == (256 if comm.rank == 0 else 0)

    on_ranks(2, body)


ROWS = {3: (54, 46), 6: (74, 74), 7: (74, 74), 9: (74, 74), 10: (74, 74)}
ASSIGNMENTS = {3: (123, 99), 6: (225, 219), 7: (258, 260), 9: (331, 335), 10: (372, 368)}


@every_kind
def test_EP_2_P3_P4_P11_any_topk_works_whatever_divides_it(kind: str) -> None:
    def body(comm: mori_shmem.Communicator) -> None:
        for topk, rows in ROWS.items():
            with made(comm, kind, num_experts=48, num_experts_per_token=topk) as op:
                given = fixture(comm.rank, 37, topk, 48, 512)
                behind = torch.full((37 * topk + 64,), 47, dtype=torch.int32)  # ids as bait behind the table
                behind[: 37 * topk] = given.ids.flatten()
                ids = behind[: 37 * topk].view(37, topk)
                *_, handle = op.dispatch(
                    given.x, given.weights, None, ids, return_routing=True, call_local_expert_count=True
                )
                assert int(op.local_expert_count.sum()) == ASSIGNMENTS[topk][comm.rank]
                used = handle.disp_dest_tok_id_map.flatten()
                used = used[used != op.config.null_position]
                all_used = sorted(itertools.chain(*comm.all_gather(used.tolist())))
                for rank in range(2):  # slots of one destination are 0..n-1, none twice
                    mine = [
                        s % op.config.position_stride
                        for s in all_used
                        if s // op.config.position_stride == rank
                    ]
                    assert mine == list(range(rows[rank]))
                assert check(op, RankInput(given.x, ids, given.weights), topk) == rows[comm.rank]
                assert bool((behind[37 * topk :] == 47).all())

    on_ranks(2, body)


@every_kind
def test_EP_3_P7_more_than_65536_tokens(kind: str) -> None:
    def body(comm: mori_shmem.Communicator) -> int:
        sizes = {"num_experts": 2, "num_experts_per_token": 1, "hidden_dim": 128}
        with made(comm, kind, max_num_inp_token_per_rank=65537, **sizes) as op:
            return check(op, fixture(comm.rank, 65537, 1, 2, 128))

    assert sum(on_ranks(2, body)) == 131074


@every_kind
def test_EP_4_P6_masked_slots_go_nowhere_and_add_nothing(kind: str) -> None:
    def body(comm: mori_shmem.Communicator) -> None:
        with made(comm, kind, num_experts_per_token=4) as op:
            given = fixture(comm.rank, 64, 4, 16, 512)
            given.ids[:, 3] = -1
            given.ids[::8] = -1
            given.ids[1, 2] = 16  # no expert has this id
            given.ids[2, 2] = 2**31 - 1
            assert op._window is not None
            op._window.tensor((256, 512), torch.bfloat16, op.layout.out.offset_bytes).fill_(torch.nan)
            op._window.tensor((256, 512), torch.bfloat16, op.layout.y.offset_bytes).fill_(torch.nan)
            comm.barrier()
            *_, count = op.dispatch(given.x, given.weights, None, given.ids, call_local_expert_count=True)
            assert int(op.local_expert_count.sum()) == sum(
                int(((ids >= 8 * comm.rank) & (ids < 8 * comm.rank + 8)).sum())
                for ids in comm.all_gather(given.ids)
            )
            out, _ = round_trip(op, given)
            assert not wrong_rows(out, expected(given, 16))
            assert not out[::8].any()
            assert int(count) < 128

    on_ranks(2, body)


def test_EP_5_calls_that_cannot_be_right_are_refused_with_the_values() -> None:
    def body(comm: mori_shmem.Communicator) -> None:
        with made(comm) as op:
            x, ids = torch.zeros(4, 512).bfloat16(), torch.zeros(4, 8, dtype=torch.int32)
            weights = torch.ones(4, 8)
            many = torch.zeros(129, 512).bfloat16()
            for call, words in (
                (
                    (many, None, None, torch.zeros(129, 8, dtype=torch.int32)),
                    "129 tokens.*max_num_inp_token_per_rank=128",
                ),
                ((torch.zeros(4, 513).bfloat16(), None, None, ids), "513.*hidden_dim=512"),
                ((x, None, None, ids.to(torch.int16)), "int16"),
                ((x, None, None, ids[:, :7].contiguous()), r"\(4, 7\).*\(4, 8\)"),
                ((x, None, None, ids[:3]), r"\(3, 8\).*\(4, 8\)"),
                ((torch.zeros(512, 4).bfloat16().t(), None, None, ids), r"strides \(1, 4\)"),
                ((x.double(), None, None, ids), "float64"),
                ((x.float(), None, None, ids), "4 bytes per element.*max_token_type_size=2"),
                ((x.to("meta"), None, None, ids), "meta"),
                ((x, weights.double(), None, ids), "float64"),
                ((x, None, torch.zeros(4, 2), ids), "scales has 2 of torch.float32.*scale_dim=0"),
                ((x[0], None, None, ids), r"\(512,\)"),
            ):
                with pytest.raises((UnsupportedShape, LayoutError), match=words):
                    op.dispatch(*call)
            with pytest.raises(ArgumentError, match="combine without a dispatch"):
                op.combine(x, None, ids)
            given = fixture(comm.rank, 7, 8, 16, 512)
            check(op, given)  # still usable
            rows, *_, count = op.dispatch(given.x, given.weights, None, given.ids)
            with pytest.raises(ArgumentError, match=f"{int(count) - 1} rows.*{int(count)} to rank"):
                op.combine(rows[: int(count) - 1], None, given.ids)
            with pytest.raises(ArgumentError, match="not the registered buffer"):
                op.combine(rows.clone(), None, given.ids, use_external_inp_buf=0)
            check(op, given)
        wrong = EpDispatchCombineConfig(
            data_type=torch.bfloat16,
            rank=comm.rank,
            world_size=3,
            hidden_dim=8,
            scale_dim=0,
            scale_type_size=0,
            max_token_type_size=2,
            max_num_inp_token_per_rank=1,
            num_experts_per_rank=1,
            num_experts_per_token=1,
        )
        with pytest.raises(ArgumentError, match=r"world_size=3.* of 2"):
            EpDispatchCombineOp(wrong, comm)

    on_ranks(2, body)


def test_P2_combine_refuses_the_ids_that_came_with_the_rows() -> None:
    def body(comm: mori_shmem.Communicator) -> None:
        with made(comm) as op:
            given = fixture(comm.rank, 7, 8, 16, 512)
            rows, _, _, ids, count = op.dispatch(given.x, given.weights, None, given.ids)
            with pytest.raises(ArgumentError, match=r"\(14, 8\).*7 tokens.*not those that it returned"):
                op.combine(rows, None, ids[: int(count)])
            with pytest.raises(ArgumentError, match="not those that it returned"):
                op.combine(rows, None, ids)

    on_ranks(2, body)


@every_kind
def test_EP_6_P13_P20_thousands_of_calls_neither_hang_nor_lose_a_row(kind: str) -> None:
    """Inputs differ per round; ranks drift apart now and then. Flags only grow."""
    rounds = 2000 if kind == "IntraNode" else 600

    def body(comm: mori_shmem.Communicator) -> None:
        with made(comm, kind, hidden_dim=64) as op:
            base = {t: fixture(comm.rank, t, 8, 16, 64) for t in (1, 37, 128)}
            assert op._window is not None
            flags = op._window.tensor(op.layout.headers.offset_bytes // 8, torch.int64)
            last, slowest = flags.clone(), 0.0
            for turn in range(rounds):
                tokens = (1, 37, 128)[turn % 3]
                given = base[tokens]
                sign = -1.0 if turn % 2 else 1.0
                began = time.monotonic()
                check(op, RankInput(given.x * sign, given.ids, given.weights), f"round {turn}")
                slowest = max(slowest, time.monotonic() - began)
                if turn % 50 == comm.rank:
                    now = flags.clone()
                    assert bool((now >= last).all())
                    last = now
                    time.sleep(0.002)
            assert slowest < 10

    on_ranks(2, body, timeout_s=280)


@every_kind
def test_EP_7_P18_shapes_and_scales_change_from_call_to_call(kind: str) -> None:
    def body(comm: mori_shmem.Communicator) -> None:
        with made(comm, kind, hidden_dim=7168, scale_dim=4, scale_type_size=4) as op:
            inputs = {
                shape: fixture(comm.rank, shape[0], 8, 16, shape[1])
                for shape in ((128, 7168), (3, 512), (0, 512), (1, 7168))
            }
            for turn in range(3):
                for index, shape in enumerate(((128, 7168), (3, 512), (128, 7168), (0, 512), (1, 7168))):
                    given = inputs[shape]
                    given.scales = (
                        torch.full((shape[0], 1 + index % 4), turn + 0.5 + comm.rank)
                        if (turn + index) % 2
                        else None
                    )
                    received = check(op, given, (turn, shape))
                    scales = op.dispatch(given.x, given.weights, given.scales, given.ids)[2]
                    if given.scales is None:
                        assert scales is None
                    else:
                        sources = op.get_dispatch_src_token_pos() // op.config.position_stride
                        assert torch.equal(scales[:received, 0], turn + 0.5 + sources.float())

    on_ranks(2, body)


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [*itertools.product(KINDS, (1, 2, 4, 5)), ("IntraNode", 12)],  # twelve ranks take seconds to start
)
def test_EP_8_no_world_size_is_built_in(kind: str, world_size: int) -> None:
    def body(comm: mori_shmem.Communicator) -> None:
        experts = 12 * world_size
        with made(comm, kind, num_experts=experts, num_experts_per_token=4, hidden_dim=128) as op:
            for tokens in (16, 16, 3):
                check(op, fixture(comm.rank, tokens, 4, experts, 128))

    on_ranks(world_size, body)


def test_P25_configurations_that_differ_name_the_field_and_the_ranks() -> None:
    def body(comm: mori_shmem.Communicator) -> None:
        for field, values in (
            ("max_num_inp_token_per_rank", (128, 256)),
            ("num_experts_per_token", (8, 6)),
            ("quant_type", ("none", "fp8_blockwise")),
            ("data_type", (torch.bfloat16, torch.float16)),
            ("kernel_type", (0, 5)),
        ):
            sizes = {field: values[comm.rank]}
            if field == "kernel_type":
                sizes = {field: EpDispatchCombineKernelType(values[comm.rank])}
            given = {
                "data_type": torch.bfloat16,
                "hidden_dim": 8,
                "num_experts": 4,
                "num_experts_per_token": 2,
                "max_num_inp_token_per_rank": 4,
                **sizes,
            }
            config = EpDispatchCombineConfig.for_comm(comm, **given)
            with pytest.raises(ArgumentError, match=f"{field} is .* on rank 0, .* on rank 1"):
                EpDispatchCombineOp(config, comm)

    on_ranks(2, body)


@every_kind
def test_P25_calls_that_differ_between_ranks_raise_on_all(kind: str) -> None:
    def body(comm: mori_shmem.Communicator) -> None:
        n = 4
        ids = torch.zeros(n, 8, dtype=torch.int32)
        cases: list[tuple[Any, ...]] = [
            (torch.zeros(n, (64, 32)[comm.rank]).bfloat16(), None, "hidden bytes is (128|64) on rank"),
            (torch.zeros(n, 64, dtype=(torch.bfloat16, torch.float16)[comm.rank]), None, "dtype is"),
            (torch.zeros(n, 64).bfloat16(), torch.ones(n, 8) if comm.rank else None, "weights is"),
        ]
        for x, weights, words in cases:
            with made(comm, kind, hidden_dim=64) as op:
                with pytest.raises(CollectiveMismatch, match=words):
                    op.dispatch(x, weights, None, ids)
                with pytest.raises(mori_shmem.errors.MoriError, match="cannot be used any more"):
                    op.dispatch(x, weights, None, ids)
        with made(comm, kind, hidden_dim=64) as op:
            x = torch.zeros(n, 64).bfloat16()
            op.dispatch(x, None, None, ids)
            y = torch.zeros(2 * n, (64, 32)[comm.rank]).bfloat16()
            with pytest.raises(CollectiveMismatch, match=r"\[\*, (64|32)\] bfloat16"):
                op.combine(y, None, ids)

    on_ranks(2, body)


@every_kind
def test_P25_weights_on_some_ranks_only_are_told_to_all(kind: str) -> None:
    """Also to a rank that has nothing to do with those that differ: else it waits for them in its next call.
    What a rank without tokens, or without rows, does not give is no difference."""

    def body(comm: mori_shmem.Communicator) -> None:
        n, me = 4, comm.rank
        x, y = torch.zeros(n, 64).bfloat16(), torch.zeros(12, 64).bfloat16()
        own = torch.full((n, 8), 2 * me, dtype=torch.int32)  # all of a rank's tokens stay with it
        for tokens, words in ((n, "with weights, rank 1 .* without weights"), (0, None)):
            with made(comm, kind, hidden_dim=64, num_experts=6) as op:
                k = tokens if me == 1 else n
                op.dispatch(x[:k], None, None, own[:k])
                weights = None if me == 1 else torch.ones(12, 8)
                if words is None:
                    out = op.combine(y, weights, own[:k])[1]
                    assert (out is None) == (me == 1)
                    continue
                with pytest.raises(CollectiveMismatch, match=words):
                    op.combine(y, weights, own[:k])
        for k in (n, 0):  # of rank 2
            with made(comm, kind, hidden_dim=64, num_experts=6) as op:
                mine = k if me == 2 else n
                weights = torch.ones(mine, 8) if me != 1 else None
                with pytest.raises(CollectiveMismatch, match="weights is 1 on rank 0 and 0 on rank 1"):
                    op.dispatch(x[:mine], weights, None, own[:mine])

    on_ranks(3, body)
