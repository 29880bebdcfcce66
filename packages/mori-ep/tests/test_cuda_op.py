"""The op on GPUs, a process a rank. gpu(2): 2 ranks with a GPU each, and 4 to 8 ranks sharing two.

Run with `tools/gpu_run pytest -m gpu packages/mori-ep/tests/test_cuda_op.py`. One start of ranks serves many
checks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import mori_shmem
import pytest
import torch
from mori_ep import EpDispatchCombineConfig, EpDispatchCombineKernelType, EpDispatchCombineOp, reference
from mori_ep.reference import RankInput, bytes_of
from mori_ep.testing import apply_experts, expected, fixture, wrong_rows
from mori_shmem.errors import ArgumentError, CollectiveMismatch, MoriError, PeerError, UnsupportedShape
from mori_shmem.testing import die, run_ranks_to_the_end

pytestmark = [pytest.mark.gpu(2), pytest.mark.timeout(200)]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    monkeypatch.setenv("MORI_SHMEM_BACKEND", "cuda")


def on_ranks(world_size: int, body: Callable[..., Any], *args: object) -> list[Any]:
    def rank() -> Any:
        with mori_shmem.init(timeout_s=30) as comm:
            return body(comm, *args)

    return mori_shmem.run_ranks(rank, world_size, timeout_s=180)


def made(comm: mori_shmem.Communicator, kind: str = "IntraNode", **sizes: Any) -> EpDispatchCombineOp:
    given: dict[str, Any] = {
        "data_type": BF16,
        "hidden_dim": 512,
        "num_experts": 8 * comm.world_size,
        "num_experts_per_token": 8,
        "max_num_inp_token_per_rank": 600,
        "kernel_type": EpDispatchCombineKernelType[kind],
    }
    return EpDispatchCombineOp(EpDispatchCombineConfig.for_comm(comm, **{**given, **sizes}), comm)


def here(op: EpDispatchCombineOp, tokens: int, hidden: int = 512) -> RankInput:
    config = op.config
    given = fixture(config.rank, tokens, config.num_experts_per_token, config.num_experts, hidden)
    return RankInput(given.x.cuda(), given.ids.cuda(), given.weights.cuda())


def check(op: EpDispatchCombineOp, given: RankInput, *, registered: bool = False) -> None:
    """A round trip of the exact fixture."""
    rows, weights, _, ids, count = op.dispatch(given.x, given.weights, given.scales, given.ids)
    received = int(count)
    y = apply_experts(rows[:received], ids[:received], weights[:received], op.config)
    if registered:
        buffer = op.get_registered_combine_input_buffer(BF16, given.x.shape[1])
        buffer[:received] = y
        y = buffer
    out, _ = op.combine(y, None, given.ids, use_external_inp_buf=int(not registered))
    wrong = wrong_rows(out[: given.x.shape[0]], expected(given, op.config.num_experts))
    assert not wrong, f"rank {op.config.rank}, tokens {wrong[:5]}"


def ragged_round_trips(comm: mori_shmem.Communicator) -> None:
    """EP-1, EP-7: empty ranks, ranks that send in different ways, another hidden size each time."""
    with made(comm) as op:
        for turn, sizes in enumerate(((600, 3), (0, 128), (600, 600), (1, 0), (37, 300), (0, 0))):
            given = here(op, sizes[comm.rank % 2], 512 if turn % 2 else 128)
            check(op, given, registered=turn % 3 == 1)
    for top_k in (1, 3, 9, 10):
        with made(comm, num_experts_per_token=top_k, num_experts=12 * comm.world_size) as op:
            check(op, here(op, 37))


def the_reference(comm: mori_shmem.Communicator) -> None:
    """Rows, positions, counts and sums are the reference's: what the host target gives."""
    world = comm.world_size
    with made(comm, num_experts_per_token=5, scale_dim=7, scale_type_size=1) as op:
        for seed, sizes in enumerate(((40, 600), (600, 1), (0, 77))):
            ranks = []
            for rank in range(world):
                g = torch.Generator().manual_seed(100 * seed + rank)
                n = sizes[rank % 2]
                ids = torch.randint(-2, 8 * world + 2, (n, 5), generator=g, dtype=torch.int32)
                scales = torch.randint(0, 256, (n, 7), dtype=torch.uint8, generator=g)
                x = torch.randn(n, 512, generator=g).to(BF16)
                ranks.append(RankInput(x, ids, torch.rand(n, 5, generator=g), scales))
            received = reference.dispatch(ranks, 8)
            given, want = ranks[comm.rank], received[comm.rank]
            tensors = [t.cuda() for t in (given.x, given.weights, given.scales, given.ids)]
            rows, weights, scales, ids, count = op.dispatch(*tensors, call_local_expert_count=True)
            n = want.count
            assert count.tolist() == [n]
            for got, wanted in (
                (rows, want.rows),
                (weights, want.weights),
                (scales, want.scales),
                (ids, want.ids),
            ):
                assert torch.equal(bytes_of(got[:n].cpu()), bytes_of(wanted))
            assert [
                op.decode_send_flat_idx(p) for p in op.get_dispatch_src_token_pos().tolist()
            ] == want.sources
            firsts = want.ids - 8 * comm.rank
            assert op.local_expert_count.tolist() == [int((firsts == e).sum()) for e in range(8)]
            y = [
                torch.randn(r.count, 512, generator=torch.Generator().manual_seed(i)).to(BF16)
                for i, r in enumerate(received)
            ]
            out, out_weights = op.combine(y[comm.rank].cuda(), weights, tensors[3])
            sums = reference.combine(ranks, received, y, 8)[comm.rank]
            assert torch.equal(bytes_of(out[: len(sums)].cpu()), bytes_of(sums))
            told = reference.combine(ranks, received, [r.weights for r in received], 8)[comm.rank]
            assert out_weights is None or torch.equal(out_weights[: len(told)].cpu(), told)


