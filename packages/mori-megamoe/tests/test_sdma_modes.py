"""Stage1 over copy engines: in every mode, every byte is the baseline's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mori_shmem
import pytest
import torch
from mori_bench import Trace
from mori_megamoe import MegaMoEStage1Sdma, StoredWeights, mx
from mori_megamoe.reference import RankInput
from mori_megamoe.targets.host.sdma.job import Job
from mori_megamoe.testing import Toy, same_bytes
from sdma_modes import FEW, MODES, check, random_arrivals, run_modes


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch finds NaN codes wherever it should only read what it was sent."""
    monkeypatch.setenv("MORI_MEGAMOE_POISON", "1")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_MM_3_four_calls_with_alternating_inputs_in_every_mode(world_size: int) -> None:
    """Installed, four calls, uninstalled, the next mode. Tokens, routing and pairs change from call to call;
    one rank has none. All modes on 2 and 3 ranks, elsewhere a selection in which every part occurs."""
    toy = Toy(world_size, experts_per_rank=3 if world_size < 8 else 2)
    tokens = [(40, 0, 7, 23, 1, 64, 3, 11), (5, 33, 0, 2, 50, 1, 17, 0)]
    inputs = [
        toy.inputs(t[:world_size], seed, invalid=0.1, hot=(0, 1) if seed else ())
        for seed, t in enumerate(tokens)
    ]
    run_modes(toy, [*inputs, *inputs], list(MODES) if world_size in (2, 3) else FEW)


def test_merged_segments_share_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six segments to the other rank: six signals, or fewer, or one."""
    monkeypatch.setenv("MORI_MEGAMOE_PAIRS", "0")
    toy = Toy(2, experts_per_rank=6)
    inputs = toy.inputs((40, 30))
    want = toy.reference(inputs)

    def rank() -> list[int]:
        signals = []
        with mori_shmem.init() as comm, toy.layer(comm) as moe:
            program = Job._program
            for merge_rows in (0, 30, 10_000):
                batches: list[int] = []

                def counted(job: Job, batch: list[Any], batches: list[int] = batches) -> Any:
                    batches.append(len(batch))
                    return program(job, batch)

                Job._program = counted  # type: ignore[method-assign]
                stage1 = MegaMoEStage1Sdma(moe, merge_rows=merge_rows).install()
                moe.stage1_only(*inputs[comm.rank])
                assert sum(batches) == 6
                signals.append(len(batches))
                check(moe, inputs, want, merge_rows)
                stage1.uninstall()
        return signals

    for counts in mori_shmem.run_ranks(rank, 2, timeout_s=60):
        assert counts[0] == 6
        assert 1 < counts[1] < 6
        assert counts[2] == 1


def test_windows_without_poison_and_a_mode_installed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As users run it; memory of a mode that was taken out is used again."""
    monkeypatch.delenv("MORI_MEGAMOE_POISON")
    toy = Toy(2)
    calls = [toy.inputs((20, 9), seed) for seed in range(2)]
    want = [toy.reference(inputs) for inputs in calls]

    def rank() -> None:
        with mori_shmem.init() as comm, toy.layer(comm) as moe:
            stages = [MegaMoEStage1Sdma(moe, **MODES[mode]) for mode in FEW]
            for round_ in range(2):
                windows = comm._num_windows
                for stage1 in stages:
                    assert stage1.install() is stage1
                    for number, (inputs, results) in enumerate(zip(calls, want, strict=True)):
                        check(moe, inputs, results, (round_, stage1.options, number))
                    stage1.uninstall()
                assert (comm._num_windows == windows) == (round_ == 1)  # made once

    mori_shmem.run_ranks(rank, 2, timeout_s=120)


def test_even_the_hidden_rows_are_the_same_in_every_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORI_MEGAMOE_PAIRS", "0")  # or the second launch would have another plan
    toy = Toy(2)
    inputs = toy.inputs((40, 17))

    def rank() -> None:
        with mori_shmem.init() as comm, toy.layer(comm) as moe:
            given = inputs[comm.rank]
            first = moe.stage1_only(*given)
            hidden, scales, plan = first.hidden.clone(), first.hidden_scales.clone(), first.launch.plan
            form = mx.ActivationScales(plan.num_rows, toy.problem.inter_scales)
            sources = moe._runner._sources[comm.rank][: plan.num_rows]
            real = sources & 0xFFFFFF != toy.problem.padding_source
            for mode in MODES.values():
                stage1 = MegaMoEStage1Sdma(moe, **mode).install()
                got = moe.stage1_only(*given)
                assert got.launch.plan == plan
                assert same_bytes(got.hidden[real], hidden[real]), mode
                assert same_bytes(form.unshuffle(got.hidden_scales)[real], form.unshuffle(scales)[real]), mode
                stage1.uninstall()

    mori_shmem.run_ranks(rank, 2, timeout_s=120)


