"""The DeepEP-shaped Buffer on the host target, against the reference and the same sums in plain torch.

A row names the rank and token it is from, and experts are the identity, so that combine must give x times
the sum of the token's weights, exactly.
"""

from __future__ import annotations

import os

import mori_shmem
import pytest
import torch
from mori_ep import reference
from mori_ep.adapters.deepep import Buffer, Config, EventOverlap
from mori_ep.adapters.deepep.quant import cast_rows, pack_exponents, restore_rows
from mori_shmem.errors import ArgumentError, ClosedError, UnsupportedShape

os.environ.setdefault("MORI_SHMEM_BACKEND", "host")
WORLD, EXPERTS, TOPK, HIDDEN, MAX_TOKENS = 2, 16, 4, 512, 32
HERE = EXPERTS // WORLD


def rt(rank: int, tokens: int, *, hidden: int = HIDDEN, topk: int = TOPK, experts: int = EXPERTS):
    """(x bf16, ids int64, weights) of one rank."""
    t, j, h = torch.arange(tokens)[:, None], torch.arange(topk)[None, :], torch.arange(hidden)[None, :]
    ids = (3 * t + 5 * j + 7 * rank) % experts
    weights = (1 + (t + j) % 2).float()
    x = ((t + 2 * h + 3 * rank) % 9 - 4).float()
    x[:, 0] = rank
    x[:, 1:2] = t % 16
    x[:, 2:3] = t // 16
    return x.bfloat16(), ids, weights


def tokens_of(rank: int, call: int) -> int:
    """Different on every rank and in every call, also none."""
    return (rank * 11 + call * 7) % (MAX_TOKENS + 1) if call % 5 else rank * MAX_TOKENS


def expected_by_expert(tokens: list[int], expert: int) -> list[tuple[int, int]]:
    """(rank, token) of the rows that an expert gets, in order."""
    return [
        (rank, token)
        for rank, n in enumerate(tokens)
        for token, ids in enumerate(rt(rank, n)[1].tolist())
        if expert in ids
    ]


def ranks(fn, *args, world: int = WORLD):
    return mori_shmem.run_ranks(fn, world, *args, timeout_s=100)


def low_latency(**more):
    comm = mori_shmem.init()
    return comm, Buffer(None, low_latency_mode=True, comm=comm, **more)


# ---- low latency ----


def test_low_latency_bf16_brings_rows_by_expert_in_order_and_weighs_them_on_the_way_back():
    def calls():
        comm, buffer = low_latency()
        for call in range(7):
            tokens = [tokens_of(r, call) for r in range(WORLD)]
            x, ids, weights = rt(comm.rank, tokens[comm.rank])
            rows, count, handle, event, hook = buffer.low_latency_dispatch(
                x, ids, MAX_TOKENS, EXPERTS, use_fp8=False
            )
            assert hook is None
            event.current_stream_wait()
            assert rows.shape == (HERE, MAX_TOKENS * WORLD, HIDDEN)
            for e in range(HERE):
                want = expected_by_expert(tokens, comm.rank * HERE + e)
                assert int(count[e]) == len(want)
                assert handle[0][e, : len(want)].tolist() == [token for _, token in want]
                for source in range(WORLD):
                    begin, number = int(handle[1][e, source]) >> 32, int(handle[1][e, source]) & 0xFFFFFFFF
                    assert [r for r, _ in want[begin : begin + number]] == [source] * number
                for row, (source, token) in enumerate(want):
                    assert torch.equal(rows[e, row], rt(source, tokens[source])[0][token])
            out, _, _ = buffer.low_latency_combine(rows, ids, weights, handle)
            assert torch.equal(out, (x.float() * weights.sum(1, keepdim=True)).bfloat16())
            assert handle[2:] == (MAX_TOKENS, HIDDEN, EXPERTS)
        buffer.destroy()

    ranks(calls)