def open_handles(comm: mori_shmem.Communicator) -> None:
    """Two dispatches open at a time, combined in either order, and one replayed with other rows."""
    with made(comm) as op:
        for sizes in ((20, 600), (600, 600)):
            first, second = here(op, sizes[comm.rank % 2]), here(op, sizes[0])
            second.ids.copy_(second.ids.flip(0))
            came = []
            for given in (first, second):
                rows, _, _, _, count, handle = op.dispatch(
                    given.x, given.weights, None, given.ids, return_routing=True
                )
                came.append((rows[: int(count)].clone(), handle))
            for given, (rows, handle) in ((second, came[1]), (first, came[0])):
                buffer = op.get_registered_combine_input_buffer(BF16)
                buffer[: len(rows)] = rows
                out, _ = op.combine(buffer, None, given.ids, use_external_inp_buf=0, routing=handle)
                assert not wrong_rows(out[: len(given.x)], given.x.float() * num_ranks(op, given.ids))
            rows, handle = came[0]
            again, *_, count = op.dispatch(-first.x, None, None, first.ids, routing=handle)
            assert int(count) == len(rows)
            assert torch.equal(again[: len(rows)], -rows)
            bare = type(handle).__mro__[1](  # without what this target keeps with it
                *(handle.disp_dest_tok_id_map, handle.disp_tok_id_to_src_tok_id, handle.recv_count),
                *(handle.recv_per_source, handle.sent_per_rank, handle.first_rows, handle.cur_rank_num_token),
                op_number=handle.op_number,
            )
            out, _ = op.combine(rows, None, first.ids, routing=bare)
            assert not wrong_rows(out[: len(first.x)], first.x.float() * num_ranks(op, first.ids))
            assert int(handle.recv_per_source.sum()) == len(rows)


def num_ranks(op: EpDispatchCombineOp, ids: torch.Tensor) -> torch.Tensor:
    owners = torch.div(ids, op.config.num_experts_per_rank, rounding_mode="floor")
    return sum((owners == r).any(1, keepdim=True).float() for r in range(op.config.world_size))  # type: ignore[return-value]


