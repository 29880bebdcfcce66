"""Several nodes of one machine on its loopback: who is a node is what `join` was told. The gloo engine runs
everywhere; nixl where it is installed.
"""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import mori_shmem
import pytest
import torch
from mori_ep import EpDispatchCombineConfig, EpDispatchCombineOp, internode, reference
from mori_ep import EpDispatchCombineKernelType as Kind
from mori_ep.adapters.deepep import Buffer
from mori_ep.internode.engine import Waits
from mori_shmem.deadline import Deadline
from mori_shmem.errors import (
    ArgumentError,
    ClosedError,
    CollectiveMismatch,
    PeerDied,
    PeerError,
    PeerTimeout,
    SettingError,
    TransportInert,
    UnsupportedShape,
)
from mori_shmem.launch import run_ranks, run_ranks_to_the_end

os.environ.setdefault("MORI_SHMEM_BACKEND", "host")
EXPERTS_PER_RANK, TOPK, HIDDEN, MAX_TOKENS = 4, 6, 128, 150
NIXL = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in ("nixl_cu12", "nixl_cu13")),
    reason="nixl is not installed: mori-ep[internode]",
)
BOTH = ["gloo", pytest.param("nixl", marks=NIXL)]


def join(engine: str, per_node: int, timeout_s: float = 60) -> internode.NodesCommunicator:
    return internode.join(engine=engine, ranks_per_node=per_node, timeout_s=timeout_s)


def config_for(comm: internode.NodesCommunicator, kind: Kind = Kind.InterNode, **more: object):
    return EpDispatchCombineConfig.for_comm(
        comm,
        **{
            "num_experts": EXPERTS_PER_RANK * comm.world_size,
            "data_type": torch.bfloat16,
            "hidden_dim": HIDDEN,
            "max_num_inp_token_per_rank": MAX_TOKENS,
            "num_experts_per_token": TOPK,
            "kernel_type": kind,
            "gpu_per_node": comm.ranks_per_node,
            **more,
        },
    )


def brought(rank: int, call: int, world: int, tokens: int | None = None) -> reference.RankInput:
    """Rows of whole numbers, so that sums are exact whatever the grouping; some slots and tokens masked."""
    generator = torch.Generator().manual_seed(rank * 1000 + call)
    n = (rank * 61 + call * 37) % (MAX_TOKENS + 1) if tokens is None else tokens
    x = torch.randint(-4, 5, (n, HIDDEN), generator=generator).bfloat16()
    ids = torch.rand(n, EXPERTS_PER_RANK * world, generator=generator).argsort(1)[:, :TOPK].int()
    ids[call % 3 :: 7, 2] = -1
    ids[::11] = -1
    weights = torch.randint(1, 4, (n, TOPK), generator=generator).float()
    scales = torch.rand(n, 3, generator=generator)
    return reference.RankInput(x, ids, weights, scales)


def check_received(op: EpDispatchCombineOp, results: tuple, want: reference.Received) -> None:
    rows, weights, scales, ids, count = results[:5]
    n = want.count
    assert int(count) == n
    assert torch.equal(rows[:n].view(torch.uint8), want.rows.view(torch.uint8))
    assert torch.equal(ids[:n], want.ids)
    if want.weights is not None:
        assert torch.equal(weights[:n], want.weights)
    if want.scales is not None:
        assert torch.equal(scales[:n], want.scales)
    positions = op.get_dispatch_src_token_pos().tolist()
    assert [op.decode_send_flat_idx(position) for position in positions] == want.sources


def pair(op: EpDispatchCombineOp, given: list[reference.RankInput], *, weights: bool = True) -> None:
    """A dispatch and a combine, held to the reference; what is stale is poison."""
    me = op.config.rank
    mine, want = given[me], reference.dispatch(given, EXPERTS_PER_RANK)
    results = op.dispatch(mine.x, mine.weights, mine.scales, mine.ids)
    check_received(op, results, want[me])
    n = want[me].count
    y = torch.full_like(results[0], float("nan"))
    y[:n] = results[0][:n]
    out, out_weights = op.combine(y, results[1] if weights else None, mine.ids)
    sums = reference.combine(given, want, [received.rows for received in want], EXPERTS_PER_RANK)
    assert torch.equal(out[: len(mine.ids)], sums[me])
    if weights:
        all_weights = [received.weights for received in want]
        sums = reference.combine(given, want, all_weights, EXPERTS_PER_RANK)
        assert torch.equal(out_weights[: len(mine.ids)], sums[me])
    else:
        assert out_weights is None


