"""The layer on ranks of this machine, byte for byte the one-process reference: worlds, corners, odd "
"tensors."""

from __future__ import annotations

import gc
import random
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import mori_shmem
import pytest
import torch
from mori_bench import Trace
from mori_megamoe import MegaMoE, MegaMoEStage1Sdma, mx, plan
from mori_megamoe.reference import RankInput, Result
from mori_megamoe.testing import Toy, same_bytes, wrong_rows
from mori_shmem.errors import ArgumentError, LayoutError
from sdma_modes import FEW, MODES

Calls = Sequence[Sequence[RankInput]]  # for each call, what every rank gives


def run_calls(toy: Toy, calls: Calls, check: Callable[[MegaMoE], None] | None = None, **changes: Any) -> None:
    """Make the calls one after the other on one layer; every output must be the reference's."""
    torch.set_num_threads(1)
    want = [toy.reference(inputs) for inputs in calls]

    def rank() -> None:
        with mori_shmem.init(timeout_s=30) as comm, toy.layer(comm, **changes) as moe:
            outs = [moe(*inputs[comm.rank]).clone() for inputs in calls]
            for number, (out, results) in enumerate(zip(outs, want, strict=True)):
                wrong = wrong_rows(out, results[comm.rank].out)
                assert not wrong, f"call {number} on rank {comm.rank}: rows {wrong[:5]} of {len(out)} differ"
            if check is not None:
                check(moe)

    mori_shmem.run_ranks(rank, toy.num_ranks, timeout_s=120)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_MM_3_four_calls_with_alternating_inputs(world_size: int) -> None:
    """Other routing and other numbers of tokens in every second call; the first and second come again."""
    toy = Toy(world_size)
    tokens = [(40, 0, 7, 23, 1, 64, 3, 11), (5, 33, 0, 2, 50, 1, 17, 0)]
    inputs = [toy.inputs(t[:world_size], seed, invalid=0.1) for seed, t in enumerate(tokens)]
    run_calls(toy, [inputs[0], inputs[1], inputs[0], inputs[1]])


@pytest.mark.parametrize("partials", ["bf16", "fp8_blockwise_1x32"])
def test_both_forms_of_partials_and_no_limit(partials: str) -> None:
    toy = Toy(2, partials=partials, swiglu_limit=0.0)
    run_calls(toy, [toy.inputs((20, 9), seed) for seed in range(2)])


def test_more_than_1024_tokens_capacity_means_fp8_partials() -> None:
    toy = Toy(2, max_tokens=2048)
    assert toy.problem.partial_format == "fp8_blockwise_1x32"
    run_calls(toy, [toy.inputs((300, 5))])  # tiles of 64 rows on rank 0, of 32 on rank 1


def forced(toy: Toy, inputs: list[RankInput], experts: Sequence[int]) -> list[RankInput]:
    """The same rows, all to these experts."""
    row = torch.tensor([*experts, *[-1] * (toy.topk - len(experts))], dtype=torch.int32)
    return [given._replace(ids=row.expand(len(given.x), -1).contiguous()) for given in inputs]


def test_MM_1_ranks_and_experts_without_tokens() -> None:
    toy = Toy(2, experts_per_rank=8, topk=4, inter_dim=256, model_dim=512)
    counts = [(0, 64), (64, 0), (0, 0), (1, 1)]
    calls = [toy.inputs(tokens, seed) for seed, tokens in enumerate(counts)]
    calls.append(forced(toy, toy.inputs((64, 64)), [3]))  # rank 1 gets no rows

    def untouched(moe: MegaMoE) -> None:
        """Only expert 3 has rows, in two tiles and more; what lies behind them is as it was."""
        given = calls[-1][moe.comm.rank]
        moe._runner.hidden.fill_(0xAB)
        stage1 = moe.stage1_only(*given)
        assert len(stage1.hidden) == (128 if moe.comm.rank == 0 else 0)
        assert (moe._runner.hidden[len(stage1.hidden) :] == 0xAB).all()

    run_calls(toy, calls, untouched)


@pytest.mark.parametrize("case", ["one expert", "one rank", "no rank", "all ranks have none"])
def test_one_sided_routing(case: str) -> None:
    toy = Toy(4, max_tokens=64)
    full = toy.inputs((64, 64, 33, 0))
    call = {
        "one expert": forced(toy, full, [7]),
        "one rank": forced(toy, full, [3, 5, 4]),
        "no rank": forced(toy, full, []),
        "all ranks have none": toy.inputs((0, 0, 0, 0)),
    }[case]
    run_calls(toy, [call, full, call])


