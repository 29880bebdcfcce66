"""Dispatch and combine against the reference, byte for byte: every way, world sizes, ragged and empty ranks,
ids that nobody has, ids twice. One start of ranks serves many cases."""

from __future__ import annotations

from typing import Any

import mori_shmem
import pytest
import torch
from mori_ep import EpDispatchCombineConfig, EpDispatchCombineKernelType, EpDispatchCombineOp, reference
from mori_ep.reference import RankInput, bytes_of

KINDS = ("IntraNode", "IntraNodeLL", "AsyncLL")
EXPERTS_PER_RANK = 3


def inputs_of(world_size: int, seed: int, tokens: list[int], hidden: int, topk: int) -> list[RankInput]:
    """Every rank can make every rank's inputs. Ids: mostly right, some -1, some beyond all experts, some
    twice."""
    made = []
    for rank in range(world_size):
        g = torch.Generator().manual_seed(1000 * seed + rank)
        n = tokens[rank % len(tokens)]
        ids = torch.randint(0, EXPERTS_PER_RANK * world_size, (n, topk), generator=g, dtype=torch.int32)
        odd = torch.rand(n, topk, generator=g)
        ids[odd < 0.15] = -1
        ids[odd > 0.93] = EXPERTS_PER_RANK * world_size + 5
        ids[odd > 0.97] = -(2**31)
        made.append(
            RankInput(
                torch.randn(n, hidden, generator=g).bfloat16(),
                ids,
                torch.rand(n, topk, generator=g),
                torch.rand(n, 5, generator=g),
            )
        )
    return made


def check_call(op: EpDispatchCombineOp, ranks: list[RankInput], *, zero_copy: bool, scales: bool) -> None:
    """One dispatch and one combine of random rows, compared with the reference."""
    me, config = op.config.rank, op.config
    given = ranks[me]
    received = reference.dispatch(ranks, EXPERTS_PER_RANK)
    want = received[me]
    rows, weights, scale, ids, count = op.dispatch(
        given.x, given.weights, given.scales if scales else None, given.ids, call_local_expert_count=True
    )
    assert count.tolist() == [want.count]
    assert torch.equal(bytes_of(rows[: want.count]), bytes_of(want.rows))
    assert torch.equal(ids[: want.count], want.ids)
    assert torch.equal(weights[: want.count], want.weights)
    if scales:
        assert torch.equal(scale[: want.count], want.scales)
    else:
        assert scale is None
    positions = [op.decode_send_flat_idx(p) for p in op.get_dispatch_src_token_pos().tolist()]
    assert positions == want.sources
    first = me * EXPERTS_PER_RANK
    for expert in range(EXPERTS_PER_RANK):
        assert op.local_expert_count[expert] == (want.ids == first + expert).sum()

    y = []
    for rank, r in enumerate(received):
        g = torch.Generator().manual_seed(rank + 77)
        y.append(torch.randn(r.count + 1, given.x.shape[1], generator=g).bfloat16())
    mine = y[me]
    if zero_copy:
        mine = op.get_registered_combine_input_buffer(torch.bfloat16, given.x.shape[1])
        mine[: want.count] = y[me][: want.count]
    y_weights = [torch.full((r.count + 1, given.ids.shape[1]), rank + 1.0) for rank, r in enumerate(received)]
    out, out_weights = op.combine(
        mine,
        y_weights[me],
        given.ids,
        use_external_inp_buf=0 if zero_copy else 1,
        block_num=10,
        rdma_block_num=85,
    )
    n = given.ids.shape[0]
    assert torch.equal(
        bytes_of(out[:n]), bytes_of(reference.combine(ranks, received, y, EXPERTS_PER_RANK)[me])
    )
    assert out_weights is not None
    assert torch.equal(out_weights[:n], reference.combine(ranks, received, y_weights, EXPERTS_PER_RANK)[me])
    assert count.tolist() == [want.count]  # P16: still there after combine
    assert out.shape == (config.max_num_inp_token_per_rank, given.x.shape[1])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_every_way_gives_the_rows_of_the_reference(world_size: int) -> None:
    def rank(kinds: tuple[str, ...]) -> None:
        with mori_shmem.init() as comm:
            for kind in kinds:
                for topk in (1, 4) if world_size == 8 else (1, 5, 8):
                    config = EpDispatchCombineConfig.for_comm(
                        comm,
                        num_experts=EXPERTS_PER_RANK * world_size,
                        data_type=torch.bfloat16,
                        hidden_dim=48,
                        max_num_inp_token_per_rank=19,
                        num_experts_per_token=topk,
                        scale_dim=5,
                        scale_type_size=4,
                        kernel_type=EpDispatchCombineKernelType[kind],
                        num_qp_per_pe=2 if kind == "AsyncLL" else 1,
                    )
                    with EpDispatchCombineOp(config, comm) as op:
                        run_cases(op, topk)

    def run_cases(op: EpDispatchCombineOp, topk: int) -> None:
        cases = [([0], 48), ([1], 48), ([19], 48), ([0, 13, 1, 19], 33), ([7, 0], 1), ([3], 48)]
        for seed, (tokens, hidden) in enumerate(cases):
            ranks = inputs_of(world_size, seed, tokens, hidden, topk)
            check_call(op, ranks, zero_copy=seed % 2 == 0, scales=seed % 3 != 1)

    mori_shmem.run_ranks(rank, world_size, KINDS, timeout_s=120)


