"""One shape's call, ready to go: what a call costs the host is the operands' addresses and one launch.

    one kernel                 launched as it is
    kernels, copies and flags  recorded as a graph of its own when first called; then one launch of it. Its
                               GEMM gets the operands of each call as kernel arguments
    in a caller's capture      everything is enqueued anew: it becomes part of the caller's graph

2x H200, Nov 2026: enqueueing fused-sdma one by one took the host 288 us a call.
"""

from __future__ import annotations

from typing import Protocol

import torch
from mori_shmem.jit import driver

from mori_gemm_ar.targets.cuda.launch import Call, Mark, Operands, SideStreams, unmarked


class Enqueues(Protocol):
    """A fused call (launch.py), or a product and what follows it (split.py)."""

    @property
    def product(self) -> Call: ...
    @property
    def is_one_kernel(self) -> bool: ...
    def enqueue(self, stream: int, mark: Mark = unmarked) -> None: ...


class Prepared:
    """Of one op, shape and way."""

    def __init__(self, call: Enqueues, name: str, recorder: SideStreams) -> None:
        """`name` says which way it is; `recorder` has a stream on which nothing ever runs."""
        self.name = name
        self._call, self._recorder = call, recorder
        self._graph: driver.Graph | None = None
        self._node = 0
        self._stale = False  # the graph's GEMM has other operands than the call

    def set_operands(self, operands: Operands) -> None:
        """Where a, b and their scales lie from now on."""
        if self._call.product.set_operands(operands):
            self._stale = True

    def launch(self, stream: int) -> None:
        """Everything of one call, ordered after what `stream` holds and before what follows on it."""
        if self._call.is_one_kernel or torch.cuda.is_current_stream_capturing():
            self._call.enqueue(stream)
            return
        if self._graph is None:
            self._graph = driver.Graph(self._record, self._recorder.streams[0])
        elif self._stale:
            self._graph.set_arguments(self._node, self._call.product.kernel_launch)
        self._stale = False
        self._graph.launch(stream)

    def _record(self, stream: int) -> None:
        def mark(phase: str) -> None:
            if phase == "gemm":
                self._node = driver.newest_node(stream)

        self._call.enqueue(stream, mark)

    def launch_marked(self, stream: int, mark: Mark) -> None:
        """The same step by step, `mark`ed behind each phase: for who wants to know where the time goes."""
        self._call.enqueue(stream, mark)
