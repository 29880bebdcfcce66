"""Every public entry of an op and of its operators, with every kind of wrong argument: an error of ours, on
the rank that gave it, before any rank waits.

Two ranks; only rank 1 makes the wrong calls, so one that waited for rank 0 would not come back with an
ArgumentError, and then both make right ones, so that nothing can have been used up.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import mori_shmem
import torch
from mori_ep import EpDispatchCombineOp, nn
from mori_ep.plan import PLANNED
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
    in_order,
    made,
    not_closed,
    refused,
    told,
    unnamed,
)

DTYPE = Other(("bfloat16", None, 7, float, torch.int8))
GEOMETRY = dict.fromkeys(("block_num", "rdma_block_num", "warp_per_block"), Whole(-1))
ROWS = {"input": "input|indices"}  # fewer rows than ids are as well more ids than rows


def tensors(x: torch.Tensor, weights: Any, scales: Any, ids: torch.Tensor) -> dict[str, Any]:
    """The four of a dispatch: fewer columns than there is room for are fine in two of them."""
    return {
        "input": Tensor(x),
        "weights": Tensor(weights, optional=True),
        "scales": Tensor(scales, optional=True),
        "indices": Tensor(ids),
    }


def op_entries(op: EpDispatchCombineOp, elastic: EpDispatchCombineOp) -> dict[str, Entry]:
    """Of an op that dispatches the fixture and lays it out by expert."""
    given = fixture(op.config.rank, TOKENS, TOPK, EXPERTS, HIDDEN)
    rows = op.config.recv_capacity
    moved = {
        "input": given.x,
        "weights": given.weights,
        "scales": torch.ones(TOKENS, 2),
        "indices": given.ids,
    }
    back = {
        "input": torch.zeros(rows, HIDDEN).bfloat16(),
        "weights": torch.zeros(rows, TOPK),
        "indices": given.ids,
        "use_external_inp_buf": 1,
    }
    come_back = {
        "input": Tensor(back["input"], rows=False),
        "weights": Tensor(back["weights"], optional=True, rows=False),
        "indices": Tensor(given.ids),
        "use_external_inp_buf": Other((7, -2, "no", 0.5, None)),
    }
    packed = torch.zeros(EXPERTS // 2, rows, HIDDEN).bfloat16()
    by_expert = {"input": packed, "weights": None, "indices": given.ids}
    two = {name: GEOMETRY[name] for name in ("block_num", "warp_per_block")}
    received = {
        "dispatch_out_x": torch.zeros(rows, HIDDEN).bfloat16(),
        "dispatch_out_topk_idx": torch.zeros(rows, TOPK, dtype=torch.int32),
        "dispatch_out_scales": torch.zeros(rows, 2),
    }
    *_, handle = op.dispatch(*moved.values(), return_routing=True)
    op.dispatch_standard_moe(*moved.values())
    forged = [
        *({"cur_rank_num_token": n} for n in ("8", -1, MAX_TOKENS + 1, TOKENS - 1)),
        *(
            {"disp_dest_tok_id_map": m}
            for m in (None, handle.disp_dest_tok_id_map[1:], torch.zeros(TOKENS, TOPK))
        ),
        *({name: handle.first_rows[:1]} for name in ("recv_per_source", "sent_per_rank", "first_rows")),
        *({"recv_count": 7}, {"disp_tok_id_to_src_tok_id": handle.first_rows}, {"op_number": 0}),
    ]
    too_many = {
        "cur_rank_num_token": MAX_TOKENS + 1,
        "disp_dest_tok_id_map": torch.zeros(MAX_TOKENS + 1, TOPK, dtype=torch.int32),
    }
    handles = [replace(handle, **changes) for changes in forged]
    numbers = {"routing": Other((7, "handle", (1, 2), torch.zeros(3), *handles))}
    count = {"call_local_expert_count": Flag()}
    taken = tensors(*moved.values())
    sent = {k: v for k, v in come_back.items() if k != "routing"}
    return {
        "dispatch": Entry(
            op.dispatch,
            moved,
            {**taken, **GEOMETRY, **count, **numbers, "return_routing": Flag()},
            called={**ROWS, "routing": "routing|cur_rank_num_token"},
        ),
        "dispatch_send": Entry(op.dispatch_send, moved, {**taken, **GEOMETRY}, called=ROWS),
        "dispatch_recv": Entry(op.dispatch_recv, {}, {**two, **count}),
        "combine": Entry(
            op.combine,
            back,
            {**come_back, **GEOMETRY, **numbers, "call_reset": Flag()},
            called={"routing": "routing|cur_rank_num_token|indices"},
        ),
        "dispatch of an elastic op": Entry(elastic.dispatch, moved, {"return_routing": Other((True, 1))}),
        "combine with more tokens than there is room for": Entry(
            op.combine,
            {**back, "weights": None, "indices": torch.zeros(MAX_TOKENS + 1, TOPK, dtype=torch.int32)},
            {"routing": Other((replace(handle, **too_many),))},
            called={"routing": "cur_rank_num_token"},
        ),
        "combine_send": Entry(op.combine_send, back, {**sent, **GEOMETRY}),
        "combine_recv": Entry(op.combine_recv, {}, two),
        "get_registered_combine_input_buffer": Entry(
            op.get_registered_combine_input_buffer,
            {"dtype": torch.bfloat16},
            {"dtype": DTYPE, "hidden_dim": Other(("8", 2.5, None, 0, -2, HIDDEN + 1))},
            called={"hidden_dim": "hidden size", "dtype": "dtype|combine"},
        ),
        "dispatch_standard_moe": Entry(op.dispatch_standard_moe, moved, {**taken, **GEOMETRY}, called=ROWS),
        "combine_standard_moe": Entry(
            op.combine_standard_moe,
            by_expert,
            {
                "input": Tensor(packed, columns=False),
                "weights": Tensor(back["weights"], optional=True, rows=False),
                "indices": Tensor(given.ids),
                **GEOMETRY,
            },
            called={"input": "packed_recv_x|float64|complex64"},
        ),
        "convert_dispatch_output": Entry(
            op.convert_dispatch_output,
            received,
            {
                "dispatch_out_x": Tensor(received["dispatch_out_x"], rows=False),
                "dispatch_out_topk_idx": Tensor(received["dispatch_out_topk_idx"], rows=False),
                "dispatch_out_scales": Tensor(received["dispatch_out_scales"], optional=True, rows=False),
                **GEOMETRY,
                "scales": Other((None, received["dispatch_out_scales"])),
            },
            free={"geometry"},
        ),
        "convert_combine_input": Entry(
            op.convert_combine_input,
            {"packed_recv_x": packed, "weights": torch.zeros(rows, TOPK)},
            {
                "packed_recv_x": Tensor(packed, columns=False),
                "weights": Tensor(torch.zeros(rows, TOPK), optional=True, rows=False),
                **GEOMETRY,
                "use_external_inp_buf": Other((1,)),
            },
            free={"packed_recv_src_info", "packed_recv_layout_range", "geometry"},
            called={"packed_recv_x": "packed_recv_x|float64|complex64"},
        ),
        "decode_send_flat_idx": Entry(
            op.decode_send_flat_idx, {}, {"position": Other(("7", 2.5, None, -1, op.config.null_position))}
        ),
        "update_mask": Entry(
            elastic.update_mask,
            {"rank": 0, "masked": True},
            {"rank": Other(("0", 0.0, None, -1, 2, elastic.config.rank)), "masked": Flag()},
        ),
        "launch_with": Entry(
            op.launch_with,
            {"geometry": {}},
            {"geometry": Other((7, "fast", [PLANNED], {"both": PLANNED}, {"dispatch": (1, 2, 3)}))},
        ),
        "rule": Entry(
            op.rule,
            {"phase": "dispatch", "dtype": torch.bfloat16, "tokens": 8},
            {
                "phase": Other((None, 7, "both")),
                "dtype": Other(("bfloat16", None, 7)),
                "tokens": Whole(0),
                "hidden": Other(("8", 2.5, 0)),
                "zero_copy": Other((7, "yes", 0.5)),
            },
        ),
        "check_due": Entry(op.check_due, {}, {"what": Other(("nothing", None, 7))}, called={"what": "call"}),
    }


def nn_entries(op: EpDispatchCombineOp) -> dict[str, Entry]:
    given = fixture(op.config.rank, TOKENS, TOPK, EXPERTS, HIDDEN)
    moved = (given.x, given.weights, torch.ones(TOKENS, 2), given.ids)
    first = tensors(*moved)
    first["x"] = first.pop("input")
    y = torch.zeros(op.config.recv_capacity, HIDDEN).bfloat16()
    an_op = {"op": Other((None, 7, "op", op.config))}
    return {
        "dispatch": Entry(
            nn.dispatch,
            {"op": op, **dict(zip(("x", "weights", "scales", "indices"), moved, strict=True))},
            {**first, **an_op},
            called={"x": "input|indices"},
        ),
        "combine": Entry(
            nn.combine,
            {"op": op, "y": y, "weights": None, "indices": given.ids},
            {
                "y": Tensor(y, rows=False),
                "weights": Tensor(torch.zeros(len(y), TOPK), optional=True, rows=False),
                "indices": Tensor(given.ids),
                "after": Other((7, "count", [1])),
                **an_op,
            },
            called={"y": "y|input|combine"},
        ),
        "handle_of": Entry(nn.handle_of, {}, an_op),
    }


# ---- the tests ----


def test_every_argument_of_an_op_and_of_its_operators() -> None:
    def rank() -> list[str]:
        with mori_shmem.init(timeout_s=20) as comm, made(comm) as op, made(comm, elastic=True) as elastic:
            entries = op_entries(op, elastic)
            faults = unnamed(EpDispatchCombineOp, entries, {"close", "__init__", "reset", "clean_mask"})
            faults += unnamed(nn, nn_entries(op), {*_imported(nn)})
            if comm.rank == 1:
                faults += refused(entries) + refused(nn_entries(op))
            in_order(op)
            in_order(elastic)
            return faults

    told(mori_shmem.run_ranks(rank, 2))


def _imported(module: Any) -> list[str]:
    """Names of a module that are another's, or its types."""
    return [
        n for n, v in inspect.getmembers(module, callable) if getattr(v, "__module__", "") != module.__name__
    ]


def test_a_closed_op_says_so_in_every_call() -> None:
    def rank() -> list[str]:
        with mori_shmem.init() as comm:
            op, elastic = made(comm), made(comm, elastic=True)
            entries = op_entries(op, elastic)
            operators = nn_entries(op)
            op.close()
            elastic.close()
            still = ("decode_send_flat_idx", "check_due", "handle_of", "rule")
            both = [*entries.items(), *operators.items()]
            calls = [(title, e.function, e.right()) for title, e in both if title not in still]
            calls += [
                ("get_dispatch_src_token_pos", op.get_dispatch_src_token_pos, {}),
                ("reset", op.reset, {}),
                ("query_mask", elastic.query_mask, {}),
                ("clean_mask", elastic.clean_mask, {}),
                ("check_due", op.check_due, {"what": "combine"}),
            ]
            faults = [text for call in calls if (text := not_closed(*call))]
        faults.append(not_closed("an op on a closed communicator", made, {"comm": comm}) or "")
        return [fault for fault in faults if fault]

    told(mori_shmem.run_ranks(rank, 1))
