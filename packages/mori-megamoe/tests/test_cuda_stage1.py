"""The cuda target's Stage1 as a whole, on the CPU's emulation, and on GPUs: rows sent by some blocks while
others multiply. Its bytes are those of the baseline (dispatch, then GEMM1), whatever the order in which rows
come."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import mori_shmem
import pytest
import torch
from mori_megamoe import mx
from mori_megamoe.targets.cuda import params, slots
from mori_megamoe.targets.cuda.faults import error_of
from mori_megamoe.targets.cuda.gemm1 import Buffers
from mori_megamoe.targets.cuda.layout import Shape
from mori_megamoe.targets.cuda.slots import Copies, SlotSizes
from mori_megamoe.targets.cuda.stage1 import MODES, Stage1
from mori_megamoe.targets.cuda.weights import PreparedWeights, prepare_weights
from mori_shmem.errors import PeerTimeout

sys.path.insert(0, str(Path(__file__).parent))
from cuda_cases import make_weights, operand_rows
from cuda_ranks import EmulatedProgram, RankCall, Ranks, random_call, routes_by_expert
from patience import with_longer_times

LIMIT = 10.0
SHAPE = Shape(2, 256, 256, num_experts=4, topk=2, max_tokens=32, body="R", tile_rows=64)


def weights_by_rank(shape: Shape) -> tuple[list[PreparedWeights], torch.Tensor]:
    """Prepared, and all in float64."""
    stored, scales, exact = make_weights(shape.num_experts, shape.inter_dim, shape.model_dim)
    made = [
        prepare_weights(
            stored[rank * shape.experts : (rank + 1) * shape.experts],
            scales[rank * shape.experts : (rank + 1) * shape.experts],
            model_dim=shape.model_dim,
            inter_dim=shape.inter_dim,
            body=shape.body,
        )
        for rank in range(shape.world_size)
    ]
    return made, exact


def run_call(
    ranks: Ranks,
    calls: Sequence[RankCall],
    weights: Sequence[PreparedWeights],
    wait: str,
    delays: random.Random,
    grid: int = 2,
    packs: bool = False,
) -> list[Buffers]:
    """One call on all ranks. wait "never": the baseline. Two blocks of the grid send. packs: before, where
    the ranks have slots."""
    made = [ranks.buffers(rank) for rank in range(ranks.shape.world_size)]

    def job(rank: int) -> None:
        time.sleep(delays.random() * 0.05)
        ranks.set_rows(rank, calls[rank])
        ranks.plan_only(rank, calls[rank])
        if wait == "never":
            ranks.dispatch(rank, calls[rank])
            ranks.gemm1(rank, weights[rank], made[rank], LIMIT)
        else:
            if ranks.copies:
                ranks.copies[rank].enqueue(len(calls[rank].ids))
            if packs:
                ranks.pack(rank, calls[rank])
            ranks.stage1(rank, calls[rank], weights[rank], made[rank], LIMIT, wait, grid=grid)
            if ranks.copies:
                ranks.copies[rank].join()

    ranks.each(job, delays)
    for rank in range(ranks.shape.world_size):
        assert ranks.fault(rank)["code"] == 0, ranks.fault(rank)
    return made


ByRoute = dict[tuple[int, int], tuple[bytes, bytes]]


def by_route(ranks: Ranks, made: Sequence[Buffers]) -> ByRoute:
    """(source, slot) -> codes and scales of its row, all that were planned."""
    found: ByRoute = {}
    for place, buffers in zip(ranks.places, made, strict=True):
        count = int(place.local.tiles.counts[params.NUM_ROWS])
        assert buffers.scales is not None
        add_routes(found, ranks.shape, place.landed.source[:count], buffers.out, buffers.scales)
    return found


def add_routes(
    found: ByRoute, shape: Shape, source: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor
) -> None:
    """One rank's rows."""
    for row, origin in enumerate(source.tolist()):
        key = (origin & 0xFFFFFF, origin >> 24)
        if key[0] < shape.world_size * shape.max_tokens:
            assert key not in found
            found[key] = (bytes(codes[row].tolist()), bytes(scales[row].tolist()))