@pytest.mark.parametrize("packed", [False, True])
def test_low_latency_fp8_casts_and_lays_scales_column_by_column(packed: bool):
    def calls():
        comm, buffer = low_latency()
        generator = torch.Generator().manual_seed(comm.rank)
        x = torch.randn(MAX_TOKENS, HIDDEN, generator=generator).bfloat16()
        _, ids, _ = rt(comm.rank, MAX_TOKENS)
        everybody = comm.all_gather(x.float().numpy())
        (codes, scales), _count, _, _, _ = buffer.low_latency_dispatch(
            x, ids, MAX_TOKENS, EXPERTS, round_scale=packed, use_ue8m0=packed
        )
        width = HIDDEN // 512 if packed else HIDDEN // 128
        assert codes.dtype == torch.float8_e4m3fn
        assert scales.shape == (HERE, MAX_TOKENS * WORLD, width)
        assert scales.stride()[1:] == (1, MAX_TOKENS * WORLD)
        for e in range(HERE):
            want = expected_by_expert([MAX_TOKENS] * WORLD, comm.rank * HERE + e)
            for row, (source, token) in enumerate(want):
                given = torch.from_numpy(everybody[source])[token : token + 1].bfloat16()
                sent, sent_scales = cast_rows(given, round_scale=packed)
                assert torch.equal(codes[e, row].view(torch.uint8), sent[0].view(torch.uint8))
                came = pack_exponents(sent_scales) if packed else sent_scales
                assert torch.equal(scales[e, row], came[0])
                assert reference.rel_l2(restore_rows(sent, sent_scales), given.float()) < 3e-2
        buffer.destroy()

    ranks(calls)


def test_hooks_receive_and_two_results_are_live():
    def calls():
        comm, buffer = low_latency()
        stats = torch.zeros(HERE, dtype=torch.int32)
        for call in range(3):
            batches = [rt(comm.rank, tokens_of(comm.rank, 2 * call + i)) for i in range(2)]
            sent = []
            for x, ids, _ in batches:
                sent.append(
                    buffer.low_latency_dispatch(
                        x,
                        ids,
                        MAX_TOKENS,
                        EXPERTS,
                        cumulative_local_expert_recv_stats=stats,
                        use_fp8=False,
                        return_recv_hook=True,
                    )
                )
            before = stats.clone()
            for _, count, _, _, hook in sent:
                hook()
                assert torch.equal(stats - before, count)
                before = stats.clone()
            halves, outs = [], []
            for (x, ids, weights), (rows, _, handle, _, _) in zip(batches, sent, strict=True):
                out = torch.full_like(x, float("nan"))
                same, _, hook = buffer.low_latency_combine(
                    rows, ids, weights, handle, return_recv_hook=True, out=out
                )
                assert same is out
                halves.append(hook)
                outs.append(out)
            for hook, out, (x, _, weights) in zip(halves, outs, batches, strict=True):
                hook()
                assert torch.equal(out, (x.float() * weights.sum(1, keepdim=True)).bfloat16())
        buffer.destroy()

    ranks(calls)


def test_one_result_is_combined_again_with_other_weights_and_from_the_zero_copy_buffer():
    def calls():
        comm, buffer = low_latency()
        x, ids, weights = rt(comm.rank, MAX_TOKENS)
        rows, count, handle, _, _ = buffer.low_latency_dispatch(x, ids, MAX_TOKENS, EXPERTS, use_fp8=False)
        for factor in (1, 2, 3):
            y = buffer.get_next_low_latency_combine_buffer(handle)
            y.fill_(float("nan"))  # rows that nobody was sent are read by nobody
            for e in range(HERE):
                y[e, : count[e]] = rows[e, : count[e]]
            out, _, _ = buffer.low_latency_combine(y, ids, weights * factor, handle, zero_copy=True)
            assert torch.equal(out, (x.float() * weights.sum(1, keepdim=True) * factor).bfloat16())
        buffer.destroy()

    ranks(calls)


def test_EP_4_masked_slots_add_nothing_in_low_latency():
    def calls():
        comm, buffer = low_latency()
        x, ids, weights = rt(comm.rank, MAX_TOKENS)
        ids[:, 3] = -1
        ids[::8] = -1
        rows, count, handle, _, _ = buffer.low_latency_dispatch(x, ids, MAX_TOKENS, EXPERTS, use_fp8=False)
        assert sum(comm.all_gather(int(count.sum()))) == sum(comm.all_gather(int((ids >= 0).sum())))
        out, _, _ = buffer.low_latency_combine(rows, ids, weights, handle)
        kept = torch.where(ids >= 0, weights, 0.0).sum(1, keepdim=True)
        assert torch.equal(out, (x.float() * kept).bfloat16())
        buffer.destroy()

    ranks(calls)


