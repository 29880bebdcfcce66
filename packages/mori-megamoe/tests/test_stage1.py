"""Other stages in the place of the baseline: what the seam allows, and what it promises to the last byte."""

from __future__ import annotations

import random
import time
from typing import Any

import mori_shmem
import pytest
import torch
from mori_megamoe import MegaMoE, Stage1, mx
from mori_megamoe.launch import Launch
from mori_megamoe.plan import needed, segment_id, slab_starts, value_after
from mori_megamoe.targets import Runner
from mori_megamoe.targets.host import DirectStores
from mori_megamoe.testing import Toy, same_bytes
from mori_shmem.errors import ArgumentError, MoriError
from mori_shmem.testing import faults
from patience import with_longer_times


class ByQueues(Stage1):
    """Rows packed segment by segment, put by copy queues that signal behind them; tiles as their rows "
    "come."""

    name = "by queues"

    def open(self, runner: Runner) -> None:
        super().open(runner)
        p = runner.problem
        self.row_bytes = {"rows": p.model_dim, "row_scales": p.model_scales}
        rows = p.max_tokens * p.topk
        self.slabs = {name: runner.comm.alloc(rows * nbytes) for name, nbytes in self.row_bytes.items()}

    def close(self) -> None:
        for slab in self.slabs.values():
            slab.close()

    def move_rows(self, launch: Launch) -> None:
        runner, p, me = self.runner, self.runner.problem, launch.rank
        starts = slab_starts(launch.routes.counts, p, me)
        for number in range(p.sends_per_rank):
            for rank in range(p.num_ranks):
                tokens = launch.routes.token[launch.routes.rows_of(segment_id(p, rank, number))]
                if not len(tokens):
                    continue  # no signal: nobody waits for it
                runner.wait_ready(launch, rank)
                runner.write_headers(launch, rank, number)
                at = launch.plans[rank].landing_row(me, number)
                self._send(launch, rank, at, starts.get((rank, number), 0), tokens)
                value = value_after(p, launch.epoch, number)
                if rank == me:
                    runner.signal_arrived(launch, me, number)
                else:
                    runner.comm.queue(rank).signal(runner.arrived_at(rank), value)

    def _send(self, launch: Launch, rank: int, at: int, start: int, tokens: torch.Tensor) -> None:
        assert launch.x_q is not None
        assert launch.x_scales is not None
        payload = {"rows": launch.x_q[tokens], "row_scales": launch.x_scales[tokens]}
        for name, nbytes in self.row_bytes.items():
            if rank == launch.rank:
                to = self.runner.rows(rank) if name == "rows" else self.runner.row_scales(rank)
                to[at : at + len(tokens)] = payload[name]
                continue
            slab = self.slabs[name]
            slab.tensor((len(tokens), nbytes), torch.uint8, start * nbytes).copy_(payload[name])
            there = self.runner.at(name, rank, row=at, row_bytes=nbytes)
            self.runner.comm.queue(rank).put(there, slab.at(start * nbytes), len(tokens) * nbytes)

    def gemm1(self, launch: Launch) -> None:
        for tile in launch.plan.tiles:
            self.runner.wait_arrived(launch, tile.number)
            self.runner.gemm1_tile(launch, tile)

    def run(self, launch: Launch) -> None:
        super().run(launch)
        for rank in range(self.runner.problem.num_ranks):
            if rank != launch.rank:
                self.runner.comm.queue(rank).quiet()


class ReadyFirst(ByQueues):
    """Quantises for itself, and takes whatever tile has its rows, in the order of arrival."""

    name = "ready first"
    quantizes = True

    def move_rows(self, launch: Launch) -> None:
        assert launch.x_q is None
        assert launch.call.x is not None
        launch.x_q, launch.x_scales = mx.quantize_input(launch.call.x)
        super().move_rows(launch)

    def gemm1(self, launch: Launch) -> None:
        runner, p = self.runner, self.runner.problem
        todo, order = list(launch.plan.tiles), []
        while todo:
            here = [runner.comm.read(runner.arrived_from(s)) for s in range(p.num_ranks)]
            wanted = {tile: needed(launch.counts, p, launch.epoch, launch.rank, tile.number) for tile in todo}
            ready = [tile for tile in todo if all(h >= w for h, w in zip(here, wanted[tile], strict=True))]
            for tile in ready:
                runner.gemm1_tile(launch, tile)
                todo.remove(tile)
                order.append(tile)
            if todo and not ready:
                source = next(s for s, w in enumerate(wanted[todo[0]]) if here[s] < w)
                runner.comm.wait(runner.arrived_from(source), here[source] + 1, peer=source)
        launch.scratch["order"] = order


class SlowDirect(DirectStores):
    """The baseline on ranks that are late, here and there."""

    name = "slow"

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def _nap(self) -> None:
        time.sleep(self.rng.choice([0, 0, 0.002, 0.02]))

    def _store(self, launch: Launch, rank: int, number: int) -> None:
        self._nap()
        super()._store(launch, rank, number)

    def gemm1(self, launch: Launch) -> None:
        self._nap()
        super().gemm1(launch)


def stage_of(name: str, rank: int) -> Stage1:
    return {"queues": ByQueues, "ready": ReadyFirst}[name]() if name != "slow" else SlowDirect(rank)


