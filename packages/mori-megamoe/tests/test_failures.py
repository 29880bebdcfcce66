"""What is refused before anybody waits, and ranks that are late, dead or of another opinion."""

from __future__ import annotations

import threading
import time
from typing import Any

import mori_shmem
import pytest
import torch
from mori_megamoe.launch import Launch
from mori_megamoe.layer import MegaMoE
from mori_megamoe.targets.host import DirectStores
from mori_megamoe.testing import Toy, same_bytes
from mori_shmem.errors import ArgumentError, ClosedError, LayoutError, MoriError, PeerDied, PeerTimeout
from mori_shmem.testing import die, run_ranks_to_the_end
from patience import with_longer_times

TOY = Toy(3)
INPUTS = TOY.inputs((20, 9, 5))


def test_a_rank_that_does_not_come_is_named_with_flag_and_values() -> None:
    with_longer_times(rank_1_does_not_come, 0.6, 3, 12)


def rank_1_does_not_come(limit_s: float) -> None:
    def rank() -> None:
        with mori_shmem.init(timeout_s=60) as comm, TOY.layer(comm) as moe:
            moe(*INPUTS[comm.rank])
            comm.barrier()
            if comm.rank == 1:
                comm.barrier()  # until the others have given up
                return
            comm.timeout_s = limit_s  # of the waits from here on
            began = time.monotonic()
            with pytest.raises(PeerTimeout, match=r"`counted` of launch 2: .*rank 1") as late:
                moe(*INPUTS[comm.rank])
            assert 0.8 * limit_s < time.monotonic() - began < 20
            assert late.value.peers == (1,)
            assert (late.value.seen, late.value.wanted) == (1, 2)
            with pytest.raises(MoriError, match="since a call failed with PeerTimeout"):
                moe(*INPUTS[comm.rank])
            comm.barrier(timeout_s=60)

    mori_shmem.run_ranks(rank, 3)


class DiesIn(DirectStores):
    """A rank that ends in the middle of Stage1: before its rows, after some, or with all of them sent."""

    name = "dies"

    def __init__(self, where: str) -> None:
        self.where = where
        self.stored = 0

    def move_rows(self, launch: Launch) -> None:
        if self.where == "before":
            die()
        super().move_rows(launch)

    def _store(self, launch: Launch, rank: int, number: int) -> None:
        self.stored += 1
        if self.where == "among" and self.stored == 3:
            die()
        super()._store(launch, rank, number)

    def gemm1(self, launch: Launch) -> None:
        if self.where == "after":
            die()
        super().gemm1(launch)


@pytest.mark.parametrize("where", ["prepare", "before", "among", "after"])
def test_a_dead_rank_is_named_within_two_seconds(where: str) -> None:
    with_longer_times(lambda limit_s: one_dies(where, limit_s), 2, 2, 20)  # of a deadline of 60


def one_dies(where: str, limit_s: float) -> None:
    def rank() -> float:
        comm = mori_shmem.init(timeout_s=60)
        moe = TOY.layer(comm)
        moe(*INPUTS[comm.rank])
        if comm.rank == 1:
            if where == "prepare":
                die()
            moe.stage1 = DiesIn(where)
            moe.stage1.open(moe._runner)
        began = time.monotonic()
        with pytest.raises(PeerDied) as dead:
            moe(*INPUTS[comm.rank])
        assert 1 in dead.value.peers
        return time.monotonic() - began

    outcomes = run_ranks_to_the_end(rank, 3, timeout_s=60)
    assert [o.error is None for o in outcomes] == [True, False, True], outcomes
    assert all(o.value < limit_s for o in outcomes if o.rank != 1)