# ---- rows and sums ----


@pytest.mark.parametrize(
    ("engine", "nodes", "per_node", "kind"),
    [
        ("gloo", 2, 2, "InterNodeV1"),
        ("gloo", 2, 1, "InterNodeV1LL"),
        ("gloo", 3, 1, "InterNode"),
        ("gloo", 1, 2, "InterNodeV1"),  # no other node: nothing goes through the engine
        pytest.param("nixl", 2, 2, "InterNodeV1LL", marks=NIXL),
    ],
)
def test_rows_order_and_sums_are_those_of_one_node(engine: str, nodes: int, per_node: int, kind: str) -> None:
    world = nodes * per_node

    def calls() -> None:
        with join(engine, per_node) as comm:
            config = config_for(comm, Kind[kind], scale_dim=3, scale_type_size=4)
            with EpDispatchCombineOp(config, comm) as op:
                for call in range(6):  # ranks of different sizes, more than one chunk, parities
                    given = [brought(rank, call, world) for rank in range(world)]
                    if call % 2:
                        given = [replace(part, scales=None) for part in given]
                    pair(op, given, weights=call != 2)
                for tokens in (0, 64, 65, MAX_TOKENS):  # EP-1: none at all; the edges of a chunk
                    one_sided = [brought(r, 9, world, tokens if r % 2 else 0) for r in range(world)]
                    pair(op, one_sided)
                all_to_one = [brought(r, 10, world, 70) for r in range(world)]
                for part in all_to_one:
                    part.ids.fill_(-1)[:, 0] = EXPERTS_PER_RANK * (world - 1)
                pair(op, all_to_one)

    run_ranks(calls, world, timeout_s=120)


def test_other_dtypes_and_hidden_sizes_on_one_op() -> None:
    def calls() -> None:
        with (
            join("gloo", 1) as comm,
            EpDispatchCombineOp(config_for(comm, max_token_type_size=4), comm) as op,
        ):
            for call, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)):
                hidden = HIDDEN - 8 * call - 3  # odd numbers of bytes in a row, too
                given = [brought(rank, call, 2) for rank in range(2)]
                given = [replace(g, x=g.x[:, :hidden].contiguous().to(dtype), scales=None) for g in given]
                want, mine = reference.dispatch(given, EXPERTS_PER_RANK), given[comm.rank]
                results = op.dispatch(mine.x, mine.weights, None, mine.ids)
                check_received(op, results, want[comm.rank])
                wide = torch.float32 if dtype == torch.float8_e4m3fn else dtype
                out, _ = op.combine(results[0].to(wide), None, mine.ids)
                y = [received.rows.to(wide) for received in want]
                sums = reference.combine(given, want, y, EXPERTS_PER_RANK)
                assert torch.equal(out[: len(mine.ids)], sums[comm.rank])

    run_ranks(calls, 2, timeout_s=60)