def check_against_float64(
    ranks: Ranks, calls: Sequence[RankCall], made: Sequence[Buffers], w: torch.Tensor
) -> None:
    """Sums of every routed row; sums of padding are whatever."""
    shape, at = ranks.shape, 0
    rows_of = routes_by_expert(shape, calls)
    for expert, rows in enumerate(rows_of):
        at = 0 if expert % shape.experts == 0 else at
        sums = made[expert // shape.experts].sums
        assert sums is not None
        for i, route in enumerate(rows):
            codes, scales = mx.quantize_input(calls[route.rank].x[route.token : route.token + 1])
            x, scale = operand_rows(shape.body, codes, scales)
            assert scale is not None
            exact = mx.decode_e4m3(x, torch.float64)[0] * 2.0 ** (int(scale) - 127) @ w[expert].T
            torch.testing.assert_close(sums[at + i].double(), exact, rtol=1e-6, atol=1e-6)
        at += -(-len(rows) // shape.tile_rows) * shape.tile_rows


def test_fused_equals_the_baseline_byte_for_byte_in_calls_that_alternate() -> None:
    """Calls of two kinds of input in turns through the same memory, each way to wait; in one a rank has no
    tokens. The first has one cluster, which sends and multiplies."""
    weights, exact = weights_by_rank(SHAPE)
    inputs = [
        [random_call(SHAPE, n, 7 * kind + r) for r, n in enumerate(tokens)]
        for kind, tokens in enumerate([(24, 9), (0, 32)])
    ]
    baseline, wanted = Ranks(SHAPE), []
    for calls in inputs:
        made = run_call(baseline, calls, weights, "never", random.Random(0))
        check_against_float64(baseline, calls, made, exact)
        wanted.append(by_route(baseline, made))
        assert len(wanted[-1]) == sum(int((call.ids >= 0).sum()) for call in calls)
    for wait in ("signals", "queue"):
        ranks, delays = Ranks(SHAPE), random.Random(3)
        for number in range(3):
            calls = inputs[number % 2]
            made = run_call(ranks, calls, weights, wait, delays, grid=4 if number else 2)
            assert by_route(ranks, made) == wanted[number % 2], (wait, number)


@pytest.mark.parametrize(
    ("experts", "slack", "packs"),
    [(1, 1.0, True), (2, 1.25, False)],
    ids=["one expert, packed before", "two experts, packed in the launch"],
)
def test_copy_engines_bring_the_baselines_bytes(
    experts: int, slack: float, packs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots of one expert and of several, with room for an even router's rows: an even call, one that is
    skewed, so that rows beyond the slots are stored, one without tokens on a rank, whose slots are empty and
    travel all the same; each followed by the others through the same memory. Engines take their time."""
    monkeypatch.setattr(slots, "PutProgram", EmulatedProgram)
    shape = replace(SHAPE, max_tokens=128)
    weights, _ = weights_by_rank(shape)
    tokens_of = [(70, 40), (90, 128), (0, 33)]
    calls_of = [[random_call(shape, n, r) for r, n in enumerate(tokens)] for tokens in tokens_of]
    for call in calls_of[1]:
        call.ids[:, 0], call.ids[:, 1] = 0, 1  # nothing for rank 1
    baseline = Ranks(shape)
    wanted = [by_route(baseline, run_call(baseline, c, weights, "never", random.Random(0))) for c in calls_of]
    delays = random.Random(5)
    sizes = SlotSizes.of(shape, experts, slack)
    ranks = Ranks(shape, slots=sizes, delay_s=lambda: delays.random() * 2e-3)
    went = []
    for number, which in enumerate((0, 1, 2, 1, 0)):
        for part in ranks.slot_parts:  # what lies in slots, words apart
            part[sizes.offsets()[0]["outgoing"] :] = 0x7F
        wait = ("signals", "queue")[number % 2]
        made = run_call(ranks, calls_of[which], weights, wait, delays, grid=4 if number else 2, packs=packs)
        assert by_route(ranks, made) == wanted[which], (number, wait)
        counts = ranks.places[0].local.tiles.counts.tolist()
        moves = ranks.copies[0].memory.moves.view(torch.int32).view(-1, 5)[: counts[params.NUM_MOVES]]
        came = sum(int(((c.ids >= 0) & (c.ids < shape.experts)).sum()) for c in calls_of[which][1:])
        went.append((int(moves[:, 3].sum()), came))
    assert went[1][0] < went[1][1]  # of the skewed call some were stored
    assert all(0 < moved <= came for moved, came in went)


def test_a_kernel_ends_when_all_slots_have_come_the_empty_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that came later would be taken for the next call's."""
    monkeypatch.setattr(slots, "PutProgram", EmulatedProgram)
    sizes = SlotSizes.of(SHAPE, 1)
    ranks = Ranks(SHAPE, slots=sizes, delay_s=lambda: 0.05)
    weights, _ = weights_by_rank(SHAPE)
    calls = [random_call(SHAPE, 0, rank) for rank in range(2)]
    ranks.each(lambda rank: ranks.plan_only(rank, calls[rank]))
    for copies in ranks.copies:
        copies.enqueue(0)
    ranks.stage1(0, calls[0], weights[0], ranks.buffers(0), LIMIT, "signals")
    came = ranks.slot_parts[0][sizes.offsets()[0]["came"] :][: 8 * sizes.number].view(torch.int64)
    assert came.tolist() == [1, 1]
    assert ranks.fault(0)["code"] == 0
    for copies in ranks.copies:
        copies.join()


def test_slots_hold_what_an_even_router_sends_and_no_more_than_there_can_be() -> None:
    pro = Shape(2, 7168, 3072, num_experts=96, topk=6, max_tokens=8192, body="R")
    sizes = SlotSizes.of(pro)
    assert (sizes.experts, sizes.per_rank, sizes.number) == (6, 8, 8)
    assert sizes.rows_for(8192) == sizes.most_rows == 3840  # 8192 * 6 / 96 * 6 * 1.25
    assert sizes.sent_bytes(8192) == 8 * 3840 * 7168
    assert sizes.rows_for(0) == 0
    assert sizes.rows_for(1) == 64
    assert SlotSizes.of(pro, slack=1000).rows_for(128) == 128 * 6
    last = SlotSizes.of(Shape(4, 256, 256, num_experts=20, topk=2, max_tokens=32, body="A"), 2)
    assert (last.per_rank, last.number) == (3, 9)  # the last of a rank has one expert
    assert [last.index(1, rank, 0) for rank in (0, 2, 3)] == [0, 3, 6]
    assert SlotSizes.of(replace(pro, world_size=1)).number == 0


def slots_of_a_process(sizes: SlotSizes) -> None:
    """One rank, on mori_shmem's host target: its slots go when they are packed, each to its place."""
    with mori_shmem.init("host") as comm:
        copies = Copies(comm, sizes)
        offsets, _ = sizes.offsets()
        window, slot_bytes = copies._window, sizes.most_rows * sizes.row_bytes

        def slots_at(name: str) -> torch.Tensor:
            return window.tensor((sizes.number, slot_bytes), torch.uint8, offsets[name])

        slots_at("outgoing")[:] = (torch.arange(sizes.number) + 20 * comm.rank)[:, None]
        copies.enqueue(sizes.shape.max_tokens)
        comm.barrier()
        assert (slots_at("incoming") == 0).all()
        comm.barrier()
        for slot in range(sizes.number):
            comm.signal(window.at(offsets["packed"] + 8 * slot), 1)
        copies.join()
        comm.barrier()
        assert window.tensor((sizes.number,), torch.int64, offsets["came"]).tolist() == [1] * sizes.number
        for source in {*range(comm.world_size)} - {comm.rank}:
            for slot in range(sizes.per_rank):
                here = slots_at("incoming")[sizes.index(comm.rank, source, slot)]
                assert (here == sizes.index(source, comm.rank, slot) + 20 * source).all()
        copies.close()


def test_each_slot_travels_to_its_place_once_it_is_packed() -> None:
    """The queues and programs of mori_shmem, between processes: what a GPU gets to do, by other engines."""
    shape = Shape(3, 256, 256, num_experts=9, topk=2, max_tokens=32, body="R")
    mori_shmem.run_ranks(slots_of_a_process, 3, SlotSizes.of(shape, 2), timeout_s=60)


def test_a_copy_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 packs, its engine stands still: rank 0 says which slot of whom is missing, and ends."""
    monkeypatch.setattr(slots, "PutProgram", EmulatedProgram)
    with_longer_times(engine_of_rank_1_stops, 0.3, 3, 20)


def engine_of_rank_1_stops(limit_s: float) -> None:
    ranks = Ranks(SHAPE, timeout_s=limit_s, slots=SlotSizes.of(SHAPE, 1))
    weights, _ = weights_by_rank(SHAPE)
    calls = [random_call(SHAPE, n, r, invalid=0) for r, n in enumerate((5, 9))]
    for rank, call in enumerate(calls):
        ranks.set_rows(rank, call)
    ranks.each(lambda rank: ranks.plan_only(rank, calls[rank]))
    ranks.pack(1, calls[1])
    assert (ranks.slot_parts[1][:16].view(torch.int64) == 1).all()  # released, and nobody takes them
    ranks.copies[0].enqueue(len(calls[0].ids))
    ranks.stage1(0, calls[0], weights[0], ranks.buffers(0), LIMIT, "signals")
    ranks.copies[0].join()
    found = ranks.fault(0)
    assert (found["code"], found["peer"]) == (1, 1)
    assert found["what"] in (params.WAIT_SLOT, params.WAIT_ROWS)
    assert isinstance(error_of(found, limit_s), PeerTimeout)
    slot = error_of({**found, "what": params.WAIT_SLOT, "index": 1}, limit_s)
    assert "rank 1: slot 1 of its rows, which its copy engine carries" in str(slot)


@pytest.mark.parametrize("wait", ["signals", "queue"])
def test_a_rank_that_stops_sending_is_named_and_the_kernel_ends(wait: str) -> None:
    """Rank 1 makes its plan and dies: rank 0 waits for its rows, says so, and ends."""
    with_longer_times(lambda limit_s: rank_1_stops(wait, limit_s), 0.3, 3, 20)


def rank_1_stops(wait: str, limit_s: float) -> None:
    ranks = Ranks(SHAPE, timeout_s=limit_s)
    weights, _ = weights_by_rank(SHAPE)
    calls = [random_call(SHAPE, n, r, invalid=0) for r, n in enumerate((5, 9))]
    for rank, call in enumerate(calls):
        ranks.set_rows(rank, call)
    ranks.each(lambda rank: ranks.plan_only(rank, calls[rank]))
    ranks.stage1(0, calls[0], weights[0], ranks.buffers(0), LIMIT, wait)
    found = ranks.fault(0)
    assert (found["code"], found["peer"]) == (1, 1)
    assert found["what"] == params.WAIT_ROWS
    assert found["seen"] < found["wanted"]
    assert isinstance(error_of(found, limit_s), PeerTimeout)


# ---- on GPUs ----


def calls_on_a_gpu(shape: Shape, mode: str, tokens: Sequence[Sequence[int]]) -> list[ByRoute]:
    """One rank: eager calls whose inputs alternate, then the same captured in a graph each and replayed in
    turns."""
    with mori_shmem.init("cuda", timeout_s=20) as comm:
        stored, scales, _ = make_weights(shape.num_experts, shape.inter_dim, shape.model_dim)
        mine = slice(comm.rank * shape.experts, (comm.rank + 1) * shape.experts)
        stage = Stage1(
            comm,
            model_dim=shape.model_dim,
            inter_dim=shape.inter_dim,
            num_experts=shape.num_experts,
            topk=shape.topk,
            max_tokens=shape.max_tokens,
            w1=stored[mine].to(comm.device),
            w1_scale=scales[mine].to(comm.device),
            swiglu_limit=LIMIT,
            body=shape.body,
            mode=mode,
            tile_rows=shape.tile_rows,
        )
        calls = []
        for kind, numbers in enumerate(tokens):
            call = random_call(shape, numbers[comm.rank], 7 * kind + comm.rank)
            calls.append([t.to(comm.device) for t in (call.x, call.weights, call.ids)])
        graphs = [torch.cuda.CUDAGraph() for _ in calls]
        results = [result_of(stage, lambda c=call: stage(*c)) for call in calls * 2]
        for graph, call in zip(graphs, calls, strict=True):
            with torch.cuda.graph(graph):
                stage(*call)
        results += [result_of(stage, graph.replay) for graph in graphs * 2]
        results += [result_of(stage, lambda: stage(*calls[0]))]
        comm.barrier()
        stage.close()
        return results


def result_of(stage: Stage1, run: Callable[[], object]) -> ByRoute:
    stage.hidden.codes.fill_(0x7F)
    run()
    torch.cuda.synchronize()
    stage.raise_faults()
    found: ByRoute = {}
    count = stage.hidden.num_rows()
    parts = (stage.hidden.source, stage.hidden.codes, stage.hidden.scales)
    add_routes(found, stage.shape, *(part[:count].cpu() for part in parts))
    return found


def on_gpus(shape: Shape, mode: str, tokens: Sequence[Sequence[int]]) -> list[ByRoute]:
    """Results of all calls, all ranks' rows together."""
    found = mori_shmem.run_ranks(calls_on_a_gpu, shape.world_size, shape, mode, tokens, timeout_s=240)
    return [{k: v for rank in found for k, v in rank[i].items()} for i in range(len(found[0]))]


@pytest.mark.parametrize(
    "world_size", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (1, 2, 4, 8)], ids="{}-ranks".format
)
@pytest.mark.parametrize("body", ["R", "A"])
def test_every_mode_gives_the_same_bytes_eagerly_and_in_graphs(world_size: int, body: str) -> None:
    shape = Shape(world_size, 1024, 512, 4 * world_size, topk=3, max_tokens=256, body=body)
    tokens = [[200 - 7 * r for r in range(world_size)], [0, *[256] * (world_size - 1)]]
    wanted = on_gpus(shape, "baseline", tokens)
    for i, result in enumerate(wanted):  # calls alternate: 4 eager, 4 replayed, 1 eager
        assert result == wanted[i % 2]
    for mode in MODES:
        assert on_gpus(shape, mode, tokens) == wanted
