"""This rank's rows into the slab, or straight to where its own land, and their headers to the ranks.

pack    segment by segment, rows that prepare has quantised. Every routed row is read and written once
route   where each routed row goes, and the headers; no row is moved
qpack   tokens in turn: each is read and quantised once, and stored to every place that route gave it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from mori_megamoe import mx
from mori_megamoe.launch import Launch
from mori_megamoe.stage1.sends import Send
from mori_megamoe.targets import Runner
from mori_megamoe.targets.host.sdma.slab import Slab

QPACK_TOKENS = 64  # tokens that are quantised at a time

WaitReady = Callable[[int], None]  # until a rank's landing rows and headers may be written


def pack(launch: Launch, runner: Runner, slab: Slab, send: Send, wait_ready: WaitReady) -> None:
    """One segment, with its headers."""
    assert launch.x_q is not None
    assert launch.x_scales is not None
    place, at = slab.place(send)
    token, there = launch.routes.token[send.routes], slice(at, at + send.rows)
    wait_ready(send.rank)  # own rows land in these stores, headers always
    place.codes[there] = launch.x_q[token]
    place.scales[there] = launch.x_scales[token]
    runner.write_headers(launch, send.rank, send.number)


def route(
    launch: Launch, runner: Runner, slab: Slab, sends: Sequence[Send], wait_ready: WaitReady
) -> torch.Tensor:
    """[routes] int64: the row of the slab, or for own rows of the landing, that each goes to. Headers are
    written."""
    to = torch.empty(len(launch.routes.token), dtype=torch.int64)
    for send in sends:
        at = slab.place(send)[1]
        to[send.routes] = torch.arange(at, at + send.rows)
        wait_ready(send.rank)
        runner.write_headers(launch, send.rank, send.number)
    return to


def qpack(launch: Launch, slab: Slab, sends: Sequence[Send], to: torch.Tensor) -> None:
    """All rows, after `route`."""
    is_own = torch.zeros(len(to), dtype=torch.bool)
    for send in sends:
        is_own[send.routes] = send.slab_row is None
    by_token = torch.argsort(launch.routes.token, stable=True)
    token = launch.routes.token[by_token]
    for begin in range(0, launch.call.num_tokens, QPACK_TOKENS):
        end = min(begin + QPACK_TOKENS, launch.call.num_tokens)
        codes, scales = _quantized(launch, begin, end)
        first, last = torch.searchsorted(token, torch.tensor([begin, end])).tolist()
        here = by_token[first:last]
        for own, place in ((False, slab.packed), (True, slab.landed)):
            rows = here[is_own[here] == own]
            row = launch.routes.token[rows] - begin
            place.codes.index_copy_(0, to[rows], codes[row])
            place.scales.index_copy_(0, to[rows], scales[row])


def _quantized(launch: Launch, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens begin..end; rows that the caller brought quantised are taken as they are."""
    if launch.call.x is not None:
        return mx.quantize_input(launch.call.x[begin:end])
    assert launch.x_q is not None
    assert launch.x_scales is not None
    return launch.x_q[begin:end], launch.x_scales[begin:end]
