"""Every public entry of the DeepEP buffer, with every kind of wrong argument: as in test_arguments.py."""

from __future__ import annotations

from typing import Any

import mori_shmem
import torch
from mori_ep.adapters.deepep import Buffer
from mori_ep.testing import fixture
from wrong_arguments import (
    EXPERTS,
    HIDDEN,
    MAX_TOKENS,
    TOKENS,
    TOPK,
    Entry,
    Flag,
    Other,
    Tensor,
    Whole,
    not_closed,
    refused,
    told,
    unnamed,
)

EVENT = {"previous_event": Other((7, "now"))}
ASYNC = {"async_finish": Flag(), "allocate_on_comm_stream": Flag()}
HANDLE = Other((None, 7, "handle", (1, 2)))


def buffer_entries(buffer: Buffer, normal: Any, low: Any) -> dict[str, Entry]:
    """`normal`, `low`: handles of dispatches of the fixture that are still open."""
    given = fixture(buffer.rank, TOKENS, TOPK, EXPERTS, HIDDEN)
    x, ids, weights = given.x, given.ids.long(), given.weights
    experts, rows = EXPERTS // 2, 2 * MAX_TOKENS
    packed = torch.zeros(experts, rows, HIDDEN).bfloat16()
    came = torch.zeros(normal.num_received, HIDDEN).bfloat16()
    bias = torch.zeros(TOKENS, HIDDEN).bfloat16()
    a_config = {"config": Other((7, "fast", {}))}
    sizes = ("num_max_dispatch_tokens_per_rank", "hidden", "num_ranks", "num_experts")
    hook = {"async_finish": Flag(), "return_recv_hook": Flag()}
    flags = dict.fromkeys(
        *[("low_latency_mode", "allow_nvlink_for_low_latency_mode", "allow_mnnvl", "explicitly_destroy")],
        Flag(),
    )
    not_measured = {"dispatch_wait_recv_cost_stats": Other((torch.zeros(2), 7))}
    return {
        "__init__": Entry(
            Buffer,
            {"group": None, "comm": buffer.comm},
            {
                **flags,
                "enable_shrink": Flag(),
                **dict.fromkeys(("num_nvl_bytes", "num_rdma_bytes", "num_qps_per_rank"), Whole(0)),
                "comm": Other((None, 7, "comm", object())),
                "group": Other((7, buffer.comm)),
            },
        ),
        "set_num_sms": Entry(Buffer.set_num_sms, {}, {"new_num_sms": Other(("8", 2.5, None, 0, 21))}),
        "capture": Entry(Buffer.capture, {}, {}),
        "get_low_latency_rdma_size_hint": Entry(
            Buffer.get_low_latency_rdma_size_hint,
            dict(zip(sizes, (MAX_TOKENS, HIDDEN, 2, EXPERTS), strict=True)),
            dict.fromkeys(sizes, Whole(1)),
        ),
        "get_dispatch_config": Entry(Buffer.get_dispatch_config, {}, {"num_ranks": Whole(1)}),
        "get_combine_config": Entry(Buffer.get_combine_config, {}, {"num_ranks": Whole(1)}),
        "get_dispatch_layout": Entry(
            buffer.get_dispatch_layout,
            {"topk_idx": ids, "num_experts": EXPERTS},
            {
                "topk_idx": Tensor(ids, rows=False, columns=False),
                "num_experts": Other(("8", 2.5, None, 0, 7)),
                **EVENT,
                **ASYNC,
            },
        ),
        "dispatch": Entry(
            buffer.dispatch,
            {"x": x, "topk_idx": ids, "topk_weights": weights, "num_tokens_per_expert": torch.zeros(EXPERTS)},
            {
                "x": Tensor(x, columns=False),
                "topk_idx": Tensor(ids, columns=False),
                "topk_weights": Tensor(weights, optional=True),
                "num_tokens_per_expert": Other((7, "8", [1], torch.zeros(EXPERTS, 1), torch.zeros(7))),
                "handle": Other((normal,)),
                "expert_alignment": Whole(1),
                "num_worst_tokens": Whole(0),
                **a_config,
                **EVENT,
                **ASYNC,
            },
            free={"num_tokens_per_rank", "num_tokens_per_rdma_rank", "is_token_in_rank"},
        ),
        "dispatch with scales": Entry(
            buffer.dispatch,
            {"x": x, "topk_idx": ids, "num_tokens_per_expert": torch.zeros(EXPERTS)},
            {
                "x": Other(
                    ((x,), (x, None), (x, torch.ones(2, 1)), (x, torch.ones(TOKENS)), (None, x), (x, x, x))
                )
            },
            called={"x": "x|scales"},
        ),
        "dispatch with a handle": Entry(
            buffer.dispatch,
            {"x": x, "handle": normal},
            {"x": Tensor(x), "handle": Other((7, "handle", (1, 2), low))},
            called={"x": "x|input|indices"},
        ),
        "combine": Entry(
            buffer.combine,
            {"x": came, "handle": normal},
            {
                "x": Tensor(came),
                "handle": Other((None, 7, "handle", low)),
                "topk_weights": Tensor(torch.zeros(len(came), TOPK), optional=True),
                "bias": Tensor(bias, optional=True),
                **a_config,
                **EVENT,
                **ASYNC,
            },
            called={"x": "x|input", "topk_weights": "weights"},
        ),
        "combine with two biases": Entry(
            buffer.combine, {"x": came, "handle": normal}, {"bias": Other(((bias, bias[1:]), (bias, None)))}
        ),
        "low_latency_dispatch": Entry(
            buffer.low_latency_dispatch,
            {
                "x": x,
                "topk_idx": ids,
                "num_max_dispatch_tokens_per_rank": MAX_TOKENS,
                "num_experts": EXPERTS,
            },
            {
                "x": Tensor(x, columns=False),
                "topk_idx": Tensor(ids, columns=False),
                "num_max_dispatch_tokens_per_rank": Whole(1),
                "num_experts": Other(("8", 2.5, None, 0, 7)),
                "cumulative_local_expert_recv_stats": Tensor(
                    torch.zeros(experts, dtype=torch.int32), optional=True
                ),
                **dict.fromkeys(("use_fp8", "round_scale", "use_ue8m0"), Flag()),
                **hook,
                **not_measured,
            },
            called={"dispatch_wait_recv_cost_stats": "wait_recv_cost_stats"},
        ),
        "low_latency_combine": Entry(
            buffer.low_latency_combine,
            {"x": packed, "topk_idx": ids, "topk_weights": weights, "handle": low},
            {
                "x": Tensor(packed),
                "topk_idx": Tensor(ids),
                "topk_weights": Tensor(weights),
                "handle": Other((None, 7, "handle", (1, 2), normal, type(low)((1, 2)))),
                "out": Tensor(bias, optional=True),
                "use_logfmt": Other((True, 7, "no")),
                "zero_copy": Flag(),
                **hook,
                "combine_wait_recv_cost_stats": Other((torch.zeros(2), 7)),
            },
            called={"combine_wait_recv_cost_stats": "wait_recv_cost_stats"},
        ),
        "get_next_low_latency_combine_buffer": Entry(
            buffer.get_next_low_latency_combine_buffer, {"handle": low}, {"handle": HANDLE}
        ),
        "clean_low_latency_buffer": Entry(
            buffer.clean_low_latency_buffer,
            dict(zip((sizes[0], sizes[1], sizes[3]), (MAX_TOKENS, HIDDEN, EXPERTS), strict=True)),
            dict.fromkeys((sizes[0], sizes[1], sizes[3]), Whole(1)),
        ),
        "destroy": Entry(buffer.destroy, {}, {}),
    }


