"""Every public entry, with every kind of wrong argument: an error of ours, on the rank that gave it, before
any rank waits.

The tables below name every parameter of every entry and what is right for it. From what is right follows
what is wrong: another type, dtype, shape, device, strides. Two ranks; only rank 1 makes the wrong calls, so
one that waited for rank 0 would not come back with an ArgumentError, and then both make right ones, so that
nothing can have been used up.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mori_shmem
import pytest
import torch
from mori_ep import EpDispatchCombineConfig, EpDispatchCombineOp, internode, nn
from mori_ep import EpDispatchCombineKernelType as Kind
from mori_ep.adapters import engines
from mori_ep.adapters.deepep import Buffer, Config
from mori_ep.bench.__main__ import main as bench_main
from mori_ep.plan import PLANNED
from mori_ep.testing import apply_experts, expected, fixture, wrong_rows
from mori_shmem.errors import ArgumentError, ClosedError, MoriError

HIDDEN, TOPK, EXPERTS, TOKENS, MAX_TOKENS = 128, 3, 8, 8, 16
HELPS = re.compile(
    r"needed|needs|allowed|was made for|one of|at most|pass |the most|only|must be|takes|adds rows of"
)


# ---- what is right, and what is wrong then ----


@dataclass
class Tensor:
    """A tensor; which of its properties the entry prescribes, since others are free."""

    good: torch.Tensor
    optional: bool = False
    rows: bool = True
    columns: bool = True
    dtype: bool = True

    def wrong(self) -> Iterator[tuple[str, Any]]:
        x = self.good
        yield from {"text": "x", "a list": [1.0, 2.0], "a number": 3, "numpy": torch.ones(3).numpy()}.items()
        if not self.optional:
            yield "None", None
        yield "on meta", x.to("meta")
        yield "sparse", torch.zeros(x.shape).to_sparse()
        yield "one dimension less", x.flatten() if x.dim() > 1 else x[0]
        if x.dim() > 1:
            yield "strided", x.transpose(0, 1).contiguous().transpose(0, 1)
        if self.rows:
            yield "a row less", x[1:].clone()
        if self.columns and x.dim() > 1:
            yield "a column more", torch.cat([x, x[..., :1]], -1)
        if self.dtype:
            yield "complex", x.to(torch.complex64)
            yield "float64", x.double()


class Flag:
    """True or False."""

    def wrong(self) -> Iterator[tuple[str, Any]]:
        yield from ((repr(value), value) for value in (7, -1, "yes", 0.5, None))


@dataclass
class Whole:
    """A whole number, at least `low`."""

    low: int

    def wrong(self) -> Iterator[tuple[str, Any]]:
        yield from ((repr(value), value) for value in ("8", 2.5, None, [], self.low - 1))


@dataclass
class Other:
    """Anything else, with what is wrong for it."""

    values: tuple[Any, ...]

    def wrong(self) -> Iterator[tuple[str, Any]]:
        yield from ((repr(value)[:40], value) for value in self.values)


@dataclass
class Entry:
    """One public function, the arguments of a call that would be right, and what is said of each."""

    function: Callable[..., Any]
    good: dict[str, Any]
    kinds: dict[str, Any]
    free: set[str] = field(default_factory=set)  # taken and not looked at: kept for callers that pass them
    called: dict[str, str] = field(default_factory=dict)  # parameters under another name in errors

    def right(self) -> dict[str, Any]:
        """Arguments for a call that could be made."""
        missing = {
            name: kind.good
            for name in inspect.signature(self.function).parameters
            if name not in self.good and isinstance(kind := self.kinds.get(name), Tensor)
        }
        return {**missing, **self.good}

    def wrong_calls(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """(what, the name that the error must have, arguments)."""
        for name, kind in self.kinds.items():
            for label, bad in kind.wrong():
                yield f"{name}: {label}", self.called.get(name, name), {**self.good, name: bad}


DTYPE = Other(("bfloat16", None, 7, float, torch.int8))
GEOMETRY = dict.fromkeys(("block_num", "rdma_block_num", "warp_per_block"), Whole(-1))
EVENT = {"previous_event": Other((7, "now"))}
ASYNC = {"async_finish": Flag(), "allocate_on_comm_stream": Flag()}
ROWS = {"input": "input|indices"}  # fewer rows than ids are as well more ids than rows
HANDLE = Other((None, 7, "handle", (1, 2)))


def tensors(x: torch.Tensor, weights: Any, scales: Any, ids: torch.Tensor) -> dict[str, Any]:
    """The four of a dispatch: fewer columns than there is room for are fine in two of them."""
    return {
        "input": Tensor(x),
        "weights": Tensor(weights, optional=True),
        "scales": Tensor(scales, optional=True),
        "indices": Tensor(ids),
    }


def made(comm: mori_shmem.Communicator, kind: str = "IntraNode", **more: Any) -> EpDispatchCombineOp:
    given: dict[str, Any] = {
        "data_type": torch.bfloat16,
        "hidden_dim": HIDDEN,
        "num_experts": EXPERTS,
        "num_experts_per_token": TOPK,
        "max_num_inp_token_per_rank": MAX_TOKENS,
        "scale_dim": 2,
        "scale_type_size": 4,
        "kernel_type": Kind[kind],
        **more,
    }
    return EpDispatchCombineOp(EpDispatchCombineConfig.for_comm(comm, **given), comm)


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


def refused(entries: dict[str, Entry]) -> list[str]:
    """What was not refused as it should be. All of them, so that one run tells."""
    faults = []
    for title, entry in entries.items():
        for what, named, arguments in entry.wrong_calls():
            try:
                entry.function(**arguments)
            except ArgumentError as error:
                text = str(error)
                if not re.search(named, text):
                    faults.append(f"{title}, {what}: the error does not name {named!r}: {text}")
                if not HELPS.search(text):
                    faults.append(f"{title}, {what}: the error does not say what is allowed: {text}")
            except Exception as error:
                faults.append(f"{title}, {what}: {type(error).__name__}: {str(error)[:200]}")
            else:
                faults.append(f"{title}, {what}: not refused")
    return faults


def told(of_ranks: list[list[str]]) -> None:
    """Nothing was found."""
    faults = list(itertools.chain.from_iterable(of_ranks))
    assert not faults, "\n".join(faults)


def unnamed(owner: Any, entries: dict[str, Entry], free: set[str]) -> list[str]:
    """Public functions of `owner` and parameters of theirs that no table names."""
    found = []
    for name, function in inspect.getmembers(owner, callable):
        if (name.startswith("_") and name != "__init__") or name in free:
            continue
        parameters = set(inspect.signature(function).parameters) - {"self", "kwargs"}
        named: set[str] = set()
        for title, entry in entries.items():
            if title.split(" ")[0] == name:
                named |= set(entry.kinds) | entry.free
        found += [f"{name}({parameter})" for parameter in sorted(parameters - named)]
    return found


def in_order(op: EpDispatchCombineOp) -> None:
    """A right round trip."""
    given = fixture(op.config.rank, TOKENS, TOPK, EXPERTS, HIDDEN)
    rows, weights, _, ids, count = op.dispatch(given.x, given.weights, None, given.ids)
    n = int(count)
    out, _ = op.combine(apply_experts(rows[:n], ids[:n], weights[:n], op.config), None, given.ids)
    assert not wrong_rows(out[:TOKENS], expected(given, EXPERTS))


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


def not_closed(title: str, call: Callable[..., Any], arguments: dict[str, Any]) -> str | None:
    """What is wrong with how a closed object answers, or None."""
    try:
        call(**arguments)
    except ClosedError:
        return None
    except Exception as error:
        return f"{title} when closed: {type(error).__name__}: {error}"
    return f"{title} when closed: not refused"


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


def test_every_field_of_a_configuration() -> None:
    """Refused before there is an op, on this rank alone."""
    fields = {
        "data_type": Other(("bfloat16", None, 7, float)),
        "dispatch_dtype": Other(("bfloat16", 7, float)),
        "combine_dtype": Other(("bfloat16", 7, float)),
        "kernel_type": Other(("IntraNode", "intranode", None, 6, -1, 0.5, True)),
        "quant_type": Other(("fp8", None, 7)),
        "use_external_inp_buf": Flag(),
        "elastic": Flag(),
        **{name: Whole(low) for name, low in _LOWEST.items()},
    }
    assert set(fields) == set(EpDispatchCombineConfig.__dataclass_fields__)
    good = {
        **{name: max(1, low) for name, low in _LOWEST.items()},
        "data_type": torch.bfloat16,
        "rank": 0,
        "quant_type": "none",
    }

    def make(**given: Any) -> None:
        EpDispatchCombineConfig(**given).check()

    for title, function in (("check", make), ("an engine's op", _engine_op)):
        told([refused({title: Entry(function, good, fields)})])
    assert EpDispatchCombineConfig(**{**good, "kernel_type": 5, "elastic": 1}).check() is None

    class Ranks:
        rank, world_size = 0, 2

    sizes = {"num_experts": 8, "data_type": torch.bfloat16, "hidden_dim": 8}
    sizes |= {"max_num_inp_token_per_rank": 4, "num_experts_per_token": 2, "comm": Ranks}
    kinds = {
        "num_experts": Other(("8", 2.5, None, 0, 7)),
        "data_type": Other(("bfloat16", None, 7)),
        "comm": Other((None, "comm")),
    }
    told([refused({"for_comm": Entry(EpDispatchCombineConfig.for_comm, sizes, kinds)})])


def _engine_op(**given: Any) -> None:
    engines.ops.EpDispatchCombineOp(EpDispatchCombineConfig(**given))


_LOWEST = {
    **dict.fromkeys(("rank", "scale_dim", "scale_type_size", "max_total_recv_tokens", "rdma_block_num"), 0),
    **dict.fromkeys(("world_size", "hidden_dim", "max_token_type_size", "max_num_inp_token_per_rank"), 1),
    **dict.fromkeys(("num_experts_per_rank", "num_experts_per_token", "warp_num_per_block", "block_num"), 1),
    **dict.fromkeys(("gpu_per_node", "num_qp_per_pe"), 1),
}


def test_what_ops_are_made_of_and_what_comes_before_them() -> None:
    config = EpDispatchCombineConfig(torch.bfloat16, 0, 1, 8, 0, 1, 2, 4, 4, 2)
    make = EpDispatchCombineOp
    wrong = {
        "op": Entry(
            make,
            {"config": config, "comm": None},
            {
                "config": Other((None, 7, {}, "config")),
                "comm": Other((7, "comm", object())),
                "geometry": Other((7, "fast", {"both": PLANNED}, {"dispatch": 3})),
            },
        ),
        "engine": Entry(engines.ops.EpDispatchCombineOp, {}, {"config": Other((None, 7, {}))}),
        "init": Entry(
            engines.shmem_torch_process_group_init, {}, {"group_name": Other((None, 7, "nobody's", b"mori"))}
        ),
        "join": Entry(
            internode.join,
            {"ranks_per_node": 1, "rank": 0, "world_size": 1},
            {
                "ranks_per_node": Whole(1),
                "engine": Other(("ucx", 7)),
                "timeout_s": Other(("soon", -1.0)),
                "rank": Other((None, 1, -1)),
            },
            called={"engine": "ENGINE", "timeout_s": "TIMEOUT"},
        ),
        "Config": Entry(Config, {"num_sms": 8}, dict.fromkeys(Config.__dataclass_fields__, Whole(1))),
    }
    told([refused(wrong)])
    for call in (engines.shmem_mype, engines.shmem_npes):
        with pytest.raises(MoriError, match="call shmem_torch_process_group_init"):
            call()


BENCH = {
    "--tokens": ("-1", "x", "1.5", ""),
    "--hidden": ("0", "x"),
    "--topk": ("0", "x", "32", "300"),
    "--experts": ("0", "7", "x"),
    "--kernel-type": ("intranode", "7", ""),
    "--dtype": ("int8", "bfloat16"),
    "--combine-dtype": ("int8", "fp4"),
    "--quant-type": ("fp8", "int4"),
    "--scale-dim": ("-1", "x"),
    "--zero-copy": ("2", "yes"),
    "--num-qp": ("0", "x"),
    "--routing": ("round-robin", "/dev/null"),
    "--rounds": ("0", "x"),
    "--nodes": ("0", "x", "3", "2"),
    "--engine": ("ucx", "gloo"),
    "--reps": ("0", "x"),
    "--warmup": ("-1", "x"),
    "--world-size": ("0", "x"),
    "--backend": ("tpu", "sycl"),
    "--seed": ("x",),
    "--json": ("/nowhere/x.json",),
    "--trace": ("/nowhere/x.json",),
    "--break": ("everything",),
}


@pytest.mark.parametrize("option", BENCH)
def test_every_option_of_the_bench(option: str, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Refused with the option and the value, before ranks are started. Two nodes, or an engine between them,
    mean nothing to a kernel type inside one."""
    for value in BENCH[option]:
        with pytest.raises(SystemExit) as status:
            bench_main(
                ["--world-size", "2", "--tokens", "4", "--hidden", "64", "--experts", "64", option, value]
            )
        assert status.value.code == 2
        error = capfd.readouterr().err
        assert "Traceback" not in error
        assert option in error or option[2:].replace("-", "_") in error, error


def test_the_table_of_the_bench_names_every_option() -> None:
    from mori_ep.bench.__main__ import parser

    known = {flag for action in parser()._actions for flag in action.option_strings if flag.startswith("--")}
    assert known - {"--help", "--no-compare", *BENCH} == set()
