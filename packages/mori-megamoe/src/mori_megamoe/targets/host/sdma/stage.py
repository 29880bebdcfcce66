"""Stage1 over copy engines: rows are packed, put by queues that signal behind them, and multiplied as they
come.

A launch on rank r, after prepare. Workgroups are threads of a crew that exists from construction on; each
has a role first, and takes work items when it is done with it.

    pack      1. for each segment in the order of sending (stage1/sends.py): wait for ready[d] of its rank d;
                 rows and scales into the slab, own ones to where they land; headers to d
              2. flag packed(segment)
                 Before the launch by the caller (pack, or route + qpack), or in it by `packers` workgroups.
    put       3. workgroup 0, segment by segment in the same order: wait for packed; to d's queue the copies
                 (rows, scales), and behind them arrived[r] = value_after(segment) at d. Of own segments the
                 word is stored. One queue for each rank, so its words only grow. With merge_rows, small
                 segments to a rank go together, and only the last is signalled
    shuffle   4. for each tile of inputs, in the order of experts: wait for arrived of the sources that have
                 rows in its segment; the tile's scales into the form of the GEMM; flag scales(tile)
    schedule  5. (ready-first) read every source's word; tiles that are complete are published, at once after
                 their scales where these are shuffled
    work      6. draw a ticket: the n-th tile in the order of experts, or the n-th that is published.
                 Wait for scales(tile) where scales are shuffled, for the words of its sources where not, for
                 its publication where there is a schedule, and for nothing else. GEMM1 to `hidden`
    end       7. all workgroups done, all queues quiet

What must come before what, and what is seen when it does not (tests/test_sdma_ordering.py breaks each):

    O1  ready[d] before the first store or put at d      rows or headers of d's last launch overwritten
    O2  rows and scales in the slab before packed        stale rows are put
    O3  headers at d before the signal                   rows of which stage2 knows no origin: lost
    O4  both copies before the signal, on one queue      tiles of stale rows
    O5  scales of all sources landed before they are shuffled, and shuffled before flagged
    O6  words of every source that has rows in the tile, own ones too, before the tile
    O7  queues quiet before the launch ends              whatever writes to the slab next is put instead.
                                                         (The next launch packs when all have told it their
                                                         counts, and so are done with this one; poison does
                                                         not wait for that)
    O8  words count epochs                               a word of the last launch lets tiles start
    O9  a publication after its tile is complete

Flags and tickets are of one launch (crew.Board). Words only grow, so nothing is cleared.

Why it ends. Whoever waits, waits for something further down in this list, of this rank or of another:

    a work item        for the shuffler or scheduler, or for words of ranks
    shuffler, scheduler    for words of ranks
    a word             for `put` of its rank, and for an engine there, which is a thread of its own
    put                for packers; where a queue's ring is full, for engines. Short copies (up to 1 to
                       4 MiB, says mori-shmem) the queue makes on the thread that submits them: workgroup
                       0, which does nothing else meanwhile, beside the workers
    a packer           for ready[d], which d stores in prepare, before its Stage1

No packer, put, shuffler or scheduler waits for a work item, and nobody draws one before its role is done. So
there is no circle, provided that all roles run at the same time: were there fewer threads than roles, a
work item could hold the thread that the packer needs. That is the residency limit. Here it is what threads a
process can have; the crew starts all of them at construction, where it is refused if they cannot be started.
A busy machine only makes them slower, for the system shares cores among threads. And provided that every
rank makes every launch, also without tokens.

Every wait for a rank has the communicator's deadline and names the word, the rank, what was seen and wanted.
Waits for this rank's own flags and words have twice that: if nothing comes, another of its workgroups waits
for a rank, and that is the one to name. A rank that died is named by all (waits.py).
"""

from __future__ import annotations

import torch
from mori_shmem.errors import ArgumentError, ClosedError

from mori_megamoe import mx
from mori_megamoe.launch import Launch
from mori_megamoe.settings import POISON
from mori_megamoe.stage1 import Stage1
from mori_megamoe.stage1.options import Options
from mori_megamoe.targets import Runner
from mori_megamoe.targets.host.sdma.crew import Crew
from mori_megamoe.targets.host.sdma.job import Job
from mori_megamoe.targets.host.sdma.slab import Slab


class CopyEngines(Stage1):
    """Made by MegaMoEStage1Sdma."""

    def __init__(self, options: Options) -> None:
        check(options)
        self.options, self.name, self.quantizes = options, options.name, options.fuse_quant
        self._crew = Crew(len(options.roles))
        self._slab: Slab | None = None

    def open(self, runner: Runner) -> None:
        if self._crew.closed:
            raise ClosedError("this stage is closed, its workgroups have ended: make another stage")
        super().open(runner)
        self._slab = Slab(runner, joined=self.options.puts == "one")
        columns = mx.padded_columns(runner.problem.model_scales)
        self._shuffled = torch.zeros(runner.problem.capacity_rows * columns, dtype=torch.uint8)
        self._poisons = bool(runner.values[POISON])
        self._multiplied()

    def run(self, launch: Launch) -> None:
        """Put and multiply in one launch, and pack in it or before."""
        job = self._job(launch)
        if not self.options.packs_in_launch:
            job.pack()
        self._crew.run(job.workgroup, job.board)
        self._sent(job)
        self._multiplied()

    # ---- phases, to be timed alone ----

    def move_rows(self, launch: Launch) -> None:
        """Pack everything, then put everything, until it has been read."""
        job = self._job(launch)
        self._pack(job)
        job.put()
        self._sent(job)

    def _pack(self, job: Job) -> None:
        if self.options.packs_in_launch:
            job.pack_some("stage1")
        else:
            job.pack()

    def gemm1(self, launch: Launch) -> None:
        job = self._job(launch)
        self._crew.run(job.multiply, job.board)
        self._multiplied()

    # ---- life ----

    def _job(self, launch: Launch) -> Job:
        assert self._slab is not None
        return Job(launch, self.runner, self._slab, self.options, self._shuffled)

    def _sent(self, job: Job) -> None:
        job.quiet()
        job.add_landings()
        if self._poisons:
            job.slab.poison_packed()

    def _multiplied(self) -> None:
        """Peers write to this rank again only after its next `ready`: with poison, nothing of this launch
        is left."""
        if self._poisons and self._slab is not None:
            self._slab.poison_landed()
            self._shuffled.fill_(0xFF)

    def close(self) -> None:
        self._crew.close()
        if self._slab is not None:
            self._slab.close()


def check(options: Options) -> None:
    """Raise for what is another target's."""
    if options.mover == "stores":
        raise ArgumentError(
            "mover='stores': on the host target that is the layer's baseline; do not install a "
            "MegaMoEStage1Sdma, or uninstall it"
        )
    usual = Options()
    for name in ("slot_experts", "slot_slack"):
        if getattr(options, name) != getattr(usual, name):
            raise ArgumentError(
                f"{name}={getattr(options, name)}: the host target copies as many rows as there are, and "
                "has no slots. Leave it out"
            )