def mask_entries(buffer: Buffer) -> dict[str, Entry]:
    """Of a Buffer with enable_shrink; before any op exists, too."""
    status = torch.zeros(2, dtype=torch.int32)
    return {
        "low_latency_update_mask_buffer": Entry(
            buffer.low_latency_update_mask_buffer,
            {"rank": 1 - buffer.rank, "mask": True},
            {"rank": Other(("0", 0.0, None, -1, 2, buffer.rank)), "mask": Flag()},
        ),
        "low_latency_query_mask_buffer": Entry(
            buffer.low_latency_query_mask_buffer, {}, {"mask_status": Tensor(status)}
        ),
        "low_latency_clean_mask_buffer": Entry(buffer.low_latency_clean_mask_buffer, {}, {}),
    }


def test_every_argument_of_the_deepep_buffer() -> None:
    def rank() -> list[str]:
        comm = mori_shmem.init(timeout_s=20)
        buffer = Buffer(None, low_latency_mode=True, comm=comm)
        other = Buffer(None, low_latency_mode=True, comm=comm)
        shrinking = Buffer(None, low_latency_mode=True, enable_shrink=True, comm=comm)
        given = fixture(comm.rank, TOKENS, TOPK, EXPERTS, HIDDEN)
        ids, wide = given.ids.long(), torch.zeros(EXPERTS)

        def open_handles(of: Buffer) -> tuple[Any, Any]:
            *_, normal, _ = of.dispatch(given.x, topk_idx=ids, num_tokens_per_expert=wide)
            _, _, low, *_ = of.low_latency_dispatch(given.x, ids, MAX_TOKENS, EXPERTS, use_fp8=False)
            return normal, low

        normal, low = open_handles(buffer)
        of_another = open_handles(other)
        entries = {**buffer_entries(buffer, normal, low), **mask_entries(shrinking)}
        faults = unnamed(Buffer, entries, set())
        if comm.rank == 1:
            faults += refused(entries)
            foreign = buffer_entries(buffer, normal, low)
            for title, handle in (("combine", of_another[0]), ("low_latency_combine", of_another[1])):
                foreign[title].kinds = {"handle": Other((handle,))}
                faults += refused({title: foreign[title]})
        for of, (one, two) in ((buffer, (normal, low)), (other, of_another)):
            combined, *_ = of.combine(torch.zeros(one.num_received, HIDDEN).bfloat16(), one)
            packed = torch.zeros(EXPERTS // 2, 2 * MAX_TOKENS, HIDDEN).bfloat16()
            out, *_ = of.low_latency_combine(packed, ids, given.weights, two)
            assert not combined.any()
            assert not out.any()
        for made_here in (buffer, other, shrinking):
            made_here.destroy()
        for title, entry in entries.items():
            if getattr(entry.function, "__self__", None) in (buffer, shrinking) and title != "destroy":
                faults.append(not_closed(title, entry.function, entry.right()) or "")
        faults = [fault for fault in faults if fault]
        comm.close()
        return faults

    told(mori_shmem.run_ranks(rank, 2))
