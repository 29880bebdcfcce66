"""Stages that cannot be opened on some rank, that outlive their layer, or that never come into it; layers
whose communicator is gone; layers made where torch does not expect writes later."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Any

import mori_shmem
import pytest
import torch
from mori_megamoe import MegaMoE, MegaMoEStage1Sdma
from mori_megamoe.targets import Runner
from mori_megamoe.targets.host import CopyEngines, DirectStores
from mori_megamoe.targets.host import Runner as HostRunner
from mori_megamoe.targets.host.sdma.slab import Slab
from mori_megamoe.testing import Toy, same_bytes
from mori_shmem.errors import ArgumentError, ClosedError, MoriError
from sdma_modes import FEW, MODES, check

TOY = Toy(3)
INPUTS = TOY.inputs((12, 9, 5))


def workgroups() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("megamoe workgroup")]


# ---- a stage that cannot be opened on one rank ----


class Unopened(DirectStores):
    """Raises on rank 1, after so many windows that all ranks make together; the others make two."""

    name = "unopened"

    def __init__(self, after: int) -> None:
        self.after, self.closed = after, 0

    def open(self, runner: Runner) -> None:
        super().open(runner)
        for made in range(2):
            if runner.comm.rank == 1 and made == self.after:
                break
            runner.comm.alloc(64)
        if runner.comm.rank == 1:
            raise RuntimeError("no room here")

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_stage_that_one_rank_cannot_open_is_told_to_all(after: int) -> None:
    want = TOY.reference(INPUTS)

    def rank() -> None:
        with mori_shmem.init(timeout_s=60) as comm, TOY.layer(comm) as moe:
            check(moe, INPUTS, want, "before")
            stage = Unopened(after)
            with pytest.raises(
                MoriError, match=r"'unopened' cannot be opened on .*rank 1: RuntimeError: no room here"
            ):
                moe.replace_stage1(stage)
            assert stage.closed == 1
            assert isinstance(moe.stage1, DirectStores)
            check(moe, INPUTS, want, "after")
            MegaMoEStage1Sdma(moe).install()
            check(moe, INPUTS, want, "another stage")

    mori_shmem.run_ranks(rank, 3, timeout_s=120)


@pytest.mark.parametrize(("where", "name"), [(Slab, "__init__"), (CopyEngines, "_multiplied")])
def test_an_install_that_fails_on_one_rank_fails_on_all(where: type, name: str) -> None:
    """Before the windows of the stage are made, and after."""
    want = TOY.reference(INPUTS)

    def rank() -> None:
        with mori_shmem.init(timeout_s=60) as comm, TOY.layer(comm) as moe:
            stage1, original = MegaMoEStage1Sdma(moe), getattr(where, name)

            def fails(*args: Any, **named: Any) -> None:
                raise MemoryError("19 GiB")

            if comm.rank == 2:
                setattr(where, name, fails)
            with pytest.raises(MoriError, match=r"cannot be opened on .*rank 2: MemoryError: 19 GiB"):
                stage1.install()
            setattr(where, name, original)
            assert not stage1.installed
            assert not workgroups()
            with pytest.raises(ClosedError, match=r"rank 0: ClosedError: this stage is closed.*make another"):
                stage1.install()
            MegaMoEStage1Sdma(moe).install()
            check(moe, INPUTS, want, "another one")

    mori_shmem.run_ranks(rank, 3, timeout_s=120)


def test_a_layer_that_cannot_be_made_on_one_rank_is_made_on_none() -> None:
    def rank() -> None:
        with mori_shmem.init(timeout_s=60) as comm:
            made = HostRunner.__init__

            def fails(*args: Any) -> None:
                raise MemoryError("300 GiB")

            if comm.rank == 1:
                HostRunner.__init__ = fails  # type: ignore[method-assign]
            with pytest.raises(MoriError, match="could not be made on rank 1: MemoryError: 300 GiB"):
                TOY.layer(comm)
            HostRunner.__init__ = made  # type: ignore[method-assign]
            with TOY.layer(comm):
                pass

    mori_shmem.run_ranks(rank, 3, timeout_s=120)


def test_another_layers_stage_on_one_rank_is_refused_on_all_and_stays_open_there() -> None:
    toy = Toy(2)
    inputs = toy.inputs((7, 5))
    want = toy.reference(inputs)

    def rank() -> None:
        with mori_shmem.init(timeout_s=60) as comm, toy.layer(comm) as a, toy.layer(comm) as b:
            with pytest.raises(ArgumentError, match="on rank 1: ArgumentError: this direct stage is another"):
                b.replace_stage1(a.stage1 if comm.rank else DirectStores())
            check(a, inputs, want, "the one whose stage it is")
            check(b, inputs, want, "the other one")

    mori_shmem.run_ranks(rank, 2, timeout_s=60)


# ---- closed ----


@contextlib.contextmanager
def alone(toy: Toy) -> Iterator[tuple[mori_shmem.Communicator, MegaMoE]]:
    with mori_shmem.init(rank=0, world_size=1) as comm, toy.layer(comm) as moe:
        yield comm, moe


def test_closing_the_layer_ends_stages_that_were_never_put_in() -> None:
    with alone(Toy(1)) as (_, moe):
        never = MegaMoEStage1Sdma(moe)
        taken_out = MegaMoEStage1Sdma(moe, workers=1).install()
        taken_out.uninstall()
        assert len(workgroups()) == 4 + 3
        moe.close()
        assert not workgroups()
        moe.close()
        for stage1 in (never, taken_out):
            for use in (stage1.install, stage1.uninstall):
                with pytest.raises(ClosedError, match="this MegaMoE is closed: make a new one"):
                    use()
        with pytest.raises(ClosedError, match="this MegaMoE is closed"):
            MegaMoEStage1Sdma(moe)
        assert not workgroups()


def test_a_stage_that_nobody_keeps_ends_before_its_layer() -> None:
    with alone(Toy(1)) as (_, moe):
        MegaMoEStage1Sdma(moe)
        gc.collect()
        for thread in workgroups():
            thread.join(20)
        assert not workgroups()


def test_a_closed_stage_is_named_where_a_launch_uses_it() -> None:
    toy = Toy(1)
    (given,) = toy.inputs((5,))
    with alone(toy) as (_, moe):
        MegaMoEStage1Sdma(moe).install()
        moe(*given)
        moe.stage1.close()
        moe.stage1.close()
        with pytest.raises(ClosedError, match="this stage is closed, its workgroups have ended"):
            moe(*given)


@pytest.mark.parametrize("with_stage", [False, True])
def test_a_communicator_that_is_closed_under_the_layer_is_named(with_stage: bool) -> None:
    toy = Toy(1)
    (given,) = toy.inputs((5,))
    with alone(toy) as (comm, moe):
        stage1 = MegaMoEStage1Sdma(moe)
        if with_stage:
            stage1.install()
        out = moe(*given)
        weights = moe.weights
        comm.close()

        def swap() -> None:
            moe.weights = weights

        uses = [
            lambda: moe(*given),
            lambda: moe.stage1_only(*given),
            lambda: moe.replace_stage1(DirectStores()),
            swap,
            stage1.uninstall if with_stage else stage1.install,
            lambda: MegaMoEStage1Sdma(moe),
            lambda: toy.layer(comm),
        ]
        for use in uses:
            with pytest.raises(ClosedError, match=r"communicator.* is closed"):
                use()
        moe.close()
        moe.close()
        assert not workgroups()
        assert out.isfinite().all()  # still readable


def test_a_stage_that_cannot_be_closed_does_not_keep_the_rest_open() -> None:
    class Stuck(DirectStores):
        name = "stuck"

        def close(self) -> None:
            raise RuntimeError("stuck")

    with alone(Toy(1)) as (_, moe):
        MegaMoEStage1Sdma(moe)
        MegaMoEStage1Sdma(moe).install()
        moe.replace_stage1(Stuck())
        with pytest.raises(RuntimeError, match="stuck"):
            moe.close()
        assert not workgroups()
        assert moe._window is not None
        assert moe._window.closed
        moe._stages.clear()


# ---- inference mode ----


@pytest.mark.parametrize("made_inside", [False, True])
@pytest.mark.parametrize("installed_inside", [False, True])
def test_layers_and_stages_made_in_inference_mode_work_outside_and_the_other_way_round(
    made_inside: bool, installed_inside: bool
) -> None:
    toy = Toy(2)
    inputs = toy.inputs((12, 9))
    want = toy.reference(inputs)

    def rank() -> None:
        with mori_shmem.init() as comm:
            with torch.inference_mode(made_inside):
                moe = toy.layer(comm)
            with moe:
                for mode in (None, *FEW):
                    with torch.inference_mode(installed_inside):
                        stage1 = MegaMoEStage1Sdma(moe, **MODES[mode]).install() if mode else None
                    for inside in (True, False, True, False):
                        with torch.inference_mode(inside):
                            x, weights, ids = (part.clone() for part in inputs[comm.rank])
                            out = moe(x, weights, ids)
                            assert same_bytes(out, want[comm.rank].out), (mode, inside)
                        assert same_bytes(moe(x, weights, ids), want[comm.rank].out), (mode, inside)
                        x_q, scales = moe.quantize(x)
                        out = moe.forward_prequant(x_q, scales, weights, ids)
                        assert same_bytes(out, want[comm.rank].out), (mode, inside)
                    if stage1 is not None:
                        stage1.uninstall()

    mori_shmem.run_ranks(rank, 2, timeout_s=120)


def test_weights_of_inference_mode_are_taken_and_may_be_swapped() -> None:
    toy = Toy(1)
    (given,) = toy.inputs((5,))
    (want,) = toy.reference([given])
    with mori_shmem.init(rank=0, world_size=1) as comm:
        with torch.inference_mode():
            weights = toy.weights(0)
        with toy.layer(comm, **weights._asdict()) as moe:
            assert same_bytes(moe(*given), want.out)
            moe.weights = weights
            assert same_bytes(moe(*given), want.out)


def test_poison_works_there_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORI_MEGAMOE_POISON", "1")
    toy = Toy(1)
    (given,) = toy.inputs((5,))
    with mori_shmem.init(rank=0, world_size=1) as comm:
        with torch.inference_mode():
            moe = toy.layer(comm)
            MegaMoEStage1Sdma(moe, puts="one").install()
        with moe:
            assert same_bytes(moe(*given), toy.reference([given])[0].out)
