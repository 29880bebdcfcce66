"""Across nodes: handles, halves of calls, rows by expert, the registered buffer, the DeepEP buffer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mori_ep import EpDispatchCombineKernelType as Kind
from mori_ep import EpDispatchCombineOp, reference
from mori_ep.adapters.deepep import Buffer
from mori_shmem.launch import run_ranks
from nodes import EXPERTS_PER_RANK, MAX_TOKENS, brought, check_received, config_for, join, slowly


@pytest.mark.parametrize("how", ["by its handle", "as the last one", "after rows of one's own"])
def test_the_registered_buffer_may_be_filled_once_combine_has_returned(how: str) -> None:
    """A dispatch combined several times: rank 0, for which rank 2 works, is done long before rank 1 has read
    rank 0's rows, and fills its buffer again at once."""

    def calls() -> None:
        with join("gloo", 2) as comm, EpDispatchCombineOp(config_for(comm), comm) as op:
            me = comm.rank
            if me == 1:
                op._runner._combiner._add_up_here = slowly(op._runner._combiner._add_up_here, 0.2)
            given = [brought(r, 1, 4, 60) for r in range(4)]
            given = [replace(part, scales=None) for part in given]
            want, mine = reference.dispatch(given, EXPERTS_PER_RANK), given[me]
            results = op.dispatch(mine.x, mine.weights, None, mine.ids, return_routing=how == "by its handle")
            rows, handle = results[0][: want[me].count].clone(), results[5] if len(results) > 5 else None
            for factor in (1, 2, 3):
                if how == "after rows of one's own" and factor == 1:
                    out, _ = op.combine(rows, None, mine.ids)
                else:
                    y = op.get_registered_combine_input_buffer(torch.bfloat16)
                    y[: len(rows)] = rows * factor
                    out, _ = op.combine(y, None, mine.ids, use_external_inp_buf=0, routing=handle)
                sums = reference.combine(given, want, [r.rows * factor for r in want], EXPERTS_PER_RANK)
                assert torch.equal(out[: len(mine.ids)], sums[me]), factor

    run_ranks(calls, 4, timeout_s=60)


def test_handles_replay_and_several_are_open() -> None:
    def calls() -> None:
        with join("gloo", 2) as comm, EpDispatchCombineOp(config_for(comm, Kind.InterNodeV1), comm) as op:
            me, open_ = comm.rank, []
            for call in range(3):
                given = [replace(brought(r, call, 4), scales=None) for r in range(4)]
                want = reference.dispatch(given, EXPERTS_PER_RANK)
                *results, handle = op.dispatch(
                    given[me].x, given[me].weights, None, given[me].ids, return_routing=True
                )
                check_received(op, tuple(results), want[me])
                open_.append((given, want, results[0][: want[me].count].clone(), handle))
            for given, want, rows, handle in (open_[1], open_[0], open_[2], open_[1]):
                y = op.get_registered_combine_input_buffer(torch.bfloat16)
                y[: len(rows)] = rows
                out, _ = op.combine(y, None, given[me].ids, use_external_inp_buf=0, routing=handle)
                sums = reference.combine(given, want, [r.rows for r in want], EXPERTS_PER_RANK)
                assert torch.equal(out[: len(given[me].ids)], sums[me])
            for (
                given,
                want,
                rows,
                handle,
            ) in open_:  # other rows, other ids on the way: they go where those went
                other_ids = torch.full_like(given[me].ids, 5)
                again, _, _, ids, count = op.dispatch(given[me].x * 2, None, None, other_ids, routing=handle)
                assert int(count) == len(rows)
                assert torch.equal(again[: len(rows)], rows * 2)
                assert (ids[: len(rows)] == 5).all()
                out, _ = op.combine(again, None, given[me].ids, routing=handle)
                sums = reference.combine(given, want, [r.rows * 2 for r in want], EXPERTS_PER_RANK)
                assert torch.equal(out[: len(given[me].ids)], sums[me])
            check_maps(op, *open_[2][:2], open_[2][3])

    run_ranks(calls, 4, timeout_s=60)


def check_maps(op, given, want, handle) -> None:
    """The handle's maps say where each token went, node by node."""
    me, config = op.config.rank, op.config
    node, stride = me // config.gpu_per_node, config.position_stride
    for token, slots in enumerate(given[me].ids.tolist()):
        ranks = {e // EXPERTS_PER_RANK for e in slots if e >= 0}
        went = {
            s // stride: s % stride for s in handle.disp_dest_tok_id_map[token].tolist() if s < 4 * stride
        }
        assert set(went) == {r for r in ranks if r // config.gpu_per_node == node}
        assert all(want[r].sources[row] == (me, token) for r, row in went.items())
        nodes = {n for n, number in enumerate(handle.inter_node_disp_send_map[token].tolist()) if number >= 0}
        assert nodes == {r // config.gpu_per_node for r in ranks}
    counterpart = (me + config.gpu_per_node) % config.world_size
    for slots in handle.inter_node_disp_dest_tok_id_map.tolist():
        for rank, row in ((s // stride, s % stride) for s in slots if s < 4 * stride):
            assert want[rank].sources[row][0] == counterpart


def test_halves_and_experts_and_the_deepep_buffer() -> None:
    def calls() -> None:
        with join("gloo", 2) as comm:
            me = comm.rank
            with EpDispatchCombineOp(config_for(comm, Kind.InterNodeV1LL), comm) as op:
                given = [replace(brought(r, 1, 4), scales=None) for r in range(4)]
                want = reference.dispatch(given, EXPERTS_PER_RANK)[me]
                mine = given[me]
                results = op.dispatch_send(mine.x, mine.weights, None, mine.ids)
                op.dispatch_recv(call_local_expert_count=True)
                check_received(op, results, want)
                local = want.ids.long() - me * EXPERTS_PER_RANK
                here = local[(local >= 0) & (local < EXPERTS_PER_RANK)]
                assert op.local_expert_count.tolist() == here.bincount(minlength=EXPERTS_PER_RANK).tolist()
                packed, count, *_ = op.convert_dispatch_output(results[0], results[3])
                assert count.tolist() == op.local_expert_count.tolist()
                y = op.convert_combine_input(packed, weights=results[1])
                out, _ = op.combine_send(y, None, mine.ids, use_external_inp_buf=0)
                op.combine_recv()
                kept = torch.where(mine.ids >= 0, mine.weights, 0.0).sum(1, keepdim=True)
                assert torch.equal(out[: len(mine.ids)], (mine.x.float() * kept).bfloat16())
            buffer = Buffer(None, low_latency_mode=True, comm=comm)
            ids, experts = mine.ids.long(), EXPERTS_PER_RANK * 4
            rows, _, handle, _, hook = buffer.low_latency_dispatch(
                mine.x, ids, MAX_TOKENS, experts, use_fp8=False, return_recv_hook=True
            )
            hook()
            out, _, _ = buffer.low_latency_combine(rows, ids, mine.weights, handle)
            assert torch.equal(out, (mine.x.float() * kept).bfloat16())
            layout = buffer.get_dispatch_layout(ids, experts)
            nodes = [{e // (2 * EXPERTS_PER_RANK) for e in slots if e >= 0} for slots in mine.ids.tolist()]
            assert layout[1].tolist() == [sum(node in to for to in nodes) for node in range(2)]
            rows, _, _, _, handle, _ = buffer.dispatch(mine.x, num_tokens_per_expert=layout[2], topk_idx=ids)
            assert torch.equal(rows, want.rows)
            buffer.destroy()

    run_ranks(calls, 4, timeout_s=60)
