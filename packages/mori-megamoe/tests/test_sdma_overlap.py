"""Rows land while experts are multiplied: seen in a trace, and in what a late rank delays."""

from __future__ import annotations

import time
from typing import Any

import mori_shmem
import pytest
import torch
from mori_bench import Trace
from mori_megamoe import MegaMoEStage1Sdma
from mori_megamoe.launch import Launch
from mori_megamoe.targets.host.sdma.job import Job
from mori_megamoe.testing import Toy, same_bytes
from mori_shmem.testing import faults
from patience import with_longer_times
from sdma_modes import MODES

OVERLAPPING = ["auto", "shuffler", "in-launch", "ldsw, ready-first", "7001, one put"]


@pytest.mark.parametrize("mode", OVERLAPPING)
def test_experts_start_while_other_segments_are_still_landing(mode: str) -> None:
    """Every copy takes a while. A tile starts after the segment that it needs, and before the last one has
    landed."""
    with_longer_times(lambda delay_s: landings_and_tiles(mode, delay_s), 0.004, 0.02, 0.1, 0.5)


def landings_and_tiles(mode: str, delay_s: float) -> None:
    toy = Toy(2, experts_per_rank=6)
    inputs = toy.inputs((40, 30))
    want = toy.reference(inputs)

    def rank() -> tuple[Trace, Launch]:
        with mori_shmem.init() as comm, toy.layer(comm) as moe, faults(comm, delay_us=round(1e6 * delay_s)):
            MegaMoEStage1Sdma(moe, **MODES[mode]).install()
            moe.trace = Trace(comm.rank)
            launches: list[Launch] = []
            prepare = moe._runner.prepare

            def kept(*args: Any, **named: Any) -> Launch:
                launches.append(launch := prepare(*args, **named))
                return launch

            moe._runner.prepare = kept  # type: ignore[method-assign]
            assert same_bytes(moe(*inputs[comm.rank]), want[comm.rank].out)
            return moe.trace, launches[0].plan

    results = mori_shmem.run_ranks(rank, 2, timeout_s=60)
    trace = Trace.merge([trace for trace, _ in results])
    for receiver in range(2):
        spans = [span for span in trace.spans if span.rank == receiver]
        landings = [span for span in spans if span.lane.startswith("landing")]
        tiles = [s for s in spans if s.lane.startswith("workgroup") and s.name.startswith("expert")]
        assert {span.lane for span in landings} == {f"landing from rank {1 - receiver}"}
        assert len(landings) == 6
        assert min(span.start_ns for span in tiles) < max(span.end_ns for span in landings)
        landed = {int(span.name.split(",")[0].removeprefix("segment ")): span.end_ns for span in landings}
        for tile in tiles:
            number = 1 + int(tile.name.removeprefix("expert ")) % 6
            assert tile.start_ns > landed[number] - 1, (tile, number)
    text = trace.draw(100)
    assert "landing from rank 1" in text
    assert "workgroup" in text


@pytest.mark.parametrize("mode", ["ldsw, ready-first", "in-launch, ready-first"])
def test_a_late_rank_delays_only_the_tiles_that_need_it(mode: str) -> None:
    """Rank 1 sends to expert 0 of rank 0, and late: rank 0 has taken its other tiles by then."""
    with_longer_times(lambda late_s: expert_0_is_the_last(mode, late_s), 0.3, 2, 8)


def expert_0_is_the_last(mode: str, late_s: float) -> None:
    toy = Toy(2, topk=1)
    inputs = toy.inputs((8, 8))
    inputs[0].ids[:, 0] = torch.arange(8, dtype=torch.int32) % 3
    inputs[1].ids.fill_(0)
    want = toy.reference(inputs)

    def rank() -> list[int]:
        with mori_shmem.init() as comm, toy.layer(comm) as moe:
            MegaMoEStage1Sdma(moe, **MODES[mode]).install()
            if comm.rank == 1:
                put = Job.put
                Job.put = lambda job: (time.sleep(late_s), put(job))[1]  # type: ignore[method-assign]
            moe.trace = Trace(comm.rank)
            assert same_bytes(moe(*inputs[comm.rank]), want[comm.rank].out)
            tiles = [span for span in moe.trace.spans if span.name.startswith("expert")]
            return [int(span.name.removeprefix("expert ")) for span in tiles]

    assert mori_shmem.run_ranks(rank, 2)[0][2] == 0


def test_in_the_order_of_experts_a_late_rank_holds_the_item_and_no_other_workgroup() -> None:
    """The item of expert 0 waits for rank 1; the other worker goes on with experts 1 and 2."""
    with_longer_times(expert_0_is_held, 0.3, 2, 8)


def expert_0_is_held(late_s: float) -> None:
    toy = Toy(2, topk=1)
    inputs = toy.inputs((8, 8))
    inputs[0].ids[:, 0] = torch.arange(8, dtype=torch.int32) % 3
    inputs[1].ids.fill_(0)

    def rank() -> list[str]:
        with mori_shmem.init() as comm, toy.layer(comm) as moe:
            MegaMoEStage1Sdma(moe, scale_mode="ldsw").install()
            if comm.rank == 1:
                put = Job.put
                Job.put = lambda job: (time.sleep(late_s), put(job))[1]  # type: ignore[method-assign]
            moe.trace = Trace(comm.rank)
            moe(*inputs[comm.rank])
            tiles = [span for span in moe.trace.spans if span.lane.startswith("workgroup")]
            return [span.name for span in sorted(tiles, key=lambda span: span.start_ns)]

    assert mori_shmem.run_ranks(rank, 2)[0][-1] == "expert 0"