def forced(toy: Toy, inputs: list[RankInput], experts: Sequence[int]) -> list[RankInput]:
    """The same rows, all to these experts."""
    row = torch.tensor([*experts, *[-1] * (toy.topk - len(experts))], dtype=torch.int32)
    return [given._replace(ids=row.expand(len(given.x), -1).contiguous()) for given in inputs]


def test_MM_1_one_sided_routing_and_ranks_without_tokens() -> None:
    """All to one expert (many tiles of one), all to one rank, nowhere; no tokens on one rank or on all;
    fewer than a tile; between them, calls that leave rows where the next has none."""
    toy = Toy(3, max_tokens=64)
    full = toy.inputs((64, 64, 33), 1)
    calls = [
        forced(toy, full, [7]),
        forced(toy, full, [3, 5, 4]),
        full,
        forced(toy, full, []),
        toy.inputs((0, 0, 0)),
        toy.inputs((1, 0, 0)),
        toy.inputs((0, 64, 1), 2, invalid=0.3),
    ]
    run_modes(toy, calls, FEW)


def test_pairs_that_come_change_and_go() -> None:
    toy = Toy(2, experts_per_rank=4)
    first, second = toy.inputs((40, 20), 1, hot=(4, 6)), toy.inputs((33, 8), 2, hot=(5, 7))
    spread = toy.inputs((30, 30), 3)
    run_modes(toy, [first, first, second, second, spread, first], FEW)


def test_more_than_eight_experts_for_a_token_and_pairs_among_them() -> None:
    """Slots of a pair that need four bits each."""
    toy = Toy(2, experts_per_rank=6, topk=10)
    calls = [toy.inputs((20, 9), seed, hot=(2, 5, 7, 8)) for seed in range(2)]
    run_modes(toy, [*calls, calls[0]], FEW, fanout_masks=(0b100100, 0b000110))


def test_ranks_with_tiles_of_different_sizes() -> None:
    """300 tokens mean tiles of 64 rows, 5 tiles of 32: senders go by the receiver's."""
    toy = Toy(2, max_tokens=2048, topk=2)
    run_modes(toy, [toy.inputs((300, 5)), toy.inputs((5, 300), 1)], FEW)


def test_auto_shuffles_where_tiles_have_128_rows() -> None:
    """3100 tokens on one rank: its scales are shuffled, those of the other are not."""
    toy = Toy(2, experts_per_rank=1, topk=1, max_tokens=4096)
    inputs = toy.inputs((3100, 40))

    def rank() -> tuple[int, int]:
        with mori_shmem.init() as comm, toy.layer(comm) as moe:
            first = moe.stage1_only(*inputs[comm.rank])
            hidden, tiles = first.hidden.clone(), len(first.launch.plan.tiles)
            MegaMoEStage1Sdma(moe).install()
            moe.trace = Trace(comm.rank)
            got = moe.stage1_only(*inputs[comm.rank]).hidden
            real = moe._runner._sources[comm.rank][: len(got)] & 0xFFFFFF != toy.problem.padding_source
            assert same_bytes(got[real], hidden[real])
            return sum(span.lane == "shuffler" for span in moe.trace.spans), tiles

    large, small = mori_shmem.run_ranks(rank, 2, timeout_s=120)
    assert large[0] == large[1] > 10  # tiles of 128 rows
    assert small[0] == 0
    assert small[1] > 40  # of 32


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_arrive_in_any_order(seed: int) -> None:
    """Queues of random slowness, ranks that nap: other tiles are first in every call."""
    toy = Toy(3)
    calls = [toy.inputs((40, 3, 17), call, invalid=0.1) for call in range(2)]
    modes = random_modes(seed)
    run_modes(toy, [*calls, *calls], modes, within=lambda moe, number: random_arrivals(moe, seed + number))


def random_modes(seed: int) -> list[str]:
    """A third of them; all, over the three seeds."""
    return list(MODES)[seed::3]


