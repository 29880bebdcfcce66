"""The cuda target's Stage1 as a whole, on the CPU's emulation, and on GPUs: rows sent by some blocks while
others multiply. Its bytes are those of the baseline (dispatch, then GEMM1), whatever the order in which rows
come."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import mori_shmem
import pytest
import torch
from mori_megamoe import mx
from mori_megamoe.targets.cuda import params
from mori_megamoe.targets.cuda.faults import error_of
from mori_megamoe.targets.cuda.gemm1 import Buffers
from mori_megamoe.targets.cuda.layout import Shape
from mori_megamoe.targets.cuda.stage1 import Stage1
from mori_megamoe.targets.cuda.weights import PreparedWeights, prepare_weights
from mori_shmem.errors import PeerTimeout

sys.path.insert(0, str(Path(__file__).parent))
from cuda_cases import make_weights, operand_rows
from cuda_ranks import RankCall, Ranks, random_call, routes_by_expert
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
) -> list[Buffers]:
    """One call on all ranks. wait "never": the baseline. Two blocks of the grid send."""
    made = [ranks.buffers(rank) for rank in range(ranks.shape.world_size)]

    def job(rank: int) -> None:
        time.sleep(delays.random() * 0.05)
        ranks.set_rows(rank, calls[rank])
        ranks.plan_only(rank, calls[rank])
        if wait == "never":
            ranks.dispatch(rank, calls[rank])
            ranks.gemm1(rank, weights[rank], made[rank], LIMIT)
        else:
            ranks.stage1(rank, calls[rank], weights[rank], made[rank], LIMIT, wait, grid=grid)

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
    for mode in ("signals", "queue"):
        assert on_gpus(shape, mode, tokens) == wanted