def test_sums_are_rounded_once_per_node_and_once_at_the_end() -> None:
    """bf16 has steps of 32 above 4096: 4096 + 16 is rounded to 4096 on node 0, and that + 8 once more.
    Rounded once, the sum would be 4128."""

    def calls() -> None:
        with (
            join("gloo", 2) as comm,
            EpDispatchCombineOp(config_for(comm, num_experts=4, num_experts_per_token=4), comm) as op,
        ):
            ids = torch.tensor([[3, 2, 0, 1]], dtype=torch.int32)
            rows, *_ = op.dispatch(torch.ones(1, HIDDEN).bfloat16(), None, None, ids)
            out, _ = op.combine(torch.full_like(rows, [4096.0, 16.0, 4.0, 4.0][comm.rank]), None, ids)
            assert (out[0] == 4096).all()

    run_ranks(calls, 4, timeout_s=60)


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (3, 1)])
def test_quantised_sums_cross_nodes(nodes: int, per_node: int) -> None:
    """Whole numbers up to 16 are e4m3fn as they are, so a direct cast loses nothing of them, and halves the
    bytes between nodes; what else is lost stays within two quantisations. Weights are exact."""
    world = nodes * per_node

    def rank() -> None:
        with join("gloo", per_node) as comm:
            sent = {}
            for quant in ("none", "fp8_direct_cast"):
                config = config_for(comm, Kind.InterNodeV1, scale_dim=3, scale_type_size=4, quant_type=quant)
                with EpDispatchCombineOp(config, comm) as op:
                    engine, puts, sums = op._window.engine, [], op.layout.extra["partials_out"]

                    def put(*to: int, then=engine.put_signal, puts=puts, sums=sums) -> None:
                        if sums.offset_bytes <= to[2] < sums.end_bytes:
                            puts.append(to[3])
                        then(*to)

                    engine.put_signal = put
                    for call in range(3):
                        pair(op, [brought(r, call, world) for r in range(world)], weights=call != 1)
                    sent[quant] = sum(puts)
            assert sent["fp8_direct_cast"] < 0.56 * sent["none"]
            for quant in ("fp8_direct_cast", "fp8_blockwise"):
                given = [brought(r, 5, world, 100) for r in range(world)]
                for r, g in enumerate(given):
                    g.x[:] = torch.randn(g.x.shape, generator=torch.Generator().manual_seed(r))
                with EpDispatchCombineOp(config_for(comm, Kind.InterNodeV1LL, quant_type=quant), comm) as op:
                    mine, want = given[comm.rank], reference.dispatch(given, EXPERTS_PER_RANK)
                    rows, weights, *_ = op.dispatch(mine.x, mine.weights, None, mine.ids)
                    out, told = op.combine(rows, weights, mine.ids)
                    sums = reference.combine(given, want, [w.rows for w in want], EXPERTS_PER_RANK)
                    loss = reference.rel_l2(out[:100].float(), sums[comm.rank].float())
                    assert 5e-3 < loss < 5e-2
                    sums = reference.combine(given, want, [w.weights for w in want], EXPERTS_PER_RANK)
                    assert torch.equal(told[:100], sums[comm.rank])

    run_ranks(rank, world)


def test_many_pairs_back_to_back_with_ranks_that_drift() -> None:
    def calls() -> None:
        with join("gloo", 2) as comm, EpDispatchCombineOp(config_for(comm), comm) as op:
            pause = random.Random(comm.rank)
            for call in range(40):
                if pause.random() < 0.2:
                    time.sleep(0.005)
                pair(op, [replace(brought(r, call, 4, (call * 7 + r) % 70), scales=None) for r in range(4)])

    run_ranks(calls, 4, timeout_s=120)


def slowly(call: Callable[..., object], pause_s: float) -> Callable[..., object]:
    def wrapped(*arguments: object) -> object:
        time.sleep(pause_s)
        return call(*arguments)

    return wrapped


def test_a_node_that_is_slow_keeps_what_came_while_others_go_on() -> None:
    """Node 0 is a call ahead whenever it can be: what it puts must not touch what node 1 has yet to read."""

    def calls() -> None:
        with join("gloo", 1) as comm, EpDispatchCombineOp(config_for(comm), comm) as op:
            me = comm.rank
            if me == 1:
                op._runner._combiner._add_up = slowly(op._runner._combiner._add_up, 0.04)
            calls_ = [
                [replace(brought(r, call, 2, 60 + 7 * call), scales=None) for r in range(2)]
                for call in range(8)
            ]
            wanted = [reference.dispatch(given, EXPERTS_PER_RANK) for given in calls_]
            for call, (given, want) in enumerate(zip(calls_, wanted, strict=True)):
                mine = given[me]
                results = op.dispatch_send(mine.x, mine.weights, None, mine.ids)
                if me == 1:
                    time.sleep(0.04)  # all of node 0's rows are here, and nothing of them is read
                op.dispatch_recv()
                check_received(op, results, want[me])
                if call % 3 == 0:
                    rows = results[0].clone()
                    for factor in (1, 2, 3):
                        out, _ = op.combine(rows * factor, None, mine.ids)
                        y = [received.rows * factor for received in want]
                        sums = reference.combine(given, want, y, EXPERTS_PER_RANK)
                        assert torch.equal(out[: len(mine.ids)], sums[me])

    run_ranks(calls, 2, timeout_s=60)


# ---- handles, halves, layouts ----


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


# ---- the engines themselves ----


