"""Every obligation of the protocol (targets/host/sdma/stage.py) broken once: what was left out is seen.

    left out                                                    seen by
    O1   ready before headers and rows                          bytes: the late rank's prepare wipes headers
    O2   packed before put                                      bytes: poison of the slab is put
    O3   headers before the signal                              bytes: rows without an origin
    O4   copies before the signal, in the program               bytes: poison is multiplied
    O4   the same, by a queue that reorders                     bytes
    O5   landed before shuffled                                 bytes: poison as scales
    O5   shuffled before flagged                                bytes
    O6   words of the ranks before a tile                       bytes
    O6   this rank's own word before a tile                     bytes
    O7   queues quiet at the end                                bytes: the slab is filled while it is read
    O8   epochs in the words                                    bytes: the last launch's words let tiles start
    O9   complete before published                              bytes

Each case runs its scenario as it is first, where every byte must be right, and then with the omission, where
some byte on some rank must be wrong; if the machine was too busy for that, again with longer delays.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mori_shmem
import pytest
from mori_megamoe import MegaMoE, MegaMoEStage1Sdma, plan
from mori_megamoe.launch import Launch
from mori_megamoe.plan import Tile
from mori_megamoe.stage1.sends import Send
from mori_megamoe.targets.host.sdma import job as job_module
from mori_megamoe.targets.host.sdma import packing
from mori_megamoe.targets.host.sdma.job import Job
from mori_megamoe.targets.host.sdma.waits import Word
from mori_megamoe.testing import Toy, wrong_rows
from mori_shmem.testing import faults
from sdma_modes import MODES

NAP_S = 0.06


class Patches:
    """Attributes replaced until the end of a run; `moe`, `rank` and `nap_s` for those that depend on them."""

    def __init__(self, moe: MegaMoE, nap_s: float) -> None:
        self.moe, self.rank, self.nap_s = moe, moe.comm.rank, nap_s
        self._undo: list[tuple[object, str, Any]] = []

    def put(self, where: object, name: str, value: Any) -> Any:
        """Returns what was there."""
        before = getattr(where, name)
        self._undo.append((where, name, before))
        setattr(where, name, value)
        return before

    def undo(self) -> None:
        for where, name, before in reversed(self._undo):
            setattr(where, name, before)


@dataclass(frozen=True)
class Case:
    """`scene` makes the moment long at which the omission matters; `omit` leaves something out."""

    mode: str
    omit: Callable[[Patches], None]
    scene: Callable[[Patches], None] = lambda patches: None
    delay_us: int = 0
    reorder: bool = False


# ---- scenes ----


def late_prepare(p: Patches) -> None:
    """Rank 1 has told its counts, and its own plan takes long: others are ahead."""
    destinations = plan.destinations
    if p.rank == 1:
        p.put(plan, "destinations", lambda *args: (time.sleep(p.nap_s), destinations(*args))[1])


def slow_packing(p: Patches) -> None:
    pack = packing.pack
    p.put(packing, "pack", lambda *args: (time.sleep(p.nap_s), pack(*args))[1])


def held_queue(p: Patches) -> None:
    """Rank 0's queue stands still for a while without keeping rank 0 from going on. (A delay of its copies
    would: short ones are made by whoever submits them.)"""
    comm, opened = p.moe.comm, 0
    gate = comm.alloc(8)

    def put(job: Job) -> None:
        nonlocal opened
        opened += 1
        if p.rank == 0:
            comm.queue(1).wait(gate.at(0), opened)
            threading.Timer(5 * p.nap_s, comm.signal, (gate.at(0), opened)).start()
        original(job)

    original = p.put(Job, "put", put)


# ---- omissions ----


def no_wait_for_ready(p: Patches) -> None:
    p.put(Job, "wait_ready", lambda job, rank: None)


def put_before_packed(p: Patches) -> None:
    def put(job: Job) -> None:
        for number in range(len(job.sends)):
            job.board.set(("packed", number))
        original(job)

    original = p.put(Job, "put", put)


def headers_late(p: Patches) -> None:
    runner = p.moe._runner
    write = runner.write_headers

    def late(launch: Launch, rank: int, number: int) -> None:
        threading.Timer(10 * p.nap_s, write, (launch, rank, number)).start()

    p.put(runner, "write_headers", late)


def signal_first(p: Patches) -> None:
    def program(job: Job, batch: list[Send]) -> mori_shmem.PutProgram:
        made = mori_shmem.PutProgram()
        value = plan.value_after(job.problem, job.launch.epoch, batch[-1].number)
        made.signal(job.runner.arrived_at(batch[-1].rank), value)
        for copy in job.slab.copies(batch[-1]):
            made.put(copy.to, copy.source, copy.nbytes)
        return made

    p.put(Job, "_program", program)


def shuffle_what_is_there(p: Patches) -> None:
    def shuffle(job: Job) -> None:
        for tile in job.input_tiles:
            job._shuffle_tile(tile)

    p.put(Job, "shuffle", shuffle)


def flag_first(p: Patches) -> None:
    def shuffle_tile(job: Job, tile: Tile) -> None:
        job.board.set(("scales", tile.input_row))
        time.sleep(p.nap_s)
        original(job, tile)

    original = p.put(Job, "_shuffle_tile", shuffle_tile)


def only_words(p: Patches, keep: Callable[[Job, Word], bool]) -> None:
    words = Job.words
    p.put(Job, "words", lambda job, number: [w for w in words(job, number) if keep(job, w)])


def own_words_only(p: Patches) -> None:
    only_words(p, lambda job, word: word.peer == job.me)


def words_of_others_only(p: Patches) -> None:
    only_words(p, lambda job, word: word.peer != job.me)


def not_quiet(p: Patches) -> None:
    p.put(Job, "quiet", lambda job: None)


def no_epochs(p: Patches) -> None:
    value_after, needed = plan.value_after, plan.needed
    p.put(job_module, "value_after", lambda problem, epoch, number: value_after(problem, 1, number))
    p.put(job_module, "needed", lambda c, problem, epoch, *rest: needed(c, problem, 1, *rest))


def publish_all(p: Patches) -> None:
    def schedule(job: Job) -> None:
        for number, tile in enumerate(job.tiles):
            job.ready.append(tile)
            job.board.set(("ready", number))

    p.put(Job, "schedule", schedule)


def nothing(p: Patches) -> None:
    """The queue itself does it."""


CASES = {
    "O1 ready": Case("shuffler", no_wait_for_ready, late_prepare),
    "O1 ready, in the launch": Case("in-launch", no_wait_for_ready, late_prepare),
    "O2 packed": Case("in-launch", put_before_packed, slow_packing),
    "O3 headers": Case("ldsw, one put", headers_late),
    "O4 signal behind the copies": Case("ldsw, one put", signal_first, delay_us=60_000),
    "O4 scales behind the rows": Case("shuffler", signal_first, delay_us=60_000),
    "O4 queue that reorders": Case("in-launch", nothing, delay_us=150_000, reorder=True),
    "O5 landed": Case("shuffler", shuffle_what_is_there, delay_us=60_000),
    "O5 flag": Case("shuffler", flag_first),
    "O6 others": Case("ldsw, one put", own_words_only, delay_us=60_000),
    "O6 own": Case("in-launch", words_of_others_only, slow_packing),
    "O7 quiet": Case("ldsw, one put", not_quiet, held_queue),
    "O8 epochs": Case("ldsw, one put", no_epochs, delay_us=60_000),
    "O9 published": Case("ldsw, ready-first", publish_all, delay_us=60_000),
}


@contextlib.contextmanager
def patched(moe: MegaMoE, nap_s: float, *patches: Callable[[Patches], None]) -> Iterator[None]:
    made = Patches(moe, nap_s)
    try:
        for patch in patches:
            patch(made)
        yield
    finally:
        made.undo()


@pytest.mark.parametrize("name", CASES)
def test_what_the_protocol_needs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MORI_MEGAMOE_POISON", "1")
    monkeypatch.setenv("MORI_MEGAMOE_PAIRS", "0")
    case, toy = CASES[name], Toy(2, experts_per_rank=2, topk=2, max_tokens=32)
    assert any(seen(case, toy, longer) for longer in (1, 2, 4, 8))


def seen(case: Case, toy: Toy, longer: int) -> bool:
    """Whether the omission makes a byte wrong, with delays so many times as long. Nothing may be wrong
    without it."""
    delay_us, nap_s = case.delay_us * longer, NAP_S * longer
    calls = [toy.inputs((20, 9), seed) for seed in range(2)]
    want = [toy.reference(inputs) for inputs in calls]

    def wrong(moe: MegaMoE) -> int:
        """Rows that differ in two calls."""
        me = moe.comm.rank
        return sum(
            len(wrong_rows(moe(*inputs[me]), results[me].out))
            for inputs, results in zip(calls, want, strict=True)
        )

    def rank() -> tuple[int, int]:
        with mori_shmem.init() as comm, toy.layer(comm) as moe:
            MegaMoEStage1Sdma(moe, **MODES[case.mode]).install()
            with faults(comm, delay_us=0 if case.reorder else delay_us), patched(moe, nap_s, case.scene):
                right = wrong(moe)
            comm.barrier()
            with (
                faults(comm, delay_us=delay_us, reorder=case.reorder),
                patched(moe, nap_s, case.scene, case.omit),
            ):
                return right, wrong(moe)

    results = mori_shmem.run_ranks(rank, 2, timeout_s=60)
    assert [right for right, _ in results] == [0, 0]
    return any(broken for _, broken in results)