def test_late_ranks_give_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A nap before every phase of every rank, another in each call; what is read too early is NaN."""
    monkeypatch.setenv("MORI_MEGAMOE_POISON", "1")
    want = TOY.reference(INPUTS)

    def rank() -> None:
        with mori_shmem.init() as comm, TOY.layer(comm) as moe:
            naps = torch.rand(6, 4, generator=torch.Generator().manual_seed(comm.rank)).mul(0.06)
            call = 0

            def late(phase: int, run: Any) -> Any:
                def wrapped(*args: Any, **named: Any) -> Any:
                    time.sleep(float(naps[call, phase]))
                    return run(*args, **named)

                return wrapped

            runner = moe._runner
            for phase, name in enumerate(("prepare", "wait_ready", "stage2", "combine")):
                setattr(runner, name, late(phase, getattr(runner, name)))
            for call in range(6):
                assert same_bytes(moe(*INPUTS[comm.rank]), want[comm.rank].out), call

    mori_shmem.run_ranks(rank, 3)


def test_MM_2_ranks_of_different_opinions_are_told_both() -> None:
    cases = [
        ({"max_tok_per_rank": 128}, r"max_tokens is 64 on rank 0, 128 on rank 1"),
        ({"swiglu_limit": 7.0}, r"swiglu_limit is 10.0 on rank 0, 7.0 on rank 1"),
        ({"fanout_masks": (3, 0)}, r"fanout_masks is \(\) on rank 0, \(3, 0\) on rank 1"),
    ]

    def rank() -> None:
        with mori_shmem.init() as comm:
            for changes, words in cases:
                with pytest.raises(ArgumentError, match=words):
                    Toy(2).layer(comm, **(changes if comm.rank else {}))
            with Toy(2).layer(comm):  # the communicator is none the worse for it
                pass

    mori_shmem.run_ranks(rank, 2)


def alone(check: Any) -> None:
    """Run on one rank; what is checked must raise without anybody else."""

    def rank() -> None:
        with mori_shmem.init() as comm, Toy(1).layer(comm) as moe:
            check(moe)

    mori_shmem.run_ranks(rank, 1)


def test_MM_2_and_other_calls_that_are_refused_leave_the_layer_as_it_was() -> None:
    toy = Toy(1)
    (good,) = toy.inputs((5,))
    (want,) = toy.reference([good])
    x, weights, ids = good
    twice = ids.clone()
    twice[2] = torch.tensor([1, 0, 1])
    minus = ids.clone()
    minus[3, 1] = -1
    cases: list[tuple[tuple[Any, ...], dict[str, Any], type[MoriError], str]] = [
        ((toy.inputs((65,))[0].x, weights, ids), {}, ArgumentError, "has 65 tokens.*max_tok_per_rank=64"),
        ((x.float(), weights, ids), {}, LayoutError, r"x_bf16 is torch.float32 \(5, 256\)"),
        ((x[:, :128], weights, ids), {}, LayoutError, r"\[n, 256\] is needed"),
        ((x.T.contiguous().T, weights, ids), {}, LayoutError, "contiguous"),
        ((x, weights[:4], ids), {}, LayoutError, r"wts is .*\(4, 3\).*\(5, 3\)"),
        ((x, weights.double(), ids), {}, LayoutError, "wts is torch.float64"),
        ((x, weights, ids.long()), {}, LayoutError, "topk_ids is torch.int64"),
        ((x, weights, ids[:, :2].contiguous()), {}, LayoutError, "topk_ids"),
        ((x, weights, twice), {}, ArgumentError, r"topk_ids\[2\] is \[1, 0, 1\]: expert 1 is there twice"),
        ((x, weights, minus), {"mask_invalid_slots": False}, ArgumentError, r"topk_ids\[3, 1\] is -1"),
        ((x, weights, ids), {"stream": object()}, ArgumentError, "no streams"),
        ((x.to("meta"), weights, ids), {}, LayoutError, "x_bf16 is on meta"),
    ]

    def check(moe: MegaMoE) -> None:
        for given, named, kind, words in cases:
            with pytest.raises(kind, match=words):
                moe(*given, **named)
        x_q, scales = moe.quantize(x)
        for bad in (scales[:, :4].contiguous(), scales.int()):
            with pytest.raises(LayoutError, match="scales is"):
                moe.forward_prequant(x_q, bad, weights, ids)
        assert same_bytes(moe(x, weights, ids), want.out)
        assert moe._runner.epoch == 1

    alone(check)


def test_the_environment_says_whether_invalid_ids_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORI_MEGAMOE_COMBINE_MASK", "0")
    (given,) = Toy(1).inputs((5,))
    given.ids[0, 0] = 99

    def check(moe: MegaMoE) -> None:
        with pytest.raises(ArgumentError, match=r"topk_ids\[0, 0\] is 99.*Switch it on"):
            moe(*given)
        moe(*given, mask_invalid_slots=True)

    alone(check)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quant": "a8w8"}, "quant='a8w8': a8w4"),
        ({"mega_scheme": "slots"}, "mega_scheme='slots' is not known; allowed: fixedslot, compact"),
        ({"experts": 4}, "experts=4 on world_size=3"),
        ({"max_tok_per_rank": 100}, "the next larger one is 128"),
        ({"topk": 17}, "topk=17"),
        ({"fanout_masks": (1, 0, 0)}, r"fanout_masks\[0\]=0x1: two bits"),
        ({"fanout_masks": (0,)}, "has 1 masks for 3 ranks"),
        ({"fanout_masks": (0b1001, 0, 0)}, "two bits below 1 << 3"),
        ({"w2": torch.zeros(3, dtype=torch.uint8)}, "w2 is .*98304 bytes in one run"),
        ({"rank": 1}, "rank=1 of world_size=3, the communicator is rank 0 of 1"),
    ],
)
def test_layers_that_are_refused(changes: dict[str, Any], words: str) -> None:
    def rank() -> None:
        with mori_shmem.init() as comm, pytest.raises(ArgumentError, match=words):
            TOY.layer(comm, world_size=3, **changes)

    mori_shmem.run_ranks(rank, 1)


def test_a_second_thread_and_a_closed_layer_are_refused() -> None:
    (given,) = Toy(1).inputs((5,))

    def check(moe: MegaMoE) -> None:
        inside, go = threading.Event(), threading.Event()

        class Waits(DirectStores):
            name = "waits"

            def gemm1(self, launch: Launch) -> None:
                inside.set()
                go.wait(60)
                super().gemm1(launch)

        moe.replace_stage1(Waits())
        thread = threading.Thread(target=lambda: moe(*given))
        thread.start()
        assert inside.wait(60)
        with pytest.raises(MoriError, match="in a call already, on another thread"):
            moe(*given)
        go.set()
        thread.join()
        out = moe(*given)
        moe.close()
        moe.close()
        assert out.isfinite().all()  # still readable
        with pytest.raises(ClosedError):
            moe(*given)

    alone(check)