def halves_and_layouts(comm: mori_shmem.Communicator) -> None:
    """AsyncLL's two halves with work between them; rows by expert and back."""
    with made(comm, "AsyncLL") as op:
        for tokens in (9, 600):
            given = here(op, tokens + comm.rank % 2 if tokens < 600 else tokens)
            rows, *_ = op.dispatch_send(given.x, None, None, given.ids)
            torch.cuda._sleep(200_000)
            op.dispatch_recv()
            out, _ = op.combine_send(rows, None, given.ids)
            torch.cuda._sleep(200_000)
            op.combine_recv()
            assert not wrong_rows(out[: len(given.x)], given.x.float() * num_ranks(op, given.ids))
    with made(comm, scale_dim=3, scale_type_size=4) as op:
        given = here(op, 90)
        given.scales = torch.rand(90, 3, device="cuda")
        packed, counts, positions, _ = op.dispatch_standard_moe(
            given.x, given.weights, given.scales, given.ids
        )
        rows = op._runner.view("out", (op.config.recv_capacity, 512), BF16)
        ids = op._runner.view("out_indices", (op.config.recv_capacity, 8), torch.int32)
        for e, n in enumerate(counts.tolist()):
            mine = (ids[: op._runner.received_rows()] == 8 * comm.rank + e).any(1)
            assert n == int(mine.sum())
            assert torch.equal(packed[e, :n], rows[: len(mine)][mine])
            assert torch.equal(positions[e, :n], op.get_dispatch_src_token_pos()[mine])
        assert op.packed_recv_scales.shape == (8, op.config.recv_capacity, 3)
        out, _ = op.combine_standard_moe(packed, None, given.ids)
        assert not wrong_rows(out[:90], expected(given, op.config.num_experts))


def quantised(comm: mori_shmem.Communicator) -> None:
    for quant_type in ("fp8_direct_cast", "fp8_blockwise"):
        with made(comm, quant_type=quant_type) as op:
            given = here(op, 77)
            rows, *_, count = op.dispatch(given.x, given.weights, None, given.ids)
            out, _ = op.combine(rows[: int(count)], None, given.ids)
            want = given.x.float() * num_ranks(op, given.ids)
            assert reference.rel_l2(out[:77], want) <= 3e-2
    with pytest.raises(UnsupportedShape, match=r"bfloat16, quant_type fp4_blockwise.*Hopper has no fp4"):
        made(comm, quant_type="fp4_blockwise")
    with pytest.raises(UnsupportedShape, match="200 x 1 bytes"):
        made(comm, hidden_dim=200, data_type=torch.float8_e4m3fn)


def skewed(comm: mori_shmem.Communicator) -> None:
    """All tokens to one expert, to one rank, and Zipf's law."""
    with made(comm) as op:
        for tokens in (100, 600):
            given = here(op, tokens)
            given.ids[:] = torch.arange(8, device="cuda") + 8 * (comm.world_size - 1)
            check(op, given)
            given.ids[:, 1:] = -1
            given.ids[:, 0] = 5
            check(op, given)
            chance = 1 / torch.arange(1, op.config.num_experts + 1, device="cuda").float()
            given.ids.copy_(torch.multinomial(chance.expand(tokens, -1), 8).int())
            check(op, given)


def differences(comm: mori_shmem.Communicator) -> None:
    """What does not go together in a combine is named on every rank; by packets, and pulled."""
    for tokens in (20, 600):
        with made(comm) as op:
            given = here(op, tokens)
            rows, weights, *_ = op.dispatch(given.x, given.weights, None, given.ids)
            op.combine(rows, weights if comm.rank else None, given.ids)
            torch.cuda.synchronize()
            told = r"rank 0 brings \[\*, 512\] bfloat16 without weights, rank \d .* with weights"
            with pytest.raises(CollectiveMismatch, match=told):
                op.dispatch(given.x, given.weights, None, given.ids)
            comm.barrier()