@pytest.mark.parametrize("name", ["queues", "ready", "slow"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_MM_3_another_stage_gives_the_same_bytes(name: str, world_size: int) -> None:
    """Four calls with alternating inputs on the new stage, the baseline before and after it."""
    toy = Toy(world_size, experts_per_rank=4)
    calls = [toy.inputs((40, 0, 17)[:world_size], seed, hot=(0, 2), invalid=0.1) for seed in range(2)]
    want = [toy.reference(inputs) for inputs in calls]

    def rank() -> None:
        with mori_shmem.init() as comm, toy.layer(comm) as moe, faults(comm, delay_us=300):

            def check(number: int) -> None:
                results = want[number % 2][comm.rank]
                assert same_bytes(moe(*calls[number % 2][comm.rank]), results.out), number

            check(0)
            baseline = moe.replace_stage1(stage_of(name, comm.rank))
            for number in range(4):
                check(number)
            moe.replace_stage1(baseline)
            check(1)

    mori_shmem.run_ranks(rank, world_size, timeout_s=120)


def test_even_the_hidden_rows_are_the_same_from_stage_to_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORI_MEGAMOE_PAIRS", "0")  # or the second launch would have another plan
    toy = Toy(2)
    inputs = toy.inputs((40, 17))

    def rank() -> None:
        with mori_shmem.init() as comm, toy.layer(comm) as moe:
            first = moe.stage1_only(*inputs[comm.rank])
            hidden, scales, plan = first.hidden.clone(), first.hidden_scales.clone(), first.launch.plan
            for stage in (ByQueues(), ReadyFirst()):
                moe.replace_stage1(stage)
                moe._runner.hidden.fill_(0xFF)
                got = moe.stage1_only(*inputs[comm.rank])
                assert got.launch.plan == plan
                real = torch.tensor([w & 0xFFFFFF != toy.problem.padding_source for w in sources(moe, plan)])
                assert same_bytes(got.hidden[real], hidden[real])
                form = mx.ActivationScales(plan.num_rows, toy.problem.inter_scales)
                assert same_bytes(form.unshuffle(got.hidden_scales)[real], form.unshuffle(scales)[real])

    mori_shmem.run_ranks(rank, 2)


def sources(moe: MegaMoE, plan: Any) -> list[int]:
    rows: list[int] = moe._runner._sources[moe.comm.rank][: plan.num_rows].tolist()
    return rows


def test_a_late_source_delays_only_the_tiles_that_need_it() -> None:
    """Rank 1 sends to expert 0 of rank 0 only, and late: rank 0 has done its other tiles by then."""
    with_longer_times(expert_0_is_the_last, 0.3, 2, 8)


def expert_0_is_the_last(late_s: float) -> None:
    toy = Toy(2, topk=1)
    inputs = toy.inputs((8, 8))
    inputs[0].ids[:, 0] = torch.arange(8, dtype=torch.int32) % 3
    inputs[1].ids.fill_(0)
    want = toy.reference(inputs)

    def rank() -> list[int]:
        with mori_shmem.init() as comm, toy.layer(comm) as moe:
            moe.replace_stage1(stage := ReadyFirst())
            if comm.rank == 1:
                monkey, stage.move_rows = stage.move_rows, lambda launch: (time.sleep(late_s), monkey(launch))
            seen: list[Launch] = []
            run, stage.run = stage.run, lambda launch: (seen.append(launch), run(launch))
            assert same_bytes(moe(*inputs[comm.rank]), want[comm.rank].out)
            return [tile.expert for tile in seen[0].scratch["order"]]

    assert mori_shmem.run_ranks(rank, 2)[0] == [1, 2, 0]


@pytest.mark.parametrize("fault", ["drop_every", "reorder"])
def test_a_transport_that_loses_or_overtakes_rows_is_seen(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What these tests compare can tell: with such queues on rank 0 the bytes are wrong."""
    monkeypatch.setenv("MORI_MEGAMOE_POISON", "1")
    faulty: dict[str, Any] = {"drop_every": 2} if fault == "drop_every" else {"reorder": True}
    with_longer_times(
        lambda delay_s: bytes_are_wrong({**faulty, "delay_us": round(1e6 * delay_s)}), 0.05, 0.3, 2
    )


def bytes_are_wrong(fault: dict[str, Any]) -> None:
    toy = Toy(2)
    inputs = toy.inputs((40, 17))
    want = toy.reference(inputs)

    def rank() -> bool:
        with mori_shmem.init() as comm, toy.layer(comm) as moe:
            moe.replace_stage1(ByQueues())
            with faults(comm, **(fault if comm.rank == 0 else {})):
                return same_bytes(moe(*inputs[comm.rank]), want[comm.rank].out)

    assert False in mori_shmem.run_ranks(rank, 2)


def test_a_stage_that_differs_between_ranks_is_refused_and_one_that_raises_ends_the_layer() -> None:
    toy = Toy(2)
    inputs = toy.inputs((4, 4))

    class Raises(DirectStores):
        name = "raises"

        def gemm1(self, launch: Launch) -> None:
            raise RuntimeError("no")

    def rank() -> None:
        with mori_shmem.init() as comm, toy.layer(comm) as moe:
            with pytest.raises(ArgumentError, match=r"different stages: \['by queues', 'slow'\]"):
                moe.replace_stage1(SlowDirect(0) if comm.rank else ByQueues())
            moe(*inputs[comm.rank])  # nothing has happened to it
            moe.replace_stage1(Raises())
            with pytest.raises(RuntimeError, match="no"):
                moe(*inputs[comm.rank])
            with pytest.raises(MoriError, match="since a call failed with RuntimeError"):
                moe(*inputs[comm.rank])
            comm.barrier()

    mori_shmem.run_ranks(rank, 2)