def test_a_rank_that_dies_is_masked_and_the_others_go_on():
    def calls():
        comm = mori_shmem.init(timeout_s=20)
        buffer = Buffer(None, low_latency_mode=True, enable_shrink=True, comm=comm)
        x, ids, weights = rt(comm.rank, 8, experts=24)
        for call in range(4):
            rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, MAX_TOKENS, 24, use_fp8=False)
            if call == 1 and comm.rank == 0:
                os._exit(7)  # between dispatch and combine: its weights never come, its rows are there
            out, _, _ = buffer.low_latency_combine(rows, ids, weights, handle)
            alive = ids // 8 != 0 if call else torch.ones_like(ids, dtype=torch.bool)
            kept = torch.where(alive, weights, 0.0).sum(1, keepdim=True)
            assert torch.equal(out, (x.float() * kept).bfloat16())
        status = torch.zeros(3, dtype=torch.int32)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [1, 0, 0]
        buffer.low_latency_clean_mask_buffer()
        buffer.low_latency_update_mask_buffer(0, True)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [1, 0, 0]
        buffer.destroy()

    outcomes = mori_shmem.launch.run_ranks_to_the_end(calls, 3, timeout_s=100)
    assert [outcome.error is None for outcome in outcomes] == [False, True, True]


# ---- normal ----


