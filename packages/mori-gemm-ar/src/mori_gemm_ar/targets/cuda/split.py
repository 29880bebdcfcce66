"""All-reduce after the GEMM, as steps on one stream: what the fused kernel is compared with.

On rank r with peers p, each having its partial sums in C:
  1. r writes 1 to c_ready[r] of every p, waits for its own c_ready[p], and clears them
  2. r adds its slice of all C, in rank order in fp32, and rounds once, into its output (it reads the peers'
  C in place)
  3. sdma: copies its slice to every p, then sets slice_ready[r] there. lsa: sets slice_ready[r] there, and
  once all its own
     slice_ready[p] have come, copies the peers' slices. Then it clears them.
The waits and writes are the stream's front end's; nothing depends on the call, so the same is captured in a
graph.

c_ready of the next call cannot come before r has cleared this one's: p ends this call only after r's
slice_ready, which r
writes behind the clearing; slice_ready of the next call takes r's next c_ready. C is overwritten when its
owner has every
slice_ready, so all have added it. An output is written by peers when its owner has announced its next C, so
behind its
readers on the owner's stream.
"""

from __future__ import annotations

import mori_shmem
import torch
from mori_shmem.jit import driver

from mori_gemm_ar.targets.cuda.regions import Regions

_WORD_BYTES = 4


class Split:
    """One op's steps on this rank."""

    def __init__(self, window: mori_shmem.Window, layout: Regions, rank: int, *, pulls: bool) -> None:
        self._window, self._layout, self._rank, self._pulls = window, layout, rank, pulls
        self._bases = list(window.addresses)
        self._peers = [p for p in range(len(self._bases)) if p != rank]

    def run(self, m: int, stream: int) -> None:
        """Everything behind the GEMM of a call of m rows, on torch's current stream."""
        self._announce("c_ready", stream)
        self._await("c_ready", stream)
        self._reduce(m)
        if self._pulls:
            self._announce("slice_ready", stream)
            self._await("slice_ready", stream)
            for p in self._peers:
                self._rows("out", m, p, self._rank).copy_(self._rows("out", m, p, p))
        else:
            mine = self._rows("out", m, self._rank, self._rank)
            for p in self._peers:
                there = self._rows("out", m, self._rank, p)
                driver.stream_copy(
                    stream, there.data_ptr(), mine.data_ptr(), mine.numel() * mine.element_size()
                )
            self._announce("slice_ready", stream)
            self._await("slice_ready", stream)

    def _rows(self, region: str, m: int, owner: int, holder: int) -> torch.Tensor:
        """The rows of a slice in a rank's memory."""
        height = -(-m // len(self._bases))
        start, stop = min(m, owner * height), min(m, (owner + 1) * height)
        n = self._layout.n
        offset = self._layout.offsets[region] + start * n * 2
        return self._window.peer(holder).tensor((stop - start, n), torch.bfloat16, offset)

    def _reduce(self, m: int) -> None:
        total = self._rows("c", m, self._rank, 0).float()
        for source in range(1, len(self._bases)):
            total += self._rows("c", m, self._rank, source)
        self._rows("out", m, self._rank, self._rank).copy_(total)

    def _announce(self, name: str, stream: int) -> None:
        for p in self._peers:
            driver.stream_write(stream, self._word(name, p, self._rank), 1)

    def _await(self, name: str, stream: int) -> None:
        for p in self._peers:
            driver.stream_wait(stream, self._word(name, self._rank, p), 1)
        driver.stream_fill(stream, self._word(name, self._rank, 0), 0, len(self._bases))

    def _word(self, name: str, holder: int, source: int) -> int:
        return self._bases[holder] + self._layout.offsets[name] + source * _WORD_BYTES