def test_MM_3_many_replays_of_one_call() -> None:
    """30 launches that end after Stage1, then whole ones: the first, and the last, are the same."""
    toy = Toy(2)
    inputs = toy.inputs((20, 9))
    want = toy.reference(inputs)

    def rank() -> None:
        with mori_shmem.init() as comm, toy.layer(comm) as moe:
            for mode in FEW:
                stage1 = MegaMoEStage1Sdma(moe, **MODES[mode]).install()
                check(moe, inputs, want, f"{mode}, before")
                for _ in range(30):
                    moe.stage1_only(*inputs[comm.rank])
                check(moe, inputs, want, f"{mode}, after")
                stage1.uninstall()

    mori_shmem.run_ranks(rank, 2, timeout_s=120)


def test_a_row_has_the_same_bytes_wherever_it_lies_in_a_tile() -> None:
    """Tokens in another order: outputs in that order, to the bit."""
    toy = Toy(2)
    inputs = toy.inputs((40, 17))
    orders = [torch.randperm(len(i.x), generator=torch.Generator().manual_seed(5)) for i in inputs]
    moved = [RankInput(*(part[o].contiguous() for part in i)) for i, o in zip(inputs, orders, strict=True)]

    def rank() -> None:
        with mori_shmem.init() as comm, toy.layer(comm) as moe:
            for mode in FEW:
                stage1 = MegaMoEStage1Sdma(moe, **MODES[mode]).install()
                out = moe(*inputs[comm.rank]).clone()
                assert same_bytes(moe(*moved[comm.rank]), out[orders[comm.rank]]), mode
                stage1.uninstall()

    mori_shmem.run_ranks(rank, 2, timeout_s=120)


def test_rows_that_come_quantised_and_weights_that_change_from_call_to_call() -> None:
    """Frameworks swap the weights of one layer object; what counts are those at the call."""
    toy = Toy(2)
    inputs = toy.inputs((20, 9))
    want = toy.reference(inputs)

    def rank() -> None:
        with mori_shmem.init() as comm, toy.layer(comm) as moe:
            x, weights, ids = inputs[comm.rank]
            right = moe.weights
            other = StoredWeights(*(part.clone() for part in right))
            other.w1.bitwise_xor_(0x77)
            for mode in FEW:
                stage1 = MegaMoEStage1Sdma(moe, **MODES[mode]).install()
                out = moe.forward_prequant(*moe.quantize(x), weights, ids)
                assert same_bytes(out, want[comm.rank].out), mode
                moe.weights = other
                assert not same_bytes(moe(x, weights, ids), want[comm.rank].out)
                moe.weights = right
                check(moe, inputs, want, mode)
                stage1.uninstall()

    mori_shmem.run_ranks(rank, 2, timeout_s=120)


@pytest.mark.parametrize("mode", ["auto", "fuse-quant, shuffler", "in-launch"])
def test_a_row_is_quantised_once(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By prepare, or with fuse_quant by the stage, however many experts it goes to."""
    toy = Toy(1, experts_per_rank=4, topk=4, max_tokens=256)
    inputs = toy.inputs((130,))
    want = toy.reference(inputs)

    def rank() -> list[tuple[str, int]]:
        seen: list[tuple[str, int]] = []
        with mori_shmem.init() as comm, toy.layer(comm) as moe:
            quantize, prepare = mx.quantize_input, moe._runner.prepare
            where = "stage"

            def counted(x: torch.Tensor) -> Any:
                seen.append((where, len(x)))
                return quantize(x)

            def prepared(*args: Any, **named: Any) -> Any:
                nonlocal where
                where = "prepare"
                launch = prepare(*args, **named)
                where = "stage"
                return launch

            monkeypatch.setattr(mx, "quantize_input", counted)
            monkeypatch.setattr(moe._runner, "prepare", prepared)
            MegaMoEStage1Sdma(moe, **MODES[mode]).install()
            check(moe, inputs, want, mode)
        return seen

    (seen,) = mori_shmem.run_ranks(rank, 1)
    assert sum(rows for _, rows in seen) == 130
    assert {where for where, _ in seen} == {"stage" if "fuse" in mode else "prepare"}


def test_phases_one_after_the_other_give_the_same_bytes() -> None:
    """As a bench times them: everything moved, then everything multiplied."""
    toy = Toy(2)
    inputs = toy.inputs((40, 17))
    want = toy.reference(inputs)

    def rank() -> None:
        with mori_shmem.init() as comm, toy.layer(comm) as moe:
            for mode in MODES.values():
                stage1 = MegaMoEStage1Sdma(moe, **mode).install()
                stage = moe.stage1

                def apart(launch: Any, stage: Any = stage) -> None:
                    stage.move_rows(launch)
                    stage.gemm1(launch)

                stage.run = apart  # type: ignore[method-assign]
                check(moe, inputs, want, mode)
                stage1.uninstall()

    mori_shmem.run_ranks(rank, 2, timeout_s=120)