def test_pairs_that_come_change_and_go() -> None:
    """Tokens to two experts of rank 1, then to another two, then spread, then the first again."""
    toy = Toy(2, experts_per_rank=4)
    first, second = toy.inputs((40, 20), 1, hot=(4, 6)), toy.inputs((33, 8), 2, hot=(5, 7))
    spread = toy.inputs((30, 30), 3)
    seen: list[Any] = []

    def pairs(moe: MegaMoE) -> None:
        seen.append(moe._runner._pairs)
        assert moe._runner._pairs[1] == (0, 2)  # of the last call, which was the first again
        launch = moe.stage1_only(*first[moe.comm.rank]).launch
        paired = launch.routes.counts[toy.problem.num_experts + 1]
        assert paired >= len(first[moe.comm.rank].x) // 2

    run_calls(toy, [first, first, second, second, spread, first], pairs)


@pytest.mark.parametrize("pairs", ["given", "off", "given and off"])
def test_pairs_on_or_off_change_no_byte(pairs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Toy(2, experts_per_rank=4)
    if "off" in pairs:
        monkeypatch.setenv("MORI_MEGAMOE_PAIRS", "0")
    masks = (0b1010, 0b0101) if "given" in pairs else ()
    calls = [toy.inputs((40, 20), seed, hot=(4, 6), invalid=0.1) for seed in range(3)]

    def check(moe: MegaMoE) -> None:
        last = moe._runner._pairs
        assert last == {"given": last, "off": [None, None], "given and off": [(1, 3), (0, 2)]}[pairs]

    run_calls(toy, calls, check, fanout_masks=masks)


def test_more_than_eight_slots() -> None:
    toy = Toy(2, experts_per_rank=8, topk=11)
    run_calls(toy, [toy.inputs((9, 20), seed) for seed in range(3)])


def test_MM_3_poisoned_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch begins with NaN wherever rows, scales and weights are to come."""
    monkeypatch.setenv("MORI_MEGAMOE_POISON", "1")
    toy = Toy(3)
    run_calls(toy, [toy.inputs((40, 0, 7), seed, invalid=0.1) for seed in (0, 1, 0)])


def test_what_lay_in_the_window_before_changes_nothing() -> None:
    toy = Toy(2)
    calls = [toy.inputs((20, 9), seed, invalid=0.2) for seed in range(2)]
    want = [toy.reference(inputs) for inputs in calls]

    def rank() -> None:
        with mori_shmem.init() as comm, toy.layer(comm) as moe:
            for name, region in moe._runner.layout.regions.items():
                if name not in ("counted", "ready", "arrived", "returned"):
                    moe._runner.window.tensor(region.nbytes, torch.uint8, region.offset_bytes).fill_(0xFF)
            comm.barrier()
            for inputs, results in zip(calls, want, strict=True):
                assert same_bytes(moe(*inputs[comm.rank]), results[comm.rank].out)

    mori_shmem.run_ranks(rank, 2)


def rows_by_slot(moe: MegaMoE, stage1: Any) -> dict[tuple[int, int], tuple[bytes, bytes]]:
    """(source, slot) -> codes and scales of its hidden row, from what Stage1 left."""
    form = mx.ActivationScales(len(stage1.hidden), moe.problem.inter_scales)
    scales = form.unshuffle(stage1.hidden_scales) if len(stage1.hidden) else None
    found = {}
    for row, word in enumerate(moe._runner._sources[moe.comm.rank][: len(stage1.hidden)].tolist()):
        source, slot = word & 0xFFFFFF, word >> 24
        if source < moe.problem.padding_source:
            assert scales is not None
            found[source, slot] = bytes(stage1.hidden[row].tolist()), bytes(scales[row].tolist())
    return found


def expected_slots(
    toy: Toy, rank: int, inputs: Sequence[RankInput], results: Sequence[Result]
) -> dict[Any, Any]:
    """The same from the reference, of the experts of one rank."""
    local, wanted = toy.experts_per_rank, {}
    for source, (given, result) in enumerate(zip(inputs, results, strict=True)):
        for token, slot in ((given.ids // local == rank) & (given.ids >= 0)).nonzero().tolist():
            key = source * toy.max_tokens + token, slot
            wanted[key] = (
                bytes(result.hidden[token, slot].tolist()),
                bytes(result.hidden_scales[token, slot].tolist()),
            )
    return wanted


def nap_in(moe: MegaMoE, rng: random.Random) -> None:
    """This rank is late, now and then, wherever another could overtake it."""

    def late(run: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **named: Any) -> Any:
            result = run(*args, **named)
            time.sleep(rng.choice([0, 0, 0.03]))
            return result

        return wrapped

    runner = moe._runner
    runner._came["counted"].wait = late(runner._came["counted"].wait)  # its counts are here, not read yet
    plan.destinations = late(plan.destinations)  # planned, its landing rows not ready
    moe.stage1.move_rows = late(moe.stage1.move_rows)  # everybody's rows may be here, none computed


@pytest.mark.parametrize("naps", [False, True])
def test_stage1_alone_again_and_again_and_its_rows(naps: bool) -> None:
    """Launches that end after Stage1, so that nobody waits in combine; then a whole one. A rank without
    tokens and one without rows for its experts may run ahead."""
    toy = Toy(3)
    calls = [toy.inputs((40, 3, 17), 0, invalid=0.1, hot=(1, 2)), toy.inputs((20, 0, 9), 1)]
    calls[1][0].ids[calls[1][0].ids >= 6] = -1  # nobody goes to rank 2
    calls[1][2].ids[calls[1][2].ids >= 6] = -1
    want = [toy.reference(inputs) for inputs in calls]

    def rank() -> None:
        with mori_shmem.init() as comm, toy.layer(comm) as moe:
            if naps:
                nap_in(moe, random.Random(comm.rank))
            for number in range(12 if naps else 6):
                inputs, results = calls[number % 2], want[number % 2]
                got = rows_by_slot(moe, moe.stage1_only(*inputs[comm.rank]))
                assert got == expected_slots(toy, comm.rank, inputs, results), number
            assert same_bytes(moe(*calls[0][comm.rank]), want[0][comm.rank].out)

    mori_shmem.run_ranks(rank, 3, timeout_s=120)


def test_counts_of_the_next_launch_do_not_disturb_one_that_is_late() -> None:
    """Rank 0 needs nothing of rank 1 but its counts, and is a launch ahead before rank 1 reads those of "
    "this one."""
    toy = Toy(2)
    calls = [toy.inputs((n, 0), seed) for seed, n in enumerate((5, 9, 14, 20))]
    for call in calls:
        call[0].ids[call[0].ids >= 3] = -1

    def rank() -> list[int]:
        with mori_shmem.init() as comm, toy.layer(comm) as moe:
            wait = moe._runner._came["counted"].wait

            def late(*args: Any, **named: Any) -> Any:
                seen = wait(*args, **named)
                time.sleep(0.1 * comm.rank)
                return seen

            moe._runner._came["counted"].wait = late
            return [sum(moe.stage1_only(*call[comm.rank]).launch.counts[0]) for call in calls]

    first, second = mori_shmem.run_ranks(rank, 2)
    assert first == second
    assert len(set(first)) == len(calls)


def test_rows_that_come_quantised_and_the_whole_buffer() -> None:
    toy = Toy(2)
    inputs = toy.inputs((20, 9))
    want = toy.reference(inputs)

    def rank() -> None:
        with mori_shmem.init() as comm, toy.layer(comm) as moe:
            x, weights, ids = inputs[comm.rank]
            x_q, scales = moe.quantize(x)
            assert (x_q.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.uint8)
            out = moe.forward_prequant(x_q, scales, weights, ids)
            assert same_bytes(out, want[comm.rank].out)
            whole = moe.forward_bf16(x, weights, ids, slice_output=False)
            assert tuple(whole.shape) == (64, 256)
            assert same_bytes(whole[: len(x)], want[comm.rank].out)
            assert whole.data_ptr() == out.data_ptr()  # the layer's own memory

    mori_shmem.run_ranks(rank, 2)


def test_weights_that_are_swapped_between_calls() -> None:
    toy = Toy(2)
    inputs = toy.inputs((20, 9))
    want = toy.reference(inputs)

    def rank() -> None:
        with mori_shmem.init() as comm, toy.layer(comm, **toy.weights(comm.rank + 5)._asdict()) as moe:
            assert not same_bytes(moe(*inputs[comm.rank]), want[comm.rank].out)
            moe.weights = toy.weights(comm.rank)
            assert same_bytes(moe(*inputs[comm.rank]), want[comm.rank].out)

    mori_shmem.run_ranks(rank, 2)


def test_weights_that_are_refused_leave_those_before() -> None:
    toy = Toy(1)
    (given,) = toy.inputs((9,))
    with mori_shmem.init(rank=0, world_size=1) as comm, toy.layer(comm) as moe:
        with pytest.raises(LayoutError, match="w1 is on meta"):
            moe.weights = type(moe.weights)(*(part.to("meta") for part in moe.weights))
        assert same_bytes(moe(*given), toy.reference([given])[0].out)


@pytest.mark.parametrize("partials", ["bf16", "fp8_blockwise_1x32"])
@pytest.mark.parametrize("mode", [None, *FEW])
def test_an_infinity_or_a_nan_stays_with_its_token(partials: str, mode: str | None) -> None:
    """In rows and in the router's weights of some tokens: these come back with no finite value, the others
    with the bytes that they have without."""
    toy = Toy(2, partials=partials)
    good = toy.inputs((20, 9))
    bad = [RankInput(x.clone(), weights.clone(), ids) for x, weights, ids in good]
    for given, odd in zip(bad, (torch.inf, torch.nan), strict=True):
        given.x[2, 40], given.x[5, 7] = odd, -odd
        given.weights[7, 1] = odd
    want, spoilt = toy.reference(good), torch.tensor([2, 5, 7])

    def rank() -> None:
        with mori_shmem.init() as comm, toy.layer(comm) as moe:
            if mode is not None:
                MegaMoEStage1Sdma(moe, **MODES[mode]).install()
            out = moe(*bad[comm.rank])
            assert not out[spoilt].isfinite().any()
            whole = torch.ones(len(out), dtype=torch.bool)
            whole[spoilt] = False
            assert same_bytes(out[whole], want[comm.rank].out[whole])

    mori_shmem.run_ranks(rank, 2)


class Routed(torch.autograd.Function):
    """A router's step whose graph holds on to something large."""

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor) -> torch.Tensor:
        ctx.activations = Toy(1)
        return weights.clone()