BODIES = (differences, ragged_round_trips, the_reference, open_handles, halves_and_layouts, quantised, skewed)


@pytest.mark.parametrize("body", BODIES)
def test_EP_1_2_4_5_7_with_a_gpu_each(body: Callable[..., Any]) -> None:
    on_ranks(2, body)


@pytest.mark.parametrize("world_size", [3, 8])
def test_EP_8_all_of_it_on_ranks_that_share_gpus(world_size: int) -> None:
    def all_of_it(comm: mori_shmem.Communicator) -> None:
        for body in BODIES:
            body(comm)

    on_ranks(world_size, all_of_it)


def test_EP_6_graphs_and_eager_calls_with_fixed_results() -> None:
    """A graph with an odd number of pairs, replayed a thousand times between eager calls of other sizes; and
    2000
    eager pairs without a wait of the host."""

    def body(comm: mori_shmem.Communicator) -> None:
        with made(comm, max_num_inp_token_per_rank=128) as op:
            static, other = here(op, 128), here(op, 37)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            bad = torch.zeros(1, dtype=torch.long, device="cuda")

            def pair(given: RankInput) -> torch.Tensor:
                rows, *_ = op.dispatch(given.x, None, None, given.ids)
                return op.combine(rows, None, given.ids)[0]

            def compare(given: RankInput, out: torch.Tensor) -> None:
                bad.add_((out[: len(given.x)] != (given.x.float() * num_ranks(op, given.ids)).to(BF16)).any())

            with torch.cuda.stream(side):
                out = pair(static)
                compare(static, out)
                pair(other)
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=side):
                    for _ in range(3):
                        assert pair(static).data_ptr() == out.data_ptr()
                draw = torch.Generator(device="cuda").manual_seed(comm.rank)
                for i in range(1000):
                    static.x.normal_(generator=draw)
                    static.ids.copy_(
                        torch.rand(128, op.config.num_experts, device="cuda", generator=draw).argsort(1)[
                            :, :8
                        ]
                    )
                    graph.replay()
                    compare(static, out)
                    if i % 7 == 3:
                        other.x.normal_(generator=draw)
                        assert pair(other).data_ptr() == out.data_ptr()
                        compare(other, out)
                for turn in range(2000):
                    given = (static, other)[turn % 2]
                    given.x.normal_(generator=draw)
                    compare(given, pair(given))
                torch.cuda.synchronize()
            assert int(bad) == 0

    on_ranks(2, body)


def test_a_second_call_allocates_nothing_and_returns_the_same_objects() -> None:
    def body(comm: mori_shmem.Communicator) -> None:
        with made(comm, max_num_inp_token_per_rank=128) as op:
            given = here(op, 40)
            buffer = op.get_registered_combine_input_buffer(BF16)
            first = [
                *op.dispatch(given.x, given.weights, None, given.ids),
                op.combine(buffer, None, given.ids, use_external_inp_buf=0)[0],
            ]
            torch.cuda.synchronize()
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            second = [
                *op.dispatch(given.x, given.weights, None, given.ids),
                op.combine(buffer, None, given.ids, use_external_inp_buf=0)[0],
            ]
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
            assert all(a is b for a, b in zip(first, second, strict=True))
            with pytest.raises(ArgumentError, match="not the registered buffer"):
                op.combine(buffer.clone(), None, given.ids, use_external_inp_buf=0)
            torch.cuda.synchronize()

    on_ranks(2, body)


def test_a_rank_that_dies_is_named_and_ends_an_op_that_is_not_elastic() -> None:
    def rank() -> str:
        comm = mori_shmem.init(timeout_s=8)  # of every wait: the kernels', too
        op = made(comm, max_num_inp_token_per_rank=128)
        given = here(op, 20)
        check(op, given)
        comm.barrier()
        if comm.rank == 1:
            die()
        started = time.monotonic()
        op.dispatch(given.x, given.weights, None, given.ids)
        torch.cuda.synchronize()
        with pytest.raises(PeerError, match="rank 1") as error:
            op.dispatch(given.x, given.weights, None, given.ids)
        assert time.monotonic() - started < 20
        with pytest.raises(MoriError):
            op.dispatch(given.x, given.weights, None, given.ids)
        return str(error.value)

    outcomes = run_ranks_to_the_end(rank, 3, timeout_s=60)
    assert ["rank 1" in str(o.value) for o in outcomes if o.rank != 1] == [True, True], outcomes


