"""The put programs of a call: which bytes copy engines move, behind which flag, and which flag they leave.

Programs are encoded per call, since the values of their flags change; their addresses follow from the layout.
With several queues per peer, chunk (or part) i goes to queue i modulo their number: each has a flag of its
own, so that nothing relies on an order between queues.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import mori_shmem
import torch
from mori_shmem.errors import ArgumentError

from mori_gemm_ar.layout import FLAG_BYTES, Layout
from mori_gemm_ar.options import Options
from mori_gemm_ar.plan import Plan
from mori_gemm_ar.problem import BF16_BYTES, FP8_BYTES, ROW_SCALE_BYTES

SCATTER, GATHER = 0, 1  # the two legs, as the layout numbers their stamps
QUEUE_BITS = 0xFFFFFFFF  # a queue compares the low 32 bits of a flag

Copy = tuple[int, int, int]  # offset in the peer's part, offset in mine, bytes


class Puts:
    """Submits one rank's programs. Opens its queues when made: one that cannot be had is an error there."""

    def __init__(
        self, comm: mori_shmem.Communicator, window: mori_shmem.Window, layout: Layout, options: Options
    ) -> None:
        self._window, self._layout, self._fp8 = window, layout, options.gather_dtype == "fp8"
        self._rank = comm.rank
        if (options.sdma_queues or 0) > comm.num_queues:
            raise ArgumentError(
                f"sdma_queues={options.sdma_queues}: this communicator has {comm.num_queues} to each peer "
                "(MORI_SHMEM_QUEUES, max_queues= of init); ask for fewer, or allow more there"
            )
        self._queues = {
            peer: [comm.queue(peer, index) for index in range(options.sdma_queues or 0)]
            for peer in range(comm.world_size)
            if peer != comm.rank
        }
        if comm.world_size > 1:
            self._check_rings(options)
        self._stamps = window.tensor(
            (2, comm.world_size, layout.stamps.nbytes // (4 * comm.world_size * FLAG_BYTES), 2),
            torch.int64,
            layout.stamps.offset_bytes,
        )

    def _check_rings(self, options: Options) -> None:
        """Programs that wait for this rank's own flags must fit into a ring whole: nobody would make room."""
        waiting = max(options.chunks or 0, (options.gather_bands or 0) * (options.publish == "writethrough"))
        queue = next(iter(self._queues.values()))[0]
        step = mori_shmem.PutProgram()
        step.wait(self._window.at(0), 1)
        self._copy(step, queue.peer, [(0, 0, self._window.nbytes)] * 2, 0)
        step.signal(self._window.at(0, queue.peer), 1 << 40)
        needed = waiting * step.encoded_for(queue.comm, queue.peer).nbytes
        if needed > queue.core.ring_bytes:
            raise ArgumentError(
                f"{waiting} chunks or bands per peer need {needed} bytes in a copy queue's ring, it has "
                f"{queue.core.ring_bytes}: raise MORI_SHMEM_RING_BYTES, or ask for fewer"
            )

    def scatter(self, plan: Plan, owner: int, call: int, tag: int, *, triggered: bool, timed: bool) -> None:
        """My partial sums of a slice to its owner. Triggered: each chunk when its `done` flag says so."""
        layout, first = self._layout, plan.problem.slice_of(owner).start
        programs = self._programs(owner)
        for chunk, rows in enumerate(plan.chunks(owner)):
            program = programs[chunk % len(programs)]
            if triggered:
                program.wait(self._window.at(layout.done_flag(owner, chunk)), call & QUEUE_BITS, "==")
            landing = layout.landing_row(self._rank, rows.start - first)
            nbytes = rows.height * layout.n * BF16_BYTES
            stamp = layout.stamp(SCATTER, owner, chunk) if timed else None
            self._copy(program, owner, [(landing, layout.c_row(rows.start), nbytes)], stamp)
            program.signal(self._window.at(layout.arrived_flag(self._rank, chunk), owner), tag)
        self._submit(owner, programs)

    def gather(
        self,
        plan: Plan,
        peer: int,
        parts: Sequence[int],
        call: int,
        tag: int,
        *,
        triggered: bool,
        timed: bool,
    ) -> None:
        """Parts of my finished slice to a peer. Triggered: each when its `pushed` flag says so."""
        layout, first = self._layout, plan.problem.slice_of(self._rank).start
        programs, runs = self._programs(peer), plan.parts(self._rank)
        for part in parts:
            program, rows = programs[part % len(programs)], runs[part]
            if triggered:
                program.wait(self._window.at(layout.pushed_flag(part)), call & QUEUE_BITS, "==")
            if self._fp8:
                codes = layout.staging_row(self._rank, rows.start - first)
                scales = layout.scale_row(self._rank, rows.start - first)
                copies = [
                    (codes, codes, rows.height * layout.n * FP8_BYTES),
                    (scales, scales, rows.height * ROW_SCALE_BYTES),
                ]
            else:
                output = layout.output_row(rows.start)
                copies = [(output, output, rows.height * layout.n * BF16_BYTES)]
            self._copy(program, peer, copies, layout.stamp(GATHER, peer, part) if timed else None)
            program.signal(self._window.at(layout.gathered_flag(self._rank, part), peer), tag)
        self._submit(peer, programs)

    def quiet(self) -> None:
        """Return when everything submitted is done: what was being sent may be overwritten."""
        for queues in self._queues.values():
            for queue in queues:
                queue.quiet()

    def times(self, leg: int, peer: int, num_parts: int) -> Iterator[tuple[int, int]]:
        """When each timed put of the last call began and ended, in ns, but for those with nothing to move."""
        for began, ended in self._stamps[leg, peer, :num_parts].tolist():
            if began:
                yield began, ended

    def forget_times(self) -> None:
        """Before a call that times its puts."""
        self._stamps.zero_()

    def _programs(self, peer: int) -> list[mori_shmem.PutProgram]:
        return [mori_shmem.PutProgram() for _ in self._queues[peer]]

    def _submit(self, peer: int, programs: list[mori_shmem.PutProgram]) -> None:
        for queue, program in zip(self._queues[peer], programs, strict=True):
            if len(program):
                queue.submit(program)

    def _copy(self, program: mori_shmem.PutProgram, peer: int, copies: list[Copy], stamp: int | None) -> None:
        moving = [copy for copy in copies if copy[2]]
        if stamp is not None and moving:
            program.timestamp(self._window.at(stamp))
        for theirs, mine, nbytes in moving:
            program.put(self._window.at(theirs, peer), self._window.at(mine), nbytes)
        if stamp is not None and moving:
            program.timestamp(self._window.at(stamp + FLAG_BYTES))