def test_nothing_of_a_routers_graph_is_kept() -> None:
    toy = Toy(1)
    (given,) = toy.inputs((9,))
    x, weights, ids = given
    with mori_shmem.init(rank=0, world_size=1) as comm, toy.layer(comm) as moe:
        routed = Routed.apply(weights.clone().requires_grad_())
        kept = weakref.ref(routed.grad_fn.activations)
        assert not moe(x, routed, ids).requires_grad
        del routed
        gc.collect()
        assert kept() is None


def test_a_stage_belongs_to_one_layer() -> None:
    toy = Toy(1)
    with (
        mori_shmem.init(rank=0, world_size=1) as comm,
        toy.layer(comm) as a,
        toy.layer(comm) as b,
        pytest.raises(ArgumentError, match="this direct stage is another layer's"),
    ):
        b.replace_stage1(a.stage1)


def test_two_layers_on_one_communicator_and_one_that_brings_its_own() -> None:
    toy = Toy(2)
    inputs = toy.inputs((20, 9))
    want = toy.reference(inputs)

    def rank() -> None:
        with mori_shmem.init(name="mine") as comm, toy.layer(comm) as a, toy.layer(comm) as b:
            with toy.layer(comm, comm=None) as c:
                for moe in (a, b, c, b, a):
                    assert same_bytes(moe(*inputs[comm.rank]), want[comm.rank].out)
                own = c.comm
            assert own.closed
            assert not comm.closed

    mori_shmem.run_ranks(rank, 2)


def test_a_trace_shows_the_phases_and_the_experts() -> None:
    toy = Toy(2)
    inputs = toy.inputs((20, 9))

    def rank() -> list[tuple[str, str]]:
        with mori_shmem.init() as comm, toy.layer(comm) as moe:
            moe(*inputs[comm.rank])
            moe.trace = Trace(comm.rank)
            moe(*inputs[comm.rank])
            return [(span.lane, span.name) for span in moe.trace.spans]

    for number, spans in enumerate(mori_shmem.run_ranks(rank, 2)):
        phases = [name for lane, name in spans if lane == "phases"]
        assert phases == ["prepare", "stage1 direct", "stage2", "combine"]
        assert {name for lane, name in spans if lane == "tiles"} == {
            f"expert {expert}" for expert in range(3 * number, 3 * number + 3)
        }
        assert [name for lane, name in spans if lane == "stage1"] == ["move rows", "gemm1"]