def sums_of(living: Iterable[int], op: EpDispatchCombineOp, tokens: int) -> None:
    """A pair, of whose rows those who take part have a share."""
    given = here(op, tokens)
    rows, *_, count = op.dispatch(given.x, given.weights, None, given.ids)
    out, _ = op.combine(rows[: int(count)], None, given.ids)
    owners = torch.div(given.ids, op.config.num_experts_per_rank, rounding_mode="floor")
    shares = torch.stack([(owners == rank).any(1, keepdim=True) for rank in living]).float().sum(0)
    wrong = wrong_rows(out[:tokens], given.x.float() * shares)
    assert not wrong, f"rank {op.config.rank}, {tokens} tokens: {wrong[:5]}"


@pytest.mark.parametrize("tokens", [20, 600])
@pytest.mark.parametrize("first", ["dispatch", "combine"])
def test_an_elastic_op_goes_on_without_a_rank_that_was_killed(
    first: str, tokens: int, tmp_path: Path
) -> None:
    """Before a dispatch, or between it and its combine; by packets and by rows. One of the others has
    launched two calls more when it looks."""

    def rank() -> tuple[list[int], str]:
        comm = mori_shmem.init(timeout_s=8)
        op = made(comm, elastic=True)
        sums_of(range(3), op, tokens)
        given = here(op, tokens)
        rows, *_ = op.dispatch(given.x, given.weights, None, given.ids)
        if first == "dispatch":
            op.combine(rows, None, given.ids)
        torch.cuda.synchronize()
        comm.barrier()
        if comm.rank == 1:
            die()

        def call(what: str) -> None:
            if what == "dispatch":
                op.dispatch(given.x, given.weights, None, given.ids)
            else:
                op.combine(rows, None, given.ids)

        for i in range(3 if comm.rank == 0 else 1):
            call(("dispatch", "combine")[(i + (first == "combine")) % 2])
        torch.cuda.synchronize()
        with pytest.raises(PeerError, match="rank 1") as error:
            call(first)
        assert error.value.peers == (1,)
        assert op.query_mask().tolist() == [0, 1, 0]
        (tmp_path / f"{comm.rank}").touch()  # those who go on agree on it by means of their own
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.01)
        op.update_mask(1, True)  # is masked already
        began = time.monotonic()
        for n in (tokens, 7, 600, 0, 20):
            sums_of((0, 2), op, n)
        assert time.monotonic() - began < 6, "nobody waits for it: that would take 8 s"
        with pytest.raises(PeerError, match="rank 1"):
            op.clean_mask()
        sums_of((0, 2), op, tokens)
        return op.query_mask().tolist(), str(error.value)

    outcomes = run_ranks_to_the_end(rank, 3, timeout_s=120)
    assert [o.value and o.value[0] for o in outcomes if o.rank != 1] == [[0, 1, 0]] * 2, outcomes


def test_ranks_that_were_masked_by_hand_come_back_together() -> None:
    def body(comm: mori_shmem.Communicator) -> None:
        with made(comm, elastic=True) as op:
            for some in ({0, 2}, {1}):
                for n in (20, 600):
                    sums_of(range(3), op, n)
                torch.cuda.synchronize()
                comm.barrier()
                mine = some if comm.rank in some else {0, 1, 2} - some
                for rank in {0, 1, 2} - mine:
                    op.update_mask(rank, True)
                for n in (600, 20, 600):
                    sums_of(mine, op, n)
                op.clean_mask()
            sums_of(range(3), op, 600)

    on_ranks(3, body)