@pytest.mark.parametrize("engine", BOTH)
def test_an_engine_brings_bytes_before_their_word(engine: str) -> None:
    size, rounds = 1 << 16, 30

    def calls() -> None:
        with join(engine, 1) as comm:
            window = comm.alloc(64 + 2 * size)
            waits = Waits(comm, window.here, window.engine)
            mine = window.here.tensor(64 + 2 * size, torch.uint8)
            other, numbers = 1 - comm.rank, random.Random(1)
            for number in range(1, rounds + 1):  # both ranks know what comes
                nbytes, shift = numbers.choice([0, 1, 7, 4096, size - 64]), numbers.randrange(64)
                at = 64 + size + shift
                mine[64 : 64 + nbytes] = number
                window.engine.put_signal(other, at, 64, nbytes, 8, number)
                waits.for_word(other, 8, number, "the other's bytes")
                assert (mine[at : at + nbytes] == number).all()
                window.engine.quiet(Deadline(comm.timeout_s))
                window.engine.put_signal(other, 0, 0, 0, 16, number)
                waits.for_word(other, 16, number, "the other's answer")
            window.close()
            window.close()

    run_ranks(calls, 2, timeout_s=60)


@pytest.mark.parametrize(("engine", "per_node"), [("gloo", 2), pytest.param("nixl", 1, marks=NIXL)])
def test_a_killed_rank_is_named_by_its_counterpart_and_all_end(engine: str, per_node: int) -> None:
    world = 2 * per_node

    def calls() -> tuple[float, str]:
        comm = join(engine, per_node, timeout_s=20)
        op = EpDispatchCombineOp(config_for(comm), comm)
        pair(op, [replace(brought(r, 0, world), scales=None) for r in range(world)])
        comm.barrier()
        if comm.rank == world - 1:
            time.sleep(0.3)  # the others wait by now, and have nothing left to send
            os.kill(os.getpid(), signal.SIGKILL)
        began_s = time.monotonic()
        try:
            for call in range(1, 100):
                pair(op, [replace(brought(r, call, world), scales=None) for r in range(world)])
        except PeerError as error:
            op.close()
            comm.close()
            return time.monotonic() - began_s, f"{type(error).__name__}: {error}"
        return -1.0, ""

    outcomes = run_ranks_to_the_end(calls, world, timeout_s=90)
    told = [outcome.value for outcome in outcomes[:-1]]
    assert outcomes[-1].error is not None
    for took_s, text in told:
        assert text.startswith(PeerDied.__name__), text
        assert took_s < 10
    assert f"rank {world - 1} on node 1" in told[per_node - 1][1]


@pytest.mark.parametrize("engine", BOTH)
def test_a_rank_that_dies_while_nothing_is_under_way_is_noticed(engine: str) -> None:
    def calls() -> str:
        comm = join(engine, 1, timeout_s=20)
        window = comm.alloc(256)
        comm.barrier()
        if comm.rank == 1:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        began_s = time.monotonic()
        with pytest.raises(PeerDied, match="rank 1 on node 1"):
            Waits(comm, window.here, window.engine).for_word(1, 8, 1, "something")
        assert time.monotonic() - began_s < 8
        return "noticed"

    assert run_ranks_to_the_end(calls, 2, timeout_s=60)[0].value == "noticed"


@pytest.mark.parametrize("engine", BOTH)
def test_a_rank_that_does_not_come_is_named_at_the_deadline(engine: str) -> None:
    def calls() -> str:
        comm = join(engine, 1, timeout_s=1.5)
        op = EpDispatchCombineOp(config_for(comm), comm)
        if comm.rank == 1:
            time.sleep(2.5)
            return ""
        given = brought(0, 0, 2)
        with pytest.raises(PeerTimeout) as caught:
            op.dispatch(given.x, None, None, given.ids)
        assert caught.value.peers == (1,)
        return str(caught.value)

    text = run_ranks(calls, 2, timeout_s=60)[0]
    assert "rank 1 on node 1" in text
    assert "header of dispatch 1" in text
    assert "it is 0" in text


# ---- what is refused ----