def test_normal_mode_brings_exact_rows_local_ids_and_counts():
    def calls():
        comm = mori_shmem.init()
        buffer = Buffer(None, comm=comm)
        handles = []
        for call in range(4):
            tokens = [tokens_of(r, call) * 7 for r in range(WORLD)]  # outgrows the first capacity
            x, ids, weights = rt(comm.rank, tokens[comm.rank])
            per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, EXPERTS)
            everybody = [rt(r, n) for r, n in enumerate(tokens)]
            given = [reference.RankInput(a, b.int(), c) for a, b, c in everybody]
            want = reference.dispatch(given, HERE)
            assert per_node is None
            assert per_rank[1 - comm.rank] == sum(r == comm.rank for r, _ in want[1 - comm.rank].sources)
            assert per_expert.tolist() == torch.bincount(ids.flatten(), minlength=EXPERTS).tolist()
            assert torch.equal(in_rank.sum(0, dtype=torch.int32), per_rank)
            rows, here, here_weights, counts, handle, event = buffer.dispatch(
                x,
                num_tokens_per_rank=per_rank,
                is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert,
                topk_idx=ids,
                topk_weights=weights,
                expert_alignment=16,
                async_finish=True,
            )
            event.current_stream_wait()
            mine = want[comm.rank]
            assert torch.equal(rows, mine.rows)
            local = mine.ids.long() - comm.rank * HERE
            inside = (local >= 0) & (local < HERE)
            assert torch.equal(here, torch.where(inside, local, -1))
            assert torch.equal(here_weights, torch.where(inside, mine.weights, 0.0))
            numbers = torch.bincount(local[inside], minlength=HERE)
            assert counts == [-(-n // 16) * 16 for n in numbers.tolist()]
            handles.append((x, weights, rows, here_weights, handle))
        for x, weights, rows, here_weights, handle in handles:  # all of them are live
            y = rows * here_weights.sum(1, keepdim=True).bfloat16()
            out, out_weights, _ = buffer.combine(y, handle, topk_weights=here_weights)
            assert torch.equal(out, (x.float() * weights.sum(1, keepdim=True)).bfloat16())
            assert torch.equal(out_weights, weights)
            again, none, *_ = buffer.dispatch(x * 2, handle=handle)
            assert none is None
            assert torch.equal(again, rows * 2)
            biased, _, _ = buffer.combine(y, handle, bias=(torch.ones_like(x), torch.ones_like(x)))
            assert torch.equal(biased, (out.float() + 2).bfloat16())
        buffer.destroy()

    ranks(calls)


def test_normal_mode_moves_fp8_rows_with_their_scales_and_pads_to_worst_tokens():
    def calls():
        comm = mori_shmem.init()
        buffer = Buffer(None, comm=comm)
        x, ids, weights = rt(comm.rank, 9)
        both = [rt(r, 9) for r in range(WORLD)]
        layout = buffer.get_dispatch_layout(ids, EXPERTS)
        (codes, scales), here, here_weights, counts, _, _ = buffer.dispatch(
            cast_rows(x, round_scale=False),
            num_tokens_per_expert=layout[2],
            topk_idx=ids,
            topk_weights=weights,
            num_worst_tokens=40,
        )
        mine = reference.dispatch([reference.RankInput(a, b.int(), c) for a, b, c in both], HERE)[comm.rank]
        want, want_scales = cast_rows(mine.rows, round_scale=False)
        n = mine.count
        assert (len(codes), len(scales), len(here), counts) == (40, 40, 40, [])
        assert torch.equal(codes[:n].view(torch.uint8), want.view(torch.uint8))
        assert torch.equal(scales[:n], want_scales)
        assert (here[n:] == -1).all()
        assert (here_weights[n:] == 0).all()
        buffer.destroy()

    ranks(calls)


# ---- what is refused ----


def test_what_cannot_be_honoured_is_refused_by_name():
    def calls():
        comm, buffer = low_latency()
        x, ids, weights = rt(comm.rank, 4)
        refused = [
            (lambda: Buffer(None), "group"),
            (lambda: Buffer.set_num_sms(3), "new_num_sms=3"),
            (lambda: buffer.low_latency_dispatch(x.float(), ids, 8, EXPERTS), "float32"),
            (lambda: buffer.low_latency_dispatch(x, ids.int(), 8, EXPERTS), "int32"),
            (lambda: buffer.low_latency_dispatch(x[:, :64].contiguous(), ids, 8, EXPERTS), "hidden size 64"),
            (lambda: buffer.low_latency_dispatch(x, ids, 8, EXPERTS, use_ue8m0=True), "round_scale=False"),
            (
                lambda: buffer.low_latency_dispatch(
                    x, ids, 8, EXPERTS, async_finish=True, return_recv_hook=True
                ),
                "exclude",
            ),
            (
                lambda: buffer.low_latency_dispatch(x, ids, 8, EXPERTS, dispatch_wait_recv_cost_stats=ids),
                "wait_recv_cost_stats",
            ),
            (lambda: buffer.low_latency_update_mask_buffer(1, True), "enable_shrink=False"),
            (lambda: buffer.dispatch(x), "topk_idx"),
            (lambda: buffer.get_dispatch_layout(ids.int(), EXPERTS), "int32"),
        ]
        for call, words in refused:
            with pytest.raises((ArgumentError, UnsupportedShape), match=words):
                call()
        handles = []
        for _ in range(3):
            rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, 8, EXPERTS, use_fp8=False)
            handles.append(handle)
        for bad, words in (
            (lambda: buffer.low_latency_combine(rows, ids, weights, handles[0]), "at most two"),
            (lambda: buffer.low_latency_combine(rows, ids, weights, handle, use_logfmt=True), "use_logfmt"),
            (lambda: buffer.low_latency_combine(rows[0], ids, weights, handle), "bfloat16"),
            (lambda: buffer.low_latency_combine(rows, ids[:2], weights, handle), "int64"),
        ):
            with pytest.raises((ArgumentError, UnsupportedShape), match=words):
                bad()
        with pytest.raises(ArgumentError, match="low_latency_mode=False"):
            Buffer(None, comm=comm).low_latency_dispatch(x, ids, 8, EXPERTS)
        buffer.clean_low_latency_buffer(8, HIDDEN, EXPERTS)
        buffer.destroy()
        buffer.destroy()
        with pytest.raises(ClosedError):
            buffer.get_dispatch_layout(ids, EXPERTS)

    ranks(calls)


def test_sizes_and_events_need_no_ranks():
    small = Buffer.get_low_latency_rdma_size_hint(64, HIDDEN, 8, 64)
    assert 0 < small < Buffer.get_low_latency_rdma_size_hint(128, HIDDEN, 8, 64)
    config = Buffer.get_dispatch_config(8)
    assert config == Config(Buffer.num_sms)
    assert config.get_nvl_buffer_size_hint(HIDDEN * 2, 8) > 0
    assert config.get_rdma_buffer_size_hint(HIDDEN * 2, 8) == 0
    with Buffer.capture() as event:
        assert isinstance(event, EventOverlap)