def test_all_ways_have_one_dispatch_map() -> None:
    """The choice of a kernel type is nothing that a caller can see."""

    def rank() -> list[Any]:
        with mori_shmem.init() as comm:
            ranks = inputs_of(3, 5, [11, 0, 16], 40, 6)
            maps = []
            for kind in KINDS:
                config = EpDispatchCombineConfig.for_comm(
                    comm,
                    num_experts=9,
                    data_type=torch.bfloat16,
                    hidden_dim=40,
                    max_num_inp_token_per_rank=16,
                    num_experts_per_token=6,
                    kernel_type=EpDispatchCombineKernelType[kind],
                )
                with EpDispatchCombineOp(config, comm) as op:
                    given = ranks[comm.rank]
                    *_, handle = op.dispatch(given.x, None, None, given.ids, return_routing=True)
                    maps.append(handle.disp_dest_tok_id_map)
                    sources = handle.disp_tok_id_to_src_tok_id[: int(handle.recv_count)]
                    assert sources.tolist() == sorted(sources.tolist())
            assert all(torch.equal(maps[0], other) for other in maps)
            return [maps[0].tolist(), config.position_stride, config.null_position]

    found = mori_shmem.run_ranks(rank, 3)
    ranks = inputs_of(3, 5, [11, 0, 16], 40, 6)
    received = reference.dispatch(ranks, EXPERTS_PER_RANK)
    for source, (slots, stride, null) in enumerate(found):
        seen = set()
        for token, row in enumerate(slots):
            for slot in row:
                if slot != null:
                    destination, index = divmod(slot, stride)
                    assert received[destination].sources[index] == (source, token)
                    seen.add((destination, token))
        assert len(seen) == sum(1 for r in received for s, _ in r.sources if s == source)


def test_buffers_full_to_the_last_row_and_not_one_beyond() -> None:
    """P19: everybody sends everything to rank 1; what lies behind its receive arrays keeps its bytes."""

    def rank(kind: str) -> None:
        with mori_shmem.init() as comm:
            config = EpDispatchCombineConfig.for_comm(
                comm,
                num_experts=2 * comm.world_size,
                data_type=torch.bfloat16,
                hidden_dim=64,
                max_num_inp_token_per_rank=32,
                num_experts_per_token=2,
                kernel_type=EpDispatchCombineKernelType[kind],
            )
            with EpDispatchCombineOp(config, comm) as op:
                window = op._window
                assert window is not None
                y = window.tensor(op.layout.y.nbytes, torch.uint8, op.layout.y.offset_bytes)
                y.fill_(0x5A)
                comm.barrier()
                x = torch.full((32, 64), float(comm.rank + 1)).bfloat16()
                ids = torch.tensor([[2, 3]], dtype=torch.int32).repeat(32, 1)
                rows, _, _, _, count = op.dispatch(x, None, None, ids)
                full = comm.world_size * 32
                assert int(count) == (full if comm.rank == 1 else 0)
                assert bool((y == 0x5A).all())
                out, _ = op.combine(rows, None, ids)
                assert torch.equal(out[:32], x)

    for kind in KINDS:
        mori_shmem.run_ranks(rank, 3, kind)


def test_too_many_rows_for_max_total_recv_tokens_raise_everywhere_and_the_op_goes_on() -> None:
    def rank(kind: str) -> None:
        with mori_shmem.init() as comm:
            config = EpDispatchCombineConfig.for_comm(
                comm,
                num_experts=2,
                data_type=torch.bfloat16,
                hidden_dim=16,
                max_num_inp_token_per_rank=32,
                num_experts_per_token=1,
                max_total_recv_tokens=15,
                kernel_type=EpDispatchCombineKernelType[kind],
            )
            with EpDispatchCombineOp(config, comm) as op:
                for rows, fits in ((8, True), (9, False), (8, True), (0, True)):
                    n = rows if comm.rank == 1 else 1
                    x, ids = torch.ones(n, 16).bfloat16(), torch.zeros(n, 1, dtype=torch.int32)
                    if not fits:
                        with pytest.raises(ValueError, match=r"rank 1 sends 9 rows to rank 0.*room for 8"):
                            op.dispatch(x, None, None, ids)
                        with pytest.raises(ValueError, match="combine without a dispatch"):
                            op.combine(x, None, ids)
                        continue
                    got, *_, count = op.dispatch(x, None, None, ids)
                    assert got.shape == (16, 16)
                    assert int(count) == (rows + 1 if comm.rank == 0 else 0)
                    out, _ = op.combine(got, None, ids)
                    assert torch.equal(out[:n], x)

    for kind in KINDS:
        mori_shmem.run_ranks(rank, 2, kind)


def test_an_op_without_a_communicator_makes_its_own_and_closes_it() -> None:
    """As engines do: a configuration with rank and world size is all that they pass."""

    def rank() -> None:
        import os

        config = EpDispatchCombineConfig(
            data_type=torch.bfloat16,
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            hidden_dim=8,
            scale_dim=0,
            scale_type_size=0,
            max_token_type_size=2,
            max_num_inp_token_per_rank=4,
            num_experts_per_rank=1,
            num_experts_per_token=1,
        )
        x, ids = torch.ones(3, 8).bfloat16(), torch.tensor([[0], [1], [-1]], dtype=torch.int32)
        for _ in range(2):
            with EpDispatchCombineOp(config) as first, EpDispatchCombineOp(config) as second:
                for op in (first, second):
                    rows, *_, count = op.dispatch(x, None, None, ids)
                    assert int(count) == 2
                    out, _ = op.combine(rows, None, ids)
                    assert out[:3, 0].tolist() == [1, 1, 0]
                first.comm.barrier()
            assert first.comm.closed
            assert second.comm.closed

    mori_shmem.run_ranks(rank, 2)