def test_what_cannot_be_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(call: Callable[[], object], kind: type[Exception], *words: str) -> None:
        with pytest.raises(kind) as caught:
            call()
        assert all(word in str(caught.value) for word in words), caught.value

    def calls() -> None:
        refused(lambda: internode.join(ranks_per_node=3), UnsupportedShape, "ranks_per_node=3", "2 ranks")
        refused(lambda: internode.join(ranks_per_node=1, engine="ucx"), SettingError, "ucx", "nixl, gloo")
        refused(lambda: internode.join(ranks_per_node=1, backend="cuda"), TransportInert, "GPU memory")
        comm = join("gloo", 1)
        for more, words in (
            ({"kind": Kind.IntraNode}, "IntraNode reaches the ranks of one node"),
            ({"elastic": True}, "elastic=True"),
            ({"quant_type": "fp4_blockwise"}, "fp4_blockwise goes with"),
            ({"quant_type": "fp8_blockwise", "use_external_inp_buf": False}, "would be ignored"),
            ({"gpu_per_node": 2}, "gpu_per_node=2"),
        ):
            refused(
                lambda more=more: EpDispatchCombineOp(config_for(comm, **more), comm), UnsupportedShape, words
            )
        with EpDispatchCombineOp(config_for(comm), comm) as op:
            given = [brought(r, 0, 2, 5) for r in range(2)]
            mine = replace(given[comm.rank], x=given[comm.rank].x[:, : HIDDEN - 8 * comm.rank].contiguous())
            refused(lambda: op.dispatch(mine.x, None, None, mine.ids), CollectiveMismatch, "hidden bytes")
        with EpDispatchCombineOp(config_for(comm, max_total_recv_tokens=80), comm) as op:
            for tokens in (3, 70, 30):  # EP-5: too many are refused on every rank, and the op goes on
                given = [replace(brought(r, 1, 2, tokens), scales=None) for r in range(2)]
                if tokens == 70:
                    mine = given[comm.rank]
                    refused(
                        lambda m=mine: op.dispatch(m.x, None, None, m.ids), UnsupportedShape, "room for 40"
                    )
                else:
                    pair(op, given)
        comm.close()
        comm.close()
        refused(comm.barrier, ClosedError, "closed")
        with mori_shmem.init(name="one node") as here:
            config = replace(config_for(here_as_nodes(here)), gpu_per_node=2)
            refused(lambda: EpDispatchCombineOp(config, here), UnsupportedShape, "internode.join")

    run_ranks(calls, 2, timeout_s=60)


def here_as_nodes(comm: mori_shmem.Communicator):
    """What config_for looks at."""

    class Nodes:
        rank, world_size, ranks_per_node = comm.rank, comm.world_size, comm.world_size

    return Nodes()


def test_configurations_and_engines_that_differ_are_told_apart() -> None:
    def calls() -> None:
        rank = int(os.environ["RANK"])
        with pytest.raises(ArgumentError, match=r"gloo.*nixl"):
            internode.join(ranks_per_node=1, engine=["gloo", "nixl"][rank], name="a", timeout_s=20)
        with (
            internode.join(ranks_per_node=1, engine="gloo", name="b", timeout_s=20) as comm,
            pytest.raises(ArgumentError, match="hidden_dim is 64 on rank 0, 65 on rank 1"),
        ):
            EpDispatchCombineOp(config_for(comm, hidden_dim=64 + rank), comm)

    run_ranks(calls, 2, timeout_s=60)


def test_PK_2_an_engine_that_is_not_installed_names_the_extra() -> None:
    def calls() -> None:
        sys.modules["nixl_cu12"] = sys.modules["nixl_cu13"] = None  # what an import of them then raises
        with join("nixl", 1) as comm, pytest.raises(TransportInert, match=r"mori-ep\[internode\].*gloo"):
            comm.alloc(256)

    run_ranks(calls, 2, timeout_s=60)


@pytest.mark.parametrize(("nodes", "per_node"), [(2, 2), (3, 1)])
def test_P25_combines_that_differ_are_told_to_all_ranks_of_all_nodes(nodes: int, per_node: int) -> None:
    """Rank 1 gives no weights, or has a smaller hidden size. With three nodes the last has no rows, so that
    nobody but the others' words can tell it."""
    world = nodes * per_node

    def rank() -> None:
        with join("gloo", per_node, timeout_s=20) as comm:
            me, n = comm.rank, 5
            x = torch.zeros(n, HIDDEN).bfloat16()
            own = torch.full((n, TOPK), EXPERTS_PER_RANK * me, dtype=torch.int32)
            if me == 2 and nodes == 3:
                own[:] = -1
            y = torch.zeros(world * n, HIDDEN).bfloat16()
            weights = torch.ones(world * n, TOPK)
            alone = nodes == 3 and me == 2
            for rows, brought, words in (
                (y, None if me == 1 or alone else weights, "weights"),
                (y[:, :16].contiguous() if me == 1 else y, None, r"\[\*, (16|128)\]|of different kinds"),
            ):
                with EpDispatchCombineOp(config_for(comm, Kind.InterNodeV1), comm) as op:
                    op.dispatch(x, None, None, own)
                    with pytest.raises(CollectiveMismatch, match=words):
                        op.combine(rows, brought, own)
                    comm.barrier()

    run_ranks(rank, world)
